"""What a plan says of batches that are under way while the trainer learns from earlier ones."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.plan.many import Chosen
from flowrl.plan.problem_of import SINGLE_ROLLOUT, rollouts_of
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import Asynchronous, leaves, seconds_of
from flowrl.plan.show.many import seconds_text


def ahead_notes(chosen: Chosen, request: PlanRequest) -> Iterator[str]:
    """One where a batch takes longer than a step: how its batches overlap; or where samples may be
    stale, and none are because there are several rollouts."""
    rollouts = rollouts_of(chosen.posed.tasks)
    if request.max_staleness and len(rollouts) > 1:
        yield (
            f"{SINGLE_ROLLOUT}, and here are {len(rollouts)}, {' and '.join(rollouts)}: all "
            f"samples are generated in their step, as with {request.train_key}.max_staleness=0"
        )
    schedule, problem = chosen.schedule, chosen.posed.problem
    if not isinstance(schedule, Asynchronous):
        return
    drawn, period = seconds_of(problem, schedule.first), seconds_of(problem, schedule)
    if drawn <= period:
        return
    tasks = " and ".join(leaf.task for leaf in leaves(schedule.first))
    old = problem.staleness
    steps = "a step" if old == 1 else f"{old} steps"
    yield (
        f"a batch of {tasks} takes {seconds_text(drawn)}, longer than a step: with samples up to "
        f"{steps} old, engines begin the next batches while it ends, and a batch is complete every "
        f"{seconds_text(period)}"
    )
