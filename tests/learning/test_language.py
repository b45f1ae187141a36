"""Programs that use the language's features learn: from a shared warm start, on held-out sums.

Each goes on from a model that gets four sums in ten right, and has to get five right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from flowrl.api import RunResult
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from tests.learning import language_programs

pytestmark = pytest.mark.learn

RISE = 0.1

REFERENCE = "roles.reference={backend: torch, copy_of: actor}"

TWO_POLICIES = ("bind.blue=actor", "roles.red={backend: torch, copy_of: actor}")
"""The config's actor plays blue, and red begins as a copy of it."""


def learn(
    program: str,
    warm_start: Path,
    runs: Path,
    *overrides: str,
    steps: int = 100,
    learning_rate: float = 1e-3,
) -> RunResult:
    """A run of a program of `language_programs`, with the quickstart's model and data."""
    repository = Path(__file__).parents[2]
    return fl.run(
        getattr(language_programs, program),
        repository / "configs" / "quickstart.yaml",
        overrides=[
            f"name={program}",
            "stages=[grpo]",
            f"roles.actor.model={warm_start}",
            f"train.steps={steps}",
            f"train.optimizer.learning_rate={learning_rate}",
            "eval.every=0",
            f"runtime.runs={runs}",
            *overrides,
        ],
        display=SilentDisplay(),
    )


def rise(result: RunResult) -> float:
    """Of sampled accuracy on held-out sums."""
    before, after = result.summary.before, result.summary.after
    assert before is not None
    assert after is not None
    return after - before


def steps_of(result: RunResult) -> Sequence[StepMetrics]:
    return list(RunFolder.open(result.folder).steps())


def rise_while_training(result: RunResult, name: str) -> float:
    """Of a number that each step reports, from the first ten steps to the last ten."""
    numbers = [row.extra[name] for row in steps_of(result)]
    return float(np.mean(numbers[-10:]) - np.mean(numbers[:10]))


def test_grpo_of_own_parts_learns_and_is_the_built_in_one(warm_start: Path, tmp_path: Path) -> None:
    own = learn("own_grpo", warm_start, tmp_path)
    assert rise(own) >= RISE
    ours = learn("built_in_grpo", warm_start, tmp_path)
    assert own.summary.after == ours.summary.after
    for mine, theirs in zip(steps_of(own), steps_of(ours), strict=True):
        shared = {name: theirs.extra[name] for name in mine.extra}  # the built-in has a few more
        same = {"wall_s": 0.0, "seconds": {}}
        assert replace(mine, **same) == replace(theirs, extra=shared, **same)


def test_two_rewards_learn_together(warm_start: Path, tmp_path: Path) -> None:
    function = f"{language_programs.__file__}:digits_in_place"
    result = learn(
        "several_rewards",
        warm_start,
        tmp_path,
        "roles.right={backend: verify}",
        "roles.digits.backend=verify",
        f"roles.digits.terms=[{{kind: python, name: digits, function: '{function}'}}]",
    )
    assert rise(result) >= RISE
    assert rise_while_training(result, "right") >= RISE
    assert rise_while_training(result, "digits") > 0


def test_two_policies_that_teach_each_other_both_learn(warm_start: Path, tmp_path: Path) -> None:
    result = learn("mutual", warm_start, tmp_path, *TWO_POLICIES)
    assert rise(result) >= RISE
    assert rise_while_training(result, "red.generate/reward_mean") >= RISE


def test_a_workflow_called_for_each_of_two_policies_teaches_both(
    warm_start: Path, tmp_path: Path
) -> None:
    result = learn("nested", warm_start, tmp_path, *TWO_POLICIES)
    assert rise(result) >= RISE
    assert rise_while_training(result, "red.generate/reward_mean") >= RISE


def test_a_policy_learns_near_a_reference_that_follows_it(warm_start: Path, tmp_path: Path) -> None:
    result = learn("refreshed_reference", warm_start, tmp_path, REFERENCE)
    assert rise(result) >= RISE
    kl = [row.kl or 0.0 for row in steps_of(result)]
    # Steps 20 and 40 end with a refresh, so steps 21 and 41 begin at no distance at all.
    for last in (20, 40):
        assert kl[last] < kl[last - 1] / 4


def test_imitating_the_best_of_its_own_answers_learns(warm_start: Path, tmp_path: Path) -> None:
    result = learn("best_of_n", warm_start, tmp_path)
    assert rise(result) >= RISE
    # One answer of each group that was not all right or all wrong, and there are 64 groups.
    assert all(row.num_samples == 64 - row.filtered_groups for row in steps_of(result))


def test_preferences_among_its_own_answers_teach_a_policy(warm_start: Path, tmp_path: Path) -> None:
    result = learn("online_dpo", warm_start, tmp_path, REFERENCE, steps=200, learning_rate=5e-4)
    assert rise(result) >= RISE


def test_a_decoupled_loss_learns_from_a_forward_of_the_old_policy(
    warm_start: Path, tmp_path: Path
) -> None:
    result = learn("decoupled", warm_start, tmp_path, "train.mini_batches=2")
    assert rise(result) >= RISE
    for row in steps_of(result):
        assert row.seconds["logprobs"] > 0
        # The sampler is the old policy: its engine computes the same logprobs, to round-off.
        assert row.extra["weight_mean"] == pytest.approx(1, abs=1e-3)
