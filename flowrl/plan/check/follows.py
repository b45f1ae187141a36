"""What of a plan over many devices follows from its operations and its schedule.

Proven of a plan's file that is read alone. With its configuration all of this is written anew
(`flowrl.plan.priced.write`), and what the file said otherwise is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrl.cost.layout import ONE_DEVICE
from flowrl.errors import PlanError
from flowrl.graph.ir import Op
from flowrl.plan.check.numbers import PRICE_ANEW
from flowrl.plan.names import device_names

if TYPE_CHECKING:
    from flowrl.cost.layout import Layout
    from flowrl.plan.many_form import ScheduleStep
    from flowrl.plan.schema import Operation, PlacementPlan


_SLEEPS = ("--enable-memory-saver", "--enable-sleep-mode")
"""Options of engines that give their memory back outside of rollouts."""


def check_follows(plan: PlacementPlan, schedule: ScheduleStep, where: str) -> None:
    """Kind, placements, slots, routes and residency are those of operations and schedule.

    Raises:
        PlanError: they are not; names the key.
    """
    _check_kind(plan, schedule, where)
    for i, one in enumerate(plan.operations):
        if one.seconds is not None and one.replicas != one.layout.dp:
            raise _otherwise(
                f"{one.node} has {one.replicas} replicas in a layout of {one.layout.dp}",
                f"{where}: operations.{i}.replicas",
                one.replicas,
                f"{one.layout.dp} (operations.{i}.layout.dp)",
            )
    _check_placements(plan, where)
    _check_slots(plan, where)
    _check_routes(plan, where)
    _check_residency(plan, where)


def _otherwise(what: str, where: str, found: object, expected: str) -> PlanError:
    return PlanError(what, where=where, found=str(found), expected=expected, hint=PRICE_ANEW)


def _check_kind(plan: PlacementPlan, schedule: ScheduleStep, where: str) -> None:
    kinds = [step.kind for step in _inner(schedule)]
    kind = "hybrid"
    if schedule.kind == "asynchronous":
        kind = "asynchronous"
    elif "spatial" not in kinds:
        kind = "temporal"
    elif set(kinds) == {"spatial"}:
        kind = "spatial"
    if plan.kind != kind:
        raise _otherwise(
            "the kind of the schedule is not the one that the plan says",
            f"{where}: kind",
            plan.kind,
            f"{kind} (schedule)",
        )


def _inner(step: ScheduleStep) -> Iterator[ScheduleStep]:
    """The steps that have parts."""
    if step.parts:
        yield step
    for part in step.parts:
        yield from _inner(part)


def _check_placements(plan: PlacementPlan, where: str) -> None:
    """A role is where its operations are, divided as its training (or first work) is."""
    for i, placement in enumerate(plan.placements):
        own = [
            (number, one)
            for number, one in enumerate(plan.operations)
            if one.role == placement.role and one.seconds is not None
        ]
        if not own:
            continue
        at = f"{where}: placements.{i}"
        used = {device for _, one in own for device in one.devices}
        unused = [device for device in placement.devices if device not in used]
        if unused:
            raise _otherwise(
                f"no operation of {placement.role} is on {device_names(unused)}",
                f"{at}.devices",
                device_names(placement.devices),
                f"{device_names([one for one in placement.devices if one in used])}, where its "
                "operations are",
            )
        number, main = next(((n, one) for n, one in own if one.op == Op.UPDATE), own[0])
        layout = main.layout if len(main.devices) == len(placement.devices) else ONE_DEVICE
        if placement.layout != layout:
            raise _otherwise(
                f"{placement.role} has another layout than its operations",
                f"{at}.layout",
                placement.layout.describe(),
                f"{layout.describe()} (operations.{number}.layout)",
            )
        number, main = next(((n, one) for n, one in own if one.op == Op.GENERATE), (number, main))
        if placement.replicas != main.replicas:
            raise _otherwise(
                f"{placement.role} has another number of replicas than its operations",
                f"{at}.replicas",
                placement.replicas,
                f"{main.replicas} (operations.{number}.replicas)",
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
            raise _otherwise(
                f"the samples that {operation.node} decodes at once are said differently",
                f"{where}: operations.{i}.slots",
                ", ".join(f"{key}={value}" for key, value in said.items()),
                "one value",
            )


def _check_routes(plan: PlacementPlan, where: str) -> None:
    nodes = {operation.node: (i, operation) for i, operation in enumerate(plan.operations)}
    updates = {one.role: (i, one) for i, one in nodes.values() if one.op == Op.UPDATE}
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
                raise _otherwise(
                    f"weights travel by another layout than {plan.operations[number].node} has",
                    f"{where}: weight_routes.{i}.{key}",
                    layout.describe(),
                    f"{other.describe()} (operations.{number}.layout)",
                )


def _check_residency(plan: PlacementPlan, where: str) -> None:
    """What is moved for others is taken before its turn, and given back before another's."""
    sleeping = {
        engine.node
        for engine in plan.engine_flags
        if any(name in _SLEEPS for name, _ in engine.flags)
    }
    flagged = {engine.node for engine in plan.engine_flags}
    # Of servers that no options are known of, nobody can say it.
    free = {one.role for one in plan.operations if one.slots and one.node not in flagged}
    moved = [one for one in plan.operations if "all" in one.offload or one.node in sleeping]
    beside = {one.node: _beside(plan, one) for one in moved}
    for i, switch in enumerate(plan.residency):
        if switch.role in free:
            continue
        own = [one for one in moved if one.role == switch.role]
        before = {one.node for one in own}
        if switch.action == "release":
            before = {node for one in own for node in beside[one.node]}
        if switch.action not in ("take", "release") or switch.before not in before:
            raise _otherwise(
                "residency does not follow from the operations (their offload, and engines that "
                "sleep)",
                f"{where}: residency.{i}",
                f"{switch.action} {switch.what} of {switch.role} before {switch.before}",
                f"before one of {', '.join(sorted(before))}" if before else "nothing of it",
            )
    there = {(one.action, one.role) for one in plan.residency}
    taken = {(one.role, one.before) for one in plan.residency if one.action == "take"}
    for one in moved:
        # The updates of a trainer follow each other, and what they need comes with the first.
        own = [two for two in moved if two.role == one.role and two.op == one.op == Op.UPDATE]
        is_taken = any((two.role, two.node) in taken for two in own or [one])
        if beside[one.node] and not (is_taken and ("release", one.role) in there):
            raise _otherwise(
                f"{one.node} moves memory for others, and the plan does not say when",
                f"{where}: residency",
                f"{len(plan.residency)} switches",
                f"take before {one.node}, and release before another on its devices",
            )


def _beside(plan: PlacementPlan, operation: Operation) -> frozenset[str]:
    """The other operations on some of its devices."""
    mine = set(operation.devices)
    return frozenset(
        one.node
        for one in plan.operations
        if one.node != operation.node and one.seconds is not None and mine & set(one.devices)
    )
