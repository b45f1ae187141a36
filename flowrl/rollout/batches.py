"""Which groups make a batch, and when it is complete.

Two orders, one for each kind of run:

- `OfferOrder`, synchronous: a batch is the next groups in offer order and waits for each of them,
  so that what is trained on never depends on who finished first.
- `ByDeadline`, asynchronous: a batch takes groups as they get ready, the oldest weights first. It
  waits for an unfinished group only if that group would be too old for the batch after this one.

In both, a pool holds every group that was offered and is not yet answered by a batch. Without
refill each group is answered exactly once, filtered and dropped ones too; with refill only kept
groups count, and the others are named in passing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from flowrl.rollout.records import Group
from flowrl.rollout.states import GroupPhase

__all__ = ["ByDeadline", "OfferOrder", "Pool", "open_pool"]


class Pool(Protocol):
    """Groups that no batch has answered yet."""

    def add(self, group: Group) -> None:
        """A group was offered; it is later than all others."""
        ...

    def settle(self, group: Group) -> None:
        """The group became READY, FILTERED or DROPPED."""
        ...

    def lose(self, group: Group) -> None:
        """A group that was READY is DROPPED."""
        ...

    def date(self, group: Group) -> None:
        """The first version of a group that is not settled changed."""
        ...

    def publish(self, version: int) -> None:
        """The weights are `version` now."""
        ...

    def complete(self, num_groups: int) -> bool:
        """Whether a batch of so many groups need not wait."""
        ...

    def take(self, num_groups: int) -> list[Group] | None:
        """Removes and returns the groups of a batch in offer order, or None while it must wait."""
        ...

    def groups(self) -> Iterable[Group]:
        """All groups of the pool in offer order."""
        ...


def open_pool(*, max_staleness: int, refill: bool) -> Pool:
    """The pool for a run of that staleness."""
    if max_staleness == 0:
        return OfferOrder(refill)
    return ByDeadline(max_staleness, refill)


class OfferOrder:
    """A batch is the next groups in offer order, all of them settled."""

    __slots__ = ("_front", "_kept", "_refill", "_rest")

    def __init__(self, refill: bool) -> None:
        self._refill = refill
        self._front: deque[Group] = deque()  # settled groups before the first that is not
        self._rest: deque[Group] = deque()  # the others; the first is not settled
        self._kept = 0  # READY groups in _front

    def add(self, group: Group) -> None:
        self._rest.append(group)

    def settle(self, group: Group) -> None:
        rest = self._rest
        while rest and rest[0].settled:
            first = rest.popleft()
            self._front.append(first)
            self._kept += first.alive

    def lose(self, group: Group) -> None:
        # Groups come to the front in offer order, so its last one says how far the front goes.
        if self._front and group.seq <= self._front[-1].seq:
            self._kept -= 1

    def date(self, group: Group) -> None:
        pass

    def publish(self, version: int) -> None:
        pass

    def complete(self, num_groups: int) -> bool:
        return (self._kept if self._refill else len(self._front)) >= num_groups

    def take(self, num_groups: int) -> list[Group] | None:
        if not self.complete(num_groups):
            return None
        taken = []
        while num_groups:
            group = self._front.popleft()
            taken.append(group)
            self._kept -= group.alive
            num_groups -= group.alive or not self._refill
        return taken

    def groups(self) -> Iterable[Group]:
        yield from self._front
        yield from self._rest


class ByDeadline:
    """A batch takes settled groups, those that are overdue at the next publication first."""

    __slots__ = ("_dead", "_open", "_overdue", "_ready", "_refill", "_staleness", "_version")

    def __init__(self, max_staleness: int, refill: bool) -> None:
        self._staleness = max_staleness
        self._refill = refill
        self._version = 0  # latest publication
        self._open: dict[int, Group] = {}  # not settled, by seq
        self._ready: dict[int, Group] = {}  # READY, by seq
        self._dead: dict[int, Group] = {}  # FILTERED or DROPPED, by seq
        self._overdue = [0, 0]  # groups with .overdue set: in _open, in _ready

    def add(self, group: Group) -> None:
        self._open[group.seq] = group
        self.date(group)

    def settle(self, group: Group) -> None:
        del self._open[group.seq]
        self._overdue[0] -= group.overdue
        if group.phase is GroupPhase.READY:
            self._ready[group.seq] = group
            self._overdue[1] += group.overdue
        else:
            self._dead[group.seq] = group
            group.overdue = False

    def lose(self, group: Group) -> None:
        del self._ready[group.seq]
        self._overdue[1] -= group.overdue
        self._dead[group.seq] = group
        group.overdue = False

    def date(self, group: Group) -> None:
        overdue = self._is_overdue(group)
        self._overdue[0] += overdue - group.overdue
        group.overdue = overdue

    def publish(self, version: int) -> None:
        self._version = version
        for number, groups in enumerate((self._open, self._ready)):
            for group in groups.values():
                group.overdue = self._is_overdue(group)
            self._overdue[number] = sum(group.overdue for group in groups.values())

    def complete(self, num_groups: int) -> bool:
        counted = len(self._ready) + (0 if self._refill else len(self._dead))
        overdue_open, overdue_ready = self._overdue
        return counted >= num_groups and (not overdue_open or overdue_ready >= num_groups)

    def take(self, num_groups: int) -> list[Group] | None:
        if not self.complete(num_groups):
            return None
        candidates = list(self._ready.values())
        if not self._refill:
            candidates += self._dead.values()
        candidates.sort(key=self._urgency)
        taken = candidates[:num_groups]
        if self._refill:
            taken += self._dead.values()
        for group in taken:
            if self._ready.pop(group.seq, None) is None:
                del self._dead[group.seq]
            else:
                self._overdue[1] -= group.overdue
        return sorted(taken, key=lambda group: group.seq)

    def groups(self) -> Iterable[Group]:
        everything = (*self._open.values(), *self._ready.values(), *self._dead.values())
        return sorted(everything, key=lambda group: group.seq)

    def problems(self) -> list[str]:
        """What is wrong with the books; for the validator."""
        found = []
        for number, groups in enumerate((self._open, self._ready)):
            overdue = [group for group in groups.values() if self._is_overdue(group)]
            flagged = [group for group in groups.values() if group.overdue]
            if overdue != flagged or len(overdue) != self._overdue[number]:
                found.append(f"{len(overdue)} groups are overdue, {self._overdue[number]} counted")
        if any(group.settled for group in self._open.values()):
            found.append("a settled group counts as open")
        if any(group.phase is not GroupPhase.READY for group in self._ready.values()):
            found.append("a group that is not ready counts as ready")
        return found

    def _is_overdue(self, group: Group) -> bool:
        first = group.first_version
        return first is not None and first + self._staleness <= self._version

    def _urgency(self, group: Group) -> tuple[bool, int, int]:
        first = self._version if group.first_version is None else group.first_version
        return (not group.overdue, first, group.seq)
