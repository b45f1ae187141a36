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

_ALONE_S, _BESIDE_S = 0.15, 0.8

_MOST_LOST, _MOST_GAINED = 3.0, 0.5
"""Seconds lost to a second of the thread's work; beyond these something else had the cores."""

_LEAST_LEFT = 0.1
"""Of the thread's speed."""


class Busy(Protocol):
    """A thread that works (`flowrl.runtime.driver.threads`)."""

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


def measure_beside(
    call: Callable[[], object], alone_s: float, open_busy: OpenBusy
) -> Beside | None:
    """The speeds of a call and of a busy thread beside each other, by the wall clock.

    Args:
        alone_s: Seconds of the call alone.

    Returns:
        None where it cannot be told: what was lost is more than such a thread takes, or less than
        nothing by far. Something else had the cores then.
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
    return told(loses=(spent_s - calls * alone_s) / work_s, lets=work_s / busy.worked_s)


def told(*, loses: float, lets: float) -> Beside | None:
    """What was measured, where it can be believed.

    >>> told(loses=0.6, lets=1.02), told(loses=3.4, lets=1.0)
    (Beside(loses=0.6, lets=1.0), None)
    """
    if not -_MOST_GAINED <= loses <= _MOST_LOST or lets < _LEAST_LEFT:
        return None
    return Beside(loses=round(max(0.0, loses), 3), lets=round(min(1.0, lets), 3))
