"""Programs that use the language's features learn: from a shared warm start, on held-out sums.

Each goes on from a model that gets four sums in ten right, and has to get five right.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

import flowrl as fl
from flowrl.api import RunResult
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from tests.learning import language_programs
from tests.learning.measures import Record, measured

pytestmark = pytest.mark.learn

STEPS = 200

RISE = 0.1

REFERENCE = "roles.reference={backend: torch, copy_of: actor}"

TWO_POLICIES = ("bind.blue=actor", "roles.red={backend: torch, copy_of: actor}")
"""The config's actor plays blue, and red begins as a copy of it."""


class Lesson:
    """Runs programs of `language_programs` with the quickstart's model and data."""

    def __init__(
        self, model: Path, repository: Path, runs: Path, seed: int, record: Record
    ) -> None:
        self._shared = (
            "stages=[grpo]",
            f"seed={seed}",
            f"roles.actor.model={model}",
            "eval.every=0",
            f"runtime.runs={runs}",
        )
        self._config = repository / "configs" / "quickstart.yaml"
        self._record = record

    def __call__(self, program: str, *overrides: str, learning_rate: float = 1e-3) -> RunResult:
        """One run of `STEPS` steps; the config's learning rate is for ten times as many."""
        return fl.run(
            getattr(language_programs, program),
            self._config,
            overrides=[
                *self._shared,
                f"name={program}",
                f"train.steps={STEPS}",
                f"train.optimizer.learning_rate={learning_rate}",
                *overrides,
            ],
            display=SilentDisplay(),
        )

    def rise(self, result: RunResult) -> float:
        """Of sampled accuracy on held-out sums."""
        return self.measured("accuracy", result.summary.before, result.summary.after)

    def rise_of(self, name: str, result: RunResult) -> float:
        """Of a number that each step reports, from the first ten steps to the last ten."""
        numbers = [row.extra[name] for row in steps_of(result)]
        return self.measured(name, fmean(numbers[:10]), fmean(numbers[-10:]))

    def measured(self, name: str, before: float | None, after: float | None) -> float:
        """See `measures.measured`."""
        return measured(self._record, name, before, after)


@pytest.fixture
def lesson(
    warm_start: Path, repository: Path, tmp_path: Path, seed: int, record_property: Record
) -> Lesson:
    return Lesson(warm_start, repository, tmp_path, seed, record_property)


def steps_of(result: RunResult) -> list[StepMetrics]:
    return list(RunFolder.open(result.folder).steps())


def test_grpo_of_own_parts_learns_and_is_the_built_in_one(lesson: Lesson) -> None:
    own = lesson("own_grpo")
    assert lesson.rise(own) >= RISE
    ours = lesson("built_in_grpo")
    assert lesson.rise(ours) >= RISE
    # Losses round otherwise, so that after the first step the two sample other tokens.
    mine, theirs = (steps_of(result)[0] for result in (own, ours))
    for name in ("reward_mean", "length_mean", "loss", "grad_norm"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-4)
    for name in ("clip_fraction_low", "clip_fraction_high"):
        assert getattr(mine, name) == getattr(theirs, name)


def test_two_rewards_learn_together(lesson: Lesson) -> None:
    function = f"{language_programs.__file__}:digits_in_place"
    result = lesson(
        "several_rewards",
        "roles.right={backend: verify}",
        "roles.digits.backend=verify",
        "eval.score=right",
        f"roles.digits.terms=[{{kind: python, name: digits, function: '{function}'}}]",
    )
    assert lesson.rise(result) >= RISE
    assert lesson.rise_of("right", result) >= RISE
    assert lesson.rise_of("digits", result) > 0


def test_two_policies_that_teach_each_other_both_learn(lesson: Lesson) -> None:
    result = lesson("mutual", *TWO_POLICIES)
    assert lesson.rise(result) >= RISE
    assert lesson.rise_of("red.generate/reward_mean", result) >= RISE


def test_a_workflow_called_for_each_of_two_policies_teaches_both(lesson: Lesson) -> None:
    result = lesson("nested", *TWO_POLICIES)
    assert lesson.rise(result) >= RISE
    assert lesson.rise_of("red.generate/reward_mean", result) >= RISE


def test_a_policy_learns_near_a_reference_that_follows_it(lesson: Lesson) -> None:
    result = lesson("refreshed_reference", REFERENCE)
    assert lesson.rise(result) >= RISE
    kl = [row.kl or 0.0 for row in steps_of(result)]
    # Steps 20 and 40 end with a refresh, so steps 21 and 41 begin at no distance at all.
    for last in (20, 40):
        assert kl[last] < kl[last - 1] / 4


def test_imitating_the_best_of_its_own_answers_learns(lesson: Lesson) -> None:
    result = lesson("best_of_n")
    assert lesson.rise(result) >= RISE
    # One answer of each group that was not all right or all wrong, and there are 64 groups.
    assert all(row.num_samples == 64 - row.filtered_groups for row in steps_of(result))


def test_preferences_among_its_own_answers_teach_a_policy(lesson: Lesson) -> None:
    # A pair of each group is little to go by: more of them, in smaller steps.
    result = lesson("online_dpo", REFERENCE, "train.prompts_per_step=128", learning_rate=5e-4)
    assert lesson.rise(result) >= RISE


def test_a_decoupled_loss_learns_from_a_forward_of_the_old_policy(lesson: Lesson) -> None:
    result = lesson("decoupled", "train.mini_batches=2")
    assert lesson.rise(result) >= RISE
    for row in steps_of(result):
        assert row.seconds["logprobs"] > 0
        # The sampler is the old policy: its engine computes the same logprobs, to round-off.
        assert row.extra["weight_mean"] == pytest.approx(1, abs=1e-3)
