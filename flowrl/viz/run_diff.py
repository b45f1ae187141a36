"""Two runs beside each other: their numbers in the same charts, times and configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import report_of
from flowrl.viz.page import render_page
from flowrl.viz.report import Table, steps_by_stage, tables_of

_Steps = Mapping[str, Sequence[StepMetrics]]


def diff_numbers(paths: tuple[Path, Path]) -> list[str]:
    """Returns lines with the last numbers of charts that differ, and with the times of a step.

    Raises:
        CheckpointError: A folder has no run, or a file of it is damaged.
    """
    old, new = map(_tables_by_name, paths)
    lines = []
    for name in old:
        if name not in new:
            continue
        shown = [key for _, keys in old[name].charts for key in keys if not _is_time(key)]
        for key in (each for each in shown if each in new[name].series):
            before, after = _last(old[name], key), _last(new[name], key)
            if before is not None and after is not None and before != after:
                lines.append(f"{name}: last {key}: {before:.4g} -> {after:.4g}")
    stages = [steps_by_stage(RunFolder.open(path)) for path in paths]
    return lines + [
        f"stage {stage}: {kind}, seconds of a step: {old_s} -> {new_s}"
        for stage, kind, old_s, new_s in _times(*stages)
    ]


def _is_time(key: str) -> bool:
    return key == "wall_s" or key.startswith(("seconds/", "tokens/s"))


def _tables_by_name(path: Path) -> dict[str, Table]:
    folder = RunFolder.open(path)
    return {table.name: table for table in tables_of(folder, steps_by_stage(folder))}


def _last(table: Table, key: str) -> float | None:
    return next((each for each in reversed(table.series[key]) if each is not None), None)


def render_run_diff(paths: tuple[Path, Path], config_lines: Sequence[str]) -> str:
    """Returns the page of two runs.

    Args:
        config_lines: What differs in their configurations.

    Raises:
        CheckpointError: A folder has no run, or a file of it is damaged.
    """
    labels = [path.name for path in paths]
    if labels[0] == labels[1]:
        labels = [str(path) for path in paths]
    old, new = map(_tables_by_name, paths)
    tables = [
        _joined(name, {labels[i]: each[name] for i, each in enumerate((old, new)) if name in each})
        for name in dict.fromkeys((*new, *old))
    ]
    values = {
        "title": f"{labels[0]} beside {labels[1]}",
        "runs": [(label, report_of(path)) for label, path in zip(labels, paths, strict=True)],
        "labels": labels,
        "tables": [table.name for table in tables],
        "times": list(_times(*(steps_by_stage(RunFolder.open(path)) for path in paths))),
        "changed": config_lines,
    }
    return render_page(
        "run_diff.html",
        values,
        data={"tables": [table.to_json() for table in tables]},
        scripts=("uplot.min.js", "report.js"),
        styles=("uplot.min.css", "page.css"),
    )


def _joined(name: str, tables: Mapping[str, Table]) -> Table:
    """Returns the tables of several runs as one, whose series are named by their runs, too."""
    steps = sorted({step for table in tables.values() for step in table.x})
    series: dict[str, Sequence[float | None]] = {}
    charts: dict[str, list[str]] = {}
    for label, table in tables.items():
        for key, values in table.series.items():
            by_step = dict(zip(table.x, values, strict=True))
            series[f"{key} ({label})"] = [by_step.get(step) for step in steps]
        for title, keys in table.charts:
            charts.setdefault(title, []).extend(f"{key} ({label})" for key in keys)
    by_name = {key: series[key] for key in sorted(series)}
    return Table(
        name=name,
        x=steps,
        series=by_name,
        charts=[(title, sorted(keys)) for title, keys in charts.items()],
    )


def _times(old: _Steps, new: _Steps) -> Iterator[tuple[str, str, str, str]]:
    """Yields a stage, a kind of work and its mean seconds in a step of each run, longest first."""
    for stage in dict.fromkeys((*old, *new)):
        rows = old.get(stage, ()), new.get(stage, ())
        whole = [f"{median(r.wall_s for r in each):.3g}" if each else "none" for each in rows]
        yield stage, "all", whole[0], whole[1]
        means = [_means(each) for each in rows]
        kinds = sorted(means[0].keys() | means[1].keys())
        for kind in sorted(kinds, key=lambda k: -max(each.get(k, 0.0) for each in means)):
            texts = [f"{each[kind]:.3g}" if kind in each else "none" for each in means]
            yield stage, kind, texts[0], texts[1]


def _means(rows: Sequence[StepMetrics]) -> dict[str, float]:
    """Returns the mean seconds of a step by kind of work."""
    means: dict[str, float] = defaultdict(float)
    for row in rows:
        for kind, spent in row.seconds.items():
            means[kind] += spent / len(rows)
    return means
