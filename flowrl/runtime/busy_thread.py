"""A thread that works like a driver, a little at a time: for measuring what works beside it."""

from __future__ import annotations

import threading
import time

__all__ = ["BusyThread"]

_WORK_S, _PAUSE_S = 0.002, 0.004
_SAMPLES, _ROUND = 20_000, 40


class BusyThread:
    """Works for so many seconds from the beginning of the block, and counts.

    Some milliseconds of work follow upon some of waiting, as in a driver whose engines and scorers
    say something now and then; and as there, it is work on many small objects.

        with BusyThread(0.5) as busy:
            ...
        busy.rounds

    Attributes:
        rounds: Done so far, each some tens of microseconds of its own time.
        worked_s: Seconds so far, without those of waiting.
    """

    def __init__(self, seconds: float) -> None:
        self.rounds = 0
        self.worked_s = 0.0
        self._seconds = seconds
        self._held = {f"0/{number}/0": [number, 0] for number in range(_SAMPLES)}
        self._thread = threading.Thread(target=self._run, name="flowrl-busy", daemon=True)

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            began, pause = time.monotonic(), time.thread_time() + _WORK_S
            while time.thread_time() < pause:
                self._work()
            self.worked_s += time.monotonic() - began
            time.sleep(_PAUSE_S)

    def _work(self) -> None:
        held, first = self._held, self.rounds * _ROUND
        for number in range(first, first + _ROUND):
            name = f"0/{number % _SAMPLES}/0"
            held[name] = [number, held[name][1] + 1]
        self.rounds += 1
