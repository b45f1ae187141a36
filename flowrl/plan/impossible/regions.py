"""Why a policy that fits has no place for its environment, and what would help.

What is told to do is tried with the whole job first. What cannot be tried, such as another kind of
accelerators for the environment, is told as what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.memory import format_bytes
from flowrl.errors import PlanError
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.impossible.ways_out import (
    Fits,
    Trial,
    more_devices,
    more_host,
    more_memory,
    tries_on,
    without_pins,
)
from flowrl.plan.options import Pin
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import Posed
from flowrl.plan.ways.pin_filter import OWN, Filter
from flowrl.plan.ways.region_ways import Drawn, ways_of
from flowrl.plan.ways.regions import HOST_SHARE, room
from flowrl.plan.ways.tasks import Region, TaskWork
from flowrl.wording import counted


def no_place_for_environment(
    task: TaskWork, posed: Posed, pins: PinnedTasks, only: Filter, fits: Fits
) -> PlanError | None:
    """Of a task of episodes that has no way to run; None where its policy alone has none.

    Args:
        only: What pins leave of the task.
        fits: Whether the job has a plan with a change.
    """
    region, counts = task.region, posed.problem.block_sizes()
    if region is None or not any(
        posed.candidates.of_task(task, count, only, shared=False) for count in counts
    ):
        return None
    where = f"plan.environments.{region.role}"
    if region.environment.accelerated:
        return _of_accelerators(task, region, posed, pins, only, where, fits)
    return _of_hosts(task, region, posed, pins, where, fits)


def _of_accelerators(
    task: TaskWork,
    region: Region,
    posed: Posed,
    pins: PinnedTasks,
    only: Filter,
    where: str,
    fits: Fits,
) -> PlanError:
    made, needs = posed.candidates, region.environment.nbytes
    if region.environment.kind not in (None, posed.group.kind):
        return _of_another_kind(task, region, posed, pins, where, fits)
    if needs > made.budget:
        return PlanError(
            f"environment {region.role} does not fit on {posed.group.device.name}",
            where=f"{where}.memory_gib",
            found=format_bytes(needs),
            expected=f"at most {format_bytes(made.budget)}, the usable memory of a device",
            hint=f"{more_memory(needs + RUNTIME_BYTES[posed.group.device.type], posed.group, fits)}"
            ", or an environment that needs less",
        )
    asked = pins.asked.get(task.id, {})
    # Each of these can be left out alone, with all others kept.
    odd = [pin for field, pin in asked.items() if _has_way(task, posed, only.without(field))]
    if only.environment == "together" and asked["environment"] in odd:
        return PlanError(
            f"environment {region.role} does not fit on the devices of {task.id} together with it",
            where=asked["environment"].where,
            found=f"{asked['environment']}, and {format_bytes(needs)} of "
            f"{format_bytes(made.budget)}",
            hint=_apart(task, posed, pins, asked["environment"], fits),
        )
    if odd:
        named = _listed([str(pin) for pin in odd])
        return PlanError(
            f"{named} contradict each other: devices cannot be shared out so between {task.id} "
            f"and environment {region.role}"
            if len(odd) > 1
            else f"{named} leaves no way to share devices out between {task.id} and environment "
            f"{region.role}",
            where=" and ".join(dict.fromkeys(pin.where for pin in odd)),
            found=pins.said(task.id, _PLACES),
            hint=_left_out(odd, posed, pins, fits),
        )
    possible = asked and _has_way(task, posed, Filter())
    return PlanError(
        f"devices cannot be shared out between {task.id} and environment {region.role}",
        where=pins.where(task.id) or "cluster",
        found=pins.said(task.id) or counted(len(posed.group.addresses), "device"),
        hint=_left_out(tuple(dict.fromkeys(asked.values())), posed, pins, fits)
        if possible
        else _larger(posed, fits),
    )


def _left_out(some: Sequence[Pin], posed: Posed, pins: PinnedTasks, fits: Fits) -> str:
    """Pins of which each can be left out alone, or all together, as the whole job says."""
    if not tries_on(len(posed.group.addresses)):
        return f"without {' or '.join(str(pin) for pin in some)} it may have a place"
    alone = [pin for pin in some if fits(Trial(pins=without_pins(pins, (pin,))))]
    if alone:
        return f"leave {' or '.join(str(pin) for pin in alone)} out"
    if len(some) > 1 and fits(Trial(pins=without_pins(pins, some))):
        return f"leave {_listed([str(pin) for pin in some])} out"
    return f"without {' and '.join(str(pin) for pin in some)} something else does not fit; " + (
        _larger(posed, fits)
    )


def _apart(task: TaskWork, posed: Posed, pins: PinnedTasks, pin: Pin, fits: Fits) -> str:
    """What helps where an environment does not fit beside its policy on the same devices."""
    only = replace(pins.filters[task.id], environment="apart")
    apart = Trial(pins=replace(pins, filters={**pins.filters, task.id: only}))
    if tries_on(len(posed.group.addresses)) and fits(apart):
        return f"leave {pin} out, or say apart"
    return _left_out((pin,), posed, pins, fits)


def _larger(posed: Posed, fits: Fits) -> str:
    """More devices on which the job was tried, or what it takes without a number."""
    more = more_devices(posed.group, len(posed.group.addresses) * 4, fits, posed.candidates.host)
    return more or "it takes more devices, or devices with more memory"


_PLACES = ("devices", "environment", OWN)
"""What pins say of where an environment is."""


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _of_another_kind(
    task: TaskWork, region: Region, posed: Posed, pins: PinnedTasks, where: str, fits: Fits
) -> PlanError:
    kind, outside = region.environment.kind, posed.outside.get(task.id)
    if outside is None:
        return PlanError(
            f"environment {region.role} is to be on {kind}, and all devices here are "
            f"{posed.group.device.name}",
            where=f"{where}.device",
            hint="plan for a cluster that has both (--cluster); or say accelerator, if it may be "
            f"on {posed.group.device.name} too",
        )
    if region.environment.nbytes > room(outside):
        return PlanError(
            f"environment {region.role} does not fit on {kind}",
            where=f"{where}.memory_gib",
            found=format_bytes(region.environment.nbytes),
            expected=f"at most {format_bytes(room(outside))}, the usable memory of a device",
            hint=f"alone it takes {kind} of {_enough(region.environment.nbytes, outside)} GiB; or "
            "an environment that needs less",
        )
    return PlanError(
        f"environment {region.role} is on {kind}, so it is apart from a policy on "
        f"{posed.group.device.name}",
        where=pins.where(task.id, _PLACES),
        found=pins.said(task.id, _PLACES),
        hint=_left_out(
            [pin for field, pin in pins.asked.get(task.id, {}).items() if field in _PLACES],
            posed,
            pins,
            fits,
        ),
    )


def _enough(nbytes: int, group: DeviceGroup) -> int:
    """GiB of each device of a group, of which an environment gets so many bytes."""
    need = nbytes + RUNTIME_BYTES[group.device.type]
    return math.ceil(need / group.device.share / (1 << 30))


def _of_hosts(
    task: TaskWork, region: Region, posed: Posed, pins: PinnedTasks, where: str, fits: Fits
) -> PlanError:
    made, needs = posed.candidates, region.environment.nbytes
    asked = pins.asked.get(task.id, {})
    if (pin := asked.get(OWN)) is not None:
        return PlanError(
            f"environment {region.role} is on the CPUs of hosts, and has no accelerators to pin",
            where=pin.where,
            found=str(pin),
            hint=f"{_left_out((pin,), posed, pins, fits)}; or, if it is on accelerators, set "
            f"{where}.device=accelerator",
        )
    spare, pin = posed.group.spare_bytes, asked.get("environment")
    is_apart = pin is not None and pin.value == "apart"
    if is_apart and posed.group.spare_cores:
        return PlanError(
            f"nodes without accelerators do not hold environment {region.role}",
            where=f"{where}.memory_gib",
            found=f"{format_bytes(needs)} for each of {region.sharers} regions",
            expected=f"at most {format_bytes(int(HOST_SHARE * spare))} in all, the usable memory",
            hint="it takes nodes of "
            f"{math.ceil(region.sharers * needs / HOST_SHARE / (1 << 30))} GiB (memory_gib), or an "
            "environment that needs less",
        )
    if pin is not None and is_apart:
        return PlanError(
            f"environment {region.role} needs no accelerator, so it is apart only on nodes without",
            where=pin.where,
            found=f"{pin}, and a cluster that has no such nodes",
            hint=f"{_left_out((pin,), posed, pins, fits)}; or, if it is on accelerators, set "
            f"{where}.device=accelerator",
        )
    host = (made.host or 0) * posed.group.node_size
    return PlanError(
        f"the hosts cannot hold environment {region.role} together with what {task.id} puts there",
        where=f"{where}.memory_gib",
        found=format_bytes(needs),
        expected=f"less than {format_bytes(host)}, what plans may fill of a host",
        hint=f"{more_host(made.host, posed.group, fits)}, or an environment that needs less",
    )


def _has_way(task: TaskWork, posed: Posed, only: Filter) -> bool:
    drawn: Drawn = {}
    counts = posed.problem.block_sizes()
    return any(
        ways_of(posed.candidates, task, count, only, shared=False, counts=counts, drawn=drawn)
        for count in counts
        if only.devices in (None, count)
    )
