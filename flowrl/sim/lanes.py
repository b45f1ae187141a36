"""What does one thing at a time: a process, or the devices that an engine has to itself.

A lane is taken in the order of asking. Whoever asks says how long it takes, and learns when it
begins: at once, or when everyone before has ended. Devices that one engine needs together, and
others by themselves, are lanes of their own, and a group of lanes for that engine.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """How much a lane did.

    Attributes:
        busy_s: Seconds of the whole simulation that it worked.
        idle_share: Of the steps that are like those that follow (`SimReport.num_ramp`), 0 to 1.
        num_devices: Accelerators that it stands for; 0 of a process.
        in_use: The plan puts something on them.
    """

    lane: str
    device: str
    busy_s: float
    idle_share: float
    num_devices: int = 0
    in_use: bool = True


class Recorder(Protocol):
    """Is told what lanes did (the trace)."""

    def span(self, lane: Lane, what: str, begin_s: float, end_s: float) -> None:
        """Something that a lane did, once it is over."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Lane:
    """One at a time: `take`, perhaps `shorten`, then `done`; or `work`, which is all of it.

    >>> lane = Lane(name="main", device="cpu:0")
    >>> lane.work("update", 0.0, 2.0), lane.work("sync", 1.0, 0.5)
    ((0.0, 2.0), (2.0, 2.5))

    Attributes:
        name: Unique: `main`, `actor.generate[3]`.
        device: Address of the device, for people; several lanes may be processes of one CPU.
        num_devices: Accelerators that it stands for; 0 of a process.
        in_use: The plan puts something on them.
        process: Lanes of one name are threads of one process, and share its interpreter; empty
            shares it with nobody.
        free_s: When everyone who asked so far has ended.
        busy_s: Seconds that it worked.
        recorder: Is told of what it did; None records nothing.
    """

    name: str
    device: str
    num_devices: int = 0
    in_use: bool = True
    process: str = ""
    free_s: float = 0.0
    busy_s: float = 0.0
    recorder: Recorder | None = None
    _spent: dict[str, float] = field(default_factory=dict)
    # Begin and end of each time that it worked, what follows at once as one; in no order.
    _begins: array[float] = field(default_factory=lambda: array("d"))
    _ends: array[float] = field(default_factory=lambda: array("d"))

    @property
    def names(self) -> frozenset[str]:
        """Its own, as `LaneGroup` has those of its lanes."""
        return frozenset({self.name})

    def take(self, now_s: float, duration_s: float) -> tuple[float, float]:
        """Takes the lane for so long, behind those who asked before; returns begin and end."""
        begin = max(now_s, self.free_s)
        self.free_s = begin + duration_s
        return begin, self.free_s

    def shorten(self, end_s: float, new_end_s: float) -> None:
        """What was to end at `end_s` ends at another time; those who asked later stay."""
        if self.free_s == end_s:
            self.free_s = new_end_s

    def done(self, what: str, begin_s: float, end_s: float) -> None:
        """Books what is over."""
        self.busy_s += end_s - begin_s
        self._spent[what] = self._spent.get(what, 0.0) + end_s - begin_s
        if self._ends and self._ends[-1] == begin_s:
            self._ends[-1] = end_s
        elif end_s > begin_s:
            self._begins.append(begin_s)
            self._ends.append(end_s)
        if self.recorder is not None and end_s > begin_s:
            self.recorder.span(self, what, begin_s, end_s)

    def work(self, what: str, now_s: float, duration_s: float) -> tuple[float, float]:
        """Takes the lane for something that nothing cuts short."""
        begin, end = self.take(now_s, duration_s)
        self.done(what, begin, end)
        return begin, end

    def spent(self, what: str) -> float:
        """Seconds that it worked at one thing."""
        return self._spent.get(what, 0.0)

    def busy_between(self, from_s: float, until_s: float) -> float:
        """Seconds that it worked in a part of the time.

        >>> lane = Lane(name="main", device="cpu:0")
        >>> lane.work("update", 0.0, 2.0), lane.busy_between(1.5, 4.0)
        ((0.0, 2.0), 0.5)
        """
        times = zip(self._begins, self._ends, strict=True)
        return sum(max(0.0, min(end, until_s) - max(begin, from_s)) for begin, end in times)

    def use(self, from_s: float, until_s: float) -> LaneUse:
        """How much it did, and its idle share of a part of the time."""
        busy_s, whole_s = self.busy_between(from_s, until_s), until_s - from_s
        idle = 1.0 - busy_s / whole_s if whole_s > 0 else 0.0
        return LaneUse(
            lane=self.name,
            device=self.device,
            busy_s=self.busy_s,
            idle_share=min(1.0, max(0.0, idle)),
            num_devices=self.num_devices,
            in_use=self.in_use,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class LaneGroup:
    """Several lanes as one: taken all at once, when the last of them is free.

    >>> left, right = Lane(name="cuda:0", device="cuda:0"), Lane(name="cuda:1", device="cuda:1")
    >>> both = LaneGroup(name="cuda:[0-1]", device="cuda:[0-1]", lanes=(left, right))
    >>> left.work("score", 0.0, 3.0), both.work("generate", 1.0, 1.0), right.busy_s
    ((0.0, 3.0), (3.0, 4.0), 1.0)
    """

    name: str
    device: str
    lanes: tuple[Lane, ...]

    @property
    def names(self) -> frozenset[str]:
        """Those of its lanes."""
        return frozenset(lane.name for lane in self.lanes)

    @property
    def free_s(self) -> float:
        """When all are free."""
        return max(lane.free_s for lane in self.lanes)

    def take(self, now_s: float, duration_s: float) -> tuple[float, float]:
        """See `Lane`."""
        begin = max(now_s, self.free_s)
        for lane in self.lanes:
            lane.take(begin, duration_s)
        return begin, begin + duration_s

    def shorten(self, end_s: float, new_end_s: float) -> None:
        """See `Lane`."""
        for lane in self.lanes:
            lane.shorten(end_s, new_end_s)

    def done(self, what: str, begin_s: float, end_s: float) -> None:
        """See `Lane`."""
        for lane in self.lanes:
            lane.done(what, begin_s, end_s)

    def work(self, what: str, now_s: float, duration_s: float) -> tuple[float, float]:
        """See `Lane`."""
        begin, end = self.take(now_s, duration_s)
        self.done(what, begin, end)
        return begin, end

    def spent(self, what: str) -> float:
        """Seconds that its lanes worked at one thing, of the busiest one."""
        return max(lane.spent(what) for lane in self.lanes)
