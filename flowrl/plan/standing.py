"""Schedules on the devices that pins name.

From the whole downwards, each block of a schedule gets devices. The parts of a Temporal have those
of the whole; of two parts that stand apart each gets devices that no pin of the other one names,
those that its own pins name among them. A part of a node stays in one node, and a block of whole
nodes has whole nodes, so that tasks which nobody pinned are where their times were reckoned for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from flowrl.plan.search import (
    Asynchronous,
    Leaf,
    Schedule,
    Spatial,
    Temporal,
    leaves,
)


def stand(
    schedule: Schedule,
    sizes: tuple[int, ...],
    node_size: int,
    num_devices: int,
    places: Mapping[str, Collection[int]],
) -> dict[str, tuple[int, ...]] | None:
    """The devices of each task, numbered in the group; None where it cannot stand so.

    Args:
        sizes: That blocks may have, ascending.
        places: The devices of tasks that have theirs given.
    """
    ground = _Ground(sizes=sizes, node_size=node_size, places=places)
    found: dict[str, tuple[int, ...]] = {}
    for task, numbers in ground.stood(schedule, frozenset(range(num_devices))):
        if numbers is None:
            return None
        found[task] = tuple(sorted(numbers))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What blocks stand on."""

    sizes: tuple[int, ...]
    node_size: int
    places: Mapping[str, Collection[int]]

    def stood(
        self, schedule: Schedule, devices: frozenset[int]
    ) -> Iterator[tuple[str, frozenset[int] | None]]:
        """Each task's devices, among `devices`; None once one of them finds none."""
        match schedule:
            case Leaf():
                mine = self._named(schedule)
                if mine:
                    yield schedule.task, mine if mine <= devices else None
                else:
                    size = schedule.option.devices
                    yield schedule.task, self._taken(size, mine, devices)
            case Temporal():
                yield from self.stood(schedule.first, devices)
                yield from self.stood(schedule.second, devices)
            case Spatial() | Asynchronous():
                parts = [schedule.first, schedule.second]
                # Those that pins tie down first, then the larger.
                parts.sort(key=lambda part: (not self._named(part), -self._size(part)))
                left = devices
                for part, other in zip(parts, reversed(parts), strict=True):
                    own = self._share(part, left - self._named(other))
                    if own is None:
                        yield next(leaves(part)).task, None
                        return
                    left -= own
                    yield from self.stood(part, own)
            case _:
                assert_never(schedule)

    def _named(self, schedule: Schedule) -> frozenset[int]:
        """All devices that pins of a part name."""
        return frozenset(
            number for leaf in leaves(schedule) for number in self.places.get(leaf.task, ())
        )

    def _share(self, part: Schedule, devices: frozenset[int]) -> frozenset[int] | None:
        """What a part that stands apart gets of `devices`; None where nodes do not let it."""
        named, size = self._named(part), self._size_apart(part)
        own = self._taken(size, named, devices)
        pinned = all(leaf.task in self.places for leaf in leaves(part))
        if own is None and pinned and size <= len(devices) and named <= devices:
            return named  # there is nothing else that a place would be chosen for
        return own

    def _size(self, part: Schedule) -> int:
        """Devices of a part's block."""
        match part:
            case Leaf():
                return self._rounded_up(part.option.devices)
            case Temporal():
                return max(self._size(part.first), self._size(part.second))
            case Spatial() | Asynchronous():
                need = self._size_apart(part.first) + self._size_apart(part.second)
                return self._rounded_up(need)
            case _:
                assert_never(part)

    def _size_apart(self, part: Schedule) -> int:
        """Those of a part that stands apart: at least as many as pins of it name."""
        return max(self._size(part), self._rounded_up(len(self._named(part))))

    def _rounded_up(self, need: int) -> int:
        at = bisect_left(self.sizes, need)
        return self.sizes[at] if at < len(self.sizes) else need

    def _taken(
        self, size: int, mine: frozenset[int], devices: frozenset[int]
    ) -> frozenset[int] | None:
        """`size` of `devices`, `mine` among them; None where nodes do not let them."""
        nodes: dict[int, list[int]] = {}
        for number in sorted(devices):
            nodes.setdefault(number // self.node_size, []).append(number)
        wanted = {number // self.node_size for number in mine}
        if not mine <= devices:
            return None
        if size < self.node_size:
            if len(wanted) > 1:
                return None
            rooms = [nodes[node] for node in wanted] or [
                room for room in nodes.values() if len(room) >= size
            ]
            # The fullest node that has room: whole nodes are left to those who need them.
            room = min(rooms, key=len, default=[])
            free = [number for number in room if number not in mine]
            taken = [*mine, *free[: max(0, size - len(mine))]]
            return frozenset(taken) if len(taken) == size else None
        whole = [node for node, room in nodes.items() if len(room) == self.node_size]
        whole.sort(key=lambda node: node not in wanted)
        chosen = whole[: size // self.node_size]
        if len(chosen) * self.node_size != size or not wanted <= set(chosen):
            return None
        return frozenset(number for node in chosen for number in nodes[node])
