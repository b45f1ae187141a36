"""Nodes that a plan uses in part: equal shares of all nodes, or a part of the only one.

Nodes that hold unequal numbers of free devices are groups of their own, and are also tried as equal
ones that leave some devices idle: of nodes with 8 and 5 free devices, 5 of each; of nodes with 5
each, 4 of each, since most models divide by powers of two. Devices of the only node that idle leave
its cores and the memory of its host to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.plan.elsewhere import Part
from flowrl.plan.many import Chosen
from flowrl.plan.problem_of import Posed


def even_parts(groups: Sequence[DeviceGroup]) -> tuple[DeviceGroup, ...]:
    """Equal shares of nodes of one kind of device, where they hold unequal or odd numbers of it."""
    kinds: dict[object, list[DeviceGroup]] = {}
    for group in groups:
        key = (replace(group.device, id="", available_bytes=None), group.spec)
        kinds.setdefault(key, []).append(group)
    found: list[DeviceGroup] = []
    for alike in kinds.values():
        held = {group.node_size for group in alike}
        sizes = {size for size in held if size < max(held)}
        sizes |= {1 << (size.bit_length() - 1) for size in held} - held
        found += [_shares(alike, size) for size in sorted(sizes, reverse=True)]
    return tuple(group for group in found if group.num_nodes > 1)


def _shares(alike: Sequence[DeviceGroup], size: int) -> DeviceGroup:
    """The first `size` devices of every node that has so many."""
    addresses = [
        address
        for group in alike
        if group.node_size >= size
        for place, address in enumerate(group.addresses)
        if place % group.node_size < size
    ]
    return replace(
        alike[0],
        node_size=size,
        addresses=tuple(addresses),
        in_part=True,
        budget_bytes=min(group.budget_bytes for group in alike if group.node_size >= size),
    )


def with_whole_host(part: Part) -> Part:
    """The same where each device of a node may fill all that those of the node may."""
    return replace(part, host=part.host * part.group.node_size)


def idle_part(part: Part, size: int) -> Part:
    """The first devices of a node, with what of the host the others would have."""
    group = part.group
    return Part(
        group=replace(group, node_size=size, addresses=group.addresses[:size]),
        host=part.host * group.node_size // size,
        numbering=part.numbering[:size],
    )


def minds_hosts(posed: Posed) -> bool:
    """Whether the part of a host that each device has may bind a plan of a job that has one."""
    regions = (task.region for task in posed.tasks if task.region is not None)
    if any(not region.environment.accelerated for region in regions):
        return True
    made = posed.candidates
    most = sum(max((way.host for way in ways), default=0) for ways in posed.ways.values())
    return made.host is not None and (made.short_of_host or most > made.host)


def is_better(one: Chosen, other: Chosen, *, spares: int) -> bool:
    """Whether a plan of a part of a node is taken in the place of another one.

    Args:
        spares: Devices of the part where the other plan is that of the whole node, else 0. If it
            leaves the same devices idle, as good is enough: then the others have the cores.
    """
    if spares and other.used == spares:
        return one.objective <= other.objective
    return one.objective < other.objective
