"""How the driver and a side take turns: one line of JSON each way for a block of steps.

The side's standard output belongs to this; whatever it prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time


class Gate:
    """Waits for the driver before each block of steps, and reports each step's seconds after it.

    A step lasts from the end of the last `step` call (or the turn given) to the next one's begin.
    `wall` is its wall time, `cpu` the processor time of this process.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._rows: list[dict[str, object]] = []
        self._left = 0
        self._started = self._cpu = 0.0

    def ready(self) -> None:
        """Everything is loaded; waits for the first turn."""
        self._say({"ready": True})

    def step(self, stages: dict[str, float], **counts: float) -> None:
        """A step is done; `stages` are seconds inside it."""
        wall = time.perf_counter() - self._started
        cpu = time.process_time() - self._cpu
        rest = wall - sum(stages.values())
        self._rows.append({"wall": wall, "cpu": cpu, "stages": {**stages, "rest": rest}, **counts})
        self._left -= 1
        if not self._left:
            rows, self._rows = self._rows, []
            self._say({"rows": rows})
        self._start()

    def _say(self, message: dict[str, object]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the driver has all it wants
        self._left = int(line)
        self._start()

    def _start(self) -> None:
        self._started, self._cpu = time.perf_counter(), time.process_time()
