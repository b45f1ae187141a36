"""What steps show is told once a stage; steps without an update where they last."""

from __future__ import annotations

from flowrl.observe.rows import StepMetrics
from flowrl.runtime.step_warnings import IDLE_STEPS, StepWarnings


def told(*steps: StepMetrics) -> list[str]:
    found: list[str] = []
    warnings = StepWarnings(found.append)
    for step in steps:
        warnings.of(step)
    return found


def idle(step: int, stage: str = "grpo") -> StepMetrics:
    return StepMetrics(stage=stage, step=step, filtered_groups=64, reward_mean=0.0)


def busy(step: int) -> StepMetrics:
    return StepMetrics(stage="grpo", step=step, num_samples=8, filtered_groups=63)


def test_steps_in_a_row_whose_groups_are_all_filtered_are_told_of_once():
    (said,) = told(*(idle(step) for step in range(1, 3 * IDLE_STEPS)))
    assert said.startswith(f"grpo step {IDLE_STEPS}: {IDLE_STEPS} steps in a row made no update")
    assert "score alike, at 0 on average" in said
    assert "train.group_size" in said
    again = [idle(step) for step in range(1, IDLE_STEPS + 1)]
    assert len(told(*again, busy(9), *again)) == 1


def test_a_step_that_learns_begins_the_count_anew():
    steps = [idle(1), idle(2), busy(3), idle(4), idle(5)]
    assert told(*steps) == []
    assert len(told(*steps, idle(6))) == 1
    assert told(idle(1), idle(2), idle(1, "other")) == []


def test_cut_episodes_and_skipped_updates_are_told_once_a_stage():
    cut = StepMetrics(stage="a", step=1, num_samples=1, extra={"game.cut_episodes": 1.0})
    skipped = StepMetrics(stage="a", step=2, num_samples=1, skipped_updates=1)
    found = told(cut, skipped, cut, skipped)
    assert len(found) == 2
    assert "1 episode was cut" in found[0]
    assert "an update was skipped" in found[1]


def test_tokens_that_the_tokenizer_does_not_have_are_told_once_a_stage():
    drawn = StepMetrics(stage="a", step=2, num_samples=1, extra={"draws.2/unnamed_tokens": 3.0})
    none = StepMetrics(stage="a", step=1, num_samples=1, extra={"unnamed_tokens": 0.0})
    (said,) = told(none, drawn, drawn)
    assert said.startswith("a step 2: 3 tokens drawn that the tokenizer does not have")
