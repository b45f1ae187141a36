"""Engines at full occupancy: rows, tokens and seconds of batches without a gap between them."""

from __future__ import annotations

import pytest

from flowrl.cost.lengths import ConstantLengths, EmpiricalLengths, Lengths, LognormalLengths
from flowrl.cost.occupancy import EngineBatch
from flowrl.cost.rollout_time import rollout_estimate
from flowrl.cost.source import Estimate
from flowrl.cost.steady import Full, full_engine

TAILED = LognormalLengths(mean=1000, sigma=0.9, maximum=4000)


def estimate(samples: int, *, slots: int = 64, kv_tokens: int = 10**7, lengths: Lengths = TAILED):
    """Steps of 10 ms, 0.1 ms a row and 1 µs a token of its context; 20 ms for a prompt."""
    return rollout_estimate(
        lambda rows, context: Estimate(seconds=0.01 + rows * (1e-4 + 1e-6 * context)),
        lambda rows, tokens: Estimate(seconds=0.02 * rows),
        replicas=2,
        samples=samples,
        group_size=4,
        prompt_tokens=100,
        lengths=lengths,
        slots=slots,
        kv_tokens=kv_tokens,
    )


def full(lengths: Lengths, *, replicas: int = 1, slots: int = 100, kv_tokens: int = 10**7) -> Full:
    return full_engine(
        lengths,
        EngineBatch(
            replicas=replicas,
            samples=400,
            group_size=4,
            prompt_tokens=60,
            slots=slots,
            kv_tokens=kv_tokens,
        ),
    )


def test_a_row_is_seen_half_way_and_long_ones_more_often():
    found = full(EmpiricalLengths(values=(100, 300)), replicas=2, slots=10)
    assert found.own == (100**2 + 300**2) / 2 / (2 * 200)
    assert (found.rows, found.steps) == (10, 200 * 200 / 10)
    assert (found.prompts, found.again) == (50, 0)  # groups of 4


def test_a_cache_holds_fewer_rows_than_there_are_slots():
    # A row has 15 tokens of its group's prompt, 100 of its own on average and 64 that are free.
    found = full(ConstantLengths(tokens=200), kv_tokens=179 * 25)
    assert found.rows == pytest.approx(25)
    # Rows that hold 15 + 100 each fill it always: every one is put back once.
    assert found.again == pytest.approx(400 * 115)


def test_a_cache_for_what_rows_hold_on_average_overflows_half_of_the_time():
    found = full(ConstantLengths(tokens=200), kv_tokens=115 * 100)
    assert found.again == pytest.approx(400 * 115 / 2)
    # Ages are even from 0 to 200: a deviation of 200 / sqrt(12) for one row, 577.4 for 100.
    one_more = full(ConstantLengths(tokens=200), kv_tokens=115 * 100 + 577)
    assert one_more.again == pytest.approx(400 * 115 * 0.1587, rel=0.01)
    assert full(ConstantLengths(tokens=200), kv_tokens=115 * 100 + 5774).again < 1e-9
    assert found.rows < one_more.rows < 100


def test_what_each_row_adds_to_a_step_is_a_batches_own():
    found = estimate(512, lengths=ConstantLengths(tokens=400))
    # 256 samples of 400 steps on 64 rows; 300 tokens of context; 64 prompts of an engine.
    step_s = 0.01 + 64 * (1e-4 + 1e-6 * 300)
    assert found.steady_s == pytest.approx(1600 * step_s + 64 * 0.02)
    assert found.dense_s == pytest.approx(1600 * (step_s - 0.01) + 64 * 0.02)


@pytest.mark.parametrize(("slots", "kv_tokens"), [(64, 10**7), (256, 10**7), (64, 40_000)])
def test_a_further_batch_of_a_long_queue_takes_what_one_without_a_gap_does(slots, kv_tokens):
    """Rows run one by one, whatever the closed form thinks of them."""
    many, more = (estimate(samples, slots=slots, kv_tokens=kv_tokens) for samples in (2048, 4096))
    assert more.seconds - many.seconds == pytest.approx(many.steady_s, rel=0.05)
    assert many.steady_s <= many.seconds


@pytest.mark.parametrize("slots", [1, 8, 64, 256])
@pytest.mark.parametrize("kv_tokens", [4_200, 20_000, 10**7])
def test_the_numbers_of_a_rollout_are_in_order(slots, kv_tokens):
    for samples in (8, 64, 512):
        found = estimate(samples, slots=slots, kv_tokens=kv_tokens)
        assert 0 <= found.dense_s <= found.steady_s <= found.seconds


def test_slots_that_a_batch_leaves_free_are_filled_by_others():
    """Four samples on an engine of 64 slots: steps of four rows alone, and of 64 with others."""
    few, many = (estimate(samples, lengths=ConstantLengths(tokens=400)) for samples in (8, 512))
    assert few.seconds == pytest.approx(400 * (0.01 + 4 * (1e-4 + 1e-6 * 300)) + 0.02)
    assert few.dense_s * 64 == pytest.approx(many.dense_s)
