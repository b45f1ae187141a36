"""Every program learns: from a shared warm start, with its own config, on held-out sums.

Two run with all other tests; `make learn` runs them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fl
from flowrl.observe.display import SilentDisplay

STEPS = 200

FASTEST = ("cispo", "dr_grpo")

PROGRAMS = ("cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "rloo")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in FASTEST else pytest.mark.learn)
        for name in PROGRAMS
    ],
)
def test_sampled_accuracy_rises_by_a_tenth_in_200_steps(
    name: str, warm_start: Path, repository: Path, tmp_path: Path
) -> None:
    config = "quickstart" if name == "grpo" else name
    # By its file, so that the test needs no installed entry point.
    result = fl.run(
        str(repository / "graphs" / "flowrl_graphs" / f"{name}.py"),
        repository / "configs" / f"{config}.yaml",
        overrides=[
            f"stages=[{name}]",
            f"roles.actor.model={warm_start}",
            f"train.steps={STEPS}",
            # The configs' own is for ten times the steps.
            "train.optimizer.learning_rate=1e-3",
            "eval.every=0",
            f"runtime.runs={tmp_path}",
        ],
        display=SilentDisplay(),
    )
    before, after = result.summary.before, result.summary.after
    assert before is not None
    assert after is not None
    assert result.summary.steps[name] == STEPS
    assert after >= before + 0.1
