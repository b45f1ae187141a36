"""What a plan says about streams from rollouts, and from what takes turns with them: when their
groups are there."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.plan.many import Chosen
from flowrl.plan.search import Arrivals, Leaf, Schedule, Spatial, arrivals_of, leaves
from flowrl.plan.search.evaluate import from_turns, readers
from flowrl.plan.ways.stream_arrivals import waves
from flowrl.wording import counted


def stream_notes(chosen: Chosen) -> Iterator[str]:
    """One of each rollout that others read in chunks, or of what they read after it."""
    for stream in _streams(chosen.schedule):
        told = arrivals_of(chosen.posed.problem, stream)
        if not told:
            yield from _turns_note(stream, chosen)
        for leaf in leaves(stream.first):
            arrivals = leaf.option.arrivals
            if arrivals is not None and arrivals in told:
                yield _note(leaf, arrivals, stream.chunks, chosen)


def _streams(schedule: Schedule) -> Iterator[Spatial]:
    if isinstance(schedule, Leaf):
        return
    if isinstance(schedule, Spatial) and schedule.chunks > 1:
        yield schedule
    yield from _streams(schedule.first)
    yield from _streams(schedule.second)


def _turns_note(stream: Spatial, chosen: Chosen) -> Iterator[str]:
    """When the chunks of what takes turns with a rollout are there."""
    problem = chosen.posed.problem
    first = {leaf.task for leaf in leaves(stream.first)}
    drawn = [task.id for task in problem.tasks if task.in_one and task.id in first]
    reads = {name for reader in readers(problem, stream) for name in problem.task(reader).after}
    read = [task.id for task in problem.tasks if task.id in reads & first and not task.in_one]
    there = from_turns(problem, stream)
    if drawn and read and there:
        at = ", ".join(f"{seconds:.1f}" for seconds, _ in there)
        yield (
            f"the {counted(stream.chunks, 'chunk')} of {' and '.join(read)} wait for "
            f"{' and '.join(drawn)} on the same devices: they are ready after {at} s"
        )


def _note(leaf: Leaf, arrivals: Arrivals, chunks: int, chosen: Chosen) -> str:
    task, way = chosen.posed.task(leaf.task), chosen.ways[leaf.task]
    groups, tokens = (100 * share for share in arrivals.until(0.5))
    rounds = waves(task, way)
    said = "one wave: all samples run at once" if rounds == 1 else f"{rounds:.3g} waves of samples"
    ready = ", ".join(f"{100 * at:.0f}" for at, _ in arrivals.chunk_lines(chunks))
    return (
        f"{task.id} streams its groups in {chunks} chunks, in {said} ({task.samples:,} on "
        f"{way.slots * way.layout.dp:,} slots): when half of its time is over, {groups:.0f} % of "
        f"them are complete, with {tokens:.0f} % of the tokens; chunks are ready after {ready} % "
        "of it"
    )
