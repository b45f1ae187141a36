"""A policy learns from episodes of several turns, from a new model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.observe.display import SilentDisplay


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
