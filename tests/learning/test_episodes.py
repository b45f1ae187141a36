"""A policy learns from episodes of several turns, from a new model."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fl
from flowrl.observe.display import SilentDisplay

# By chance a game of 16 numbers is solved in one of five to ten tries.
RISE = 0.3


@pytest.mark.parametrize(
    ("compare", "steps"),
    [
        pytest.param("episodes", 200, marks=pytest.mark.learn),
        pytest.param("turns", 100, marks=pytest.mark.learn),
    ],
)
def test_more_games_are_solved_after_training(
    compare: str, steps: int, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    result = fl.run(
        None,
        "configs/guess.yaml",
        overrides=[
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
    assert after >= before + RISE
