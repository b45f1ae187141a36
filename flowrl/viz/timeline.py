"""Some steps of a run or of a simulation over time as a page, or one below the other.

Slices that follow each other more closely than the picture can show are drawn as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flowrl.errors import ConfigError
from flowrl.observe.trace import WAIT, Span, Work, work_of
from flowrl.plan.show.many import seconds_text
from flowrl.viz.gantt import Bar, Gantt, gantt
from flowrl.viz.labels import ROLE_COLOURS, RoleColour
from flowrl.viz.page import render_page
from flowrl.wording import counted, percent

_STEP = re.compile(r"step (\d+)")
_ROW = re.compile(r" row \d+$")
_GREY = RoleColour("", "#f4f4f4", "#777777")
_SHOWN_STEPS = 3
_MOST_WORKERS = 64
_PARTS = 1000


def step_times(spans: Sequence[Span], steps: tuple[int, int] | None) -> tuple[float, float, str]:
    """Returns the begin and the end of some steps, and what they are.

    Args:
        steps: The first and the last one, of the last stage that has them; None for the last three.

    Raises:
        ConfigError: The trace has no such steps.
    """
    found = [(int(match[1]), span) for span in spans if (match := _STEP.fullmatch(span.operation))]
    if not found:
        return spans[0].begin_s, max(span.end_s for span in spans), "the whole run"
    if steps is None:
        chosen = found[-_SHOWN_STEPS:]
    else:
        # The last of a number is of the last stage that has it.
        last = dict(found)
        chosen = [(n, last[n]) for n in range(steps[0], steps[1] + 1) if n in last]
    if not chosen:
        raise ConfigError(
            "the trace has no such steps",
            where="--steps",
            found=":".join(map(str, steps or ())),
            expected=f"steps from {found[0][0]} to {found[-1][0]}",
            hint="the oldest part of a trace is removed (runtime.trace_mb)",
        )
    (first, begins), (last_one, ends) = chosen[0], chosen[-1]
    what = f"step {first}" if first == last_one else f"steps {first} to {last_one}"
    return begins.begin_s, ends.end_s, what


def render_timeline(
    name: str,
    spans: Sequence[Span],
    steps: tuple[int, int] | None,
    work: Sequence[Work],
    simulated: Sequence[Span] = (),
) -> str:
    """Returns the page.

    Args:
        spans: All of a run.
        steps: The first and the last step that are drawn; see `step_times`.
        work: The work of the whole run.
        simulated: The spans of a simulation, which are drawn from its begin, for as long.

    Raises:
        ConfigError: The trace has no such steps.
    """
    begin_s, end_s, what = step_times(spans, steps)
    parts = [(what, _within(spans, begin_s, end_s))]
    if simulated:
        first_s = min(span.begin_s for span in simulated)
        parts.append(("simulated", _within(simulated, first_s, first_s + end_s - begin_s)))
    return _page(name, parts, end_s - begin_s, work, "")


def render_simulation(
    name: str, spans: Sequence[Span], steps: Sequence[tuple[float, float]], summary: str
) -> str:
    """Returns the page of a simulation, which draws its last steps.

    Args:
        spans: All of the simulation.
        steps: The begin and the end of each step.
        summary: The text of the simulation's result, which the page shows.
    """
    shown = steps[-_SHOWN_STEPS:]
    begin_s, end_s = shown[0][0], shown[-1][1]
    first = len(steps) - len(shown) + 1
    what = f"steps {first} to {len(steps)}" if len(shown) > 1 else f"step {first}"
    lanes = sorted(
        (span for span in spans if _ROW.search(span.worker) is None), key=lambda span: span.begin_s
    )
    parts = [(what, _within(lanes, begin_s, end_s))]
    return _page(name, parts, end_s - begin_s, work_of(lanes)[1], summary)


def _page(
    name: str,
    parts: Sequence[tuple[str, Sequence[Span]]],
    length_s: float,
    work: Sequence[Work],
    summary: str,
) -> str:
    colours = _colours([span for _, part in parts for span in part])
    pictures = [(what, *_picture(part, length_s, colours)) for what, part in parts]
    values = {
        "title": name,
        "summary": summary,
        "pictures": pictures,
        "colours": list(colours.items()),
        "work": [
            (f"{each.worker} on {each.where}", each.operation, seconds_text(each.seconds),
             percent(each.share), f"{each.calls:,}")
            for each in work
        ],
    }  # fmt: skip
    return render_page("timeline.html", values, styles=("page.css",))


def _within(spans: Sequence[Span], begin_s: float, end_s: float) -> list[Span]:
    """Returns what workers did in a time, which begins at 0.

    The rows of simulated engines, whose slices are samples, are left out.
    """
    return [
        replace(
            span,
            begin_s=max(span.begin_s, begin_s) - begin_s,
            end_s=min(span.end_s, end_s) - begin_s,
        )
        for span in spans
        if span.end_s > begin_s and span.begin_s < end_s and _ROW.search(span.worker) is None
    ]


def _colours(spans: Sequence[Span]) -> Mapping[str, RoleColour]:
    work = (s.operation for s in spans if s.operation != WAIT and not _STEP.fullmatch(s.operation))
    names = enumerate(dict.fromkeys(work))
    return {name: ROLE_COLOURS[i % len(ROLE_COLOURS)] for i, name in names}


def _picture(
    spans: Sequence[Span], end_s: float, colours: Mapping[str, RoleColour]
) -> tuple[Gantt, str]:
    """Returns the picture, and a note of what it leaves out."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        row = span.worker if span.worker == span.where else f"{span.worker} on {span.where}"
        rows.setdefault(row, []).append(span)
    shown = sorted(rows)[:_MOST_WORKERS]
    bars = [
        _bar(row, span, colours) for row in shown for span in _joined(rows[row], end_s / _PARTS)
    ]
    hidden = len(rows) - len(shown)
    note = f"{counted(hidden, 'worker')} more did the like and are left out" if hidden else ""
    return gantt(bars, end_s), note


def _joined(spans: Sequence[Span], gap_s: float) -> Iterator[Span]:
    """Yields the spans of a worker, close ones of an operation as one."""
    open_: dict[tuple[str, str], Span] = {}
    for span in sorted(spans, key=lambda each: each.begin_s):
        key = span.operation, span.waits_for
        before = open_.get(key)
        if before is not None and span.begin_s - before.end_s <= gap_s:
            end_s = max(before.end_s, span.end_s)
            open_[key] = replace(before, end_s=end_s, calls=before.calls + span.calls)
            continue
        if before is not None:
            yield before
        open_[key] = span
    yield from open_.values()


def _bar(row: str, span: Span, colours: Mapping[str, RoleColour]) -> Bar:
    name = f"wait for {span.waits_for}" if span.waits_for else span.operation
    calls = f", {counted(span.calls, 'call')}" if span.calls > 1 else ""
    return Bar(
        row=row,
        begin_s=span.begin_s,
        end_s=span.end_s,
        names=(name, span.operation),
        title=f"{name}: {seconds_text(span.end_s - span.begin_s)}{calls}\n{row}",
        colour=colours.get(span.operation, _GREY),
    )
