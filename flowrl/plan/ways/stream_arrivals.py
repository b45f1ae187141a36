"""When the groups of a rollout are there for what streams from it, for each way to run it."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.cost.arrivals import rollout_arrivals
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import Arrivals
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork


def arrivals_of_ways(
    task: TaskWork, ways: Sequence[Candidate], request: PlanRequest
) -> tuple[Arrivals | None, ...]:
    """For each way to run a task; None where its results come as evenly as its work is done."""
    if not task.generates:
        return (None,) * len(ways)
    return tuple(_arrivals(task, way, request) for way in ways)


def _arrivals(task: TaskWork, way: Candidate, request: PlanRequest) -> Arrivals:
    points = rollout_arrivals(
        way.estimate.clock,
        replicas=way.layout.dp,
        samples=task.samples,
        group_size=task.group_size,
        prompt_tokens=task.prompt_tokens,
        lengths=request.options.lengths,
        slots=_at_once(task, way),
        kv_tokens=way.kv_tokens,
    )
    ready, work = zip(*points, strict=True)
    return Arrivals(ready=ready, work=work)


def _at_once(task: TaskWork, way: Candidate) -> int:
    """Samples that one replica has begun and not ended."""
    return way.slots if task.region is None else GIVEN_PER_SLOT * way.slots


def waves(task: TaskWork, way: Candidate) -> float:
    """Samples for each that all replicas have begun at once; 1 where all are."""
    return max(1.0, task.samples / (_at_once(task, way) * way.layout.dp))
