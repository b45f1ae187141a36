"""Rollouts whose caches hold few of the longest samples: by hand, and beside drawn samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowrl.cost.lengths import EmpiricalLengths, LognormalLengths, expected_maximum
from flowrl.cost.occupancy import EngineBatch, run_rows
from flowrl.cost.replicas import on_replicas
from flowrl.cost.short_caches import is_short
from flowrl.cost.uneven import uneven, work_variation

MEAN, MOST = 1000.0, 8192.0
TAILED = LognormalLengths(mean=MEAN, sigma=1.2, maximum=MOST)


def batch(*, replicas: int, samples: int, kv_tokens: int) -> EngineBatch:
    return EngineBatch(
        replicas=replicas,
        samples=replicas * samples,
        group_size=1,
        prompt_tokens=0.0,
        slots=samples,
        kv_tokens=kv_tokens,
    )


def test_work_of_two_lengths_by_hand():
    # 10 and 30 tokens beside a prompt of 5 hold 10 x 10 and 30 x 20 token steps: 350 and 250 off.
    lengths = EmpiricalLengths(values=(10, 30))
    assert work_variation(lengths, 5.0) == pytest.approx(250 / 350)


@pytest.mark.parametrize(("samples", "varied"), [(8, 8), (32, 32), (128, 16)])
def test_replicas_with_unequal_work_have_all_samples_between_them(samples: int, varied: int):
    kinds = uneven(TAILED, held=100.0, samples=samples, varied=varied)
    assert sum(kind.replicas for kind in kinds) == pytest.approx(1)
    for age in (300.0, MEAN, 3000.0, 8000.0):
        shares = [float(np.exp(kind.log_ended(np.array([age]))[0])) for kind in kinds]
        assert shares == sorted(shares, reverse=True)  # with more work fewer have ended
        ended = sum(kind.replicas * share for kind, share in zip(kinds, shares, strict=True))
        z = (math.log(age) - TAILED.mu) / TAILED.sigma
        assert ended == pytest.approx(0.5 * math.erfc(-z / math.sqrt(2)), abs=0.01)


def test_a_cache_is_short_for_few_samples_that_differ_much():
    asked = {"samples": 64, "kv_tokens": 2 * MOST, "needed": MOST}
    assert is_short(TAILED, 0.0, **asked)
    assert not is_short(TAILED, 0.0, **{**asked, "samples": 1024})
    assert not is_short(TAILED, 0.0, **{**asked, "kv_tokens": 8 * MOST})
    alike = LognormalLengths(mean=MEAN, sigma=0.3, maximum=MOST)
    assert not is_short(alike, 0.0, **asked)


@pytest.mark.parametrize("mean", [MEAN, 2300.0])
@pytest.mark.parametrize("room", [1.2, 2.0])
@pytest.mark.parametrize(("replicas", "samples"), [(1, 16), (8, 16), (1, 64), (8, 64), (2, 128)])
def test_long_samples_that_do_not_fit_together_are_drawn_one_after_the_other(
    replicas: int, samples: int, room: float, mean: float
):
    """Beside engines that are given all of their samples at once."""
    lengths = LognormalLengths(mean=mean, sigma=1.2, maximum=MOST)
    kv_tokens = int(room * MOST)
    rng = np.random.default_rng(6)

    def one() -> float:
        rows = [lengths.quantile(share) for share in rng.random(samples).tolist()]
        return max(run_rows(rows, slots=samples, kv_tokens=kv_tokens, held_tokens=0.0).ends)

    took = [max(one() for _ in range(replicas)) for _ in range(24 + 96 // replicas)]
    error = float(np.std(took)) / math.sqrt(len(took))
    asked = batch(replicas=replicas, samples=samples, kv_tokens=kv_tokens)
    planned = on_replicas(lengths, asked).pieces.total_steps
    assert planned == pytest.approx(float(np.mean(took)), rel=0.08, abs=2 * error)
    assert planned >= expected_maximum(lengths, samples * replicas)


def test_all_alternatives_end_with_the_last_replica():
    pieces = on_replicas(TAILED, batch(replicas=8, samples=32, kv_tokens=10_000)).pieces
    ends = [float(pieces.steps[run].sum()) for run in pieces.runs]
    assert ends == pytest.approx([pieces.total_steps] * len(ends))
    assert len(pieces.starts) == len(ends)
    assert pieces.again > 0
    for starts in pieces.starts:
        assert len(starts) == 32
        assert 0 <= starts.min() <= starts.max() < pieces.total_steps


@pytest.mark.parametrize("samples", [512, 700])
def test_rows_that_stand_for_several_wait_for_a_short_cache_as_single_ones_do(samples: int):
    lengths = LognormalLengths(mean=MEAN, sigma=0.8, maximum=MOST)
    rng = np.random.default_rng(3)
    rows = [lengths.quantile(share) for share in rng.random(4 * samples).tolist()]
    room = int(1.2 * MOST)
    took = [
        max(run_rows(part, slots=64, kv_tokens=room, held_tokens=0.0).ends)
        for part in np.split(np.array(rows), 4)
    ]
    one = EngineBatch(
        replicas=1, samples=samples, group_size=1, prompt_tokens=0.0, slots=64, kv_tokens=room
    )
    planned = on_replicas(lengths, one).pieces.total_steps
    assert planned == pytest.approx(float(np.mean(took)), rel=0.06)
