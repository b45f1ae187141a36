"""What steps show is told once a stage; steps without an update where they last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.graph.ir import format_attr
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_text import step_line
from flowrl.runtime.driver.run_summary import IDLE_STEPS, StepWarnings
from flowrl.specs import RowCondition


def told(*steps: StepMetrics) -> list[str]:
    found: list[str] = []
    warnings = StepWarnings(found.append)
    for step in steps:
        warnings.check(step)
    return found


def idle(step: int, stage: str = "grpo") -> StepMetrics:
    return StepMetrics(stage=stage, step=step, filtered_groups=64, reward_mean=0.0)


def busy(step: int) -> StepMetrics:
    return StepMetrics(stage="grpo", step=step, num_samples=8, filtered_groups=63)


def test_steps_in_a_row_whose_groups_are_all_filtered_are_told_of_once():
    (said,) = told(*(idle(step) for step in range(1, 3 * IDLE_STEPS)))
    assert said.startswith(f"grpo step {IDLE_STEPS}: {IDLE_STEPS} steps in a row were left")
    assert "score alike, at 0 on average" in said
    assert "train.group_size" in said
    again = [idle(step) for step in range(1, IDLE_STEPS + 1)]
    assert len(told(*again, busy(9), *again)) == 1


def test_a_step_that_learns_begins_the_count_anew():
    steps = [idle(1), idle(2), busy(3), idle(4), idle(5)]
    assert told(*steps) == []
    assert len(told(*steps, idle(6))) == 1
    assert told(idle(1), idle(2), idle(1, "other")) == []


@pytest.mark.parametrize(
    ("mean", "hint"),
    [(1.0, "harder prompts"), (0.25, "solves more often"), (0.7, "set these further apart")],
)
def test_difficulty_is_named_with_its_strict_bounds_and_the_side_that_groups_lie_on(
    mean: float, hint: str
):
    by = {"filter:difficulty(low=0.5, high=1.0)": 64}
    (said,) = told(*(replace(idle(step), reward_mean=mean, filtered_by=by) for step in range(1, 5)))
    assert "fl.filter.difficulty(low=0.5, high=1.0) removed all of their groups" in said
    assert "0.5 < mean score < 1, which excludes the bounds" in said
    assert f"at {mean:g} on average" in said
    assert hint in said
    assert ("take harder" in said) == (mean == 1.0)


@pytest.mark.parametrize(
    ("by", "rule", "hint"),
    [
        ("select:threshold(at_least=0.5)", "score at least 0.5", "a lower at_least"),
        ("filter:zero_variance(tolerance=1e-08)", "score alike", "group_size"),
        ("select:best_and_worst(tolerance=1e-08)", "score alike", "group_size"),
    ],
)
def test_every_filter_and_selection_is_named_as_a_program_writes_it(by: str, rule: str, hint: str):
    (said,) = told(*(replace(idle(step), filtered_by={by: 64}) for step in range(1, 4)))
    assert f"fl.{by.replace(':', '.')} removed" in said
    assert rule in said
    assert hint in said


def test_a_part_by_row_is_named_by_its_field_and_values():
    by = {format_attr(RowCondition.of("kind", ["maths"], excluded=False)): 64}
    (said,) = told(*(replace(idle(step), filtered_by=by) for step in range(1, 4)))
    assert "fl.where(kind='maths') removed all of their groups (the rows of these have" in said
    line = step_line(replace(idle(1), filtered_by=by), 1, None)
    assert "groups filtered by where(kind='maths')" in line


def test_several_removers_are_all_named_and_the_first_one_explained():
    by = {"filter:difficulty(low=0.2, high=0.8)": 40, "filter:zero_variance(tolerance=0.0)": 24}
    (said,) = told(*(replace(idle(step), filtered_by=by) for step in range(1, 4)))
    assert "difficulty(low=0.2, high=0.8) and fl.filter.zero_variance(tolerance=0.0) rem" in said
    assert "0.2 < mean score < 0.8" in said


GOOD = StepMetrics(
    stage="grpo",
    step=1,
    num_samples=64,
    reward_mean=0.5,
    reward_std=0.5,
    length_mean=3.9,
    length_max=4,
    truncated=0.1,
    learning_rate=3.0,
)
SILENT = replace(
    GOOD, reward_mean=0.0, reward_std=0.0, length_mean=1.0, length_max=1, truncated=0.0
)
ENDLESS = replace(SILENT, length_mean=3.98, length_max=4, truncated=0.97)
HUSHED = replace(SILENT, length_mean=1.01, length_max=3)


@pytest.mark.parametrize(
    "collapsed", [SILENT, HUSHED, ENDLESS], ids=["silent", "hushed", "endless"]
)
@pytest.mark.parametrize("filtered", [0, 64])
def test_a_policy_that_falls_silent_or_never_stops_has_collapsed(collapsed, filtered: int):
    worse = replace(
        collapsed, learning_rate=None, num_samples=64 - filtered, filtered_groups=filtered
    )
    steps = [replace(worse, step=step) for step in range(2, 12)]
    (said,) = told(GOOD, *steps)
    assert said.startswith(f"grpo step {1 + IDLE_STEPS}: the policy has collapsed.")
    assert ("do not stop any more" if collapsed is ENDLESS else "end at their first token") in said
    assert "at step 1 it was 0.5 (length 3.9, truncated 10 %)" in said
    assert "lower the learning rate (it was 3 at the last update)" in said


def test_what_only_looks_like_a_collapse_is_none():
    for steps in (
        [SILENT] * 5,  # it never was better
        [replace(GOOD, reward_mean=0.0), *[SILENT] * 5],
        [GOOD, SILENT, SILENT, GOOD, SILENT],  # two steps may be chance
        [GOOD, *[replace(SILENT, reward_mean=1.0)] * 5],  # one token is right
        [GOOD, *[replace(SILENT, reward_std=0.2)] * 5],  # there is something to learn
        [GOOD, *[replace(SILENT, length_max=2, length_mean=1.1)] * 5],
        [replace(GOOD, length_mean=1.0, length_max=1), *[SILENT] * 5],  # answers are one token
        [replace(GOOD, truncated=0.9), *[ENDLESS] * 5],  # they hardly ever stopped
    ):
        assert told(*steps) == []
    assert told(GOOD, *[replace(SILENT, stage="other")] * 5) == []


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
    assert said.startswith("a step 2: 3 tokens sampled that the tokenizer does not have")
