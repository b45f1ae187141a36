"""Whether the parts of a plan agree with each other; proven after a file is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flowrl.errors import PlanError
from flowrl.plan.check.edits import check_edits
from flowrl.plan.check.numbers import UNDO
from flowrl.plan.check.schedule import block_devices, check_schedule
from flowrl.plan.check.trainers import check_trainers

if TYPE_CHECKING:
    from flowrl.plan.schema import DeviceSummary, Operation, PlacementPlan


_MAX_LISTED = 24

Known = Callable[[str, Collection[str], str], None]
"""Of a value, the names that there are, and the key that has it: raises PlanError for others."""


def check_plan(plan: PlacementPlan, where: str = "plan") -> PlacementPlan:
    """The plan itself, if it keeps the invariants of `flowrl.plan.schema`.

    Raises:
        PlanError: it does not; names the key.
    """
    known = partial(_known, where)
    _check_pool(plan, where)
    _check_names(plan, where, known)
    for i, operation in enumerate(plan.operations):
        _check_layout(operation, f"{where}: operations.{i}")
    check_trainers(plan, where)
    check_schedule(plan, where)
    _check_prediction(plan, where, known)
    _check_pins(plan, where)
    check_edits(plan, where)
    return plan


def _known(where: str, value: str, names: Collection[str], key: str) -> None:
    """Raises PlanError if `value` is none of `names`."""
    if value not in names:
        some = sorted(names)[:_MAX_LISTED]
        more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
        raise PlanError(
            "names what the plan does not have",
            where=f"{where}: {key}",
            found=repr(value),
            expected=f"one of {', '.join(some)}{more}" if some else "nothing: the plan has none",
            hint=UNDO,
        )


def _check_pool(plan: PlacementPlan, where: str) -> None:
    """Devices are of machines that the plan has."""
    for i, one in enumerate(plan.pool.devices):
        if one.machine is not None and one.machine >= len(plan.pool.machines):
            raise PlanError(
                "names what the plan does not have",
                where=f"{where}: pool.devices.{i}.machine",
                found=str(one.machine),
                expected=f"below {len(plan.pool.machines)}, the number of machines",
                hint=UNDO,
            )


def _check_names(plan: PlacementPlan, where: str, known: Known) -> None:
    """Every name is there once, and whatever else names something names what is there."""
    devices = [device.address for device in plan.pool.devices]
    roles = [placement.role for placement in plan.placements]
    nodes = [operation.node for operation in plan.operations]
    for kind, names in (("pool.devices", devices), ("placements", roles), ("operations", nodes)):
        for name, times in Counter(names).items():
            if times > 1:
                raise PlanError(f"{name!r} is there twice", where=f"{where}: {kind}", hint=UNDO)
    known_devices = frozenset(devices)
    homes = {placement.role: frozenset(placement.devices) for placement in plan.placements}
    for i, placement in enumerate(plan.placements):
        for device in placement.devices:
            known(device, known_devices, f"placements.{i}.devices")
        for key in ("copy_of", "shares_weights_with"):
            other = getattr(placement, key)
            if other is not None:
                known(other, roles, f"placements.{i}.{key}")
    for i, operation in enumerate(plan.operations):
        for before in operation.after:
            known(before, nodes, f"operations.{i}.after")
        if operation.role is not None:
            known(operation.role, roles, f"operations.{i}.role")
            for device in operation.devices:
                known(device, homes[operation.role], f"operations.{i}.devices")
    for i, switch in enumerate(plan.residency):
        known(switch.role, roles, f"residency.{i}.role")
        known(switch.before, nodes, f"residency.{i}.before")
    for i, route in enumerate(plan.weight_routes):
        if route.node is not None:
            known(route.node, nodes, f"weight_routes.{i}.node")
        known(route.source, roles, f"weight_routes.{i}.source")
        known(route.destination, roles, f"weight_routes.{i}.destination")
        known(route.after, nodes, f"weight_routes.{i}.after")
    for i, channel in enumerate(plan.channels):
        known(channel.source, nodes, f"channels.{i}.source")
        known(channel.destination, nodes, f"channels.{i}.destination")


def _check_layout(operation: Operation, where: str) -> None:
    layout, devices = operation.layout, len(operation.devices)
    is_placed = operation.seconds is not None  # else it has none of its own
    if layout.num_devices != devices and (is_placed or layout.num_devices > 1):
        raise PlanError(
            f"{operation.node} has {devices} devices and a layout of {layout.num_devices}",
            where=f"{where}.layout",
            found=layout.describe(),
            expected=f"tp x pp x cp x dp = {devices}",
            hint=UNDO,
        )


def _check_prediction(plan: PlacementPlan, where: str, known: Known) -> None:
    """What is predicted is of operations, roles and devices of the plan."""
    nodes = frozenset(operation.node for operation in plan.operations)
    devices = frozenset(device.address for device in plan.pool.devices)
    roles = [placement.role for placement in plan.placements]
    prediction = plan.prediction
    for i, entry in enumerate(prediction.memory):
        known(entry.device, devices, f"prediction.memory.{i}.device")
        known(entry.active, roles, f"prediction.memory.{i}.active")
    if prediction.bottleneck is not None:
        known(prediction.bottleneck, nodes, "prediction.bottleneck")
    for i, source in enumerate(prediction.confidence):
        known(source.node, nodes, f"prediction.confidence.{i}.node")
    for i, flags in enumerate(plan.engine_flags):
        known(flags.node, nodes, f"engine_flags.{i}.node")
    for i, span in enumerate(prediction.timeline or ()):
        if span.end_s < span.begin_s:
            raise PlanError(
                f"{span.node} ends before it begins",
                where=f"{where}: prediction.timeline.{i}",
                found=f"{span.begin_s:g} to {span.end_s:g} s",
                hint=UNDO,
            )


def _check_pins(plan: PlacementPlan, where: str) -> None:
    nodes = {operation.node: operation for operation in plan.operations}
    order = {device.address: i for i, device in enumerate(_pinnable(plan))}
    for i, pin in enumerate(plan.pins):
        for node in pin.nodes:
            if node not in nodes:
                raise PlanError(
                    "pins an operation that there is not",
                    where=f"{where}: pins.{i}",
                    found=repr(node),
                    hint=UNDO,
                )
            shown = nodes[node]
            if pin.field == "devices" and shown.environment is None:
                shown = replace(shown, devices=block_devices(plan, shown))
            found = pinned_value(shown, pin.field, order)
            if found is not None and found != pin.value:
                raise PlanError(
                    f"{pin.subject}.{pin.field}={pin.value} is pinned, but {node} has {found}",
                    where=f"{where}: pins.{i}",
                    hint="change both, or take the pin out",
                )


def pinned_value(operation: Operation, field: str, order: Mapping[str, int]) -> str | None:
    """What an operation has of something that can be pinned, in the form that pins are written in.

    Args:
        order: Numbers of devices, as pins count them.
    """
    match field:
        case "devices":
            numbers = [order[device] for device in operation.devices if device in order]
            return number_ranges(numbers) or "none"
        case "tp" | "pp" | "dp" | "cp" | "ep":
            return str(getattr(operation.layout, field))
        case "recompute":
            return operation.recompute
        case "offload":
            return "+".join(operation.offload) or "none"
        case "micro_tokens":
            return str(operation.micro_tokens)
        case "environment":
            return None if operation.environment is None else operation.environment.mode
        case _:
            return None


def number_ranges(numbers: Iterable[int]) -> str:
    """`0-31,40` for whole numbers in any order."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)


def _pinnable(plan: PlacementPlan) -> Iterator[DeviceSummary]:
    """The devices in the order in which pins count them: accelerators first, then CPUs."""
    yield from sorted(plan.pool.devices, key=lambda device: device.type == "cpu")
