"""Rollouts end with the last of several replicas: by hand, and beside samples that are drawn."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from flowrl.cost.lengths import ConstantLengths, EmpiricalLengths, Lengths, LognormalLengths
from flowrl.cost.occupancy import EngineBatch, run_rows, token_steps
from flowrl.cost.prompts import held_tokens, shared_by
from flowrl.cost.replicas import _NODES, _SHARES, OnReplicas, on_replicas

MEAN, MOST = 1000.0, 8000.0


def found(lengths: Lengths, **batch: float) -> OnReplicas:
    plain = {"replicas": 1, "group_size": 1, "prompt_tokens": 0.0, "kv_tokens": 10**9}
    return on_replicas(lengths, EngineBatch(**{**plain, **batch}))


def drawn(sigma: float) -> Lengths:
    return LognormalLengths(mean=MEAN, sigma=sigma, maximum=MOST)


def draw(lengths: Lengths, rng: np.random.Generator, num: int) -> list[float]:
    return [lengths.quantile(share) for share in rng.random(num).tolist()]


def handed_out(lengths: list[float], slots: int) -> float:
    """Steps until all have ended that as many slots take from one line."""
    ends = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def test_points_of_a_normal_number_have_its_moments():
    moments = [float(_SHARES @ _NODES**power) for power in range(14)]
    assert moments == pytest.approx(
        [1, 0, 1, 0, 3, 0, 15, 0, 105, 0, 945, 0, 10395, 0], rel=1e-9, abs=1e-6
    )


def test_a_slot_with_two_samples_by_hand():
    # Of 10 and 30, two samples stand for by 15 and 25, so the second starts at step 15 or 25, each
    # half of it. By step 35 it may have ended as may the first, or not: P is 0 before, then
    # sqrt(1/2) sqrt(1/2) up to 45, sqrt(1/2) up to 55, and 1.
    pieces = found(EmpiricalLengths(values=(10, 30)), samples=2, slots=1).pieces
    by_hand = 35 + 10 * (1 - 0.5) + 10 * (1 - math.sqrt(0.5))
    assert pieces.total_steps == pytest.approx(by_hand, abs=0.4)


def test_equal_samples_of_equal_replicas_end_together():
    pieces = found(ConstantLengths(tokens=50), replicas=16, samples=16 * 12, slots=4).pieces
    assert pieces.total_steps == 150


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    ("replicas", "slots", "samples"), [(1, 16, 128), (8, 8, 32), (32, 16, 32), (16, 64, 256)]
)
def test_slots_are_done_when_the_last_of_drawn_samples_is(replicas, slots, samples, sigma):
    """Of engines that take samples from one line as slots get free."""
    lengths, rng = drawn(sigma), np.random.default_rng(5)
    num = replicas * samples
    took = [handed_out(draw(lengths, rng, num), replicas * slots) for _ in range(8192 // num + 8)]
    planned = found(lengths, replicas=replicas, samples=num, slots=slots).pieces.total_steps
    error = float(np.std(took)) / math.sqrt(len(took))
    assert planned == pytest.approx(float(np.mean(took)), rel=0.03, abs=2 * error)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(("replicas", "samples"), [(1, 64), (8, 64), (32, 64), (32, 32)])
def test_short_caches_are_done_when_the_fullest_replica_is(replicas, samples, sigma):
    """Of engines that were given all of their samples at once, and hold a quarter of them."""
    lengths, rng = drawn(sigma), np.random.default_rng(6)
    room = max(1.2 * MOST, samples / 4 * lengths.mean_square / (2 * MEAN))

    def one() -> float:
        rows = draw(lengths, rng, samples)
        return max(run_rows(rows, slots=samples, kv_tokens=room, held_tokens=0.0).ends)

    took = [max(one() for _ in range(replicas)) for _ in range(8 + 64 // replicas)]
    planned = found(
        lengths, replicas=replicas, samples=replicas * samples, slots=samples, kv_tokens=int(room)
    ).pieces.total_steps
    error = float(np.std(took)) / math.sqrt(len(took))
    assert planned == pytest.approx(float(np.mean(took)), rel=0.06, abs=2 * error)


@pytest.mark.parametrize("kv_tokens", [9_000, 30_000, 10**9])
def test_more_replicas_end_later_and_no_step_is_saved(kv_tokens: int):
    lengths, before = drawn(0.6), 0.0
    for replicas in (1, 2, 8, 64):
        batch = EngineBatch(
            replicas=replicas,
            samples=96 * replicas,
            group_size=8,
            prompt_tokens=100.0,
            slots=16,
            kv_tokens=kv_tokens,
        )
        pieces = on_replicas(lengths, batch).pieces
        ends = [float(pieces.steps[run].sum()) for run in pieces.runs]
        assert ends == pytest.approx([pieces.total_steps] * len(ends))
        assert pieces.total_steps > before
        assert pieces.total_steps >= token_steps(lengths, batch) / kv_tokens
        before = pieces.total_steps


def test_whole_groups_are_given_to_replicas():
    """Ten groups on eight replicas: two of these have two, and work as long as if all had."""
    lengths = ConstantLengths(tokens=50)
    ten, sixteen = (
        found(lengths, replicas=8, samples=8 * groups, group_size=8, slots=8).pieces
        for groups in (10, 16)
    )
    assert ten.total_steps == sixteen.total_steps == 100


def test_a_replica_is_given_no_more_at_first_than_it_has_room_for():
    pieces = found(ConstantLengths(tokens=50), replicas=2, samples=48, group_size=16, slots=4)
    assert pieces.pieces.total_steps == 300


def test_groups_that_are_given_at_first_are_whole():
    assert shared_by(replicas=8, samples=16, group_size=8, at_first=16) == pytest.approx(8)
    assert shared_by(replicas=8, samples=2, group_size=8, at_first=16) == pytest.approx(2)


def test_later_ones_go_where_there_is_room():
    # Of two samples on two replicas: on one in half of the cases, so on 1.5 in the mean.
    half = shared_by(replicas=2, samples=8, group_size=2, at_first=4)
    assert half == pytest.approx(2 / (0.5 + 0.5 * 1.5))
    assert shared_by(replicas=1, samples=800, group_size=8, at_first=4) == pytest.approx(8)
    assert shared_by(replicas=10**6, samples=800, group_size=8, at_first=0) == pytest.approx(
        1, rel=1e-4
    )


def test_rows_hold_their_prompts_by_hand():
    # Eleven rows of a line of equal samples lie in 1 + 10 / 8 groups of eight.
    equal = ConstantLengths(tokens=100)
    assert held_tokens(equal, prompt_tokens=256, shared=8, rows=11) == pytest.approx(
        256 * (1 + 10 / 8) / 11
    )
    assert held_tokens(equal, prompt_tokens=256, shared=1, rows=11) == 256
    # The longer of two draws from 10 and 30 has 25: a prompt stays 1.25 times a mean sample.
    two = EmpiricalLengths(values=(10, 30))
    assert held_tokens(two, prompt_tokens=64, shared=2, rows=4) == pytest.approx(
        64 * (1.25 / 2 + 1 / 8)
    )


def test_prompts_are_computed_at_once_and_then_one_by_one():
    lengths = ConstantLengths(tokens=50)
    alone = found(lengths, samples=32, group_size=8, slots=8)
    assert (alone.prompts, alone.later) == (1, 3)
    apart = found(lengths, replicas=2, samples=64, group_size=8, slots=8)
    parts = 2 * (1 - 0.5**8)
    assert apart.prompts == 1
    assert apart.later == pytest.approx(24 * (0.5 + 0.5 * parts) / 8)
    at_once = found(lengths, samples=32, group_size=8, slots=32)
    assert (at_once.prompts, at_once.later) == (4, 0)
