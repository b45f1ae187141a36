"""What a hand that edits a plan over many devices has to change together: sizes said twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.errors import PlanError

if TYPE_CHECKING:
    from flowrl.cost.layout import Layout
    from flowrl.plan.schema import PlacementPlan

__all__ = ["check_edits"]


_RECOMPUTE = ("none", "selective", "full")
_OFFLOAD = ("optimizer", "all")
_SHARD = ("none", "optimizer", "full")


def check_edits(plan: PlacementPlan, where: str) -> None:
    """Slots of an engine, and layouts at both ends of weight routes, agree with the operations.

    Raises:
        PlanError: they do not; names both keys.
    """
    if plan.schedule is None:
        return
    _check_words(plan, where)
    _check_slots(plan, where)
    _check_routes(plan, where)


def _check_words(plan: PlacementPlan, where: str) -> None:
    """Values that mean something."""
    for i, operation in enumerate(plan.operations):
        for key, values, known in (
            ("recompute", (operation.recompute,), _RECOMPUTE),
            ("offload", operation.offload, _OFFLOAD),
            ("shard", (operation.shard,), _SHARD),
        ):
            strange = [value for value in values if value not in known]
            if strange:
                raise PlanError(
                    f"{operation.node} cannot have this",
                    where=f"{where}: operations.{i}.{key}",
                    found=repr(strange[0]),
                    expected=f"one of {', '.join(known)}",
                    hint="write one of them, or undo the edit",
                )


def _check_slots(plan: PlacementPlan, where: str) -> None:
    seen: set[str] = set()
    roles = {placement.role: (i, placement) for i, placement in enumerate(plan.placements)}
    for i, operation in enumerate(plan.operations):
        if not operation.slots or operation.role not in roles:
            continue
        number, placement = roles[operation.role]
        said = {f"operations.{i}.slots": operation.slots}
        if operation.role not in seen:
            said[f"placements.{number}.num_slots"] = placement.num_slots
        if operation.start != "group":
            said[f"operations.{i}.chunk"] = operation.chunk
        seen.add(operation.role)
        if len(set(said.values())) > 1:
            raise PlanError(
                f"the samples that {operation.node} decodes at once are said differently",
                where=f"{where}: operations.{i}.slots",
                found=", ".join(f"{key}={value}" for key, value in said.items()),
                hint=f"give {', '.join(said)} one value",
            )


def _check_routes(plan: PlacementPlan, where: str) -> None:
    nodes = {operation.node: (i, operation) for i, operation in enumerate(plan.operations)}
    updates = {one.role: (i, one) for i, one in nodes.values() if one.op == "update"}
    for i, route in enumerate(plan.weight_routes):
        ends: list[tuple[str, Layout, int, Layout]] = []
        if route.source in updates:
            number, source = updates[route.source]
            ends.append(("source_layout", route.source_layout, number, source.layout))
        if route.node is not None and route.node in nodes:
            number, reader = nodes[route.node]
            ends.append(("destination_layout", route.destination_layout, number, reader.layout))
        for key, layout, number, other in ends:
            if layout != other:
                raise PlanError(
                    f"weights travel by another layout than {plan.operations[number].node} has",
                    where=f"{where}: weight_routes.{i}.{key}",
                    found=layout.describe(),
                    expected=f"{other.describe()} (operations.{number}.layout)",
                    hint="change both",
                )
