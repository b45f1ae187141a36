"""Deadlines of the scheduler, and when it must be woken for the next one.

Time is what events say it is; it never goes back. A deadline is due when an event's time reaches
it. Whenever the earliest deadline is earlier than the wake-up that was last asked for, another
wake-up is asked for: no deadline is ever without one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from flowrl.ids import EngineId

__all__ = ["Timer", "TimerKind", "Timers"]


class TimerKind(StrEnum):
    """What a deadline is for."""

    HEARTBEAT = "heartbeat"  # a silent engine is given up
    RELEASE = "release"  # an engine leaves quarantine
    STALL = "stall"  # running attempts are looked at; of no engine


Timer: TypeAlias = tuple[TimerKind, EngineId]


class Timers:
    """Deadlines by what they are for."""

    __slots__ = ("announced", "now_s", "pending")

    def __init__(self) -> None:
        self.now_s = 0.0  # the latest time of any event
        self.pending: dict[Timer, float] = {}  # deadlines that have not come
        self.announced: float | None = None  # the wake-up asked for; None when it has passed

    def set(self, kind: TimerKind, engine: EngineId, at_s: float) -> None:
        """Sets the deadline, whatever it was before."""
        self.pending[kind, engine] = at_s

    def cancel(self, kind: TimerKind, engine: EngineId) -> None:
        """Removes the deadline if there is one."""
        self.pending.pop((kind, engine), None)

    def advance(self, at_s: float) -> None:
        """It is `at_s`, or later."""
        if at_s > self.now_s:
            self.now_s = at_s
            if self.announced is not None and self.announced <= at_s:
                self.announced = None

    def pop_due(self) -> list[Timer]:
        """Deadlines that have come, the earliest first; they are pending no more."""
        due = sorted((at_s, timer) for timer, at_s in self.pending.items() if at_s <= self.now_s)
        for _, timer in due:
            del self.pending[timer]
        return [timer for _, timer in due]

    def wake(self) -> float | None:
        """The wake-up to ask for now, if another one than before is needed."""
        if not self.pending:
            return None
        earliest = min(self.pending.values())
        if self.announced is not None and self.announced <= earliest:
            return None
        self.announced = earliest
        return earliest

    def restart(self, at_s: float) -> None:
        """A new clock that shows `at_s`: as much is left of each deadline as before."""
        shift = at_s - self.now_s
        self.pending = {timer: at_s + shift for timer, at_s in self.pending.items()}
        self.now_s = at_s
        self.announced = None
