"""Rollouts with their tail, against engines that are stepped token by token."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths, EmpiricalLengths, LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.occupancy import LONGEST, RESERVE_TOKENS, _enough, _occupancy, run_rows
from flowrl.cost.rollout_time import COMPUTED_AGAIN, rollout_estimate
from flowrl.cost.source import Estimate
from flowrl.errors import PlanError

H100 = Machine(spec=device_spec("H100-SXM-80GB"), node_size=8)


@pytest.fixture(scope="module")
def qwen(repository):
    config = json.loads((repository / "configs/models/qwen2.5-1.5b.json").read_text("utf-8"))
    return ModelShape.from_hf_config(config)


def _step(batch: float, context: float) -> float:
    return 3e-3 + 1e-5 * batch + 2e-9 * batch * context


def _decode(batch: int, context: float) -> Estimate:
    return Estimate(seconds=_step(batch, context))


def _prefill(rows: int, tokens: int) -> Estimate:
    return Estimate(seconds=1e-6 * rows * tokens)


def _stepped(lengths, slots, kv_tokens, prompt, held):
    """An engine, token by token: first come, first served; the newest is put back when full."""
    waiting = [[int(length), 0] for length in lengths]
    running: list[list[int]] = []
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            own = sum(has for _, has in running) + waiting[0][1]
            if running and own + (len(running) + 1) * (held + RESERVE_TOKENS) > kv_tokens:
                break
            running.append(waiting.pop(0))
        own = sum(has for _, has in running)
        if len(running) > 1 and own + len(running) * (held + 1) > kv_tokens:
            waiting.insert(0, running.pop())
            continue
        seconds += _step(len(running), prompt + own / len(running))
        for row in running:
            row[1] += 1
        running = [row for row in running if row[1] < row[0]]
    return seconds


def _rollout(lengths, samples, slots, kv_tokens=10**9, prompt=100, group=8, replicas=1):
    return rollout_estimate(
        _decode,
        _prefill,
        replicas=replicas,
        samples=samples,
        group_size=group,
        prompt_tokens=prompt,
        lengths=lengths,
        slots=slots,
        kv_tokens=kv_tokens,
    )


def test_rows_that_start_together_by_hand():
    # Of two draws from 10 and 30 the longer is 25 on average, which leaves 15 for the shorter.
    found = _rollout(EmpiricalLengths(values=(10, 30)), samples=2, slots=8, group=2)
    first = 15 * _step(2, 100 + 7.5)
    second = 10 * _step(1, 100 + 20)
    assert dict(found.parts)["decode"] == pytest.approx(first + second)
    assert dict(found.parts)["prefill"] == pytest.approx(1e-6 * 100)


def test_waiting_rows_take_the_place_of_those_that_end():
    found = run_rows([4.0, 2.0, 3.0], slots=2, kv_tokens=1e9, held_tokens=0)
    # The third starts when the second ends, and is alone for one step.
    assert (found.steps, found.rows, found.own) == ([2, 2, 1], [2, 2, 1], [1, 2, 2.5])
    assert found.again == 0
    assert found.ends == [4.0, 2.0, 5.0]


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_a_cache_without_a_limit_is_one_that_is_never_filled(slots):
    lengths = [*np.random.default_rng(7).lognormal(5, 1, 30).tolist(), 0.0, 9.0, 9.0]
    never_filled, unlimited = (
        run_rows(lengths, slots=slots, kv_tokens=tokens, held_tokens=3.5)
        for tokens in (1e300, math.inf)
    )
    assert unlimited == never_filled


def test_a_full_cache_puts_the_newest_back():
    found = run_rows([100.0, 100.0], slots=2, kv_tokens=140, held_tokens=5)
    # 65 steps fill 2 (65 + 5) = 140; then one goes on alone, and the other comes again.
    assert (found.steps, found.rows, found.own) == ([65, 35, 35], [2, 1, 1], [32.5, 82.5, 82.5])
    assert found.again == 70
    assert found.ends == [100.0, 135.0]


@pytest.mark.parametrize(
    ("samples", "slots", "kv_tokens"),
    [
        (128, 128, 10**9),  # all at once
        (200, 200, 60_000),  # all at once, until the cache is full
        (400, 64, 10**9),  # the tail behind a queue
        (400, 64, 15_000),  # a queue, and a small cache
        (96, 16, 10**9),
    ],
)
@pytest.mark.parametrize("sigma", [0.4, 1.0])
def test_rollouts_take_as_long_as_engines_that_are_stepped(samples, slots, kv_tokens, sigma):
    lengths = LognormalLengths(mean=300, sigma=sigma, maximum=1500)
    rng = np.random.default_rng(1)
    times = []
    for _ in range(24):
        drawn = np.minimum(np.exp(lengths.mu + sigma * rng.standard_normal(samples)), 1500)
        drawn = np.maximum(1, np.rint(drawn))
        times.append(_stepped(drawn, slots, kv_tokens, 100, 100 / 8))
    found = dict(_rollout(lengths, samples, slots, kv_tokens).parts)["decode"]
    assert found == pytest.approx(np.mean(times), rel=0.07)


@given(
    st.integers(1, 600),
    st.integers(1, 64),
    st.floats(0.3, 1.2),
    st.floats(0, 40),
)
@settings(max_examples=40, deadline=None)
def test_caches_that_are_large_enough_are_all_alike(samples, slots, sigma, held):
    asked = (LognormalLengths(mean=300, sigma=sigma, maximum=1500), samples, slots, held, 1500.0)
    free, enough = _occupancy(*asked, math.inf), _enough(*asked)
    # Below this, rows stand for fewer samples than without a limit.
    enough = max(enough, free.samples_a_row * LONGEST * (held + 1500.0))
    for cache in (enough, 1.3 * enough):
        found = _occupancy(*asked, cache)
        assert np.array_equal(found.steps, free.steps)
        assert np.array_equal(found.own, free.own)
    assert free.again == 0


def test_rows_that_stand_for_several_change_little(monkeypatch):
    lengths = LognormalLengths(mean=300, sigma=1.0, maximum=1500)
    found = {}
    for most in (256, 4000):
        monkeypatch.setattr("flowrl.cost.occupancy.MOST_SAMPLES", most)
        monkeypatch.setattr("flowrl.cost.occupancy.MOST_WAITING", most)
        _occupancy.cache_clear()
        _enough.cache_clear()
        for slots in (256, 2000):
            found[most, slots] = _rollout(lengths, samples=2000, slots=slots).seconds
    _occupancy.cache_clear()
    _enough.cache_clear()
    for slots in (256, 2000):
        assert found[256, slots] == pytest.approx(found[4000, slots], rel=0.04)


@pytest.mark.parametrize(
    ("samples", "slots", "longest"),
    [
        (1024, 128, 3),  # a quarter of the rows, stretched, in place of rows for 4 samples
        (1024, 64, 1.05),
        (2048, 64, 3),  # and the queue is stretched
        (2048, 16, 1.3),
    ],
)
def test_small_caches_hold_no_more_where_rows_stand_for_several(
    samples, slots, longest, monkeypatch
):
    lengths = LognormalLengths(mean=300, sigma=1.0, maximum=1500)
    asked = (lengths, samples, slots, 20.0, 1500.0, longest * 1520.0)
    found = _occupancy(*asked).total_steps
    for name in ("MOST_SAMPLES", "MOST_WAITING"):
        monkeypatch.setattr(f"flowrl.cost.occupancy.{name}", 10**6)
    _occupancy.cache_clear()
    every = _occupancy(*asked)
    _occupancy.cache_clear()
    assert every.samples_a_row == 1
    assert found == pytest.approx(every.total_steps, rel=0.04)


def test_long_queues_of_few_slots_take_as_long_as_all_of_their_tokens():
    lengths = LognormalLengths(mean=300, sigma=0.8, maximum=1500)
    found = dict(_rollout(lengths, samples=6000, slots=8).parts)["decode"]
    rng = np.random.default_rng(1)
    drawn = np.minimum(np.exp(lengths.mu + 0.8 * rng.standard_normal(6000)), 1500)
    run = run_rows(drawn.tolist(), slots=8, kv_tokens=1e9, held_tokens=12.5)
    pieces = zip(run.steps, run.rows, run.own, strict=True)
    assert found == pytest.approx(sum(s * _step(b, 100 + own) for s, b, own in pieces), rel=0.03)
    huge = _rollout(lengths, samples=10**8, slots=8).seconds
    assert huge == pytest.approx(found * 10**8 / 6000, rel=0.02)


def test_replicas_share_samples_and_wait_for_the_longest_of_all():
    lengths = LognormalLengths(mean=300, sigma=1.0, maximum=100_000)
    alone = _rollout(lengths, samples=16, slots=16)
    shared = _rollout(lengths, samples=64, slots=16, replicas=4)
    assert shared.seconds > alone.seconds
    equal = ConstantLengths(tokens=300)
    assert _rollout(equal, samples=64, slots=16, replicas=4).seconds == pytest.approx(
        _rollout(equal, samples=16, slots=16).seconds
    )


def test_a_prompt_is_computed_once_a_group():
    lengths = ConstantLengths(tokens=10)
    alone = dict(_rollout(lengths, samples=64, slots=64, group=1).parts)["prefill"]
    shared = dict(_rollout(lengths, samples=64, slots=64, group=8).parts)["prefill"]
    assert alone == pytest.approx(8 * shared)


def test_what_rows_that_were_put_back_compute_again_is_told_apart_from_their_prompts():
    lengths = LognormalLengths(mean=300, sigma=1.0, maximum=3000)
    ample, short = (
        _rollout(lengths, samples=256, slots=64, kv_tokens=room) for room in (10**7, 6000)
    )
    parts, more = dict(ample.parts), dict(short.parts)
    assert COMPUTED_AGAIN not in parts
    assert more["prefill"] == parts["prefill"]
    assert more[COMPUTED_AGAIN] > 0
    spent = more["decode"] + more["prefill"] + more[COMPUTED_AGAIN]
    assert short.seconds == pytest.approx(spent)


def test_an_engine_that_cannot_hold_the_longest_sample_says_so():
    with pytest.raises(PlanError, match="cannot hold the longest sample"):
        _rollout(ConstantLengths(tokens=1000), samples=4, slots=4, kv_tokens=1050)


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 300),
    slots=st.integers(1, 128),
    sigma=st.floats(0.2, 1.5),
)
def test_more_slots_more_cache_and_shorter_samples_are_never_slower(samples, slots, sigma):
    """Up to a percent: lengths stand in for drawn ones."""
    lengths = LognormalLengths(mean=200, sigma=sigma, maximum=1600)
    base = _rollout(lengths, samples, slots, kv_tokens=20_000).seconds
    assert _rollout(lengths, samples, slots, kv_tokens=10**8).seconds <= base * 1.03
    longer = LognormalLengths(mean=260, sigma=sigma, maximum=1600)
    assert _rollout(longer, samples, slots, kv_tokens=20_000).seconds >= base * 0.97
    assert _rollout(lengths, samples, 2 * slots, kv_tokens=10**8).seconds <= base * 1.05


def test_a_rollout_is_at_least_its_longest_sample_alone(qwen):
    cost = AnalyticCost()
    alone = cost.decode_step(qwen, Layout(), H100, batch=1, context=500).seconds * 1000
    found = cost.rollout(
        qwen,
        Layout(dp=8),
        H100,
        samples=512,
        group_size=16,
        prompt_tokens=0,
        lengths=ConstantLengths(tokens=1000),
        slots=64,
        kv_tokens=10**6,
    )
    assert found.seconds > alone
    assert found.source == "analytic"
    assert {name for name, _ in found.parts} == {"decode", "tail of it", "prefill"}


@pytest.mark.parametrize("kv_tokens", [3_000, 10_000, 30_000, 300_000, 10_000_000])
@pytest.mark.parametrize("samples", [1, 30, 4_000])
def test_what_rows_add_to_a_batch_is_a_part_of_what_it_takes(kv_tokens: int, samples: int):
    """Also of a cache that holds few samples, where a full engine is no faster than a batch."""
    found = rollout_estimate(
        decode=_decode,
        prefill=_prefill,
        lengths=LognormalLengths(mean=600.0, sigma=0.8, maximum=2_000.0),
        replicas=1,
        samples=samples,
        group_size=1,
        prompt_tokens=200.0,
        slots=64,
        kv_tokens=kv_tokens,
    )
    assert found.steady_s is not None
    assert 0 < found.dense_s <= found.steady_s <= found.seconds
