"""Measures what an operation and another thread of its process take from each other.

A thread works some milliseconds now and then, as a driver does that takes samples, and the
operation is called beside it again and again. What its calls take longer than alone is what they
lose to the thread's work; what the thread's rounds take longer is what it loses to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from flowrl.sim.sharing import Beside

__all__ = ["Busy", "OpenBusy", "measure_beside"]

_ALONE_S, _BESIDE_S = 0.15, 0.8


class Busy(Protocol):
    """A thread that works (`flowrl.runtime.busy_thread`)."""

    @property
    def rounds(self) -> int:
        """What it has done so far."""
        ...

    @property
    def worked_s(self) -> float:
        """Seconds in which it has done it."""
        ...


OpenBusy: TypeAlias = Callable[[float], AbstractContextManager[Busy]]
"""Has one work for so many seconds from the beginning of a block."""


def measure_beside(call: Callable[[], object], alone_s: float, open_busy: OpenBusy) -> Beside:
    """The speeds of a call and of a busy thread beside each other, by the wall clock.

    Args:
        alone_s: Seconds of the call alone.
    """
    with open_busy(_ALONE_S) as busy:
        time.sleep(_ALONE_S)
    round_s = busy.worked_s / busy.rounds
    calls, began = 0, time.perf_counter()
    with open_busy(_BESIDE_S) as busy:
        while time.perf_counter() - began < _BESIDE_S:
            call()
            calls += 1
        spent_s = time.perf_counter() - began
    work_s = busy.rounds * round_s
    loses = (spent_s - calls * alone_s) / work_s
    return Beside(
        loses=round(min(3.0, max(0.0, loses)), 3),
        lets=round(min(1.0, max(0.1, work_s / busy.worked_s)), 3),
    )
