"""The example programs run as they are written, only shorter."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl

SHORT = (
    *("stage.sft.train.steps=2", "stage.sft.stop.check_every=2", "stage.sft.stop.num=8"),
    *("train.steps=2", "train.prompts_per_step=8", "eval.num=16"),
)


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("three_lines", {"actor", "reward"}),
        ("arithmetic_grpo", {"actor", "verifier"}),
    ],
)
def test_an_example_runs_to_its_last_line(
    name: str,
    roles: set[str],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    run = fl.run

    def short(workflow: fl.Workflow, config: str, *, overrides: Sequence[str] = ()) -> Any:
        return run(workflow, config, overrides=[*overrides, *SHORT, f"runtime.runs={tmp_path}"])

    monkeypatch.setattr(fl, "run", short, raising=False)
    monkeypatch.chdir(repository)  # where the examples say to be started

    runpy.run_path(f"examples/{name}.py", run_name="__main__")

    folder = tmp_path / "quickstart"
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("held-out sampled accuracy: before ")
    plan = json.loads((folder / "plan.grpo.json").read_text())
    assert {placement["role"] for placement in plan["placements"]} == roles
    assert f"graph {name}" in (folder / "graph.grpo.txt").read_text()
    assert (folder / "model" / "model.safetensors").is_file()


def test_the_guessing_game_runs_to_its_last_line(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    run = fl.run

    def short(workflow: fl.Workflow, config: str) -> Any:
        shorter = ["train.steps=2", "train.prompts_per_step=8", "eval.num=16"]
        return run(workflow, config, overrides=[*shorter, f"runtime.runs={tmp_path}"])

    monkeypatch.setattr(fl, "run", short, raising=False)
    monkeypatch.chdir(repository)

    runpy.run_path("examples/guessing_game.py", run_name="__main__")

    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("held-out sampled solved: before ")
    assert "turns=4" in (tmp_path / "guess" / "graph.guess.txt").read_text().replace(" ", "")
