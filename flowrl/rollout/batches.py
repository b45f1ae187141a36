"""Chooses the groups of a batch and decides when it is complete.

Two orders, one for each kind of run:

- `OfferOrder`, synchronous: a batch is the next groups in the order of admission and waits for each
  of them, so that what is trained on never depends on who finished first.
- `ByDeadline`, asynchronous, and synchronous with redundant prompts: a batch takes groups as they
  get ready, the oldest weights first (earliest deadline first). It waits for an unfinished group
  only where going on without it would make a sample too old for every batch that could still take
  it; with `DropStragglers` not even then.
- `ByName`, where batches name their groups: those of samples' children, which are consumed with
  the samples.

When that is: a group that began at version f can be consumed up to version f + max_staleness, its
deadline. With n groups a batch and one batch a version, the batches up to a deadline d take at
most (d - version + 1) n groups. So of the groups with a deadline up to d, the batch of now must
take all but (d - version) n; an age budget may have several batches a version. Looking at the next
version alone is not enough: two groups with the same deadline that are both passed over until then
cannot both be in its batch.

How much is offered ahead decides how much slack there is. With (max_staleness + 1) n groups in
flight no group can be passed over at all, and batches follow the order of versions; every batch
fewer lets fresh groups overtake stragglers by one version more.

In all, a pool holds every group that was admitted and is not yet answered by a batch. Without
refill each group is answered exactly once, filtered and dropped ones too; with refill only kept
groups count, and the others are named in passing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from flowrl.ids import GroupId
from flowrl.rollout.policies.limits import DropStragglers
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import BatchRequest, Group, GroupPhase


class Pool(Protocol):
    """Groups that no batch has answered yet."""

    @property
    def num_counted_dead(self) -> int:
        """Dead groups that count towards batches, and that no batch has named yet."""
        ...

    def add(self, group: Group) -> None:
        """Adds an admitted group, which is later than all others."""
        ...

    def settle(self, group: Group) -> None:
        """Notes that the group became READY, FILTERED or DROPPED."""
        ...

    def lose(self, group: Group) -> None:
        """Notes that a group that was READY is DROPPED."""
        ...

    def update_version(self, group: Group) -> None:
        """Notes the changed first version of a group that is not settled."""
        ...

    def expect(self, version: int, further: int) -> None:
        """Notes that the next batch, and `further` ones after it, are for weights `version`."""
        ...

    def complete(self, asked: BatchRequest) -> bool:
        """Returns True if a batch does not have to wait."""
        ...

    def take(self, asked: BatchRequest) -> list[Group] | None:
        """Removes and returns the groups of a batch in order, or None while it must wait."""
        ...

    def groups(self) -> Iterable[Group]:
        """Returns all groups of the pool in the order of admission."""
        ...


def open_pool(settings: SchedulerSettings) -> Pool:
    """Returns the pool for a run of these rules."""
    if settings.named:
        return ByName()
    if settings.max_staleness == 0 and not settings.over_sampling.prompts:
        return OfferOrder(settings.refill)
    return ByDeadline(
        settings.max_staleness,
        settings.refill,
        waits=not isinstance(settings.stragglers, DropStragglers),
        per_version=settings.budget.batches_per_version if settings.budget else 1,
    )


class OfferOrder:
    """A batch is the next groups in the order of admission, all of them settled."""

    __slots__ = ("_dead", "_front", "_kept", "_refill", "_rest")

    def __init__(self, refill: bool) -> None:
        self._refill = refill
        self._front: deque[Group] = deque()  # settled groups before the first that is not
        self._rest: deque[Group] = deque()  # the others; the first is not settled
        self._kept = 0  # READY groups in _front
        self._dead = 0  # FILTERED or DROPPED groups in either

    @property
    def num_counted_dead(self) -> int:
        return 0 if self._refill else self._dead

    def add(self, group: Group) -> None:
        self._rest.append(group)

    def settle(self, group: Group) -> None:
        self._dead += not group.alive
        rest = self._rest
        while rest and rest[0].settled:
            first = rest.popleft()
            self._front.append(first)
            self._kept += first.alive

    def lose(self, group: Group) -> None:
        self._dead += 1
        # Groups come to the front in offer order, so its last one says how far the front goes.
        if self._front and group.seq <= self._front[-1].seq:
            self._kept -= 1

    def update_version(self, group: Group) -> None:
        pass

    def expect(self, version: int, further: int) -> None:
        pass

    def complete(self, asked: BatchRequest) -> bool:
        return (self._kept if self._refill else len(self._front)) >= asked.groups

    def take(self, asked: BatchRequest) -> list[Group] | None:
        if not self.complete(asked):
            return None
        taken: list[Group] = []
        num_groups = asked.groups
        while num_groups:
            group = self._front.popleft()
            taken.append(group)
            self._kept -= group.alive
            self._dead -= not group.alive
            num_groups -= group.alive or not self._refill
        return taken

    def groups(self) -> Iterable[Group]:
        yield from self._front
        yield from self._rest


class ByDeadline:
    """A batch takes settled groups, oldest weights first, unless others would get too old.

    Without refill a dead group is answered like a ready one, in its place by age; with refill it
    is no longer of interest.
    """

    __slots__ = (
        "_begun",
        "_dead",
        "_done",
        "_further",
        "_open",
        "_per_version",
        "_ready",
        "_refill",
        "_staleness",
        "_version",
        "_waits",
    )

    def __init__(
        self, max_staleness: int, refill: bool, *, waits: bool = True, per_version: int = 1
    ) -> None:
        self._staleness = max_staleness
        self._refill = refill
        self._waits = waits  # for groups that the next batches could not take any more
        self._per_version = per_version  # batches
        self._version = 0  # that the next batch is for
        self._further = per_version - 1  # batches after it for the same version
        self._open: dict[int, Group] = {}  # not settled, by seq
        self._ready: dict[int, Group] = {}  # READY, by seq
        self._dead: dict[int, Group] = {}  # FILTERED or DROPPED, by seq
        # Groups by first version, of those that batches are still to take; no zeros.
        self._begun: dict[int, int] = {}  # open, ready and, without refill, dead
        self._done: dict[int, int] = {}  # the same without the open ones

    @property
    def num_counted_dead(self) -> int:
        return 0 if self._refill else len(self._dead)

    def add(self, group: Group) -> None:
        self._open[group.seq] = group
        self.update_version(group)

    def update_version(self, group: Group) -> None:
        if group.pooled_version is not None:
            _count(self._begun, group.pooled_version, -1)
        group.pooled_version = group.first_version
        if group.pooled_version is not None:
            _count(self._begun, group.pooled_version, 1)

    def settle(self, group: Group) -> None:
        del self._open[group.seq]
        if group.phase is GroupPhase.READY:
            self._ready[group.seq] = group
        else:
            self._dead[group.seq] = group
        if group.pooled_version is not None:
            if group.phase is GroupPhase.READY or not self._refill:
                _count(self._done, group.pooled_version, 1)
            else:
                _count(self._begun, group.pooled_version, -1)

    def lose(self, group: Group) -> None:
        del self._ready[group.seq]
        self._dead[group.seq] = group
        if self._refill:
            self._forget(group)

    def expect(self, version: int, further: int) -> None:
        self._version = version
        self._further = further

    def complete(self, asked: BatchRequest) -> bool:
        num_groups = asked.groups
        counted = len(self._ready) + (0 if self._refill else len(self._dead))
        if counted < num_groups:
            return False
        if not self._waits:
            return True
        begun = done = 0
        for first in sorted(self._begun):
            begun += self._begun[first]
            done += self._done.get(first, 0)
            versions = max(0, first + self._staleness - self._version)
            later = (versions * self._per_version + self._further) * num_groups
            if done < min(num_groups, begun - later):
                return False
        return True

    def take(self, asked: BatchRequest) -> list[Group] | None:
        if not self.complete(asked):
            return None
        candidates = list(self._ready.values())
        if not self._refill:
            candidates += self._dead.values()
        candidates.sort(key=self._urgency)
        taken = candidates[: asked.groups]
        for group in taken:
            self._forget(group)
            if self._ready.pop(group.seq, None) is None:
                del self._dead[group.seq]
        if self._refill:
            taken += self._dead.values()
            self._dead.clear()
        return sorted(taken, key=lambda group: group.seq)

    def groups(self) -> Iterable[Group]:
        everything = (*self._open.values(), *self._ready.values(), *self._dead.values())
        return sorted(everything, key=lambda group: group.seq)

    def problems(self) -> list[str]:
        """Returns the inconsistencies of the counts; for the validator."""
        found = []
        done = [*self._ready.values(), *(() if self._refill else self._dead.values())]
        for name, counts, groups in (
            ("begun", self._begun, [*self._open.values(), *done]),
            ("done", self._done, done),
        ):
            actual = Counter(g.first_version for g in groups if g.first_version is not None)
            if actual != counts:
                found.append(f"groups {name} by version are {dict(actual)}, counted {counts}")
        if any(group.settled for group in self._open.values()):
            found.append("a settled group counts as open")
        if any(group.phase is not GroupPhase.READY for group in self._ready.values()):
            found.append("a group that is not ready counts as ready")
        return found

    def _forget(self, group: Group) -> None:
        """Takes a settled group out of the counts."""
        if group.pooled_version is not None:
            _count(self._begun, group.pooled_version, -1)
            _count(self._done, group.pooled_version, -1)

    def _urgency(self, group: Group) -> tuple[int, int]:
        return (self._version if group.pooled_version is None else group.pooled_version, group.seq)


class ByName:
    """A batch is the groups that it names, in that order, all of them settled."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[GroupId, Group] = {}  # in the order of admission

    @property
    def num_counted_dead(self) -> int:
        return sum(not group.alive for group in self._groups.values())

    def add(self, group: Group) -> None:
        self._groups[group.id] = group

    def settle(self, group: Group) -> None:
        pass

    def lose(self, group: Group) -> None:
        pass

    def update_version(self, group: Group) -> None:
        pass

    def expect(self, version: int, further: int) -> None:
        pass

    def complete(self, asked: BatchRequest) -> bool:
        return all(self._groups[name].settled for name in asked.names)

    def take(self, asked: BatchRequest) -> list[Group] | None:
        if not self.complete(asked):
            return None
        return [self._groups.pop(name) for name in asked.names]

    def groups(self) -> Iterable[Group]:
        return self._groups.values()


def _count(counts: dict[int, int], version: int, change: int) -> None:
    number = counts.get(version, 0) + change
    if number:
        counts[version] = number
    else:
        del counts[version]
