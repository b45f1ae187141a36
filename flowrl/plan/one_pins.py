"""Pins of a plan for one device: which device, recomputation; all else there is only one value of.

What a pin asks for is done or refused; nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.cluster.pool import ResourcePool
from flowrl.errors import PlanError, raise_all
from flowrl.graph.ir import Graph
from flowrl.plan.many_form import PinnedDecision
from flowrl.plan.options import Pin
from flowrl.plan.pin_errors import Near, PinError, contradiction
from flowrl.plan.pins import LAYOUT_FIELDS, always_so, of_environment, pins_of
from flowrl.plan.request import PlanRequest
from flowrl.plan.ways.tasks import TaskWork, works_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePins:
    """What pins mean for one device.

    Attributes:
        request: With what they say of roles.
        address: The device that they name, if they name one.
        decisions: As the plan keeps them.
    """

    request: PlanRequest
    address: str | None = None
    decisions: tuple[PinnedDecision, ...] = ()


def device_numbers(pool: ResourcePool) -> dict[str, int]:
    """The numbers by which pins name devices: accelerators first, then CPUs."""
    accelerators = [address for address, _, device in pool if device.type != "cpu"]
    cpus = [address for address, _, device in pool if device.type == "cpu"]
    return {address: number for number, address in enumerate((*accelerators, *cpus))}


def one_device_pins(graph: Graph, request: PlanRequest, pool: ResourcePool) -> OnePins:
    """What pins mean, and whether one device can do it.

    Raises:
        PlanError: it cannot, or two of them contradict each other; one error for all of them.
    """
    if not request.options.pins:
        return OnePins(request=request)
    numbers = device_numbers(pool)
    free = [(numbers[a], device.type != "cpu") for a, _, device in pool if not device.reserved]
    usable = [number for number, fast in free if fast] or [number for number, _ in free]
    options = replace(request.options, settings=())
    decisions, named, again = [], list[tuple[Pin, str]](), dict[str, tuple[Pin, str]]()
    known, problems = pins_of(
        options, works_of(graph, request), usable, [role.name for role in request.roles]
    )
    for pin, value, tasks in known:
        if pin.field == "environment" or any(of_environment(pin, task) for task in tasks):
            problems.append(_of_environments(pin))
        elif pin.field == "devices":
            named.append((pin, value))
        elif pin.field == "recompute":
            problems += _note_recompute(pin, value, tasks, again)
        else:
            problems += _other_value(pin, value)
        nodes = tuple(str(node) for task in tasks for node in task.operations)
        decisions.append(
            PinnedDecision(subject=pin.subject, field=pin.field, value=value, nodes=nodes)
        )
    address, wrong = _address(named, numbers)
    raise_all([*problems, *wrong])
    roles = [
        replace(role, recompute=again[role.name][1]) if role.name in again else role
        for role in request.roles
    ]
    return OnePins(
        request=replace(request, roles=tuple(roles)),
        address=address,
        decisions=tuple(decisions),
    )


def _of_environments(pin: Pin) -> PlanError:
    return PlanError(
        "this plan is for one device, and environments hold none of it",
        where=pin.where,
        found=str(pin),
        hint="leave it out, or plan for more devices (--cluster FILE)",
    )


def _note_recompute(
    pin: Pin, value: str, tasks: Sequence[TaskWork], again: dict[str, tuple[Pin, str]]
) -> Iterator[PlanError]:
    """Notes what it says of each task's role; yields what cannot be."""
    for task in tasks:
        if always_so(pin, value, task):
            continue
        role = task.role
        can = ("none", *sorted(role.capabilities.recompute))
        if value not in can:
            yield PinError(
                f"backend {role.backend!r} has no {value} recompute",
                where=pin.where,
                found=str(pin),
                expected=f"one of {', '.join(can)}",
                hint="leave the pin out",
            ).offering(Near(pin=pin, values=can))
            continue
        if role.recompute not in ("auto", value):
            yield PlanError(
                f"{pin} contradicts roles.{role.name}.recompute={role.recompute}",
                where=pin.where,
                hint="take one of them out",
            )
        before = again.setdefault(role.name, (pin, value))
        if before[1] != value:
            yield contradiction(
                [before[0], pin],
                f"for {task.id} they say two things",
                near=[Near(pin=before[0], values=(value,)), Near(pin=pin, values=(before[1],))],
            )


def _other_value(pin: Pin, value: str) -> list[PlanError]:
    """One device divides nothing, and moves nothing to the host."""
    only = "1" if pin.field in LAYOUT_FIELDS else "none" if pin.field == "offload" else None
    if value == only:
        return []
    error = PinError(
        f"this plan is for one device, where {pin.field} "
        + (f"is always {only}" if only is not None else "follows from micro_batch"),
        where=pin.where,
        found=str(pin),
        hint="leave it out, or plan for more devices (--cluster FILE)"
        if only is not None
        else "set train.micro_batch in its place, or plan for more devices (--cluster FILE)",
    )
    return [error.offering(*([] if only is None else [Near(pin=pin, values=(only,))]))]


def _address(
    named: Sequence[tuple[Pin, str]], numbers: Mapping[str, int]
) -> tuple[str | None, list[PlanError]]:
    """The one device that all pins name, if they do; and what is wrong with them."""
    if not named:
        return None, []
    first, value = named[0]
    problems: list[PlanError] = [
        contradiction(
            [first, pin],
            "on one device, all models take turns",
            near=[Near(pin=first, values=(other,)), Near(pin=pin, values=(value,))],
        )
        for pin, other in named[1:]
        if other != value
    ]
    found = [address for address, number in numbers.items() if str(number) == value]
    if not found:
        several = PinError(
            "this plan is for one device, on which all models take turns",
            where=first.where,
            found=str(first),
            expected="the number of one device",
            hint="plan for more devices of configs/hardware (--cluster FILE)",
        )
        first_of = value.replace(",", "-").partition("-")[0]
        problems.insert(0, several.offering(Near(pin=first, values=(first_of,))))
    return (found[0] if found else None), problems
