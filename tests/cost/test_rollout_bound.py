"""No rollout takes less than its bound, and most of those that are never full hardly more."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths, LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.occupancy import EngineBatch
from flowrl.cost.rollout_bound import LEAST, RolloutBound, rollout_bound

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)
COST = AnalyticCost()
LONGEST = 8192


@pytest.fixture(scope="module")
def qwen(repository) -> ModelShape:
    config = json.loads((repository / "configs/models/qwen2.5-7b.json").read_text("utf-8"))
    return ModelShape.from_hf_config(config)


def batch_of(layout: Layout, **changes: float) -> EngineBatch:
    plain = {"samples": 512, "group_size": 8, "prompt_tokens": 500.0, "kv_tokens": 10**9}
    return EngineBatch(replicas=layout.dp, **{**plain, **changes})


def bound_of(
    shape: ModelShape, layout: Layout, lengths: LognormalLengths, batch: EngineBatch
) -> RolloutBound:
    def step_s(rows: int, context: float) -> float:
        return COST.decode_step(shape, layout, H100, batch=rows, context=context).seconds

    return rollout_bound(step_s, lengths, batch)


def seconds(
    shape: ModelShape, layout: Layout, lengths: LognormalLengths, batch: EngineBatch
) -> float:
    return COST.rollout(
        shape,
        layout,
        H100,
        samples=batch.samples,
        group_size=batch.group_size,
        prompt_tokens=batch.prompt_tokens,
        lengths=lengths,
        slots=batch.slots,
        kv_tokens=batch.kv_tokens,
    ).seconds


def test_a_batch_in_turns_by_hand():
    # Two replicas of 12 samples of 100 tokens each on 4 slots: 300 steps, and 1,200 rows. A step of
    # b rows takes 5 + b; of full slots 9, for a row 2.25.
    batch = EngineBatch(
        replicas=2, samples=24, group_size=1, prompt_tokens=0.0, slots=4, kv_tokens=10**9
    )
    bound = rollout_bound(lambda rows, _: 5.0 + rows, ConstantLengths(tokens=100), batch)
    assert bound.steps == 300
    assert bound.full_s == pytest.approx(1200 * 2.25)
    assert bound.lines == ((pytest.approx(5.0), pytest.approx(1200.0)),) * 2
    assert bound.least_s() == pytest.approx(LEAST * (300 * 5 + 1200))
    # A sample holds 100 / 2 tokens for 100 steps; with room for 150, that is 400 steps.
    assert bound.least_s(150) == pytest.approx(LEAST * (400 * 5 + 1200))


def test_steps_that_bend_up_or_down_are_above_the_lines():
    batch = EngineBatch(
        replicas=1, samples=64, group_size=1, prompt_tokens=0.0, slots=64, kv_tokens=10**9
    )
    for step in (lambda rows: max(10.0, rows), lambda rows: rows**0.5):
        bound = rollout_bound(
            lambda rows, _, step=step: step(rows), ConstantLengths(tokens=9), batch
        )
        for a, rows_s in bound.lines:
            slope = rows_s / (64 * 9)
            assert all(a + rows * slope <= step(rows) + 1e-9 for rows in range(1, 65))


@settings(max_examples=60, deadline=None)
@given(
    sigma=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.5]),
    mean=st.sampled_from([200.0, 1000.0, 4000.0]),
    slots=st.sampled_from([1, 4, 16, 64, 256]),
    samples=st.sampled_from([8, 64, 512, 4096]),
    sizes=st.sampled_from([(1, 1, 1), (1, 1, 8), (2, 1, 4), (4, 2, 2), (1, 4, 16), (1, 1, 64)]),
    room=st.sampled_from([1.05, 1.5, 4.0, 1e6]),
)
def test_no_rollout_takes_less(qwen, sigma, mean, slots, samples, sizes, room):
    tp, pp, dp = sizes
    if samples < dp:
        return
    layout = Layout(tp=tp, pp=pp, dp=dp)
    lengths = LognormalLengths(mean=mean, sigma=sigma, maximum=LONGEST)
    batch = batch_of(layout, slots=slots, samples=samples, kv_tokens=int(room * (LONGEST + 500)))
    bound = bound_of(qwen, layout, lengths, batch)
    assert bound.least_s(batch.kv_tokens) <= seconds(qwen, layout, lengths, batch)


def test_it_is_near_where_all_samples_start_at_once(qwen):
    layout = Layout(tp=4, pp=1, dp=16)
    lengths = LognormalLengths(mean=2500.0, sigma=0.6, maximum=LONGEST)
    batch = batch_of(layout, slots=256, samples=4096)
    took = seconds(qwen, layout, lengths, batch)
    assert 0.96 * took <= bound_of(qwen, layout, lengths, batch).least_s() <= took
