"""`flowrl trace`: what the workers of a run did, as a table or a file for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from flowrl.cli.files import format_of, require_output, write_output
from flowrl.files import encode_json
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_text import format_seconds
from flowrl.observe.trace import Work, run_spans, trace_text, work_of
from flowrl.wording import counted, percent, table


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
    whole_s, works = work_of(spans)
    if as_json:
        rows = [asdict(work) for work in works]
        print(encode_json({"seconds": whole_s, "work": rows}), end="")
    elif output is None:
        print("\n".join(_lines(works, whole_s)))
    if output is not None:
        workers = counted(len({(work.where, work.worker) for work in works}), "worker")
        what = f"{counted(len(spans), 'slice')} of {workers}; open it at https://ui.perfetto.dev"
        write_output(output, trace_text(spans), None if as_json else what)


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
