"""What a plan says about streams from rollouts: when their groups are there."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.plan.many import Chosen
from flowrl.plan.search import Arrivals, Leaf, Schedule, Spatial, arrivals_of, leaves
from flowrl.plan.stream_arrivals import waves

__all__ = ["stream_notes"]


def stream_notes(chosen: Chosen) -> Iterator[str]:
    """One of each rollout that others read in chunks."""
    for stream in _streams(chosen.schedule):
        told = arrivals_of(chosen.posed.problem, stream)
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


def _note(leaf: Leaf, arrivals: Arrivals, chunks: int, chosen: Chosen) -> str:
    task, way = chosen.posed.task(leaf.task), chosen.ways[leaf.task]
    groups, tokens = (100 * share for share in arrivals.until(0.5))
    rounds = waves(task, way)
    said = "one wave: all samples run at once" if rounds == 1 else f"{rounds:.3g} waves of samples"
    ready = ", ".join(f"{100 * at:.0f}" for at, _ in arrivals.chunk_lines(chunks))
    return (
        f"{task.id} streams its groups in {chunks} chunks, in {said} ({task.samples:,} on "
        f"{way.slots * way.layout.dp:,} slots): when half of its time is over, {groups:.0f} % of "
        f"them are complete, with {tokens:.0f} % of the tokens; chunks are there after {ready} % "
        "of it"
    )
