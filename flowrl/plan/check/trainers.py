"""Whether a plan has all updates of a role done by one trainer.

They share weights, gradients and optimizer states, and happen in the order of the program. So they
are on the same devices in the same form, and take turns there with nothing between them but the
role's forward passes that need the weights between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrl.errors import PlanError
from flowrl.graph.ir import Op
from flowrl.wording import counted

if TYPE_CHECKING:
    from flowrl.plan.many_form import ScheduleStep
    from flowrl.plan.schema import Operation, PlacementPlan


def check_trainers(plan: PlacementPlan, where: str) -> None:
    """Raises PlanError where updates of a role are not one trainer's; names both operations."""
    if plan.schedule is None:
        return
    last = {one.role: one.node for one in plan.operations if one.op == Op.UPDATE}
    trained = {one.node: one.role for one in plan.operations if one.op == Op.UPDATE}
    updates: dict[str, list[tuple[int, Operation]]] = {}
    for i, operation in enumerate(plan.operations):
        role = operation.role
        before = [node for node in operation.after if role and trained.get(node) == role]
        between = operation.seconds is not None and any(node != last[role] for node in before)
        if role is not None and (operation.op == Op.UPDATE or between):
            updates.setdefault(role, []).append((i, operation))
    for role, own in updates.items():
        for number, other in own[1:]:
            _check_alike(role, own[0], (number, other), where)
        if len(own) > 1:
            _check_turns(role, tuple(one.node for _, one in own), plan.schedule, where)


def _check_alike(
    role: str, first: tuple[int, Operation], other: tuple[int, Operation], where: str
) -> None:
    """Two updates are on the same devices, in the same form."""
    (i, one), (j, two) = first, other
    for key in _KEYS:
        if getattr(one, key) != getattr(two, key):
            here, there = _said(one, key), _said(two, key)
            raise PlanError(
                f"{one.node} and {two.node} are one trainer's, which has the weights and optimizer "
                f"states of {role} once",
                where=f"{where}: operations.{j}.{key}",
                found=f"{key} {there}",
                expected=f"{key} {here} (operations.{i}.{key})",
                hint="give both one value",
            )


_KEYS = ("devices", "layout", "recompute", "offload", "micro_tokens")
"""What all updates of a trainer have in common."""


def _said(operation: Operation, key: str) -> str:
    if key == "devices":
        number = counted(len(operation.devices), "device")
        return f"{number}, {operation.devices[0]} first" if operation.devices else number
    if key == "layout":
        return operation.layout.describe()
    if key == "offload":
        return ", ".join(operation.offload) or "none"
    return str(getattr(operation, key))


def _check_turns(role: str, nodes: tuple[str, ...], schedule: ScheduleStep, where: str) -> None:
    """Updates take turns with nothing between them, in the order of the program."""
    mine = [step for step in _steps(schedule) if set(nodes) <= set(step.nodes())]
    if not mine:
        return  # `flowrl.plan.check.schedule` says what is not in it
    least = mine[-1]  # from the whole schedule down to the smallest step with all of them
    turns = all(step.kind in ("run", "temporal") for step in _steps(least))
    if turns and least.nodes() == nodes:
        return
    raise PlanError(
        f"the updates of {role} are one trainer's, and follow each other in the order of the "
        "program",
        where=f"{where}: schedule",
        found=f"{least.kind}: {', '.join(least.nodes())}",
        expected=f"temporal: {', '.join(nodes)}",
        hint="undo the edit, or make the plan again: flowrl plan CONFIG -o FILE",
    )


def _steps(step: ScheduleStep) -> Iterator[ScheduleStep]:
    yield step
    for part in step.parts:
        yield from _steps(part)
