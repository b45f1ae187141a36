"""The report of a run: one page with its numbers, times, samples and configuration.

The page holds at most `_MOST_STEPS` steps of a stage and some samples of some steps, so that it
opens at once however long the run was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import TypeVar

from flowrl.config.load import load_config
from flowrl.errors import CheckpointError
from flowrl.observe.metric_names import NAMES
from flowrl.observe.rows import EvaluationRow, SampleRow, StepMetrics, overlapping_work
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import report_of
from flowrl.observe.run_text import format_rate, format_seconds, pick_samples, summary_lines
from flowrl.observe.trace import run_spans, work_of
from flowrl.viz.page import render_page
from flowrl.wording import counted, percent

_T = TypeVar("_T")

_MOST_STEPS = 2000
_SAMPLED_STEPS = 40
_PER_STEP = 6
_OF_LAST_STEP = 60
_GROUPS = 5
"""Of the best and of the worst."""
_TEXT = 1500
"""Characters of a prompt or a response."""
_BAR_REM = 12

# Names end in * where they begin several; a chart without any is left out.
_CHARTS: Sequence[tuple[str, Sequence[str]]] = (
    ("reward", ("reward_mean", "reward_std")),
    ("reward terms, before their weights", ("terms/*/mean",)),
    ("pairs", ("pair_accuracy", "reward_margin")),
    ("response length in tokens", ("length_mean", "length_max")),
    ("share of truncated responses", ("truncated",)),
    ("entropy in nats", ("entropy",)),
    ("KL to the reference", ("kl",)),
    ("mismatch of engine and trainer", ("mismatch/k1", "mismatch/k3")),
    ("share of clipped tokens", ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction")),
    ("gradient norm", ("grad_norm",)),
    ("loss", ("loss",)),
    ("learning rate", ("learning_rate",)),
    ("staleness in versions", ("staleness/mean", "staleness/max")),
    ("seconds of a step", ("wall_s", "seconds/*")),
    ("response tokens per second of the work", ("tokens/s *",)),
    ("not learned from", ("filtered_groups", "dropped_samples", "skipped_updates")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers over steps, and the charts of them.

    Attributes:
        series: By name, a number or a gap for each step of `x`.
        charts: The title of each, and the names of its series.
    """

    name: str
    x: Sequence[int]
    series: Mapping[str, Sequence[float | None]]
    charts: Sequence[tuple[str, Sequence[str]]]

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "x": self.x,
            "series": self.series,
            "charts": [{"title": title, "series": names} for title, names in self.charts],
        }


def render_report(path: Path) -> str:
    """Returns the page of a run, which may still go on.

    Raises:
        CheckpointError: The folder has no run, or a file of it is damaged.
        ConfigError: The configuration of the run is none any more.
    """
    folder = RunFolder.open(path)
    status, summary = report_of(path), folder.read_summary()
    steps = steps_by_stage(folder)
    tables = tables_of(folder, steps)
    samples = _samples(folder)
    config = load_config(folder.config_path).config
    values = {
        "title": f"run {config.name}",
        "verdict": status.verdict,
        "progress": status.progress,
        "summary": [] if summary is None else summary_lines(summary),
        "warnings": [line for stage in steps for line in _warnings(stage, steps[stage])],
        "tables": [table.name for table in tables],
        "stages": [_times(folder.path, stage, rows) for stage, rows in reversed(steps.items())],
        "workers": _workers(folder.path),
        "groups": _groups(folder),
        "num_samples": len(samples),
        "samples_note": f"{counted(len(samples), 'sample')} of {_SAMPLED_STEPS} steps at most, "
        f"over the range of scores of each; of long texts the first {_TEXT:,} characters. "
        f"`flowrl samples {path}` shows all.",
        "changed": list(_leaves(config.model_dump(mode="json", exclude_defaults=True))),
        "config": folder.config_path.read_text(encoding="utf-8"),
        "libraries": [] if summary is None else list(summary.libraries.items()),
    }
    data = {"tables": [table.to_json() for table in tables], "samples": samples}
    return render_page(
        "report.html",
        values,
        data=data,
        scripts=("uplot.min.js", "report.js"),
        styles=("uplot.min.css", "page.css"),
    )


def steps_by_stage(folder: RunFolder) -> dict[str, list[StepMetrics]]:
    return {stage: list(rows) for stage, rows in groupby(folder.steps(), key=lambda r: r.stage)}


def tables_of(folder: RunFolder, steps: dict[str, list[StepMetrics]]) -> list[Table]:
    """Returns the numbers of the steps and of the held-out data of each stage, the last first."""
    evaluations = list(folder.evaluations())
    return [t for stage in reversed(steps) for t in _tables(stage, steps[stage], evaluations)]


def _tables(
    stage: str, rows: Sequence[StepMetrics], evaluations: Sequence[EvaluationRow]
) -> Iterator[Table]:
    rows = _thinned(rows, _MOST_STEPS)
    numbers = [NAMES["flowrl"].step(row, 1) | _rates(row) for row in rows]
    yield _table(f"stage {stage}", [row.step for row in rows], numbers, _CHARTS)
    held_out: dict[int, dict[str, float]] = {}
    for row in evaluations:
        if row.stage == stage:
            held_out.setdefault(row.step, {}).update(row.named_metrics())
    if held_out:
        names = dict.fromkeys(name for values in held_out.values() for name in values)
        charts = [(name, [name]) for name in names]
        yield _table(f"held-out, {stage}", list(held_out), list(held_out.values()), charts)


def _rates(row: StepMetrics) -> dict[str, float]:
    kinds = ("generate", "logprobs", "values", "update")
    rates = {f"tokens/s {kind}": row.tokens_per_second(kind) for kind in kinds}
    if row.wall_s > 0 and row.num_tokens:
        rates["tokens/s step"] = row.num_tokens / row.wall_s
    return {name: rate for name, rate in rates.items() if rate is not None}


def _table(
    name: str,
    steps: Sequence[int],
    numbers: Sequence[Mapping[str, float]],
    charts: Sequence[tuple[str, Sequence[str]]],
) -> Table:
    keys = sorted({key for values in numbers for key in values})
    series = {key: [_rounded(values.get(key)) for values in numbers] for key in keys}
    chosen = [
        (title, [key for pattern in patterns for key in keys if _is_like(key, pattern)])
        for title, patterns in charts
    ]
    charts = [(title, found) for title, found in chosen if found]
    return Table(name=name, x=steps, series=series, charts=charts)


def _is_like(key: str, pattern: str) -> bool:
    begin, star, end = pattern.partition("*")
    return key.startswith(begin) and key.endswith(end) if star else key == pattern


def _rounded(value: float | None) -> float | None:
    """Returns a number as the page has it: a gap in its line where it is none."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _thinned(rows: Sequence[_T], most: int) -> Sequence[_T]:
    """Returns at most `most` rows, evenly from the first to the last."""
    if len(rows) <= most:
        return rows
    return [rows[i * (len(rows) - 1) // (most - 1)] for i in range(most)]


def _warnings(stage: str, rows: Sequence[StepMetrics]) -> Iterator[str]:
    """Yields what a reader should know before reading the numbers."""
    for name in ("loss", "grad_norm", "reward_mean", "kl"):
        values = [(row.step, getattr(row, name)) for row in rows]
        bad = [step for step, value in values if value is not None and not math.isfinite(value)]
        if bad:
            number = counted(len(bad), "step")
            yield f"{stage}: {name} is not a number in {number}, first in {bad[0]}"
    counts = {
        "updates skipped, because the gradient was not finite": [r.skipped_updates for r in rows],
        "samples dropped": [r.dropped_samples for r in rows],
        "rewards failed": [int(r.extra.get("failed_rewards", 0)) for r in rows],
    }
    for what, numbers in counts.items():
        if total := sum(numbers):
            yield f"{stage}: {total:,} {what}, in {counted(sum(map(bool, numbers)), 'step')}"


def _times(folder: Path, stage: str, rows: Sequence[StepMetrics]) -> dict[str, object]:
    """Returns the work of a stage's steps, the longest first; see `report.html`."""
    seconds: dict[str, float] = {}
    for row in rows:
        for kind, spent in row.seconds.items():
            seconds[kind] = seconds.get(kind, 0.0) + spent
    whole_s = sum(row.wall_s for row in rows)
    overlapping = overlapping_work(seconds)
    kinds = sorted(seconds, key=lambda kind: -seconds[kind])
    slowest = next((kind for kind in kinds if kind not in overlapping), None)
    tokens = sum(row.num_tokens for row in rows)
    works = []
    for kind in kinds:
        note = "beside the steps" if kind in overlapping else ""
        if kind == slowest:
            note = "longest; it waits for engines" if kind == "wait" else "longest"
        rated = (
            kind in ("generate", "logprobs", "values", "update") and seconds[kind] > 0 and tokens
        )
        works.append(
            {
                "kind": kind,
                "note": note,
                "rate": format_rate(tokens / seconds[kind]) if rated else "",
                **_share(seconds[kind], whole_s),
            }
        )
    return {
        "name": stage,
        "steps": counted(len(rows), "step"),
        "step_s": _precise(median(row.wall_s for row in rows)),
        "planned": _planned(folder, stage),
        "works": works,
    }


def _planned(folder: Path, stage: str) -> str:
    """Returns the seconds of a step by the plan; empty if it predicts none."""
    path = folder / f"plan.{stage}.json"
    if not path.is_file():  # a run that ended while it began
        return ""
    step_s = json.loads(path.read_text(encoding="utf-8"))["prediction"]["step_s"]
    return "" if step_s is None else _precise(step_s)


def _precise(seconds: float) -> str:
    """`0.0412 s`: steps of small models would be 0.0 s."""
    return f"{seconds:.3g} s" if seconds < 100 else format_seconds(seconds)


def _workers(folder: Path) -> list[dict[str, object]]:
    try:
        whole_s, works = work_of(run_spans(folder))
    except CheckpointError:  # runtime.trace_mb=0
        return []
    return [
        {
            "worker": f"{work.worker} on {work.where}",
            "operation": work.operation,
            **_share(work.seconds, whole_s),
        }
        for work in works
    ]


def _share(seconds: float, whole_s: float) -> dict[str, object]:
    share = seconds / whole_s if whole_s else 0.0
    return {
        "time": format_seconds(seconds),
        "share_text": percent(share),
        "width": round(min(share, 1.0) * _BAR_REM, 2),
    }


def _samples(folder: RunFolder) -> list[dict[str, object]]:
    places = folder.sample_steps()
    chosen = set(_thinned(places, _SAMPLED_STEPS))
    samples: list[dict[str, object]] = []
    rows = folder.samples_at(chosen)
    for place, of_step in groupby(rows, key=lambda row: (row.stage, row.step)):
        count = _OF_LAST_STEP if place == places[-1] else _PER_STEP
        samples += [_sample(row) for row in pick_samples(list(of_step), count)]
    return samples


def _groups(folder: RunFolder) -> list[dict[str, str]]:
    """Returns groups of the last step: those with the worst mean scores, then the best."""
    scored: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in folder.samples_at(set(folder.sample_steps()[-1:])):
        if row.score is not None and math.isfinite(row.score):
            name = row.rollout, row.sample.rpartition("/")[0]
            scored.setdefault(name, []).append((row.score, row.prompt))
    groups = []
    for name, rows in scored.items():
        scores = [score for score, _ in rows]
        groups.append((fmean(scores), pstdev(scores), len(rows), rows[0][1], " ".join(name)))
    groups.sort()
    if len(groups) > 2 * _GROUPS:
        groups = groups[:_GROUPS] + groups[-_GROUPS:]
    return [
        {
            "group": name.strip(),
            "prompt": _cut(prompt),
            "number": str(number),
            "mean": f"{mean:.4g}",
            "std": f"{std:.4g}",
        }
        for mean, std, number, prompt, name in groups
    ]


def _sample(row: SampleRow) -> dict[str, object]:
    cut = {name: _cut(getattr(row, name)) for name in ("prompt", "response", "answer", "reason")}
    terms = {name: _rounded(value) for name, value in row.terms.items()}
    known = ("stage", "step", "rollout", "sample", "num_tokens", "finish", "end")
    values = {name: getattr(row, name) for name in known}
    return {**values, **cut, "score": _rounded(row.score), "terms": terms}


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else text[:_TEXT] + " …"


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
