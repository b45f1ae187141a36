"""Two runs beside each other, as lines and as a page."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flowrl import api
from flowrl.observe.run_folder import RunFolder
from flowrl.viz.run_diff import render_run_diff
from tests.cli.command_line import runner
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config
from tests.viz.test_report import Page

Runs = tuple[Path, Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run, and a copy of it with other numbers, one step less, and another seed."""
    config = tiny_config(tmp_path_factory.mktemp("runs"))
    config["train"] = {**config["train"], "steps": 2}
    old = api.run(None, config, display=WatchedDisplay()).folder
    new = Path(shutil.copytree(old, tmp_path_factory.mktemp("others") / "<b>new"))
    values = yaml.safe_load((new / "config.yaml").read_text())
    (new / "config.yaml").write_text(yaml.safe_dump({**values, "seed": 41}))
    rows = [
        replace(row, reward_mean=0.75, wall_s=8.0, seconds={"update": 6.0})
        for row in RunFolder.open(old).steps()
        if (row.stage, row.step) != ("grpo", 2)
    ]
    (new / "metrics.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    return old, new


def test_lines_have_the_configurations_the_last_numbers_and_the_times(runs: Runs, capsys):
    code, told, _ = runner(capsys, "diff")(*map(str, runs))
    assert code == 0
    lines = told.splitlines()
    assert any(line.startswith("seed: ") and line.endswith("-> 41") for line in lines)
    last = [row for row in RunFolder.open(runs[0]).steps() if row.stage == "grpo"][-1]
    assert f"stage grpo: last reward_mean: {last.reward_mean:.4g} -> 0.75" in lines
    assert any(x.startswith("stage grpo: all, ") and x.endswith(" -> 8") for x in lines)
    assert any(x.startswith("stage grpo: update, ") and x.endswith(" -> 6") for x in lines)
    assert not any("held-out" in line for line in lines)  # they are equal


def test_a_run_is_equal_to_itself_but_for_nothing(runs: Runs, capsys):
    code, told, _ = runner(capsys, "diff")(str(runs[0]), str(runs[0]))
    assert code == 0
    assert all(", seconds of a step: " in line for line in told.splitlines())


def test_the_page_has_both_runs_in_the_same_charts(runs: Runs, capsys, tmp_path: Path):
    output = tmp_path / "diff.html"
    code, _, errors = runner(capsys, "diff")(*map(str, runs), "-o", str(output))
    assert code == 0
    assert errors == f"written to {output}: page; open it in a browser\n"
    page = Page(output.read_text())
    tables = {table["name"]: table for table in page.data["tables"]}
    table, old = tables["stage grpo"], runs[0].name
    rows = [row for row in RunFolder.open(runs[0]).steps() if row.stage == "grpo"]
    assert table["x"] == [1, 2]
    assert table["series"][f"reward_mean ({old})"] == [
        float(f"{row.reward_mean:.5g}") for row in rows
    ]
    assert table["series"]["reward_mean (<b>new)"] == [0.75, None]  # it has a step less
    charts = {chart["title"]: chart["series"] for chart in table["charts"]}
    assert {f"reward_mean ({old})", "reward_mean (<b>new)"} <= set(charts["reward"])
    assert not [tag for tag, _ in page.elements if tag == "b"]  # names are text


def test_runs_of_one_name_are_told_apart_by_their_folders(runs: Runs, capsys, tmp_path: Path):
    copy = Path(shutil.copytree(runs[0], tmp_path / runs[0].name))
    page = Page(render_run_diff((runs[0], copy), []))
    assert f"reward_mean ({copy})" in page.data["tables"][0]["series"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "configs/quickstart.yaml"], "these two cannot be compared"),
        (["{run}", "{empty}"], "this is no run folder"),
        (["{run}", "{run}", "-o", "diff.png"], "a name that ends in .html"),
        (["{run}", "{run}", "--cluster", "x.yaml"], "--cluster has a meaning for plans"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: Runs, capsys, tmp_path: Path, words, message):
    given = [word.format(run=runs[0], empty=tmp_path) for word in words]
    code, _, errors = runner(capsys, "diff")(*given)
    assert code == 2
    assert message in errors
