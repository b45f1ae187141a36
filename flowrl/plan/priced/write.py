"""A plan's file, written down anew by its decisions.

What a plan says beside its decisions is written by what writes the planner's own plans
(`flowrl.plan.write.many`), so nothing of a file is kept that follows from something else.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flowrl.cluster.pool import ResourcePool
from flowrl.graph.ir import Graph
from flowrl.plan.assign import schedule_step
from flowrl.plan.explain.reasons import AS_FAST, beside, cache_why, summary_of
from flowrl.plan.make import hosted_roles
from flowrl.plan.many import Chosen
from flowrl.plan.names import cache_words, way_words
from flowrl.plan.request import PlanRequest
from flowrl.plan.schema import Alternative, PlacementPlan, Reason
from flowrl.plan.show.many import seconds_text
from flowrl.plan.ways.trainers import nodes_in_turn
from flowrl.plan.write.many import engine_flags_of, prediction_of, switches_of, written


def with_prices(
    plan: PlacementPlan, chosen: Chosen, graph: Graph, request: PlanRequest, pool: ResourcePool
) -> PlacementPlan:
    """The plan, with all that follows from its decisions as `chosen` has it.

    Args:
        request: With the parameter types that the file decides.
        pool: That the plan describes.
    """
    parts = written(graph, request, pool, chosen, hosted_roles(graph, request))
    prediction = prediction_of(chosen, graph, pool)
    new = replace(
        plan,
        placements=parts.placements,
        operations=parts.operations,
        residency=tuple(switches_of(chosen)),
        weight_routes=parts.weight_routes,
        channels=parts.channels,
        prediction=prediction,
        schedule=schedule_step(
            chosen.posed.problem, chosen.schedule, nodes_in_turn(chosen.posed.tasks)
        ),
        kind=str(chosen.kind),
        engine_flags=tuple(engine_flags_of(chosen, request)),
    )
    reasons = tuple(_reason(one, new, chosen) for one in plan.reasons)
    if _same(plan.prediction.step_s, prediction.step_s):
        return replace(new, reasons=reasons)
    return replace(
        new,
        reasons=tuple(_of_schedule(one, chosen) for one in reasons),
        alternatives=tuple(_alternative(one, chosen.step_s) for one in plan.alternatives),
    )


def _same(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9)


def _of_schedule(reason: Reason, chosen: Chosen) -> Reason:
    """The reason of the schedule where its step takes something else than what was chosen."""
    if reason.subject != "schedule":
        return reason
    return Reason(
        subject=reason.subject,
        choice=f"{chosen.kind}: {summary_of(chosen)}",
        why=f"the plan's file decides so; a step takes {seconds_text(chosen.step_s)}",
    )


def _alternative(other: Alternative, step_s: float) -> Alternative:
    """What came close to the schedule that was chosen, beside that of the file."""
    if other.step_s is None:
        return other
    time = beside(other.step_s, step_s)
    than = "as" if time == AS_FAST else "than"
    return replace(other, why_not=f"{time} {than} what the file decides")


def _reason(reason: Reason, plan: PlacementPlan, chosen: Chosen) -> Reason:
    """A reason that is not of the file's decisions any more gives way to a plain statement."""
    for one in plan.operations:
        if one.seconds is None or one.environment is not None:
            continue
        words = way_words(one.layout, one.recompute, one.offload)
        took = f"the plan's file decides so: {seconds_text(one.seconds)} a step"
        if reason.subject == one.node and reason.choice != words:
            return Reason(subject=reason.subject, choice=words, why=took)
        cache = cache_words(one.kv_tokens, one.slots)
        if reason.subject == f"{one.node} kv cache":
            why = took if reason.choice != cache else cache_why(one.node, chosen)
            return Reason(subject=reason.subject, choice=cache, why=why)
    return reason
