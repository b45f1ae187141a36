"""A virtual clock: what is to happen, in order of time, and nothing that waits.

Times are seconds from the start of the simulation. What is due at the same time happens in the
order in which it was asked for, so that a simulation depends on nothing but its inputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls by time.

    >>> clock, heard = Clock(), []
    >>> clock.at(2.0, heard.append, "late")
    >>> clock.at(1.0, heard.append, "early")
    >>> clock.run_to(1.5)
    >>> (heard, clock.now)
    (['early'], 1.5)

    Attributes:
        now: Seconds since the start; never falls.
        num_calls: Calls made so far.
    """

    __slots__ = ("_heap", "_seq", "now", "num_calls")

    def __init__(self) -> None:
        self.now = 0.0
        self.num_calls = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._seq = 0

    def at(self, time_s: float, call: Callable[..., object], *args: object) -> None:
        """Makes the call when the clock reaches `time_s`; at once in turn, if that is past."""
        self._seq += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._seq, call, args))

    def run_until(self, done: Callable[[], bool]) -> bool:
        """Makes calls until `done`; false where nothing is left to happen before."""
        heap = self._heap
        while not done():
            if not heap:
                return False
            self._step()
        return True

    def run_to(self, time_s: float) -> None:
        """Makes every call due up to `time_s`, then moves on to it."""
        heap = self._heap
        while heap and heap[0][0] <= time_s:
            self._step()
        self.now = max(self.now, time_s)

    def _step(self) -> None:
        self.now, _, call, args = heapq.heappop(self._heap)
        self.num_calls += 1
        call(*args)
