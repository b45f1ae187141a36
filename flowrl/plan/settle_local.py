"""What follows from who draws, in a plan for one device that a hand has edited.

Of such a plan a file decides kind, processes, engines, cores, slots and scorers' processes. Some of
these are written in two places, and the ways of weights and samples follow from them: they are made
here as the planner makes them.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph.ir import Graph, Op
from flowrl.plan.local import local_choice, with_choice
from flowrl.plan.schema import Operation, Placement, PlacementPlan


def settled(plan: PlacementPlan, base: PlacementPlan, graph: Graph) -> PlacementPlan:
    """The plan with numbers that are written twice as the edited one of them, and with the ways of
    weights and samples, and the memory of engines, as its processes have them.

    Args:
        base: The plan of the configuration, with everything in the main process. What a plan has
            otherwise than it in one of two places is the edit; in both, nothing is changed.
    """
    if [one.node for one in plan.operations] != [one.node for one in base.operations]:
        return plan
    if [one.role for one in plan.placements] != [one.role for one in base.placements]:
        return plan
    plan = _with_equal_numbers(plan, base)
    choice = local_choice(plan)
    if choice is None:
        return plan
    made = with_choice(base, graph, choice)
    return replace(
        plan,
        weight_routes=made.weight_routes,
        channels=made.channels,
        prediction=replace(plan.prediction, memory=made.prediction.memory),
    )


def _with_equal_numbers(plan: PlacementPlan, base: PlacementPlan) -> PlacementPlan:
    """Slots of a role and of what it draws, and processes of a scorer and of its scores."""
    placements = {one.role: one for one in plan.placements}
    operations: list[Operation] = []
    for one, own in zip(plan.operations, base.operations, strict=True):
        role = placements.get(one.role or "")
        if role is None:
            operations.append(one)
        elif one.op == Op.GENERATE:
            before = base.placement(role.role).num_slots
            number = _edited(role.num_slots, before, one.chunk, own.chunk)
            placements[role.role] = replace(role, num_slots=number or role.num_slots)
            operations.append(replace(one, chunk=number or one.chunk))
        elif role.head == "none" and _is_scorer(role):
            before = base.placement(role.role).replicas
            number = _edited(role.replicas, before, one.replicas, own.replicas)
            placements[role.role] = replace(role, replicas=number or role.replicas)
            operations.append(replace(one, replicas=number or one.replicas))
        else:
            operations.append(one)
    return replace(plan, placements=tuple(placements.values()), operations=tuple(operations))


def _is_scorer(role: Placement) -> bool:
    return role.dtype == "none" and role.process == role.role


def _edited(placed: int, placed_before: int, done: int, done_before: int) -> int | None:
    """Of a number in two places the one that somebody changed; None of two that were changed."""
    if placed == done:
        return placed
    if placed == placed_before:
        return done
    return placed if done == done_before else None
