"""What a plan says of engines whose caches do not hold what they may draw at once."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.cost.rollout_time import COMPUTED_AGAIN
from flowrl.plan.many import Chosen
from flowrl.plan.show.many import seconds_apart, seconds_text
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork

MUCH = 0.05
"""Of a rollout's time, from which on it is told that contexts are computed again."""

FASTER = 0.98
"""Of its time: fewer slots with which it takes more are not worth telling."""


def cache_notes(chosen: Chosen) -> Iterator[str]:
    """One of each rollout in which rows are put back for long."""
    for task in chosen.posed.tasks:
        way = chosen.ways[task.id]
        again = dict(way.estimate.parts).get(COMPUTED_AGAIN, 0.0)
        if again >= MUCH * way.seconds:
            options = chosen.posed.made(task.id).options
            each = task.prompt_tokens + options.lengths.mean
            yield (
                f"{task.id} computes contexts again for {seconds_text(again)}: the cache of an "
                f"engine holds {way.kv_tokens / each:,.0f} samples of mean length, it may run "
                f"{way.slots:,} at once, and those that do not fit are preempted; "
                f"{_fewer_slots(task, way, chosen)}"
            )


def _fewer_slots(task: TaskWork, way: Candidate, chosen: Chosen) -> str:
    made = chosen.posed.made(task.id)
    fewer = [way.slots >> halved for halved in (1, 2, 3) if way.slots >> halved]
    timed = [(made.with_slots(task, way, slots).estimate.seconds, slots) for slots in fewer]
    seconds, slots = min(timed, default=(way.estimate.seconds, way.slots))
    if seconds > FASTER * way.estimate.seconds:
        return "fewer slots take no less time"
    less, more = seconds_apart(seconds, way.estimate.seconds)
    return f"with roles.{task.role.name}.num_slots={slots} the rollout takes {less}, not {more}"
