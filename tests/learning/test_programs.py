"""Every program learns: from a shared warm start, with its own config, on held-out sums.

Two of these run with `make test-slow`, and `make learn` runs them all. With all other tests the
same two learn a reward of which an untrained model gets half.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

import flowrl as fl
from flowrl.api import RunResult
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics
from tests.learning.measures import Record, measured
from tests.runtime.tiny_runs import tiny_config

STEPS = 200

# The configs' own is for ten times the steps.
LEARNING_RATE = 1e-3

FASTEST = ("cispo", "dr_grpo")

ON_POLICY = ("cispo", "dapo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce_pp", "remax", "rloo")
"""Programs that learn from scores of the policy's own answers."""


class Lesson:
    """Runs programs for `STEPS` steps.

    Attributes:
        model: Folder that the actor begins with.
    """

    def __init__(
        self, model: Path, repository: Path, runs: Path, seed: int, record: Record
    ) -> None:
        self.model = model
        self._repository = repository
        self._runs = runs
        self._seed = seed
        self._record = record

    def __call__(self, name: str, *overrides: str) -> RunResult:
        """One run; overrides come after those that all tests share."""
        config = "quickstart" if name == "grpo" else name
        # By its file, so that the test needs no installed entry point.
        result = fl.run(
            str(self._repository / "graphs" / "flowrl_graphs" / f"{name}.py"),
            self._repository / "configs" / f"{config}.yaml",
            overrides=[
                f"stages=[{name}]",
                f"seed={self._seed}",
                f"roles.actor.model={self.model}",
                f"train.steps={STEPS}",
                f"train.optimizer.learning_rate={LEARNING_RATE}",
                "eval.every=0",
                f"runtime.runs={self._runs}",
                *overrides,
            ],
            display=SilentDisplay(),
        )
        assert result.summary.steps[name] == STEPS
        self.measured(result.summary.metric, result.summary.before, result.summary.after)
        return result

    def measured(self, name: str, before: float | None, after: float | None) -> float:
        """See `measures.measured`."""
        return measured(self._record, name, before, after)


@pytest.fixture
def lesson(
    warm_start: Path,
    repository: Path,
    tmp_path: Path,
    seed: int,
    record_property: Record,
) -> Lesson:
    return Lesson(warm_start, repository, tmp_path, seed, record_property)


def rise(result: RunResult) -> float:
    """Of the sampled accuracy on held-out sums."""
    assert result.summary.before is not None
    assert result.summary.after is not None
    return result.summary.after - result.summary.before


def steps_of(result: RunResult) -> list[StepMetrics]:
    """The steps of the last stage."""
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    return [StepMetrics.from_json(json.loads(line)) for line in lines][-STEPS:]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in FASTEST else pytest.mark.learn)
        for name in ON_POLICY
    ],
)
def test_sampled_accuracy_rises_by_a_tenth_in_200_steps(name: str, lesson: Lesson) -> None:
    assert rise(lesson(name)) >= 0.1


@pytest.mark.learn
@pytest.mark.parametrize(
    "name", ["pass_at_k", "raft", "reference_ema", "ppo_value_updates", "luffy"]
)
def test_the_metric_of_the_program_rises_by_a_tenth_in_200_steps(name: str, lesson: Lesson) -> None:
    """Of best-of-4 training the share of prompts with a right answer among 4."""
    assert rise(lesson(name)) >= 0.1


@pytest.mark.learn
@pytest.mark.parametrize("name", ["prime", "process_reward"])
def test_a_policy_learns_from_rewards_of_tokens_by_a_model_that_learns_outcomes(
    name: str, lesson: Lesson
) -> None:
    result = lesson(name)
    accuracy = [row.extra["prm/outcome_accuracy"] for row in steps_of(result)]
    assert lesson.measured("outcome_accuracy", fmean(accuracy[:10]), fmean(accuracy[-10:])) > 0
    assert rise(result) >= 0.1


@pytest.mark.parametrize("name", FASTEST)
def test_answers_begin_with_a_digit_more_often_after_25_steps(
    name: str, repository: Path, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path)
    del config["stage"], config["args"], config["roles"]["reference"]
    config |= {"stages": [name], "eval": {"every": 0, "num": 128, "metric": "digit"}}
    config["train"] |= {"steps": 25, "optimizer": {"learning_rate": 1e-2}}
    program = repository / "graphs" / "flowrl_graphs" / f"{name}.py"
    result = fl.run(str(program), config, display=SilentDisplay())
    assert rise(result) >= 0.3


@pytest.mark.learn
def test_a_student_comes_nearer_to_its_teacher(lesson: Lesson, teacher: Path) -> None:
    result = lesson("opd", f"roles.teacher.model={teacher}")
    divergence = [row.extra["reverse_kl"] for row in steps_of(result)]
    # In nats a token, on the student's own answers.
    fall = -lesson.measured("reverse_kl", fmean(divergence[:10]), fmean(divergence[-10:]))
    assert fall >= 0.5
    assert rise(result) >= 0.1


@pytest.mark.learn
def test_a_student_comes_nearer_to_the_teacher_of_each_kind_of_sum(
    lesson: Lesson, teacher: Path
) -> None:
    teachers = [f"roles.{name}.model={teacher}" for name in ("plain", "carry")]
    result = lesson("multi_teacher_opd", *teachers)
    for name in ("plain", "carry"):
        # The mean advantage is minus the divergence, in nats a token.
        nearness = [row.extra[f"{name}/advantage"] for row in steps_of(result)]
        measure = f"{name}/advantage"
        assert lesson.measured(measure, fmean(nearness[:10]), fmean(nearness[-10:])) >= 0.4
    assert rise(result) >= 0.1


@pytest.mark.learn
def test_a_policy_learns_to_tell_solutions_from_answers_of_its_earlier_self(
    lesson: Lesson,
) -> None:
    assert rise(lesson("spin")) >= 0.1


@pytest.mark.learn
def test_a_policy_learns_from_a_reward_model_that_learns_from_its_answers(
    lesson: Lesson, teacher: Path
) -> None:
    result = lesson(
        "ppo_rm",
        "stages=[reward_model, comparisons, ppo_rm]",
        f"roles.teacher.model={teacher}",
        # The reward model's, as in the config. The policy has a rate of its own, or it would find
        # out mistakes before the reward model has learned of them.
        "train.optimizer.learning_rate=1e-4",
    )
    assert rise(result) >= 0.1


@pytest.mark.learn
def test_preferred_answers_become_likelier_than_the_others(lesson: Lesson) -> None:
    result = lesson("dpo")
    right = [row.extra["pair_accuracy"] for row in steps_of(result)]
    # No pair comes twice in so few steps, so that each is measured before it is learned from. The
    # first step is left out: policy and reference are the same there, and a tie counts as wrong.
    assert lesson.measured("pair_accuracy", fmean(right[1:11]), fmean(right[-10:])) >= 0.1
    assert rise(result) >= 0.1
