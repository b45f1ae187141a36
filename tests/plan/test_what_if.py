"""The study of kinds of schedules, on its small case."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowrl.plan.search import Kind, evaluate


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    folder = repository / "benchmarks"
    spec = importlib.util.spec_from_file_location("what_if", folder / "what_if.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))  # it imports its neighbour `line_plots`
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("what_if") / "small.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["what_if.py", "--small", str(file)])
        script.main()
    return json.loads(file.read_text())


def test_the_small_case_is_that_of_the_results(small: Any, repository: Path):
    results = json.loads((repository / "benchmarks" / "results" / "what_if.json").read_text())
    for row in small["jobs"]["GRPO 7B"]:
        same = {name: row[name] for name in ("devices", "kind")}
        (kept,) = (one for one in results["jobs"]["GRPO 7B"] if same.items() <= one.items())
        assert row["step_s"] == pytest.approx(kept["step_s"], rel=0.02)


def test_the_guide_says_what_the_results_say(repository: Path):
    results = json.loads((repository / "benchmarks" / "results" / "what_if.json").read_text())
    guide = (repository / "docs" / "planning-guide.md").read_text()
    for devices in {row["devices"] for row in results["jobs"]["GRPO 7B"]}:
        cells = []
        for rows in results["jobs"].values():
            steps = [row["step_s"] for row in rows if row["devices"] == devices]
            cells.append(" / ".join("-" if one is None else f"{one:,.0f}" for one in steps))
        assert f"| {devices:,} | {' | '.join(cells)} |" in guide


def test_hybrid_is_as_fast_as_what_it_contains_and_more_devices_are_no_slower(small: Any):
    rows = small["jobs"]["GRPO 7B"]
    seconds = {(row["kind"], row["devices"]): row["step_s"] for row in rows}
    assert len(seconds) == 8
    for devices in (8, 16):
        others = min(seconds[kind, devices] for kind in ("temporal", "spatial"))
        assert seconds["hybrid", devices] <= others
    for kind in ("temporal", "spatial", "hybrid", "asynchronous"):
        assert seconds[kind, 16] <= seconds[kind, 8]


def test_rows_fit_their_devices_and_are_never_busier_than_whole(small: Any):
    for row in small["jobs"]["GRPO 7B"]:
        assert 0 < row["peak_gib"] <= 80
        assert 0 <= row["idle"] < 1
        assert len(row["layouts"]) == 3


def test_no_plan_that_expects_even_chunks_is_faster_than_one_that_knows_better(repository: Path):
    results = json.loads((repository / "benchmarks" / "results" / "what_if.json").read_text())
    assert results["streams"]
    for row in results["streams"]:
        assert row["hybrid_s"] <= min(row["temporal_s"], row["even_true_s"]) + 0.01


def test_a_plan_for_even_chunks_takes_longer_than_it_says(script: ModuleType):
    problem = script.posed(*script.JOBS["GRPO 7B"], 16)
    smooth = script._even(problem)
    hoped = script.best(smooth, 16, Kind.SPATIAL)
    true = evaluate(problem.problem, script._true(problem, hoped.schedule))
    assert true.step_s > hoped.evaluation.step_s
    assert script.best(problem, 16, Kind.SPATIAL).evaluation.step_s <= true.step_s
