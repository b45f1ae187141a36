"""Distributions of lengths, against drawn numbers and sums by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.cost.lengths import (
    ConstantLengths,
    EmpiricalLengths,
    LognormalLengths,
    expected_maximum,
    lognormal_before_cut,
)
from flowrl.cost.spread import spread
from flowrl.errors import ConfigError


def test_lognormal_lengths_have_the_moments_of_drawn_ones():
    lengths = LognormalLengths(mean=1400, sigma=1.0, maximum=4096)
    rng = np.random.default_rng(0)
    drawn = np.minimum(np.exp(lengths.mu + rng.standard_normal((200_000, 4))), 4096)
    assert drawn.mean() == pytest.approx(1400, rel=0.005)
    assert (drawn**2).mean() == pytest.approx(lengths.mean_square, rel=0.01)
    assert np.median(drawn) == pytest.approx(lengths.quantile(0.5), rel=0.01)
    assert drawn.max(axis=1).mean() == pytest.approx(expected_maximum(lengths, 4), rel=0.01)


def test_empirical_lengths_by_hand():
    lengths = EmpiricalLengths(values=(30, 10, 20, 40))
    assert lengths.mean == 25
    assert lengths.mean_square == (900 + 100 + 400 + 1600) / 4
    assert [lengths.quantile(share) for share in (0.0, 0.25, 0.26, 1.0)] == [10, 10, 20, 40]
    # The longest of two: 40 in 7 of 16 pairs, 30 in 5, 20 in 3, 10 in 1.
    assert expected_maximum(lengths, 2) == pytest.approx((7 * 40 + 5 * 30 + 3 * 20 + 10) / 16)


def test_constant_lengths_have_one_quantile():
    lengths = ConstantLengths(tokens=7)
    assert spread(lengths, 3).tolist() == [7, 7, 7]
    assert expected_maximum(lengths, 100) == 7


def test_a_mean_before_the_cut_is_above_the_one_after():
    found = lognormal_before_cut(mean=3000, sigma=1.0, maximum=4096)
    assert isinstance(found, LognormalLengths)
    rng = np.random.default_rng(0)
    drawn = np.minimum(np.exp(np.log(3000) - 0.5 + rng.standard_normal(400_000)), 4096)
    assert found.mean == pytest.approx(drawn.mean(), rel=0.005)
    assert lognormal_before_cut(mean=9000, sigma=0, maximum=4096) == ConstantLengths(tokens=4096)


def test_a_mean_at_the_cut_is_refused():
    with pytest.raises(ConfigError, match="below the cut"):
        LognormalLengths(mean=4096, sigma=1.0, maximum=4096)
    with pytest.raises(ConfigError, match="lengths that cannot be used"):
        EmpiricalLengths(values=())
    with pytest.raises(ConfigError, match="above 0"):
        ConstantLengths(tokens=0)


@settings(max_examples=60, deadline=None)
@given(
    mean=st.floats(2, 20_000),
    sigma=st.floats(0.1, 2.0),
    room=st.floats(1.05, 40),
    num=st.integers(1, 300),
)
def test_lengths_that_stand_for_others_keep_mean_and_cut(mean, sigma, room, num):
    lengths = LognormalLengths(mean=mean, sigma=sigma, maximum=mean * room)
    values = spread(lengths, num)
    assert len(values) == num
    assert np.all(np.diff(values) >= 0)
    assert values[-1] <= lengths.maximum
    assert values[-1] == expected_maximum(lengths, num)
    # One factor sets the mean, unless others come to the longest with it.
    if num > 1 and values[-2] < values[-1]:
        assert values.mean() == pytest.approx(mean)
    assert expected_maximum(lengths, num) <= expected_maximum(lengths, num + 1) * (1 + 1e-9)
    assert mean * (1 - 0.01) <= expected_maximum(lengths, max(2, num)) <= lengths.maximum
