"""Rows come back from their logs as they were."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from flowrl.files import JsonLines, encode_json, read_json_lines
from flowrl.observe.rows import EvaluationRow, SampleRow, StepMetrics, Summary

STEP = StepMetrics(
    stage="grpo",
    step=7,
    version=6,
    num_samples=512,
    num_tokens=2048,
    reward_mean=0.5,
    reward_std=0.25,
    length_mean=4.0,
    length_max=4,
    truncated=0.125,
    loss=0.01,
    grad_norm=1.5,
    learning_rate=2e-4,
    kl=0.0,
    clip_fraction_low=0.1,
    clip_fraction_high=0.2,
    filtered_groups=3,
    wall_s=0.5,
    seconds={"generate": 0.25, "update": 0.2},
    extra={"ratio_max": 1.25},
)
SAMPLE = SampleRow(
    stage="grpo",
    step=7,
    sample="0/17/3",
    prompt="23+45=",
    response="068",
    answer="068",
    score=1.0,
    terms={"accuracy": 1.0},
    num_tokens=4,
    finish="stop",
    versions=((5, 1), (6, 3)),
    end="consumed",
)
SUMMARY = Summary(
    name="quickstart",
    folder="runs/quickstart",
    seed=3,
    metric="accuracy",
    temperature=1.0,
    before=0.4063,
    after=0.9375,
    seconds={"grpo": {"generate": 12.0}},
    steps={"grpo": 300},
    samples={"consumed": 100, "filtered": 3},
    num_tokens=400,
    libraries={"torch": "2.13.0"},
)


def through_json(row):
    return type(row).from_json(json.loads(encode_json(row.to_json())))


@pytest.mark.parametrize(
    "row",
    [
        STEP,
        StepMetrics(stage="sft", step=1),
        SAMPLE,
        replace(SAMPLE, score=None, terms={}, finish="", versions=(), end="dropped", reason="aged"),
        EvaluationRow(stage="grpo", step=0, num=512, temperature=1.0, metrics={"accuracy": 0.5}),
        SUMMARY,
        replace(SUMMARY, before=None, after=None),
    ],
)
def test_a_row_comes_back_equal(row):
    assert through_json(row) == row


def test_numbers_that_are_not_finite_come_back_as_numbers():
    row = through_json(replace(STEP, loss=math.nan, grad_norm=math.inf, extra={"x": -math.inf}))
    assert math.isnan(row.loss)
    assert row.grad_norm == math.inf
    assert row.extra == {"x": -math.inf}
    assert math.isnan(through_json(replace(SAMPLE, score=math.nan)).score)


def test_numpy_numbers_are_written_as_plain_ones():
    row = replace(STEP, loss=np.float32(0.5), length_max=np.int64(4), extra={"x": np.float64(2)})
    assert through_json(row) == replace(STEP, loss=0.5, length_max=4, extra={"x": 2.0})


def test_a_step_with_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="'lost' is no field"):
        StepMetrics.from_json({"stage": "grpo", "step": 1, "lost": 0.5})


def test_sample_rows_have_every_field_in_the_order_of_definition(tmp_path):
    with JsonLines(tmp_path / "samples.jsonl") as log:
        log.append([SAMPLE.to_json()])
    (row,) = read_json_lines(tmp_path / "samples.jsonl")
    assert list(row) == list(SampleRow.__dataclass_fields__)


def test_tokens_per_second_are_known_only_where_time_and_tokens_are():
    assert STEP.tokens_per_second("generate") == 8192
    assert STEP.tokens_per_second("score") is None
    assert replace(STEP, num_tokens=0).tokens_per_second("generate") is None


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({}, "held-out sampled accuracy: before 0.41 after 0.94"),
        ({"temperature": 0.0}, "held-out greedy accuracy: before 0.41 after 0.94"),
        ({"metric": "format"}, "held-out sampled format: before 0.41 after 0.94"),
        ({"after": None}, "held-out sampled accuracy: before 0.41 after not measured"),
        ({"before": None, "after": None}, "held-out accuracy: not measured"),
        ({"before": 0.0, "after": 1.0}, "held-out sampled accuracy: before 0.00 after 1.00"),
    ],
)
def test_the_headline_names_the_metric_and_how_it_was_measured(changes, headline):
    assert replace(SUMMARY, **changes).headline == headline


def test_the_driver_work_of_older_rows_has_its_present_names():
    before = {"offer": 0.1, "drive": 0.2, "answer": 0.3, "wait": 1.0}
    now = {"dispatch": 0.1, "collect": 0.2, "assemble": 0.3, "wait": 1.0}
    assert through_json(replace(STEP, seconds=before)).seconds == now
    assert through_json(replace(SUMMARY, seconds={"grpo": before})).seconds == {"grpo": now}
