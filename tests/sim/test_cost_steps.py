"""The simulator's engines by a cost, and a profile as a cost reads it."""

from __future__ import annotations

import json

import pytest

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.measured import MeasuredCost
from flowrl.cost.models import ModelShape
from flowrl.sim.cost_steps import AnalyticStep, measured_models
from flowrl.sim.costs import LinearCost
from flowrl.sim.profile import DecodePoint, EngineProfile, OpProfile, Profile
from flowrl.sim.step_time import LinearPrefill, StepTime, decode_run_s

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
COST = AnalyticCost()


@pytest.fixture(scope="module")
def qwen(repository):
    config = json.loads((repository / "configs/models/qwen3-8b.json").read_text("utf-8"))
    return ModelShape.from_hf_config(config)


def test_an_engines_steps_are_those_of_the_cost_at_any_context(qwen):
    step: StepTime = AnalyticStep(COST, qwen, Layout(tp=2), H100)
    for batch in (1, 100):
        for context in (10.0, 1000.0, 30_000.0):
            asked = COST.decode_step(qwen, Layout(tp=2), H100, batch=batch, context=context)
            assert step.decode_s(batch, context, 2 * context) == pytest.approx(asked.seconds)
    prefill = COST.prefill(qwen, Layout(tp=2), H100, rows=4, tokens=300)
    assert step.prefill_s(4, 1200) == pytest.approx(prefill.seconds)
    assert step.prefill_s(0, 0) == 0
    assert step.leave_s() == 0


def test_a_run_of_steps_is_that_of_single_ones(qwen):
    step = AnalyticStep(COST, qwen, Layout(), H100)
    single = sum(step.decode_s(8, 500.0 + grown, 500.0 + grown) for grown in range(200))
    assert decode_run_s(step, 8, 500.0, 500.0, 200) == pytest.approx(single)


def test_a_step_is_asked_for_once_a_batch(qwen):
    asked = []

    class Counting(AnalyticCost):
        def decode_step(self, *where, batch, context):
            asked.append(batch)
            return super().decode_step(*where, batch=batch, context=context)

    step = AnalyticStep(Counting(), qwen, Layout(), H100)
    for context in range(100):
        step.decode_s(7, float(context), float(context))
    assert asked == [7, 7]


def test_what_a_profile_measured_is_what_the_cost_answers(qwen):
    profile = Profile(
        version=1,
        name="one",
        engines=(
            EngineProfile(
                role="actor",
                decode=(
                    DecodePoint(batch=1, context=100, seconds=0.01),
                    DecodePoint(batch=9, context=100, seconds=0.05),
                ),
                prefill=LinearPrefill(token_s=1e-4),
            ),
        ),
        ops=(
            OpProfile(role="actor", op="update", cost=LinearCost(call_s=2.0, token_s=1e-3)),
            OpProfile(role="reference", op="logprobs", cost=LinearCost(token_s=3e-4)),
        ),
    )
    shapes = {"actor": qwen, "reference": qwen}
    (model,) = measured_models(profile, shapes, device="H100-SXM-80GB")
    assert model.decode == ((1, 100, 0.01), (9, 100, 0.05))
    assert model.forward is not None
    assert model.forward.token_s == 3e-4
    assert model.train is not None
    assert model.train.call_s == 2.0
    cost = MeasuredCost([model], COST)
    found = cost.decode_step(qwen, Layout(dp=4), H100, batch=5, context=100)
    assert found.seconds == pytest.approx(0.03)
    apart = measured_models(
        profile, shapes, device="H100-SXM-80GB", layouts={"reference": Layout(tp=2)}
    )
    assert [(model.layout.tp, model.train is None) for model in apart] == [(1, False), (2, True)]
