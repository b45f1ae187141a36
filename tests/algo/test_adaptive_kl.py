"""Penalties whose coefficient follows the measured divergence."""

from __future__ import annotations

import math

import pytest

from flowrl.algo.kl import adapted
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.specs import kl


def test_a_target_makes_the_coefficient_follow() -> None:
    spec = kl.k3(0.2, target=0.1, horizon=1000)
    # 50 % too much counts as 20 %: times 100 / 1000.
    assert adapted(0.2, 0.15, 100, spec) == pytest.approx(0.2 * 1.02)
    # It goes on from where it is, not from where it began.
    assert adapted(0.5, 0.09, 1000, spec) == pytest.approx(0.5 * 0.9)
    wide = kl.k3(0.2, target=0.1, horizon=1000, step_clip=1.0)
    assert adapted(0.2, 0.15, 100, wide) == pytest.approx(0.2 * 1.05)


def test_a_divergence_that_is_no_number_gives_no_coefficient() -> None:
    assert math.isnan(adapted(0.2, math.nan, 100, kl.k1(0.2, target=0.1)))


def test_an_adaptive_penalty_reads_back_from_its_text() -> None:
    spec = kl.k2(0.01, target=0.05, horizon=500, clamp_input=20.0)
    assert parse_attr(format_attr(spec)) == spec
    assert "target=0.05, horizon=500" in str(spec)
    assert str(kl.k2(0.01)) == 'kl(estimator="k2", coefficient=0.01)'
