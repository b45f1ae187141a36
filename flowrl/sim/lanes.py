"""What does one thing at a time: a process, or the devices that an engine has to itself.

A lane is taken in the order of asking. Whoever asks says how long it takes, and learns when it
begins: at once, or when everyone before has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Lane", "LaneUse", "Recorder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """How much a lane did.

    Attributes:
        idle_share: Of the simulated time, 0 to 1.
    """

    lane: str
    device: str
    busy_s: float
    idle_share: float


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
        free_s: When everyone who asked so far has ended.
        busy_s: Seconds that it worked.
        recorder: Is told of what it did; None records nothing.
    """

    name: str
    device: str
    free_s: float = 0.0
    busy_s: float = 0.0
    recorder: Recorder | None = None
    _spent: dict[str, float] = field(default_factory=dict)

    def take(self, now_s: float, duration_s: float) -> tuple[float, float]:
        """Takes the lane for so long, behind those who asked before; returns begin and end."""
        begin = max(now_s, self.free_s)
        self.free_s = begin + duration_s
        return begin, self.free_s

    def shorten(self, end_s: float, new_end_s: float) -> None:
        """What was to end at `end_s` ends sooner; those who asked later stay where they are."""
        if self.free_s == end_s:
            self.free_s = new_end_s

    def done(self, what: str, begin_s: float, end_s: float) -> None:
        """Books what is over."""
        self.busy_s += end_s - begin_s
        self._spent[what] = self._spent.get(what, 0.0) + end_s - begin_s
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

    def use(self, until_s: float) -> LaneUse:
        """How much it did up to `until_s`."""
        idle = 1.0 - self.busy_s / until_s if until_s > 0 else 0.0
        return LaneUse(
            lane=self.name,
            device=self.device,
            busy_s=self.busy_s,
            idle_share=min(1.0, max(0.0, idle)),
        )
