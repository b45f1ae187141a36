"""`flowrl trace`: what the workers of a run did, as a table, a page or a file for Perfetto."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from flowrl.cli.files import format_of, require_output, write_output
from flowrl.errors import ConfigError
from flowrl.files import encode_json
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_text import format_seconds
from flowrl.observe.trace import Span, Work, read_spans, run_spans, trace_text, work_of
from flowrl.wording import counted, percent, table


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The options of the command line; `flowrl.cli.run_commands` describes each."""

    output: Path | None = None
    steps: str | None = None
    simulated: Path | None = None
    json: bool = False


def run(folder: Path, options: TraceOptions) -> None:
    """Prints the seconds of each worker and operation, or writes the trace to a file.

    Raises:
        CheckpointError: The folder has no run, or the run no trace.
        ConfigError: The file cannot be written or is named as of another format, or the options
            choose no steps.
    """
    output = options.output
    form = "" if output is None else format_of(output, {".json": "json", ".html": "html"}, "json")
    if output is not None:
        require_output(output)
    if form != "html" and (given := [o for o in ("steps", "simulated") if getattr(options, o)]):
        raise ConfigError(
            f"--{given[0]} belongs to a page",
            where="command line",
            hint=f"add -o run.html, or leave --{given[0]} out",
        )
    spans = run_spans(RunFolder.open(folder).path)
    whole_s, works = work_of(spans)
    if options.json:
        rows = [asdict(work) for work in works]
        print(encode_json({"seconds": whole_s, "work": rows}), end="")
    elif output is None:
        print("\n".join(_lines(works, whole_s)))
    if output is None:
        return
    if form == "html":
        from flowrl.viz.timeline import render_timeline

        simulated = () if options.simulated is None else _simulated(options.simulated)
        steps = None if options.steps is None else _steps(options.steps)
        text = render_timeline(f"trace of {folder}", spans, steps, works, simulated)
        what = "timeline; open it in a browser"
    else:
        text = trace_text(spans)
        workers = counted(len({(work.where, work.worker) for work in works}), "worker")
        what = f"{counted(len(spans), 'slice')} of {workers}; open it at https://ui.perfetto.dev"
    write_output(output, text, None if options.json else what)


def _steps(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if numbers is None:
        raise ConfigError(
            "this names no steps",
            where="--steps",
            found=text,
            expected="a step, or the first and the last one, such as 10:12",
            hint="--steps 10:12",
        )
    return int(numbers[1]), int(numbers[2] or numbers[1])


def _simulated(path: Path) -> list[Span]:
    try:
        spans = list(read_spans(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "this is no trace of a simulation",
            where="--simulated",
            found=f"{path}: {error}",
            expected="a file of `flowrl simulate CONFIG --trace FILE`",
            hint="make it with the configuration of the run",
        ) from error
    if not spans:
        raise ConfigError(
            "this trace of a simulation is empty",
            where="--simulated",
            found=str(path),
            hint="make it anew: flowrl simulate CONFIG --trace FILE",
        )
    return spans


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
