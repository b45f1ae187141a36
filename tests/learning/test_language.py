"""Programs that use the language's features learn: from a shared warm start, on held-out sums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.api import RunResult
from flowrl.observe.display import SilentDisplay
from tests.learning import language_programs

pytestmark = pytest.mark.learn

COPY = "{backend: torch, copy_of: actor}"


def learn(
    name: str, warm_start: Path, runs: Path, *, overrides: Sequence[str] = (), steps: int = 100
) -> RunResult:
    """One run of a program of `language_programs`, with the quickstart's model and data."""
    repository = Path(__file__).parents[2]
    return fl.run(
        getattr(language_programs, name),
        repository / "configs" / "quickstart.yaml",
        overrides=[
            f"name={name}",
            "stages=[grpo]",
            f"roles.actor.model={warm_start}",
            f"train.steps={steps}",
            "train.optimizer.learning_rate=1e-3",
            "eval.every=0",
            f"runtime.runs={runs}",
            *overrides,
        ],
        display=SilentDisplay(),
    )


def rise(result: RunResult) -> float:
    assert result.summary.before is not None
    assert result.summary.after is not None
    return result.summary.after - result.summary.before


def test_grpo_of_a_user_s_own_parts_learns(warm_start: Path, tmp_path: Path) -> None:
    assert rise(learn("own_grpo", warm_start, tmp_path)) >= 0.1
