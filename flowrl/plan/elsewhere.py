"""Devices for environments that are on accelerators of another kind than their policies.

Before tasks are placed, devices of the kind that environments ask for are set aside for them: all
of that kind, or so many as `device_counts` has (whole nodes, or a part of the only one), so that
tasks may have the others. Environments of several regions have equal numbers of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.errors import PlanError
from flowrl.plan.check.whole import number_ranges
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import device_counts
from flowrl.plan.ways.tasks import TaskWork
from flowrl.wording import listing, suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group of devices that may hold some of the tasks.

    Attributes:
        host: Bytes of its host's memory that each device may fill.
        numbering: Of each device, its number in the cluster.
    """

    group: DeviceGroup
    host: int
    numbering: tuple[int, ...]

    @property
    def kind(self) -> str:
        """What its devices are."""
        return self.group.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """What is set aside where rollouts are on one part of the devices.

    Attributes:
        outside: The devices of environments, by the task that they play with.
        left: What other tasks may be on beside the rollouts' part.
    """

    outside: Mapping[str, DeviceGroup]
    left: tuple[Part, ...]


def check_environment_kinds(tasks: Sequence[TaskWork], kinds: Collection[str]) -> None:
    """Environments are on devices that there are.

    Raises:
        PlanError: one is not; names the nearest kind.
    """
    for task in tasks:
        kind = None if task.region is None else task.region.environment.kind
        if task.region is not None and kind is not None and kind not in kinds:
            known = dict.fromkeys(("cpu", "accelerator", *kinds))
            raise PlanError(
                f"environment {task.region.role} is to be on {kind}, and the cluster has none",
                where=f"plan.environments.{task.region.role}.device",
                found=kind,
                expected=f"one of {listing(known)}",
                hint=suggestion(kind, known)
                or f"say one of these, or plan for a cluster that has {kind} (--cluster)",
            )


def seatings(
    tasks: Sequence[TaskWork],
    part: Part,
    parts: Sequence[Part],
    hosts: Sequence[Part],
    pins: PinnedTasks,
) -> list[Seating]:
    """The ways to set devices aside for environments of rollouts on `part`; one that sets none
    aside where none needs any.

    Args:
        parts: All that tasks may be on.
        hosts: All that environments may be on.

    Raises:
        PlanError: pins name devices of a kind that the environment is not on.
    """
    others = tuple(one for one in parts if not set(one.numbering) & set(part.numbering))
    kinds: dict[str, list[TaskWork]] = {}
    for task in tasks:
        kind = None if task.region is None else task.region.environment.kind
        if kind is not None and kind != part.kind:
            kinds.setdefault(kind, []).append(task)
    found = [Seating(outside={}, left=others)]
    for kind, playing in kinds.items():
        places = [one for one in hosts if one.kind == kind]
        found = [
            Seating(outside={**before.outside, **outside}, left=left)
            for before in found
            for outside, left in _aside(playing, places, before.left, pins)
        ]
    return found


def _aside(
    playing: Sequence[TaskWork], places: Sequence[Part], left: tuple[Part, ...], pins: PinnedTasks
) -> Iterator[tuple[dict[str, DeviceGroup], tuple[Part, ...]]]:
    """Devices of one kind for the environments of some tasks, and what is left."""
    numbers = [number for place in places for number in place.numbering]
    named = {
        task.id: pins.environments[task.id] for task in playing if task.id in pins.environments
    }
    for task in playing:
        if not set(named.get(task.id, ())) <= set(numbers):
            region = task.region
            assert region is not None
            raise PlanError(
                f"environment {region.role} is on {region.environment.kind}, which its pins do not "
                "name",
                where=pins.where(task.id),
                found=pins.said(task.id),
                expected=f"devices of {number_ranges(numbers)}",
                hint=f"pin some of those, or leave {pins.said(task.id)} out",
            )
    free = [task for task in playing if task.id not in named]
    taken = {number for some in named.values() for number in some}
    shares: list[Sequence[int]] = [[number for number in numbers if number not in taken]]
    if not free:
        shares = [()]
    elif len(places) == 1 and not taken:
        shares += list(_shares(places[0], len(free)))
    for share in shares:
        each = len(share) // max(1, len(free))
        if free and not each:
            continue
        given = dict(named)
        for at, task in enumerate(free):
            given[task.id] = tuple(share[at * each : (at + 1) * each])
        used = {number for some in given.values() for number in some}
        yield (
            {name: _group(some, places) for name, some in given.items()},
            tuple(rest for one in left if (rest := _without(one, used)) is not None),
        )


def _shares(place: Part, playing: int) -> Iterator[Sequence[int]]:
    """Ends of a group that leave a group: whole nodes, or parts of the only one."""
    size, total = place.group.node_size, len(place.numbering)
    for count in device_counts(total, size):
        whole = count % size == 0 or place.group.num_nodes == 1
        if whole and playing <= count < total:
            yield place.numbering[total - count :]


def _group(numbers: Sequence[int], places: Sequence[Part]) -> DeviceGroup:
    """The devices of these numbers, of one kind."""
    at = {
        number: address
        for place in places
        for number, address in zip(place.numbering, place.group.addresses, strict=True)
    }
    return replace(
        places[0].group,
        addresses=tuple(at[number] for number in numbers),
        budget_bytes=min(place.group.budget_bytes for place in places),
    )


def _without(part: Part, used: Collection[int]) -> Part | None:
    """A part without some of its devices; None where that leaves no nodes with equally many."""
    kept = [at for at, number in enumerate(part.numbering) if number not in used]
    if len(kept) == len(part.numbering):
        return part
    nodes: dict[int, int] = {}
    for at in kept:
        nodes[at // part.group.node_size] = nodes.get(at // part.group.node_size, 0) + 1
    sizes = set(nodes.values())
    if len(sizes) != 1 or len(kept) < 2:
        return None
    return replace(
        part,
        group=replace(
            part.group,
            node_size=sizes.pop(),
            addresses=tuple(part.group.addresses[at] for at in kept),
        ),
        numbering=tuple(part.numbering[at] for at in kept),
    )
