"""Admission: which offered groups may start, and how many more are wanted.

Groups that are not admitted wait here, where nothing ages and no batch counts on them. Admission is
of whole groups; the order of admission is the order of batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from flowrl.errors import SchedulerError
from flowrl.ids import GroupId
from flowrl.rollout.policies.prompts import WeightedShares
from flowrl.rollout.queues import Shares
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import Group


class AdmissionQueue:
    """Groups that wait for admission, by source, and the counts of requested prompts."""

    __slots__ = (
        "_settings",
        "_shares",
        "_waiting",
        "admitted",
        "asked_for_lost",
        "kept",
        "lost",
        "new_kept",
        "new_settled",
        "num_admitted",
        "requested",
        "settled",
        "unsettled",
    )

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        fairness = settings.fairness
        self._shares = (
            Shares(fairness)
            if isinstance(fairness, WeightedShares) and settings.budget is not None
            else None
        )
        self._waiting: dict[str, deque[Group]] = {}  # by source, no empty ones, in offer order
        self.num_admitted = 0  # groups ever admitted, which is the next one's seq
        self.admitted = 0  # admitted groups that are alive
        self.lost = 0  # refill: dead groups for which no replacement was asked for; >= 0
        self.asked_for_lost = 0  # refill: those for which one was, and has not been offered; >= 0
        self.requested: Counter[str] = Counter()  # by source, asked for and not yet offered; > 0
        self.unsettled = 0  # admitted groups that neither got READY nor died; >= 0
        self.kept = 0.0  # refill: groups that got READY before the last request, fading
        self.settled = 0.0  # refill: groups that got READY or died before it, fading alike
        self.new_kept = 0  # refill: of those since then
        self.new_settled = 0

    # Groups

    def add(self, group: Group) -> None:
        """Adds an offered group, which waits for its admission."""
        source = self._key(group.source)
        queue = self._waiting.get(source)
        if queue is None:
            queue = self._waiting[source] = deque()
            if self._shares is not None:
                self._shares.activate(source)
        queue.append(group)

    def pop(self) -> Group:
        """Removes the next group; there is one."""
        source = "" if self._shares is None else self._shares.next(self._waiting)
        queue = self._waiting[source]
        group = queue.popleft()
        if not queue:
            del self._waiting[source]
        if self._shares is not None:
            self._shares.charge(source)
        return group

    def admit(self, group: Group) -> None:
        """Admits the group: its samples may start."""
        group.seq = self.num_admitted
        self.num_admitted += 1
        self.admitted += 1
        self.unsettled += 1

    def clear(self) -> None:
        """Forgets all waiting groups and requests."""
        self._waiting.clear()
        self.lost = self.asked_for_lost = 0
        self.requested.clear()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def groups(self) -> Iterator[Group]:
        """Yields the waiting groups, source by source."""
        for queue in self._waiting.values():
            yield from queue

    def _key(self, source: str) -> str:
        return source if self._shares is not None else ""

    # Demand

    def num_admissible(
        self, version: int, horizon: int, served: tuple[int, int], num_dead: int
    ) -> int:
        """Returns the number of groups that may be admitted now under the age budget.

        Args:
            num_dead: Dead groups that batches will count.
        """
        budget = self._settings.budget
        assert budget is not None
        capacity = budget.capacity(version, self._settings.max_staleness, horizon, served)
        if capacity:
            capacity += self._settings.over_sampling.prompts
        return capacity - self.admitted - num_dead

    def wanted_by_budget(self, num_admissible: int) -> dict[str, int]:
        """Returns how many groups to ask for, by source, if so many more may be admitted."""
        budget = self._settings.budget
        assert budget is not None
        number = max(0, num_admissible) + budget.queue - len(self) - self.requested.total()
        if number <= 0:
            return {}
        if self._shares is None:
            return {"": number}
        coming = Counter({source: len(queue) for source, queue in self._waiting.items()})
        return self._shares.demand(number, coming + self.requested)

    def wanted_by_batches(self, asked: int, alive: int) -> int:
        """Returns how many groups to ask for where batches that wait for `asked` groups lack some.

        Only what was lost is asked for again: the caller offers the first ones by itself. Groups
        are asked for once all others are settled, so that their number does not depend on the order
        in which these were.
        """
        missing = min(asked - alive - self.requested.total(), self.lost)
        if missing <= 0 or self.unsettled:
            return 0
        self.lost -= missing
        self.asked_for_lost += missing
        policy = self._settings.refill_by
        faded = policy.fading**self.new_settled
        self.kept = self.kept * faded + self.new_kept
        self.settled = self.settled * faded + self.new_settled
        self.new_kept = self.new_settled = 0
        return policy.ask(missing, self.kept, self.settled)

    def request(self, source: str, number: int) -> None:
        """Notes that so many groups were asked for."""
        self.requested[source] += number

    def offered(self, source: str, number: int) -> None:
        """Notes that so many groups were offered, whether asked for or not.

        Prompts beyond the request of their source count for other sources, which may have none
        left.
        """
        source = self._key(source)
        for name in sorted(self.requested, key=lambda name: (name != source, name)):
            taken = min(number, self.requested[name])
            number -= taken
            self.requested[name] -= taken
            if not self.requested[name]:
                del self.requested[name]
        self.asked_for_lost = min(self.asked_for_lost, self.requested.total())

    def forget_requests(self) -> None:
        """Forgets what was asked for, which is to be asked for again."""
        self.lost += self.asked_for_lost
        self.asked_for_lost = 0
        self.requested.clear()

    def settle(self, kept: bool) -> None:
        """Counts a group that got READY, or died before."""
        self.unsettled -= 1
        self.new_kept += kept
        self.new_settled += 1

    # The state as JSON

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the groups themselves."""
        return {
            "num_admitted": self.num_admitted,
            "waiting": {
                source: [group.id for group in queue] for source, queue in self._waiting.items()
            },
            "lost": self.lost,
            "asked_for_lost": self.asked_for_lost,
            "requested": dict(self.requested),
            "kept": self.kept,
            "settled": self.settled,
            "new_kept": self.new_kept,
            "new_settled": self.new_settled,
            "shares": None if self._shares is None else self._shares.to_json(),
        }

    def read(self, obj: dict[str, Any], groups: dict[GroupId, Group]) -> None:
        """Restores what `to_json` wrote; whoever reads the admitted groups counts them."""
        self.num_admitted = obj["num_admitted"]
        self._waiting = {
            source: deque(groups[GroupId(name)] for name in names)
            for source, names in obj["waiting"].items()
        }
        self.lost, self.asked_for_lost = obj["lost"], obj["asked_for_lost"]
        self.requested = Counter(obj["requested"])
        self.kept, self.settled = obj["kept"], obj["settled"]
        self.new_kept, self.new_settled = obj["new_kept"], obj["new_settled"]
        if self._shares is not None:
            self._shares.read(obj["shares"])


# Which groups were ever offered, in one bit each, so that none is consumed twice in a long run.


class OfferedGroups:
    """A set of group ids that only grows: a bitmap of prompts for each epoch.

    The groups of samples' children have a bitmap for each epoch and members: that of the groups
    `0/*/3`, which answer what member 3 made of each prompt, has the name `0/3`.
    """

    __slots__ = ("_bitmaps",)

    def __init__(self) -> None:
        self._bitmaps: dict[str, bytearray] = {}

    def add(self, group: GroupId) -> bool:
        """Remembers the group; False if it was there already.

        Raises:
            SchedulerError: the id is neither `epoch/prompt` nor that of a sample.
        """
        name, prompt = self._parse(group)
        bits = self._bitmaps.setdefault(name, bytearray())
        byte, mask = prompt >> 3, 1 << (prompt & 7)
        if byte >= len(bits):
            # Doubling keeps the cost of growing constant for each prompt.
            bits.extend(bytes(max(byte + 1 - len(bits), len(bits))))
        if bits[byte] & mask:
            return False
        bits[byte] |= mask
        return True

    def __contains__(self, group: GroupId) -> bool:
        name, prompt = self._parse(group)
        bits = self._bitmaps.get(name, b"")
        return prompt >> 3 < len(bits) and bool(bits[prompt >> 3] & (1 << (prompt & 7)))

    @staticmethod
    def _parse(group: GroupId) -> tuple[str, int]:
        epoch, *path = group.split("/")
        if not path or not all(part.isdecimal() for part in (epoch, *path)):
            raise SchedulerError(
                "a group id has the wrong form",
                found=repr(group),
                expected="'epoch/prompt', both counted from 0, or the id of a sample",
            )
        return "/".join([epoch, *path[1:]]), int(path[0])

    def to_json(self) -> dict[str, str]:
        """Returns each bitmap in hexadecimal: bit `p & 7` of byte `p >> 3` is prompt p.

        Written at every step boundary, so it costs one call an epoch and no look at each prompt.
        """
        return {name: bits.rstrip(b"\0").hex() for name, bits in sorted(self._bitmaps.items())}

    @classmethod
    def from_json(cls, value: dict[str, str]) -> OfferedGroups:
        """Returns the set that `to_json` wrote.

        Raises:
            ValueError: not such a description.
        """
        offered = cls()
        offered._bitmaps = {name: bytearray.fromhex(bits) for name, bits in value.items()}
        return offered
