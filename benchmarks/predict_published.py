"""Published stage and step times beside what the cost model predicts, without constants of a row.

    python benchmarks/predict_published.py ../shared/anchors/stage_times.yaml [FILE...]
    python benchmarks/predict_published.py ../shared/anchors/engine_steps.json --json OUT

`published/schema.py` defines the files, with an example: stage times of runs (`rows`), steps of
inference engines (`decode` and `prefill`), and weight syncs (`weight_syncs`). Rows that lack an
input say so and do not count; nor do rows that their file calls incomplete. The exit code is 0
where at least one row of each file was predicted, 1 where none was, and 2 for a file that cannot be
read or has unknown keys.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arguments import json_file
from flowrl.errors import FlowError
from flowrl.files import write_result
from published.schema import EngineSteps, StageTimes, WeightSyncs, read
from published.stages import SIGMA, Prediction, StagePrediction, predict_row, predict_sync
from published.steps import StepError, predict_steps

MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"

STAGE_AIM, STEP_AIM, ENGINE_AIM = 0.25, 0.15, 0.25


def stage_lines(found: Prediction) -> list[str]:
    """A row for people."""
    if found.missing:
        return [f"{found.name}: not counted"] + [f"    {reason}" for reason in found.missing]
    name = f"{found.name}: not counted, {found.flagged}" if found.flagged else found.name
    shown = [*found.stages, *([found.step] if found.step is not None else [])]
    lines = [name, *(f"    ({note})" for note in found.notes)]
    return lines + [_stage_line(stage) for stage in shown]


def _stage_line(stage: StagePrediction) -> str:
    line = f"    {stage.stage:<16} predicted {stage.predicted_s:9.1f} s"
    if stage.measured_s is None or stage.error is None:
        return f"{line}   not measured"
    return f"{line}   measured {stage.measured_s:9.1f} s   error {stage.error:+7.1%}"


def report_stages(document: StageTimes) -> tuple[dict[str, Any], int]:
    """Predicts and prints every row; what goes into the JSON, and how many rows counted."""
    print(
        f"response lengths: lognormal, sigma {SIGMA:g}, cut at the longest, with the row's mean\n"
    )
    found = [prediction for row in document.rows for prediction in predict_row(row, MODELS)]
    for prediction in found:
        print("\n".join(stage_lines(prediction)))
    counting = [p for p in found if p.counts]
    stages = [abs(s.error) for p in counting for s in p.stages if s.error is not None]
    steps = [abs(p.step.error) for p in counting if p.step and p.step.error is not None]
    print(f"\n{len(counting)} predicted, {len(found) - len(counting)} not counted")
    _print_errors("stages", stages, STAGE_AIM)
    _print_errors("steps", steps, STEP_AIM)
    written = [{**asdict(p), "errors": _errors(p)} for p in found]
    return {"sigma": SIGMA, "rows": written}, len(counting)


def report_syncs(document: WeightSyncs) -> tuple[dict[str, Any], int]:
    """Predicts and prints every weight sync."""
    found = [predict_sync(row, MODELS) for row in document.weight_syncs]
    for prediction in found:
        print("\n".join(stage_lines(prediction)))
    counting = [p for p in found if p.counts]
    ratios = [1 + p.step.error for p in counting if p.step and p.step.error is not None]
    if ratios:
        inside = sum(0.5 <= ratio <= 2 for ratio in ratios)
        print(
            f"\nweight syncs: {inside} of {len(ratios)} within half and twice the measured time, "
            f"median {statistics.median(ratios):.2f} times"
        )
    written = [{**asdict(p), "errors": _errors(p)} for p in found]
    return {"weight_syncs": written}, len(counting)


def _print_errors(name: str, errors: list[float], aim: float) -> None:
    if errors:
        inside = sum(error <= aim for error in errors)
        print(
            f"{name}: {inside} of {len(errors)} within {aim:.0%}, "
            f"median {statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )


def _errors(found: Prediction) -> dict[str, float]:
    shown = [*found.stages, *([found.step] if found.step is not None else [])]
    return {stage.stage: stage.error for stage in shown if stage.error is not None}


def report_steps(document: EngineSteps) -> tuple[dict[str, Any], int]:
    """Predicts all rows of engine steps and prints their errors by group."""
    errors, refused = predict_steps(document, MODELS)
    print(
        "kind     system     model                     layout          rows  median    p90    bias"
    )
    groups = group_errors(errors, "kind", "system", "model", "layout")
    overall = group_errors(errors, "kind")
    for group in groups:
        print(_group_line(group))
    for group in overall:
        print(_group_line({**group, "name": (*group["name"], "all", "", "")}))
    inside = sum(group["median"] <= ENGINE_AIM for group in groups)
    print(f"\n{inside} of {len(groups)} groups have a median within {ENGINE_AIM:.0%}")
    for reason, count in refused.items():
        print(f"not counted: {count} rows: {reason}")
    rows = [{**asdict(error), "error": error.error} for error in errors]
    return {"groups": groups, "all": overall, "not_counted": refused, "rows": rows}, len(errors)


def group_errors(errors: Iterable[StepError], *keys: str) -> list[dict[str, Any]]:
    """Returns absolute errors by the named attributes, and their mean signed error (`bias`)."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for found in errors:
        groups.setdefault(tuple(getattr(found, key) for key in keys), []).append(found.error)
    return [
        {
            "name": name,
            "num": len(values),
            "median": statistics.median(map(abs, values)),
            "p90": sorted(map(abs, values))[-(-90 * len(values) // 100) - 1],
            "bias": statistics.fmean(values),
        }
        for name, values in groups.items()
    ]


def _group_line(group: dict[str, Any]) -> str:
    kind, system, model, layout = group["name"]
    return (
        f"{kind:<8} {system:<10} {model:<25} {layout:<14} {group['num']:>5}  "
        f"{group['median']:6.1%} {group['p90']:6.1%} {group['bias']:+7.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts all files."""
    parser = argparse.ArgumentParser(description="Published times beside predicted ones.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--json", type=json_file, metavar="OUT", help="write all of it to this file"
    )
    options = parser.parse_args(argv)
    written, code = [], 0
    for path in options.files:
        try:
            document = read(path)
        except FlowError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{path}")
        match document:
            case StageTimes():
                result, counted = report_stages(document)
            case EngineSteps():
                result, counted = report_steps(document)
            case WeightSyncs():
                result, counted = report_syncs(document)
        written.append({"file": path.name, **result})
        code = code if counted else 1
        print()
    if options.json is not None:
        write_result(options.json, json.dumps(written, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
