"""What makes an impossible job possible: changes that are tried before they are suggested.

A size is looked for on a ladder, on each step of which the whole job is placed anew, and then
between the last that was not enough and the first that was: memory halfway, nodes by round numbers.
How many are tried depends on the number of devices alone, so that messages are the same everywhere;
where none was enough, or the pool is too large to try any, no number is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.memory import format_bytes
from flowrl.plan.batches import Batch
from flowrl.plan.options import Pin
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.ways.candidate import RECOMPUTE
from flowrl.plan.ways.pin_filter import OWN, Filter
from flowrl.wording import counted

GIB = 1 << 30

_LADDER = (1.0, 1.03, 1.07, 1.12, 1.2, 1.35, 1.6, 2.0, 3.0, 5.0, 8.0)
"""Of what is needed at least: sizes that are tried. Other tasks need some more beside."""

_HALVINGS = 3

_FAR = 1.5
"""Times what is needed at least, from which on a size needs a word on what takes it."""

_FOUND = {"cuda": 0.98, "npu": 0.95}
"""Of the memory that an accelerator is sold with, what software finds on it: rounded down from
those of configs/hardware, which have both (0.985 to 0.992 of CUDA's but for cards
whose ECC takes some, 0.952 to 0.957 of NPUs)."""

_ECC_GIB = 48
_FOUND_BESIDE_ECC = 0.92
"""CUDA's devices of up to so much may be cards whose ECC takes a sixteenth of it (L40S, L20)."""

FULL_NODE = 8
"""Devices that a node may have: a smaller one may get more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A job with one thing otherwise: its devices, the memory of their hosts, its pins or batch.

    Attributes:
        host: Bytes of its host's memory that each device may fill.
    """

    group: DeviceGroup | None = None
    host: int | None = None
    pins: PinnedTasks | None = None
    batch: Batch | None = None


Fits: TypeAlias = Callable[[Trial], bool]
"""Whether a job has a plan with a change."""


def tries_on(devices: int) -> int:
    """How many changes are tried of a job on so many devices: a search takes longer on more."""
    return 14 if devices <= 128 else 6 if devices <= 512 else 0


def more_memory(need: int, group: DeviceGroup, fits: Fits) -> str:
    """How a plan may fill so many bytes of a device or somewhat more: a share, or larger ones.

    Sizes are those that devices are sold with, of which software finds less.

    Args:
        need: At least.
    """
    if need <= _free(group) and group.device.type != "cpu":
        least = math.ceil(100 * need / _free(group))
        share = _smallest(
            least, group, lambda one: fits(Trial(group=_filled(group, one / 100))), most=100
        )
        if share is not None:
            return f"set plan.memory_share to {share / 100:g}"
        if not tries_on(len(group.addresses)):
            return f"set plan.memory_share to more than {(least - 1) / 100:g}"
    usable = 1.0 if group.device.type == "cpu" else group.device.share
    least_gib = math.ceil(_sold(group.device.type, max(need / usable, _free(group))))
    found = _smallest(least_gib, group, lambda gib: fits(Trial(group=_larger(group, gib))))
    if found is None:
        more = round(_sold(group.device.type, need / usable) * GIB)
        return f"take devices with more than {format_bytes(more)}"
    whole = ", for all that the job does there" if found > _FAR * least_gib else ""
    return f"take devices of {found} GiB{whole}"


def more_host(host: int | None, group: DeviceGroup, fits: Fits, need: int = 0) -> str:
    """How large hosts must be, of which devices may fill `host` bytes each now.

    Args:
        need: Of these, at least.
    """
    return host_enough(host, group, fits, need) or "take hosts with more memory (memory_gib)"


def host_enough(host: int | None, group: DeviceGroup, fits: Fits, need: int = 0) -> str | None:
    """The same, where a size that is tried is enough; else None."""
    if not host or not group.host_bytes:
        return None
    each = group.host_bytes / host
    least = math.ceil(max(need * each, group.host_bytes) / GIB)
    found = _smallest(least, group, lambda gib: fits(Trial(host=int(gib * GIB / each))))
    if found is None:
        return None
    return f"take hosts with {found} GiB of memory (memory_gib)"


def more_devices(group: DeviceGroup, most: int, fits: Fits, host: int | None = None) -> str | None:
    """The fewest devices that are enough, of the numbers that are tried; None where none is.

    Those are more devices in a node that is the only one and has few, twice as many nodes and four
    times as many, and then round numbers below.

    Args:
        host: Bytes of its host's memory that each device may fill now.
    """
    devices, size = len(group.addresses), group.node_size
    alone = devices == size and group.device.type != "cpu"
    for more in range(devices + 1, FULL_NODE + 1) if alone else ():
        # They share the host that there is.
        part = None if host is None else host * size // more
        if fits(Trial(group=_fuller(group, more), host=part)):
            return f"take {more} devices in the node"

    def enough(nodes: int) -> bool:
        return fits(Trial(group=wider(group, nodes)))

    low = devices // size
    for nodes in (2 * low, 4 * low):
        if nodes * size <= most and tries_on(nodes * size) and enough(nodes):
            fewer = next(filter(enough, _round_numbers(low, nodes, tries_on(nodes * size))), nodes)
            if group.in_part:
                return f"take {counted(fewer, 'node')} like these"
            return f"take {fewer * size} devices ({counted(fewer, 'node')})"
        low = nodes
    return None


def _round_numbers(low: int, high: int, most: int) -> list[int]:
    """Between two numbers those of the highest powers of two, ascending: what can be divided most
    often. Not every number of nodes has a layout, so they are not halved."""
    between = sorted(range(low + 1, high), key=lambda one: (-(one & -one), one))
    return sorted(between[:most])


def _smallest(
    least: int, group: DeviceGroup, enough: Callable[[int], bool], most: int | None = None
) -> int | None:
    """The smallest size that is enough, nearly; None where none of those that are tried is."""
    ladder = (math.ceil(least * one) for one in _LADDER)
    sizes = list(dict.fromkeys(one if most is None else min(one, most) for one in ladder))
    low, tried = least - 1, tries_on(len(group.addresses))
    for size in sizes[:tried]:
        if enough(size):
            high = size
            break
        low = size
    else:
        return None
    for _ in range(min(_HALVINGS, tried)):
        middle = (low + high) // 2
        if middle <= low or high - low <= 0.01 * high:
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _free(group: DeviceGroup) -> int:
    """Free memory of the device that has least."""
    if group.device.type == "cpu":
        return group.budget_bytes
    return min(group.device.free_bytes, round(group.budget_bytes / group.device.share))


def _filled(group: DeviceGroup, share: float) -> DeviceGroup:
    device = replace(group.device, share=share)
    return replace(group, device=device, budget_bytes=int(share * _free(group)))


def _larger(group: DeviceGroup, gib: int) -> DeviceGroup:
    """Devices that are sold with so much."""
    nbytes = int(found_share(group.device.type, gib) * gib * GIB)
    device = replace(group.device, memory_bytes=nbytes, available_bytes=None)
    spec = None if group.spec is None else replace(group.spec, memory_bytes=nbytes)
    return replace(group, device=device, spec=spec, budget_bytes=device.budget_bytes)


def found_share(device_type: str, gib: float) -> float:
    """Of so much that an accelerator is sold with, what software finds on it at least."""
    if device_type == "cuda" and gib <= _ECC_GIB:
        return _FOUND_BESIDE_ECC
    return _FOUND.get(device_type, 1.0)


def _sold(device_type: str, nbytes: float) -> float:
    """GiB that an accelerator is sold with on which software finds so many bytes."""
    gib = nbytes / GIB / found_share(device_type, 0.0)
    if device_type == "cuda" and gib > _ECC_GIB:
        return max(_ECC_GIB + 1.0, nbytes / GIB / _FOUND["cuda"])
    return gib


def _fuller(group: DeviceGroup, devices: int) -> DeviceGroup:
    """The only node with more devices."""
    more = tuple(f"more/{one}" for one in range(devices - len(group.addresses)))
    return replace(group, addresses=group.addresses + more, node_size=devices)


def wider(group: DeviceGroup, nodes: int) -> DeviceGroup:
    """With so many nodes, like those that are there."""
    more = range(nodes * group.node_size - len(group.addresses))
    spare = tuple(f"more-{one // group.node_size}/{one}" for one in more)
    return replace(group, addresses=group.addresses + spare)


def changed_alike(
    group: DeviceGroup, before: DeviceGroup, after: DeviceGroup
) -> DeviceGroup | None:
    """A group of the same devices, changed as another one was: in their memory, or in the number of
    nodes; None where that says nothing of it."""
    if group.kind != before.kind or before.node_size != after.node_size:
        return None
    if before.num_nodes != after.num_nodes:
        return wider(group, after.num_nodes) if group.num_nodes == before.num_nodes else None
    return replace(group, device=after.device, spec=after.spec, budget_bytes=after.budget_bytes)


def without_pins(pins: PinnedTasks, left_out: Collection[Pin]) -> PinnedTasks:
    """What the others say."""
    filters = dict(pins.filters)
    devices, environments = dict(pins.devices), dict(pins.environments)
    asked = {}
    for name, own in pins.asked.items():
        for field, pin in own.items():
            if pin in left_out:
                filters[name] = filters[name].without(field)
                if field == "devices":
                    devices.pop(name, None)
                if field == OWN:
                    environments.pop(name, None)
        asked[name] = {field: pin for field, pin in own.items() if pin not in left_out}
    return replace(pins, filters=filters, devices=devices, environments=environments, asked=asked)


def with_value(pins: PinnedTasks, pin: Pin, value: int | str) -> PinnedTasks:
    """The same with another value of a pin of anything but devices."""
    filters = dict(pins.filters)
    for name, own in pins.asked.items():
        if own.get(pin.field) == pin:
            filters[name] = with_setting(filters[name], pin.field, value)
    return replace(pins, filters=filters)


def with_devices(pins: PinnedTasks, pin: Pin, numbers: tuple[int, ...]) -> PinnedTasks:
    """The same with other devices in a pin of tasks' devices.

    Args:
        numbers: In the cluster.
    """
    filters, devices = dict(pins.filters), dict(pins.devices)
    for name, own in pins.asked.items():
        if own.get("devices") == pin:
            filters[name] = replace(filters[name], devices=len(numbers))
            devices[name] = numbers
    return replace(pins, filters=filters, devices=devices)


def with_setting(only: Filter, field: str, value: int | str) -> Filter:
    """What is left of a task's candidates by another value of one field."""
    match field:
        case "recompute":
            return replace(only, recompute=next(one for one in RECOMPUTE if one == value))
        case "offload":
            return replace(only, offload=str(value))
        case "micro_tokens":
            return replace(only, micro_tokens=int(value))
        case _:
            layout = ((name, int(value) if name == field else size) for name, size in only.layout)
            return replace(only, layout=tuple(layout))


def fewer_pins(pins: PinnedTasks, task: str) -> Iterator[tuple[Pin, ...]]:
    """Pins of a task that may be left out: one, then two and so on, in the order of the task's."""
    every = tuple(dict.fromkeys(pins.asked.get(task, {}).values()))
    for number in range(1, len(every) + 1):
        yield from combinations(every, number)
