"""The trace of a simulation, in the format of those of runs (`flowrl.observe.trace`).

Devices are processes and lanes are threads. Engines that are small enough have a thread for each
row besides, in which one sees samples come and go. Publications and losses are moments.
"""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.files import write_result
from flowrl.observe.trace import event_place, name_events, slice_event
from flowrl.sim.engine import SimEngine
from flowrl.sim.lanes import Lane, LaneGroup
from flowrl.sim.rows import Request

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
        self._named: dict[tuple[str, str], None] = {}
        self._rows: dict[str, _Rows | None] = {}
        self._rows_left = _ROWS_SHOWN
        self.num_left_out = 0

    def span(self, lane: Lane, what: str, begin_s: float, end_s: float) -> None:
        """See `Recorder`."""
        self._slice(lane.device, lane.name, what, begin_s, end_s)

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
        row = f"{engine.id} row {rows.take(begin, end):03d}"
        more = f'{{"attempt":{request.attempt},"end":"{why}"}}'
        self._slice(engine.lane.device, row, request.sample, begin, end, more)

    def moment(self, lane: Lane | LaneGroup, what: str, at_s: float) -> None:
        """Something that takes no time: a publication, the loss of an engine."""
        self._named[lane.device, lane.name] = None
        self._add(
            f'{{"name":{json.dumps(what)},"ph":"i","s":"p","ts":{at_s * 1e6:.3f},'
            f"{event_place(lane.device, lane.name)}}}"
        )

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [event for place in self._named for event in name_events(*place)]
        events = ",\n".join([*names, *self._events])
        write_result(path, f"[\n{events}\n]\n")

    def _slice(
        self, device: str, lane: str, name: str, begin_s: float, end_s: float, more: str = "{}"
    ) -> None:
        self._named[device, lane] = None
        self._add(slice_event(device, lane, name, begin_s, end_s, more))

    def _add(self, event: str) -> None:
        if len(self._events) < self._limit:
            self._events.append(event)
        else:
            self.num_left_out += 1


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
