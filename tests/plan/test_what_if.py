"""The study of kinds of schedules, on its small case."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowrl.cost.lengths import ConstantLengths, LognormalLengths


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


def test_groups_of_equal_samples_all_come_at_the_end(script: ModuleType):
    groups = script.groups_of(ConstantLengths(tokens=100), 64, 8)
    assert script.by_completion_s(groups, 60.0, 20.0, 4) == pytest.approx(80.0)
    assert script.even_s(60.0, 20.0, 4) == pytest.approx(65.0)


def test_no_stream_ends_before_its_last_group_is_read(script: ModuleType):
    lengths = LognormalLengths(mean=2400, sigma=0.8, maximum=8192)
    groups = script.groups_of(lengths, 512, 8)
    found = script.by_completion_s(groups, 61.5, 32.2, 4)
    # A fifth of the groups has a sample that is cut at 8,192, and waits for it.
    assert script.even_s(61.5, 32.2, 4) < found < 61.5 + 32.2
    assert sum(end >= 8191 for end in groups[0]) / 512 == pytest.approx(0.2, abs=0.05)
