"""A schedule on the devices of a group: who stands where, and when each works.

A block of the schedule gets consecutive devices. Of two parts that stand apart the larger one
comes first, so that blocks of whole nodes begin at a node; a part of a node that would cross into
the next one begins there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.search import (
    Asynchronous,
    Leaf,
    Problem,
    Schedule,
    Spatial,
    Temporal,
    block,
    leaves,
)
from flowrl.plan.search.arrivals import even_lines
from flowrl.plan.search.evaluate import (
    arrivals_of,
    chunked_seconds,
    from_turns,
    readers,
    seconds_of,
)
from flowrl.plan.ways.regions import Played
from flowrl.plan.ways.trainers import in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """When a task works, in seconds from the start of the step.

    Attributes:
        first_s: Seconds of its first piece, from `begin_s`; all of it where it works in one.
        last_s: Of its last piece, until `end_s`.
    """

    task: str
    begin_s: float
    end_s: float
    first_s: float
    last_s: float


def slots(schedule: Schedule, sizes: tuple[int, ...], node_size: int) -> Mapping[str, range]:
    """The devices of each task, counted from 0.

    Args:
        sizes: That blocks may have, ascending.
    """
    return dict(_slots(schedule, 0, sizes, node_size))


def _slots(
    schedule: Schedule, start: int, sizes: tuple[int, ...], node_size: int
) -> Iterator[tuple[str, range]]:
    match schedule:
        case Leaf():
            yield schedule.task, range(start, start + schedule.option.devices)
        case Temporal():
            yield from _slots(schedule.first, start, sizes, node_size)
            yield from _slots(schedule.second, start, sizes, node_size)
        case Spatial() | Asynchronous():
            parts = [schedule.first, schedule.second]
            parts.sort(key=lambda part: -block(part, sizes))
            for part in parts:
                size = block(part, sizes)
                # Blocks of one node are at most two: more would be a block of whole nodes.
                if start % node_size and start % node_size + size > node_size:
                    start += node_size - start % node_size
                yield from _slots(part, start, sizes, node_size)
                start += size
        case _:
            assert_never(schedule)


def bars(problem: Problem, schedule: Schedule, begin_s: float = 0.0) -> Iterator[Bar]:
    """When each task works.

    What runs ahead begins with the step, and may end after it: the next batch begins meanwhile. Of
    a pipeline in chunks each bar of the reading part begins with its first chunk and ends with its
    last; it is not busy all the time between. Tasks of both parts that take turns do so in each
    chunk, so their bars overlap, but for those of the first part that are done in one go, which
    come before, and those that nobody reads, which come after.
    """
    match schedule:
        case Leaf():
            seconds = schedule.option.seconds
            yield Bar(
                task=schedule.task,
                begin_s=begin_s,
                end_s=begin_s + seconds,
                first_s=seconds,
                last_s=seconds,
            )
        case Temporal():
            yield from bars(problem, schedule.first, begin_s)
            middle = begin_s + seconds_of(problem, schedule.first)
            yield from bars(problem, schedule.second, middle)
        case Spatial():
            if readers(problem, schedule):
                yield from _streaming(problem, schedule, begin_s)
                yield from _streamed(problem, schedule, begin_s)
            else:
                yield from bars(problem, schedule.first, begin_s)
                yield from bars(problem, schedule.second, begin_s)
        case Asynchronous():
            yield from bars(problem, schedule.first, begin_s)
            yield from bars(problem, schedule.second, begin_s)
        case _:
            assert_never(schedule)


def _streaming(problem: Problem, schedule: Spatial, begin_s: float) -> Iterator[Bar]:
    """The bars of a part that another one reads."""
    if not isinstance(schedule.first, Temporal):
        yield from bars(problem, schedule.first, begin_s)
        return
    in_one, in_chunks, unread = _in_order(problem, schedule.first)
    for part in in_one:
        yield from bars(problem, part, begin_s)
        begin_s += seconds_of(problem, part)
    work_s = sum(seconds_of(problem, part) for part in in_chunks)
    fed_s, _ = chunked_seconds(problem, schedule)
    longer = 1.0 + (fed_s - seconds_of(problem, schedule.first)) / work_s if work_s else 1.0
    share, done = longer / schedule.chunks, 0.0
    end_s = begin_s + longer * work_s
    for part in in_chunks:
        for bar in bars(problem, part, done):
            yield Bar(
                task=bar.task,
                begin_s=begin_s + share * bar.begin_s,
                end_s=end_s - share * (work_s - bar.end_s),
                first_s=share * bar.first_s,
                last_s=share * bar.last_s,
            )
        done += seconds_of(problem, part)
    for part in unread:
        yield from bars(problem, part, end_s)
        end_s += seconds_of(problem, part)


def _in_order(
    problem: Problem, schedule: Temporal
) -> tuple[list[Schedule], list[Schedule], list[Schedule]]:
    """The parts of what takes turns and is read by another part: those with something that is done
    in one go, those that take turns with every chunk, and those that nobody reads."""
    at = {task.id: number for number, task in enumerate(problem.tasks)}
    tasks = [(part, {leaf.task for leaf in leaves(part)}) for part in _turns(schedule)]
    first = problem.in_one()
    in_one = [(part, max(at[name] for name in own & first)) for part, own in tasks if own & first]
    rest = [(part, own) for part, own in tasks if not own & first]
    unread = problem.unread()
    return (
        [part for part, _ in sorted(in_one, key=lambda both: both[1])],
        [part for part, own in rest if not own <= unread],
        [part for part, own in rest if own <= unread],
    )


def _turns(schedule: Schedule) -> Iterator[Schedule]:
    """The parts of a Temporal, however nested."""
    if isinstance(schedule, Temporal):
        yield from _turns(schedule.first)
        yield from _turns(schedule.second)
    else:
        yield schedule


def _streamed(problem: Problem, schedule: Spatial, begin_s: float) -> Iterator[Bar]:
    """The bars of a part that reads another one in chunks.

    It works through each chunk as through a batch of so much less: the first as soon as it is
    there, the last until the end, unless the part that feeds it goes on after that.
    """
    work_s = seconds_of(problem, schedule.second)
    there = chunk_shares(problem, schedule)
    fed_s, read_s = chunked_seconds(problem, schedule)
    waits = [there_s + left * read_s for there_s, left in from_turns(problem, schedule)]
    end_s = begin_s + (max(waits) if waits else seconds_of(problem, schedule))
    begin_s += there[0][0] * fed_s
    left = [share for _, share in there] + [0.0]
    longer = read_s / work_s if work_s else 1.0
    first, last = (longer * (left[at] - left[at + 1]) for at in (0, schedule.chunks - 1))
    for bar in bars(problem, schedule.second):
        yield Bar(
            task=bar.task,
            begin_s=begin_s + first * bar.begin_s,
            end_s=end_s - last * (work_s - bar.end_s),
            first_s=first * bar.first_s,
            last_s=last * bar.last_s,
        )


def pieces(problem: Problem, schedule: Schedule) -> Mapping[str, int]:
    """Into how many pieces the batch of each task is cut, where it reads from another part."""
    found: dict[str, int] = {}
    waiting: list[Schedule] = [schedule]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Leaf):
            continue
        waiting += [node.first, node.second]
        if isinstance(node, Spatial) and node.chunks > 1:
            first = {leaf.task for leaf in leaves(node.first)}
            for leaf in leaves(node.second):
                if first & set(problem.task(leaf.task).after):
                    found[leaf.task] = max(found.get(leaf.task, 1), node.chunks)
    return found


def busy_seconds(
    problem: Problem, schedule: Schedule, played: Mapping[str, Played] | None = None
) -> float:
    """Device seconds of a step in which something is computed.

    Of what runs ahead batches may overlap; they keep devices busy no longer than a step takes.

    Args:
        played: Environments, by the task that plays with them. While a policy waits for its
            environment, or that for its policy, the devices of the one that waits are idle.
    """
    most = seconds_of(problem, schedule)
    found = 0.0
    for leaf in leaves(schedule):
        episodes = (played or {}).get(leaf.task)
        if episodes is None:
            found += leaf.option.devices * min(leaf.option.seconds, most)
        else:
            found += sum(number * min(spent, most) for number, spent in episodes.work())
    return found


def bottleneck(problem: Problem, schedule: Schedule) -> str:
    """The task that the step waits for most: the longest one of those that nothing hides.

    Of an Asynchronous the longest one of the side that decides. Where that is the age that samples
    may have, a batch takes longer on its way than its update does (`flowrl.plan.search.overlap`).
    """
    match schedule:
        case Leaf():
            return schedule.task
        case Temporal():
            parts = [bottleneck(problem, part) for part in (schedule.first, schedule.second)]
            took = {leaf.task: leaf.option.seconds for leaf in leaves(schedule)}
            return max(parts, key=lambda task: took[task])
        case Asynchronous():
            learns = seconds_of(problem, schedule.second) >= seconds_of(problem, schedule)
            return bottleneck(problem, schedule.second if learns else schedule.first)
        case Spatial():
            slow = max(
                (schedule.first, schedule.second), key=lambda part: seconds_of(problem, part)
            )
            return bottleneck(problem, slow)
        case _:
            assert_never(schedule)


def schedule_step(
    problem: Problem, schedule: Schedule, nodes: Mapping[str, tuple[str, ...]] | None = None
) -> ScheduleStep:
    """The schedule as the plan keeps it.

    A step has as many devices as its parts use, and not the whole nodes that the search counts for
    them: so a plan that is read says the same, whatever sizes of blocks were looked at.

    Args:
        nodes: The operations of tasks that are several of them, or of all.
    """
    ready: tuple[float, ...] = ()
    match schedule:
        case Leaf():
            return in_turns(schedule.task, schedule.option.devices, nodes or {})
        case Temporal():
            kind, chunks = "temporal", 1
        case Spatial():
            kind, chunks = "spatial", schedule.chunks
            uneven = arrivals_of(problem, schedule) or from_turns(problem, schedule)
            if chunks > 1 and uneven:
                ready = tuple(round(at, 3) for at, _ in chunk_shares(problem, schedule))
        case Asynchronous():
            kind, chunks = "asynchronous", 1
        case _:
            assert_never(schedule)
    parts = tuple(schedule_step(problem, part, nodes) for part in (schedule.first, schedule.second))
    sizes = [part.devices for part in parts]
    return ScheduleStep(
        kind=kind,  # type: ignore[arg-type]
        devices=max(sizes) if kind == "temporal" else sum(sizes),
        chunks=chunks,
        ready=ready,
        parts=parts,
    )


def chunk_shares(problem: Problem, schedule: Spatial) -> list[tuple[float, float]]:
    """Of each chunk of a stream: the share of the first part's time after which it is there, and
    the share of the second part's work that is left then. Empty where nothing passes."""
    if not readers(problem, schedule):
        return []
    count = schedule.chunks
    waits = from_turns(problem, schedule)
    if waits:
        fed_s, _ = chunked_seconds(problem, schedule)
        return [(there_s / fed_s if fed_s else 0.0, left) for there_s, left in waits]
    lines = [one.chunk_lines(count) for one in arrivals_of(problem, schedule)]
    if not lines:
        return list(even_lines(count))
    return [
        (max(a for a, _ in chunk), max(b for _, b in chunk)) for chunk in zip(*lines, strict=True)
    ]
