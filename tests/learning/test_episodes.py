"""A policy learns from episodes of several turns, from a new model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

import flowrl as fl
from flowrl.observe.display import SilentDisplay
from flowrl.observe.run_folder import RunFolder


@pytest.mark.learn
@pytest.mark.parametrize(
    ("compare", "steps", "rise"), [("episodes", 100, 0.3), ("turns", 60, 0.15)]
)
def test_more_games_are_solved_after_training(
    compare: str,
    steps: int,
    rise: float,
    repository: Path,
    tmp_path: Path,
    seed: int,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(repository)  # the config names its files from there
    result = fl.run(
        None,
        "configs/guess.yaml",
        overrides=[
            f"seed={seed}",
            f"args.compare={compare}",
            f"train.steps={steps}",
            "eval.every=0",
            f"runtime.runs={tmp_path}",
        ],
        display=SilentDisplay(),
    )
    before, after = result.summary.before, result.summary.after
    assert before is not None
    assert after is not None
    record_property("solved", f"{before:.3f} {after:.3f}")
    assert result.summary.steps["guess"] == steps
    assert after >= before + rise


@pytest.mark.learn
def test_one_policy_learns_two_games_at_once(
    repository: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)  # the config names its files from there
    result = fl.run(
        "graphs/flowrl_graphs/multi_environment.py",
        "configs/multi_environment.yaml",
        overrides=[f"seed={seed}", "train.steps=60", "eval.every=0", f"runtime.runs={tmp_path}"],
        display=SilentDisplay(),
    )
    steps = list(RunFolder.open(result.folder).steps())
    for game, rise in (("large", 0.2), ("small", 0.4)):
        scores = [row.extra[f"{game}/score"] for row in steps]
        assert fmean(scores[-5:]) >= fmean(scores[:5]) + rise
