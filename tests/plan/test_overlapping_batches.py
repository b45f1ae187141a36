"""Batches that are drawn at once wait for each other's slots."""

from __future__ import annotations

import heapq
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from flowrl.cost.layout import Layout
from flowrl.cost.source import Estimate
from flowrl.plan.search_options import _dense_s, _waits_s
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork
from tests.plan.many_cases import request

MEAN, SAMPLES = 1000.0, 256


def task(samples: int) -> TaskWork:
    """What is read of a rollout's task."""
    return cast(TaskWork, SimpleNamespace(samples=samples))


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_of_batches_that_bring_no_other_one_on_all_of_a_period_is_their_own(staleness: int):
    estimate = Estimate(seconds=20.0, steady_s=20.0, dense_s=20.0)
    whole = Candidate(layout=Layout(), estimate=estimate, resident=0, peak=0, slots=64)
    assert _dense_s(task(64), whole, request(max_staleness=staleness)) == 20.0
    # It is where a batch that brings others on a little comes to.
    nearly = replace(whole, estimate=replace(estimate, seconds=20.1, dense_s=19.9))
    near = _dense_s(task(64), nearly, request(max_staleness=staleness))
    assert near == pytest.approx(20.0, abs=0.11)


def way(slots: int, period: float) -> Candidate:
    estimate = Estimate(seconds=4 * period, steady_s=period)
    return Candidate(layout=Layout(), estimate=estimate, resident=0, peak=0, slots=slots)


def test_waits_by_hand():
    # A batch of 128 comes every 25 s, of which 128 slots do one in 20: 102.4 rows run on average,
    # 64 more when a batch begins, so 38.4 of its own wait, for 38.4 / 128 of 20 s.
    assert _waits_s(way(128, 20.0), 128, 25.0) == pytest.approx(6.0)
    assert _waits_s(way(160, 20.0), 128, 25.0) == pytest.approx((128 - 64 - 32) / 128 * 20)
    assert _waits_s(way(256, 10.0), 128, 25.0) == 0  # three batches have slots at once
    assert _waits_s(way(64, 40.0), 128, 50.0) == 0  # its own samples wait in any case


@pytest.mark.parametrize("slots", [256, 288, 320])
@pytest.mark.parametrize("busy", [0.8, 0.9])
def test_waits_are_those_of_samples_that_are_drawn(slots: int, busy: float):
    """Steps until the last of a batch begins, of batches that come so that slots are busy so much
    of the time. Few rows end just after a batch has begun, so the wait is longer than planned."""
    rng = np.random.default_rng(0)
    period = SAMPLES * MEAN / slots
    apart = period / busy
    free = [0.0] * slots
    waits = []
    for batch in range(400):
        begun = batch * apart
        for length in rng.lognormal(np.log(MEAN) - 0.32, 0.8, SAMPLES).tolist():
            last = max(begun, free[0])
            heapq.heapreplace(free, last + length)
        waits.append(last - begun)
    planned, took = _waits_s(way(slots, period), SAMPLES, apart), float(np.mean(waits[40:]))
    assert 0 < planned <= took <= planned + 0.25 * period
