"""The trace of a simulation, as Chrome's trace events, which Perfetto and chrome://tracing open.

Of its format ("Trace Event Format"), `X` is a slice with a duration, `i` a moment, `M` a name;
times are microseconds. Devices are processes and lanes are threads. Engines that are small enough
have a thread for each row besides, in which one sees samples come and go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from flowrl.files import write_result
from flowrl.sim.engine import SimEngine
from flowrl.sim.lanes import Lane, LaneGroup
from flowrl.sim.rows import Request

__all__ = ["Trace"]

_ROWS_SHOWN = 1024
"""Rows of all engines that are drawn; with more, the first engines' are."""


class Trace:
    """Records lanes, rows and moments; see `Recorder` and `RowRecorder`.

    Args:
        limit: Events kept at most; what comes after is counted and left out.

    Attributes:
        num_left_out: Events over the limit.
    """

    def __init__(self, limit: int = 400_000) -> None:
        self._limit = limit
        self._events: list[str] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._rows: dict[str, _Rows | None] = {}
        self._rows_left = _ROWS_SHOWN
        self.num_left_out = 0

    def span(self, lane: Lane, what: str, begin_s: float, end_s: float) -> None:
        """See `Recorder`."""
        process, thread = self._place(lane.device, lane.name)
        self._slice(what, process, thread, begin_s, end_s, "")

    def row(self, engine: SimEngine, request: Request, why: str) -> None:
        """See `RowRecorder`."""
        if engine.id not in self._rows:
            shown = engine.num_slots <= self._rows_left
            self._rows_left -= engine.num_slots if shown else 0
            self._rows[engine.id] = _Rows() if shown else None
        rows = self._rows[engine.id]
        if rows is None:
            return
        begin, end = request.entered_s, engine.clock.now
        process, _ = self._place(engine.lane.device, engine.lane.name)
        thread = self._thread(process, f"{engine.id} row {rows.take(begin, end):03d}")
        told = f',"args":{{"attempt":{request.attempt},"end":"{why}"}}'
        self._slice(request.sample, process, thread, begin, end, told)

    def moment(self, lane: Lane | LaneGroup, what: str, at_s: float) -> None:
        """Something that takes no time: a publication, the loss of an engine."""
        process, thread = self._place(lane.device, lane.name)
        self._add(
            f'{{"name":{json.dumps(what)},"ph":"i","s":"p","ts":{_us(at_s)},'
            f'"pid":{process},"tid":{thread}}}'
        )

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        events = ",\n".join([*self._names(), *self._events])
        text = f'{{"displayTimeUnit":"ms","traceEvents":[\n{events}\n]}}\n'
        write_result(path, text)

    def _slice(
        self, name: str, process: int, thread: int, begin_s: float, end_s: float, more: str
    ) -> None:
        self._add(
            f'{{"name":{json.dumps(name)},"ph":"X","ts":{_us(begin_s)},'
            f'"dur":{_us(end_s - begin_s)},"pid":{process},"tid":{thread}{more}}}'
        )

    def _add(self, event: str) -> None:
        if len(self._events) < self._limit:
            self._events.append(event)
        else:
            self.num_left_out += 1

    def _place(self, device: str, lane: str) -> tuple[int, int]:
        process = self._processes.setdefault(device, len(self._processes) + 1)
        return process, self._thread(process, lane)

    def _thread(self, process: int, name: str) -> int:
        return self._threads.setdefault((process, name), len(self._threads) + 1)

    def _names(self) -> Iterator[str]:
        for device, process in self._processes.items():
            yield _named("process_name", process, 0, device)
        for (process, name), thread in self._threads.items():
            yield _named("thread_name", process, thread, name)


class _Rows:
    """Finds a row for each sample as it ends: the first that was free when it began."""

    def __init__(self) -> None:
        self._free: list[float] = []  # when each row's last sample ended

    def take(self, begin: float, end: float) -> int:
        for number, free in enumerate(self._free):
            if free <= begin:
                self._free[number] = end
                return number
        self._free.append(end)
        return len(self._free) - 1


def _named(kind: str, process: int, thread: int, name: str) -> str:
    return (
        f'{{"name":"{kind}","ph":"M","pid":{process},"tid":{thread},'
        f'"args":{{"name":{json.dumps(name)}}}}}'
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3f}"
