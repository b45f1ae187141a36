"""Reward shaping and filters, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.algo.filters import zero_variance
from flowrl.algo.maps import cosine_length, repetition, soft_overlong, stop_properly, words
from flowrl.algo.resolve import resolve_filter
from flowrl.specs.filters import Difficulty, ZeroVariance
from flowrl.specs.maps import CosineLength, Repetition, SoftOverlong, StopProperly


def test_the_overlong_penalty_grows_over_its_buffer_and_stops_at_its_factor() -> None:
    lengths = [0, 80, 85, 100, 110]
    spec = SoftOverlong(max_tokens=100, buffer=20, factor=2.0)
    np.testing.assert_allclose(soft_overlong(lengths, spec), [0, 0, -0.5, -2, -2])
    assert not np.signbit(soft_overlong(lengths, spec)[0])
    endless = SoftOverlong(max_tokens=100, buffer=20, factor=2.0, cap=False)
    np.testing.assert_allclose(soft_overlong(lengths, endless), [0, 0, -0.5, -2, -3])


def test_without_a_buffer_the_penalty_is_hard() -> None:
    spec = SoftOverlong(max_tokens=100, buffer=0)
    assert soft_overlong([99, 100, 101], spec).tolist() == [0, 0, -1]
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong([1], SoftOverlong(max_tokens=100, buffer=-1))


def test_truncated_responses_lose_a_part_of_their_score_or_all_of_it() -> None:
    scores, cut = [1.0, -1.0, 0.5], [True, True, False]
    assert stop_properly(scores, cut, StopProperly(coefficient=0.5)).tolist() == [0.5, -0.5, 0.5]
    assert stop_properly(scores, cut, StopProperly(coefficient=-0.5)).tolist() == [-0.5, -0.5, 0.5]


def test_the_cosine_score_prefers_short_right_and_long_wrong_responses() -> None:
    spec = CosineLength(max_tokens=10)
    lengths, correct = [0, 5, 10, 20, 0, 5, 10, 20], [True] * 4 + [False] * 4
    want = [1, 0.75, 0.5, 0.5, -1, -0.75, -0.5, -0.5]
    np.testing.assert_allclose(cosine_length(lengths, correct, spec), want, atol=1e-12)


def test_repetition_counts_ngrams_that_occurred_before() -> None:
    # 1 2 1 2 1: bigrams 12 21 12 21, two of four are new.
    got = repetition([[1, 2, 1, 2, 1], [1, 2, 3], [1], []], Repetition(ngram=2, max_penalty=-2.0))
    assert got.tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert not np.signbit(got).any(where=got == 0)
    assert words(" The cat\n THE cat") == ["the", "cat", "the", "cat"]
    assert repetition([words("a A a")], Repetition(ngram=1)).tolist() == [pytest.approx(-2 / 3)]


def test_difficulty_keeps_groups_strictly_between_its_bounds() -> None:
    scores = [1, 1, 0, 0, 1, 0, 0.1, 0.1, 0.1]
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 3]
    kept = resolve_filter(Difficulty())(scores, groups)
    assert kept.tolist() == [False] * 4 + [True] * 5
    # The mean of three times 0.1 is 0.1, though their sum over 3 is not.
    kept = resolve_filter(Difficulty(low=0.1, high=0.4))(scores, groups)
    assert not kept.any()


def test_only_samples_with_a_loss_are_compared() -> None:
    scores, groups = [1, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 2]
    live = [True, False, True, True, True, False]
    got = zero_variance(scores, groups, ZeroVariance(), live)
    assert got.tolist() == [False] * 3 + [True] * 2 + [False]
    got = zero_variance(scores, groups, ZeroVariance(singleton="keep"), live)
    assert got.tolist() == [False] * 3 + [True] * 3
    assert not zero_variance(scores, groups, ZeroVariance(), [False] * 6).any()


def test_the_deviation_may_be_compared_in_place_of_the_spread() -> None:
    # Spread 2e-6, deviation 1e-6 of four.
    scores = [2e-6, 0, 0, 0]
    spread = ZeroVariance(tolerance=1.5e-6)
    assert zero_variance(scores, [0] * 4, spread).all()
    deviation = ZeroVariance(tolerance=1.5e-6, measure="std")
    assert not zero_variance(scores, [0] * 4, deviation).any()
    assert not zero_variance([0.1] * 3, [0] * 3, ZeroVariance(tolerance=0, measure="std")).any()
