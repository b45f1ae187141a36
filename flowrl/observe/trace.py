"""What workers did and when, as Chrome's trace events: of real runs and of simulations alike.

A file is an array of events, one a line, which https://ui.perfetto.dev and chrome://tracing open
also where the closing bracket is missing: a run that goes on, or was killed, has none. A process is
where workers are (a node, or a simulated device), a thread is a worker, a slice is a `Span`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from flowrl.errors import CheckpointError
from flowrl.files import JsonLines

TRACE = "trace.json"
"""The file of a run folder."""

WAIT = "wait"
"""The operation of a worker that waits."""

_EARLIER = "trace.earlier.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a worker did.

    Attributes:
        where: Name of its node; in a simulation the device.
        worker: `actor.generate[0]`, `actor.train`, `verifier.score[1]`, `driver`.
        operation: `generate`, `load weights`, `update`, `score`, ... or `wait`.
        begin_s: Seconds since 1970; in a simulation since its begin.
        end_s: The same.
        waits_for: What a worker that waits is waiting for.
        calls: Calls that are drawn as one, because they followed each other closely.
    """

    where: str
    worker: str
    operation: str
    begin_s: float
    end_s: float
    waits_for: str = ""
    calls: int = 1


class TraceFile:
    """Appends spans to trace.json of a run folder, which is bounded.

    At half of `max_bytes` the file becomes `trace.earlier.json` and another one is begun, so that
    the oldest spans go first. A resumed run goes on with the file that is there.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._path = folder / TRACE
        self._max_bytes = max_bytes // 2
        self._begin()

    def _begin(self) -> None:
        self._lines = JsonLines(self._path)
        self._size = self._path.stat().st_size
        self._failed = False
        self._named: set[tuple[str, str]] = set()

    def append(self, spans: Iterable[Span]) -> None:
        """Writes spans with one call of the system.

        Raises:
            OSError: the disk is full or failed.
        """
        if self._size > self._max_bytes:
            self._lines.close()
            with suppress(FileNotFoundError):
                self._path.replace(self._path.with_name(_EARLIER))
            self._failed = True
        if self._failed:
            self._begin()  # cuts what is written of a line
        parts = [] if self._size else ["[\n"]
        for span in spans:
            if (place := (span.where, span.worker)) not in self._named:
                self._named.add(place)
                parts += [f"{event},\n" for event in name_events(*place)]
            parts.append(f"{_event(span)},\n")
        text = "".join(parts)
        try:
            self._lines.write(text)
        except OSError:
            self._lines.close()
            self._failed = True  # the next call opens it again
            raise
        self._size += len(text)

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._lines.close()


def _event(span: Span) -> str:
    more: dict[str, object] = {"waits_for": span.waits_for} if span.waits_for else {}
    if span.calls > 1:
        more["calls"] = span.calls
    return slice_event(
        span.where, span.worker, span.operation, span.begin_s, span.end_s, json.dumps(more)
    )


def slice_event(
    where: str, worker: str, name: str, begin_s: float, end_s: float, arguments: str = "{}"
) -> str:
    """Returns the event of something with a duration.

    Args:
        arguments: Further values, as a JSON object.
    """
    return (
        f'{{"name":{json.dumps(name)},"ph":"X","ts":{begin_s * 1e6:.3f},'
        f'"dur":{(end_s - begin_s) * 1e6:.3f},{event_place(where, worker)},"args":{arguments}}}'
    )


def event_place(where: str, worker: str) -> str:
    """Returns the numbers by which an event names its process and its thread."""
    # By their names alone: a resumed run, and a worker that was replaced, go on in the same place.
    return f'"pid":{_number(where)},"tid":{_number(worker)}'


def _number(name: str) -> int:
    return crc32(name.encode()) & 0x7FFFFFFF


def name_events(where: str, worker: str) -> Iterator[str]:
    """Yields the events that show the names of a process and of a thread in it."""
    for kind, name in (("process_name", where), ("thread_name", worker)):
        yield (
            f'{{"name":"{kind}","ph":"M",{event_place(where, worker)},'
            f'"args":{{"name":{json.dumps(name)}}}}}'
        )


def run_spans(folder: Path) -> list[Span]:
    """Returns the spans of a run, by their begin and then the longest first.

    Raises:
        CheckpointError: The run has no trace.
    """
    paths = [path for name in (_EARLIER, TRACE) if (path := folder / name).is_file()]
    spans = [span for path in paths for span in read_spans(path)]
    if not spans:
        raise CheckpointError(
            "this run has no trace",
            where=str(folder / TRACE),
            found="no slices" if paths else "no such file",
            hint="runs write one unless runtime.trace_mb=0, once their first worker has started",
        )
    return sorted(spans, key=lambda span: (span.begin_s, -span.end_s))


def trace_text(spans: Sequence[Span]) -> str:
    """Returns a whole JSON file of `run_spans`, which begins at 0 and reads in any viewer."""
    begin_s = spans[0].begin_s
    places = dict.fromkeys((span.where, span.worker) for span in spans)
    events = [event for place in places for event in name_events(*place)]
    for span in spans:
        # In whole microseconds: parts of one are not exact since 1970, and slices would overlap.
        begin, end = (round(at - begin_s, 6) for at in (span.begin_s, span.end_s))
        events.append(_event(replace(span, begin_s=begin, end_s=end)))
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


def read_spans(path: Path) -> Iterator[Span]:
    """Yields the spans of a file in the order of writing; of a torn last line none."""
    names: dict[tuple[str, int, int], str] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith(("},\n", "}\n")):
                continue
            event = json.loads(line.rstrip(",\n"))
            pid, tid = event["pid"], event["tid"]
            if event["ph"] == "M":
                names[event["name"], pid, tid] = event["args"]["name"]
            elif event["ph"] == "X":
                begin_s = event["ts"] / 1e6
                yield Span(
                    where=names["process_name", pid, tid],
                    worker=names["thread_name", pid, tid],
                    operation=event["name"],
                    begin_s=begin_s,
                    end_s=begin_s + event["dur"] / 1e6,
                    waits_for=event["args"].get("waits_for", ""),
                    calls=event["args"].get("calls", 1),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker did in all its time.

    Attributes:
        operation: `update`, `step` of all steps together, or `wait for a batch`.
        seconds: Their sum; a step of the driver holds its waits.
        share: `seconds` over the time from the first to the last slice of the run.
    """

    where: str
    worker: str
    operation: str
    seconds: float
    share: float
    calls: int


def work_of(spans: Sequence[Span]) -> tuple[float, list[Work]]:
    """Returns the seconds from the first of `run_spans` to the last, and the work in them.

    Workers are in the order of their begin, and the work of each begins with the longest.
    """
    whole_s = max(span.end_s for span in spans) - spans[0].begin_s
    seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str, str]] = Counter()
    workers = list(dict.fromkeys((span.where, span.worker) for span in spans))
    for span in spans:
        name = span.operation.rstrip("0123456789").strip() or span.operation  # all steps together
        if span.operation == WAIT:
            name = f"wait for {span.waits_for}" if span.waits_for else WAIT
        key = (span.where, span.worker, name)
        seconds[key] += span.end_s - span.begin_s
        calls[key] += span.calls
    return whole_s, [
        Work(
            where=where, worker=worker, operation=operation, seconds=spent,
            share=spent / whole_s if whole_s else 0.0, calls=calls[where, worker, operation],
        )
        for (where, worker, operation), spent in sorted(
            seconds.items(), key=lambda item: (workers.index(item[0][:2]), -item[1])
        )
    ]  # fmt: skip
