"""`flowrl trace`: what the workers of a run did, as a table or a file for Perfetto."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from flowrl.cli.files import format_of, require_output, write_output
from flowrl.files import encode_json
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_text import format_seconds
from flowrl.observe.trace import WAIT, Span, run_spans, trace_text
from flowrl.wording import counted, percent, table


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


def run(folder: Path, output: Path | None, *, as_json: bool) -> None:
    """Prints the seconds of each worker and operation, or writes the trace to a file.

    Raises:
        CheckpointError: The folder has no run, or the run no trace.
        ConfigError: The file cannot be written, or is named as of another format.
    """
    if output is not None:
        format_of(output, {".json": "json"}, "json")
        require_output(output)
    spans = run_spans(RunFolder.open(folder).path)
    whole_s = max(span.end_s for span in spans) - spans[0].begin_s
    works = work_of(spans, whole_s)
    if as_json:
        rows = [asdict(work) for work in works]
        print(encode_json({"seconds": whole_s, "work": rows}), end="")
    elif output is None:
        print("\n".join(_lines(works, whole_s)))
    if output is not None:
        workers = counted(len({(work.where, work.worker) for work in works}), "worker")
        what = f"{counted(len(spans), 'slice')} of {workers}; open it at https://ui.perfetto.dev"
        write_output(output, trace_text(spans), None if as_json else what)


def work_of(spans: Sequence[Span], whole_s: float) -> list[Work]:
    """Returns the work of each worker in the order of their begin, the longest first."""
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
    return [
        Work(
            where=where, worker=worker, operation=operation, seconds=spent,
            share=spent / whole_s if whole_s else 0.0, calls=calls[where, worker, operation],
        )
        for (where, worker, operation), spent in sorted(
            seconds.items(), key=lambda item: (workers.index(item[0][:2]), -item[1])
        )
    ]  # fmt: skip


def _lines(works: Sequence[Work], whole_s: float) -> list[str]:
    rows = []
    for (where, worker), own in groupby(works, key=lambda work: (work.where, work.worker)):
        name = f"{worker} on {where}"
        for work in own:
            share, spent = percent(work.share), format_seconds(work.seconds)
            rows.append((name, work.operation, spent, share, f"{work.calls:,}"))
            name = ""
    head = ("worker", "operation", "time", "share", "calls")
    return [f"{format_seconds(whole_s)} from the first slice to the last", *table(head, rows)]
