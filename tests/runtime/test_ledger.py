"""What a run has counted goes on over a stop exactly as if there had been none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.config.schema import RunConfig
from flowrl.errors import CheckpointError
from flowrl.files import encode_json
from flowrl.observe.rows import EvaluationRow, SampleRow, StepMetrics, Summary
from flowrl.observe.run_folder import RunFolder
from flowrl.runtime.driver.run_summary import RunTotals, ended_at
from flowrl.runtime.driver.step_report import StepResult
from tests.runtime.tiny_runs import tiny_config


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


CONFIG = RunConfig.model_validate(tiny_config(Path("runs")))


def sample(end: str, number: int) -> SampleRow:
    return SampleRow(
        stage="grpo",
        step=1,
        sample=f"0/{number}/0",
        prompt="",
        response="",
        answer="",
        score=None,
        terms={},
        num_tokens=3,
        finish="stop",
        versions=(),
        end=end,
    )


def step(stage: str, number: int, *, tokens: int, ends: str = "") -> StepResult:
    """With other numbers for each step; its samples ended as `ends` says by their first letters."""
    names = {"c": "consumed", "f": "filtered", "d": "dropped"}
    metrics = StepMetrics(
        stage=stage,
        step=number,
        num_tokens=tokens,
        wall_s=number + 0.5,
        seconds={"update": number * 0.25, "generate": number * 0.125},
    )
    samples = [sample(names[end], index) for index, end in enumerate(ends)]
    return StepResult(metrics=metrics, samples=samples)


def evaluation(stage: str, seconds: float) -> EvaluationRow:
    return EvaluationRow(
        stage=stage, step=0, num=4, temperature=1.0, metrics={"digit": 0.25}, seconds=seconds
    )


def first_half(ledger: RunTotals) -> None:
    ledger.add(step("sft", 1, tokens=70), logging_s=0.5)
    ledger.add(step("sft", 2, tokens=11), logging_s=0.25)
    ledger.add_evaluation(evaluation("sft", 3.0))
    ledger.before = {"digit": 0.25, "score": 0.75}
    ledger.add_evaluation(evaluation("grpo", 5.0))
    ledger.add(step("grpo", 1, tokens=13, ends="ccfd"), logging_s=0.125)
    ledger.settle("grpo", 1, False)


def second_half(ledger: RunTotals) -> None:
    ledger.add(step("grpo", 2, tokens=17, ends="fcff"), logging_s=2.0)
    ledger.add_evaluation(evaluation("grpo", 7.0))
    ledger.after = {"digit": 0.5, "score": 0.8125}


def summary_of(ledger: RunTotals) -> Summary:
    return ledger.summary(RunFolder(Path("runs/tiny")), num_held_out=4)


def test_every_count_is_in_the_summary():
    clock = Clock()
    ledger = RunTotals(CONFIG, clock=clock)
    first_half(ledger)
    second_half(ledger)
    clock.now += 100.0
    summary = summary_of(ledger)
    assert summary.seconds == {
        "sft": {"update": 0.75, "generate": 0.375, "log": 0.75, "step": 4.0, "evaluate": 3.0},
        "grpo": {"update": 0.75, "generate": 0.375, "log": 2.125, "step": 4.0, "evaluate": 12.0},
    }
    assert summary.steps == {"sft": 2, "grpo": 2}
    assert summary.samples == {"consumed": 3, "filtered": 4, "dropped": 1}
    assert (summary.num_tokens, summary.num_example_tokens) == (30, 81)
    assert (summary.before, summary.after, summary.wall_s) == (0.25, 0.5, 100.0)


def test_a_resumed_ledger_counts_on_from_every_number_that_was_written():
    clock = Clock()
    never = RunTotals(CONFIG, clock=clock)
    first_half(never)
    clock.now += 40.0
    written = json.loads(encode_json(never.state()))

    later = Clock()  # of another process, whose clock says something else
    later.now = 7.0
    resumed = RunTotals(CONFIG, clock=later)
    later.now += 2.0  # which opened its workers first
    resumed.restore(written)
    assert resumed.settled("grpo", 1) is False
    assert resumed.settled("grpo", 2) is None
    assert [resumed.step_of(stage) for stage in ("sft", "grpo", "other")] == [2, 1, 0]
    assert (resumed.before, resumed.after) == ({"digit": 0.25, "score": 0.75}, None)
    clock.now += 2.0
    assert json.loads(encode_json(resumed.state())) == json.loads(encode_json(never.state()))

    for ledger in (never, resumed):
        second_half(ledger)
    clock.now += 5.0
    later.now += 5.0
    assert summary_of(resumed) == summary_of(never)
    assert summary_of(resumed).wall_s == 47.0
    assert json.loads(encode_json(resumed.state())) == json.loads(encode_json(never.state()))


@pytest.mark.parametrize("reached", [True, False])
def test_whether_a_stage_ended_early_is_taken_up_again(reached: bool):
    ledger = RunTotals(CONFIG)
    ledger.settle("sft", 3, reached)
    written = json.loads(encode_json(ledger.state()))
    assert ended_at(written, "sft", 3) is reached
    assert not ended_at(written, "sft", 2)
    assert not ended_at(written, "grpo", 3)
    resumed = RunTotals(CONFIG)
    resumed.restore(written)
    assert resumed.settled("sft", 3) is reached
    assert resumed.settled("sft", 2) is None


def test_a_checkpoint_without_a_ledger_is_refused():
    with pytest.raises(CheckpointError, match="no ledger"):
        RunTotals(CONFIG).restore({})
