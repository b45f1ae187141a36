"""The search against the answers of a published planner, under that planner's cost model.

    python -m flowrl.testing.planner_fixtures FILE [NAME]

Reads fixtures (`planner_fixture_file`), makes a search problem of each with the costs of the model
written below, searches, scores the schedules by that same model, and prints ours beside theirs: the
best temporal and the best spatial schedule, and the best of any kind. Exits with 1 where ours is
slower than theirs, and with 2 where a fixture cannot be read.

The model, with W devices of the whole pool, g of them given, s = W / g, and c a stage's seconds for
one of the batch's B prompts (its whole-pool seconds / B when g = W):

    train, logprobs    c s / (1 + clamp(s / 10, 0.1, 0.9))
    rollout            c where (g // tp) ceil(0.9 max_running_requests) >= B group_size, else c s
    temporal           the sum of the whole-pool seconds
    spatial S -> T     warm_S + warm_T + max(c_S, c_T) (B - 1)

warm is what one prompt takes from entering to leaving a part. A part of several stages passes a
prompt on every max(c) seconds where they stand apart and every sum(c) where they take turns; parts
that feed each other nothing run at once. A stage whose devices do not come to whole replicas cannot
run, nor one (but the rollout) whose replicas do not divide the prompts of a mini-batch, as the
published planner has it.

A cycle of environment and rollout takes the sum of both where they share devices; apart, the slower
of the two, as the published planner has it: each works on what the other has sent. Seconds between
the measured numbers of environments are interpolated.

A stage is a rollout by its name. Where a published planner's devices are given without seconds, its
seconds are those of the model: all stages apart, or a cycle and what follows it.
"""

from __future__ import annotations

import argparse
import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from flowrl.errors import ConfigError, FlowError
from flowrl.plan.search import (
    Asynchronous,
    Kind,
    Leaf,
    Option,
    Problem,
    Schedule,
    Spatial,
    Task,
    Temporal,
    draw,
    leaves,
    search,
)
from flowrl.testing.planner_fixture_file import Fixture, read_fixtures
from flowrl.testing.planner_fixture_search import best_below

__all__ = ["Answer", "answer", "main", "problem_of", "seconds_of", "theirs_of"]

FEW_COUNTS = 64
"""Numbers of devices on which a first schedule is looked for."""

_ROLLOUTS = ("rollout", "generat", "gen_", "sampl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Our schedules of a fixture and the seconds of theirs.

    Attributes:
        ours: Seconds and schedule of the best of each kind; HYBRID is the best of all kinds.
        theirs: Seconds by kind as published or, where only devices are, by the model; HYBRID is
            the best of them.
    """

    ours: dict[Kind, tuple[float, Schedule]]
    theirs: dict[Kind, float]

    def slower(self, fixture: Fixture) -> bool:
        """Whether ours takes longer than theirs, beyond the digits that theirs is printed with."""
        if Kind.HYBRID not in self.theirs:
            return False
        theirs = self.theirs[Kind.HYBRID]
        return self.ours[Kind.HYBRID][0] > theirs + fixture.half_digit(theirs)


def answer(fixture: Fixture) -> Answer:
    """Searches the fixture."""
    ours: dict[Kind, tuple[float, Schedule]] = {}
    for kind in (Kind.TEMPORAL, Kind.SPATIAL, Kind.HYBRID):
        best = _best(fixture, problem_of(fixture, kind))
        if best is not None:
            ours[kind] = best
    if not ours:
        raise ConfigError("No schedule fits the fixture")
    ours[Kind.HYBRID] = min(ours.values(), key=lambda item: item[0])
    return Answer(ours=ours, theirs=theirs_of(fixture))


def _best(fixture: Fixture, problem: Problem) -> tuple[float, Schedule] | None:
    """The best of a problem by the published model, and what it takes by that.

    The search's own seconds are those of that model but where pipelines are nested, so what it
    finds on few numbers of devices is near to the answer; what takes less is looked for below that.
    """
    found = search(problem, max_counts=FEW_COUNTS).best or search(problem).best
    if not found:
        return None
    seconds = seconds_of(fixture, found[0].schedule)
    better = best_below(problem, fixture.batch or 1, seconds)
    schedule = found[0].schedule if better is None else better
    return seconds_of(fixture, schedule), schedule


def problem_of(fixture: Fixture, kind: Kind) -> Problem:
    """The fixture as a search problem for schedules of one kind."""
    tasks = []
    region = fixture.region
    for name, reads in fixture.stages():
        if region is not None and name == fixture.region_name:
            tasks.append(Task(id=name, after=reads, options=_region_options(fixture)))
            continue
        options = [
            Option(devices=count, seconds=seconds)
            for count in range(1, fixture.devices + 1)
            if (seconds := _stage_s(fixture, name, count)) is not None
        ]
        most = fixture.batch or 1
        tasks.append(Task(id=name, after=reads, options=_worth(options), max_chunks=most))
    return Problem(
        tasks=tuple(tasks),
        num_devices=fixture.devices,
        memory_bytes=0,
        counts=_sums(tasks, fixture.devices),
        chunks=(fixture.batch or 1,),
        kinds=frozenset({kind}),
    )


def _sums(tasks: Sequence[Task], most: int) -> tuple[int, ...]:
    """The numbers of devices that tasks may have between them: no block needs another size."""
    sums = 1  # bit n: some of the tasks come to n
    for task in tasks:
        before = sums
        for option in task.options:
            sums |= before << option.devices
    return tuple(count for count in range(1, most + 1) if sums >> count & 1)


def _worth(options: Sequence[Option]) -> tuple[Option, ...]:
    """Without those that take as long as one on fewer devices; they come by devices, ascending."""
    kept: list[Option] = []
    for option in options:
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return tuple(kept)


def seconds_of(fixture: Fixture, schedule: Schedule) -> float:
    """What a schedule takes by the published model."""
    return _timing(fixture, schedule).total_s


def theirs_of(fixture: Fixture) -> dict[Kind, float]:
    """The published planner's seconds."""
    found = {}
    source = fixture.source_planner
    if source.temporal_s is not None:
        found[Kind.TEMPORAL] = source.temporal_s
    if source.spatial_s is not None:
        found[Kind.SPATIAL] = source.spatial_s
    if Kind.SPATIAL not in found and source.spatial_devices and fixture.region is None:
        found[Kind.SPATIAL] = _published_spatial_s(fixture, source.spatial_devices)
    if not found and source.devices and fixture.region is None:
        found[Kind.SPATIAL] = _published_spatial_s(fixture, source.devices)
    elif not found and source.devices:
        found[Kind.HYBRID] = _published_region_s(fixture, source.devices)
    if found:
        found[Kind.HYBRID] = min(found.values())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """Seconds of a part: in all, of the first prompt through it, and from prompt to prompt."""

    total_s: float
    warm_s: float
    pace_s: float


def _timing(fixture: Fixture, schedule: Schedule) -> _Timing:
    batch = fixture.batch or 1
    match schedule:
        case Leaf():
            seconds = schedule.option.seconds
            return _Timing(total_s=seconds, warm_s=seconds / batch, pace_s=seconds / batch)
        case Temporal():
            first, second = (_timing(fixture, side) for side in (schedule.first, schedule.second))
            return _Timing(
                total_s=first.total_s + second.total_s,
                warm_s=first.warm_s + second.warm_s,
                pace_s=first.pace_s + second.pace_s,
            )
        case Spatial():
            first, second = (_timing(fixture, side) for side in (schedule.first, schedule.second))
            pace = max(first.pace_s, second.pace_s)
            if not _feeds(fixture, schedule):
                return _Timing(
                    total_s=max(first.total_s, second.total_s),
                    warm_s=max(first.warm_s, second.warm_s),
                    pace_s=pace,
                )
            warm = first.warm_s + second.warm_s
            return _Timing(total_s=warm + pace * (batch - 1), warm_s=warm, pace_s=pace)
        case Asynchronous():
            raise ValueError("the published model has no asynchronous schedules")
        case _:
            assert_never(schedule)


def _feeds(fixture: Fixture, schedule: Spatial) -> bool:
    reads = dict(fixture.stages())
    first = {leaf.task for leaf in leaves(schedule.first)}
    return any(first & set(reads[leaf.task]) for leaf in leaves(schedule.second))


def _stage_s(fixture: Fixture, name: str, count: int) -> float | None:
    """Seconds of a stage on `count` devices; None where it cannot run on so many."""
    whole = fixture.whole_pool_cost_s[name]
    if count == fixture.devices:
        return whole
    parallel = fixture.tp.get(name, 1)
    if count % parallel:
        return None
    share = fixture.devices / count
    if is_rollout(name):
        running = fixture.max_running_requests
        waits = running is None or fixture.batch is None
        if running is not None and fixture.batch is not None:
            at_once = count // parallel * math.ceil(0.9 * running)
            waits = at_once < fixture.batch * fixture.group_size
        return whole * share if waits else whole
    source = fixture.source_planner
    published = count in (source.spatial_devices.get(name), source.devices.get(name))
    if fixture.num_minibatches and fixture.batch and not published:
        prompts = fixture.batch * fixture.group_size / fixture.num_minibatches
        if prompts % (count // parallel * fixture.group_size):
            return None
    return whole * share / (1 + min(max(share / 10, 0.1), 0.9))


def is_rollout(name: str) -> bool:
    """Whether a stage generates, by its name: of the published model, only such stages wait."""
    return name.lower().startswith(_ROLLOUTS) or name.lower() in ("gen", "actor_gen")


def _region_options(fixture: Fixture) -> tuple[Option, ...]:
    """The cycle as one task: on each number of devices, together or apart, whichever is faster."""
    options = []
    for count in range(1, fixture.devices + 1):
        best: tuple[float, str] | None = None
        for seconds, form in _region_ways(fixture, count):
            if best is None or seconds < best[0]:
                best = (seconds, form)
        if best is not None:
            options.append(Option(devices=count, seconds=best[0], form=best[1]))
    return _worth(options)


def _region_ways(fixture: Fixture, count: int) -> list[tuple[float, str]]:
    region = fixture.region
    assert region is not None
    one, other = region
    ways = []
    together = [_side_s(fixture, name, count) for name in region]
    if None not in together:
        ways.append((sum(seconds for seconds in together if seconds is not None), "together"))
    for first in range(1, count):
        sides = (_side_s(fixture, one, first), _side_s(fixture, other, count - first))
        if sides[0] is not None and sides[1] is not None:
            form = f"apart: {one} {first}, {other} {count - first}"
            ways.append((max(sides[0], sides[1]), form))
    return ways


def _side_s(fixture: Fixture, name: str, count: int) -> float | None:
    """Seconds of one side of the cycle on `count` devices, which share its environments out."""
    parallel = fixture.tp.get(name, 1)
    if count % parallel:
        return None
    assert fixture.num_envs is not None
    return interpolated(
        fixture.cost_by_envs_s[name], math.ceil(fixture.num_envs * parallel / count)
    )


def interpolated(table: dict[int, float], at: float) -> float:
    """The value of a table at `at`: linear between its rows, and beyond the last as it ends there.

    Below the first row it is the first's: fewer environments take at least their own time.
    """
    counts = sorted(table)
    if at <= counts[0]:
        return table[counts[0]]
    if len(counts) == 1:  # in proportion
        return table[counts[0]] * at / counts[0]
    place = min(bisect_left(counts, at), len(counts) - 1)
    low, high = counts[place - 1], counts[place]
    return table[low] + (table[high] - table[low]) * (at - low) / (high - low)


def _published_region_s(fixture: Fixture, devices: dict[str, int]) -> float:
    """Seconds of a published placement of the cycle, the other stages after it."""
    region = fixture.region
    assert region is not None
    _check_named((*region, *fixture.whole_pool_cost_s), devices, fixture)
    sides = [_side_s(fixture, name, devices[name]) for name in region]
    after = [_stage_s(fixture, name, devices[name]) for name in fixture.whole_pool_cost_s]
    if None in (*sides, *after):
        raise ConfigError(
            "no whole replicas fit the published planner's devices",
            where="source_planner.devices",
            hint="mend source_planner, or the fixture's tp",
        )
    numbers = [seconds for seconds in sides if seconds is not None]
    apart = sum(devices[name] for name in region) <= fixture.devices
    return (max(numbers) if apart else sum(numbers)) + sum(s for s in after if s is not None)


def _published_spatial_s(fixture: Fixture, devices: dict[str, int]) -> float:
    """Seconds of a published placement whose stages all have devices of their own."""
    stages = fixture.stages()
    _check_named([name for name, _ in stages], devices, fixture)
    if sum(devices.values()) > fixture.devices:
        raise ConfigError(
            f"the published planner's {sum(devices.values())} devices are more than there are",
            where="source_planner",
            expected=f"at most {fixture.devices}",
            hint="mend source_planner, or the fixture's devices",
        )
    batch = fixture.batch or 1
    done: dict[str, float] = {}  # when one prompt has left a stage
    pace = 0.0
    for name, reads in stages:
        seconds = _stage_s(fixture, name, devices[name])
        if seconds is None:
            raise ConfigError(
                f"{name} cannot run on the published planner's {devices[name]} devices",
                where="source_planner",
                hint="mend source_planner, or the fixture's tp",
            )
        done[name] = max((done[read] for read in reads), default=0.0) + seconds / batch
        pace = max(pace, seconds / batch)
    return max(done.values()) + pace * (batch - 1)


def _check_named(names: Sequence[str], devices: dict[str, int], fixture: Fixture) -> None:
    missing = [name for name in names if name not in devices]
    if missing:
        raise ConfigError(
            f"the published planner's devices lack {missing[0]!r}",
            where="source_planner",
            hint="give source_planner.temporal_s and spatial_s",
        )


def _report(fixture: Fixture, found: Answer) -> list[str]:
    lines = [f"{fixture.name}: {fixture.devices} devices"]
    for kind, label in (
        (Kind.TEMPORAL, "temporal"),
        (Kind.SPATIAL, "spatial"),
        (Kind.HYBRID, "best"),
    ):
        ours = f"{found.ours[kind][0]:.3f} s" if kind in found.ours else "none"
        theirs = f"{found.theirs[kind]:g} s" if kind in found.theirs else "not given"
        lines.append(f"  {label:9} ours {ours:>14}   theirs {theirs:>12}")
    seconds, schedule = found.ours[Kind.HYBRID]
    lines += [f"    {line}" for line in draw(schedule).splitlines()]
    if Kind.HYBRID in found.theirs:
        ratio = found.theirs[Kind.HYBRID] / seconds if seconds else math.inf
        verdict = "SLOWER than theirs" if found.slower(fixture) else "at least as fast"
        lines.append(f"  {verdict}: theirs / ours = {ratio:.4f}")
    if fixture.measured_on_cluster:
        measured = ", ".join(f"{key} {value}" for key, value in fixture.measured_on_cluster.items())
        lines.append(f"  measured on a cluster: {measured}")
    if fixture.max_running_requests and not fixture.region:
        taken = [name for name, _ in fixture.stages() if is_rollout(name)]
        if taken != ["rollout"]:
            lines.append(f"  stages taken for rollouts: {', '.join(taken) or 'none'}")
    if fixture.unread:
        lines.append(f"  keys that nothing here reads: {', '.join(fixture.unread)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 = never slower, 1 = slower somewhere, 2 = a fixture cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m flowrl.testing.planner_fixtures",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("file", help="YAML with a list `fixtures`")
    parser.add_argument("name", nargs="?", help="only the fixture of this name")
    asked = parser.parse_args(arguments)
    slower = unreadable = 0
    try:
        fixtures = read_fixtures(asked.file, asked.name)
    except FlowError as error:
        print(error, file=sys.stderr)
        return 2
    for fixture in fixtures:
        try:
            if isinstance(fixture, FlowError):
                raise fixture
            found = answer(fixture)
        except FlowError as error:
            if not isinstance(fixture, FlowError):
                error.where = ": ".join(filter(None, (asked.file, fixture.name, error.where)))
            print(error, file=sys.stderr)
            unreadable += 1
            continue
        print("\n".join(_report(fixture, found)))
        slower += found.slower(fixture)
    return 1 if slower else 2 if unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
