"""Advantages of a sample: the field's variants, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algo.advantages import AdvantageBatch
from flowrl.algo.advantages.group import (
    Partition,
    centre_scores,
    gpg,
    group_relative,
    leave_one_out,
    length_weighted,
    max_rl,
    normalise_then_sum,
    pass_at_k,
    weighted_sum,
)
from flowrl.algo.resolve import resolve_advantage
from flowrl.errors import RewardError
from flowrl.specs import AdvantageSpec, GroupRelative
from flowrl.specs.advantage import (
    GPG,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    NormaliseThenSum,
    PassAtK,
)


def computed(spec: AdvantageSpec, scores: Any, groups: Any) -> Any:
    """Returns the advantages of a batch that has scores and groups alone."""
    batch = AdvantageBatch(scores=np.asarray(scores), groups=np.asarray(groups))
    return resolve_advantage(spec)(batch).advantages


def scores_and_groups() -> st.SearchStrategy[list[tuple[float, int]]]:
    scores = st.sampled_from([0.0, 1.0, 0.1, 0.7, -0.3, 2.5])
    return st.lists(st.tuples(scores, st.integers(0, 3)), min_size=1, max_size=14)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # 4 - mean(1, 1), 1 - mean(4, 1), 1 - mean(4, 1)
    got = leave_one_out([4, 1, 1], [0, 0, 0], LeaveOneOut())
    np.testing.assert_allclose(got, [3, -1.5, -1.5])


def test_leave_one_out_may_be_standardised_over_the_batch() -> None:
    # 1, -1, 2, -2: mean 0, squares 10 over 3
    got = leave_one_out([1, 0, 2, 0], [0, 0, 1, 1], LeaveOneOut(batch_std=True, eps=0.0))
    np.testing.assert_allclose(got, np.array([1, -1, 2, -2]) / (10 / 3) ** 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        (leave_one_out, LeaveOneOut),
        (pass_at_k, PassAtK),
        (gpg, GPG),
        (max_rl, MaxRL),
    ],
)
def test_a_group_of_one_gets_zero_or_its_score(function, spec) -> None:  # type: ignore[no-untyped-def]
    # Four samples with a score that is not 0, so that GPG's factor is 1.
    scores, groups = [3, 1, 1, 1], [0, 1, 1, 1]
    assert function(scores, groups, spec())[0] == 0
    assert function(scores, groups, spec(singleton="raw"))[0] == 3


@pytest.mark.parametrize(
    "spec",
    [
        GroupRelative(mean="group_others", std="group_others", eps=0.0),
        GroupRelative(mean="batch", std="batch", eps=0.0),
        GroupRelative(mean="batch_others", std="none"),
        GroupRelative(std="group", std_about="centre", eps=0.0),
        LeaveOneOut(batch_std=True, eps=0.0),
        PassAtK(std="group", eps=0.0),
        GPG(),
        MaxRL(eps=0.0),
    ],
)
def test_equal_scores_give_exactly_zero_under_every_variant(spec) -> None:  # type: ignore[no-untyped-def]
    # 0.1 has no exact binary form: the mean of three differs from it in the last bit.
    assert computed(spec, [0.1] * 3, [0] * 3).tolist() == [0.0, 0.0, 0.0]


def test_the_mean_and_deviation_of_the_others() -> None:
    # Others of 4: 1, 3 -> mean 2, std sqrt(2). Of 1: 4, 3 -> 3.5, sqrt(.5). Of 3: 2.5, sqrt(4.5).
    spec = GroupRelative(mean="group_others", std="group_others", eps=0.0)
    got = group_relative([4, 1, 3], [0, 0, 0], spec)
    np.testing.assert_allclose(got, [2 / 2**0.5, -2.5 / 0.5**0.5, 0.5 / 4.5**0.5], rtol=1e-6)


def test_where_the_others_are_equal_the_score_is_left_as_centred_or_divided_by_eps() -> None:
    kept = GroupRelative(mean="group_others", std="group_others", eps=1e-3)
    assert group_relative([2.0, 0.1, 0.1, 0.1], [0] * 4, kept)[0] == pytest.approx(1.9)
    divided = GroupRelative(mean="group_others", std="group_others", eps=0.5, zero_std="divide")
    assert group_relative([2.0, 0.1, 0.1, 0.1], [0] * 4, divided)[0] == pytest.approx(3.8)


def test_two_samples_have_one_other_each_and_no_deviation() -> None:
    spec = GroupRelative(mean="group_others", std="group_others")
    assert group_relative([1.0, 0.0], [0, 0], spec).tolist() == [1.0, -1.0]


@given(scores_and_groups(), st.integers(0, 1))
def test_statistics_of_others_equal_those_computed_one_by_one(
    rows: list[tuple[float, int]], ddof: int
) -> None:
    scores = np.array([score for score, _ in rows])
    groups = np.array([group for _, group in rows])
    part = Partition.of(groups)
    variance = part.variance_of_others(scores, ddof)
    centred = centre_scores(scores, groups, "group_others")
    for i in range(len(rows)):
        others = np.delete(scores, i)[np.delete(groups, i) == groups[i]]
        if len(others) <= ddof or len(set(others.tolist())) == 1:
            assert variance[i] == 0.0
        else:
            np.testing.assert_allclose(variance[i], np.var(others, ddof=ddof), atol=1e-12)
        expected = scores[i] - others.mean() if len(others) else 0.0
        np.testing.assert_allclose(centred[i], expected, atol=1e-12)


@given(scores_and_groups())
def test_centred_scores_of_every_group_sum_to_zero(rows: list[tuple[float, int]]) -> None:
    scores = [score for score, _ in rows]
    groups = np.array([group for _, group in rows])
    for spec in (GroupRelative(), GroupRelative(std="none"), LeaveOneOut(), MaxRL(eps=10.0)):
        got = computed(spec, scores, groups)
        for group in set(groups.tolist()):
            assert abs(float(got[groups == group].sum())) < 1e-4


def test_the_batch_mean_and_the_batch_without_the_sample() -> None:
    batch = GroupRelative(mean="batch", std="none")
    np.testing.assert_allclose(group_relative([0, 1, 5], [0, 0, 1], batch), [-2, -1, 3])
    others = GroupRelative(mean="batch_others", std="none")
    np.testing.assert_allclose(group_relative([0, 1, 5], [0, 0, 1], others), [-3, -1.5, 4.5])
    raw = GroupRelative(mean="none", std="none")
    np.testing.assert_allclose(group_relative([0, 1, 5], [0, 0, 1], raw), [0, 1, 5])


def test_deviations_may_be_measured_from_what_was_subtracted() -> None:
    # Group-centred: -1, 1, -3, 3; about the batch's mean 5 they would be -5, -3, 1, 7.
    about_centre = GroupRelative(std="batch", std_about="centre", eps=0.0)
    got = group_relative([0, 2, 6, 12], [0, 0, 1, 1], about_centre)
    np.testing.assert_allclose(got, np.array([-1, 1, -3, 3]) / (20 / 3) ** 0.5, rtol=1e-6)
    about_mean = GroupRelative(std="batch", eps=0.0)
    got = group_relative([0, 2, 6, 12], [0, 0, 1, 1], about_mean)
    np.testing.assert_allclose(got, np.array([-1, 1, -3, 3]) / (84 / 3) ** 0.5, rtol=1e-6)


def test_a_floor_bounds_the_variance_before_the_root() -> None:
    spec = GroupRelative(variance_floor=4.0, eps=0.0)
    np.testing.assert_allclose(group_relative([0, 1], [0, 0], spec), [-0.25, 0.25])


def test_the_best_sample_gets_its_lead_and_ties_get_nothing() -> None:
    got = pass_at_k([0, 3, 1, 2, 2], [0, 0, 0, 1, 1], PassAtK())
    assert got.tolist() == [0, 2, 0, 0, 0]
    # std of 0, 3, 1: mean 4/3, squares 42/9 over 2
    got = pass_at_k([0, 3, 1], [0, 0, 0], PassAtK(std="group", eps=0.0))
    np.testing.assert_allclose(got, [0, 2 / (42 / 18) ** 0.5, 0], rtol=1e-6)


def test_gpg_makes_up_for_scores_of_zero() -> None:
    # Two of four scores are not 0: alpha = 2.
    got = gpg([1, 0, 1, 0], [0, 0, 1, 1], GPG(norm=2.0))
    np.testing.assert_allclose(got, [0.5, -0.5, 0.5, -0.5])
    assert gpg([0, 0], [0, 0], GPG()).tolist() == [0, 0]


def test_max_rl_divides_by_the_solve_rate() -> None:
    got = max_rl([1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], MaxRL(eps=0.0))
    np.testing.assert_allclose(got, [3, -1, -1, -1, 0, 0])


def test_opo_weighs_its_baseline_by_length() -> None:
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]])
    batch = AdvantageBatch(
        scores=np.array([1.0, 5.0, 2.0, 4.0]), groups=np.array([0, 0, 1, 1]), mask=mask
    )
    # (3 * 1 + 1 * 5) / 4 = 2; the second group's one sample with tokens is its own baseline.
    got = length_weighted(batch, LengthWeighted()).advantages
    np.testing.assert_allclose(got, [-1, 3, 0, 2])


def test_opo_without_a_token_or_a_sibling() -> None:
    batch = AdvantageBatch(
        scores=np.array([1.0, 5.0, 3.0]), groups=np.array([0, 0, 1]), mask=np.zeros((3, 2))
    )
    assert length_weighted(batch, LengthWeighted()).advantages.tolist() == [1, 5, 0]
    raw = length_weighted(batch, LengthWeighted(singleton="raw"))
    assert raw.advantages.tolist() == [1, 5, 3]


def test_a_weighted_sum_passes_over_rewards_that_do_not_apply() -> None:
    nan = float("nan")
    got = weighted_sum([[1, 2], [nan, 2], [nan, nan]], [1.0, 0.5])
    np.testing.assert_array_equal(got, [2, 1, nan])


def test_rewards_may_be_normalised_before_they_are_summed() -> None:
    # Reward a: -1, 1 over sqrt(2); b: 100, -100 over sqrt(2) * 100. With weight 0.5, S = -+ .5/r2.
    batch = AdvantageBatch(
        scores=np.zeros(2),
        groups=np.zeros(2, np.int64),
        rewards=np.array([[0.0, 200.0], [2.0, 0.0]]),
    )
    spec = NormaliseThenSum(reward_weights="1.0, 0.5", eps=0.0, batch_eps=0.0)
    got = normalise_then_sum(batch, spec).advantages
    np.testing.assert_allclose(got, [-(0.5**0.5), 0.5**0.5], rtol=1e-6)
    # Summed first, the larger reward decides.
    summed = group_relative(weighted_sum(batch.rewards, [1.0, 0.5]), batch.groups, GroupRelative())
    assert summed[0] > 0


def test_a_sample_without_rewards_takes_no_part() -> None:
    nan = float("nan")
    batch = AdvantageBatch(
        scores=np.zeros(3),
        groups=np.zeros(3, np.int64),
        rewards=np.array([[0.0, nan], [nan, nan], [2.0, 1.0]]),
    )
    got = normalise_then_sum(batch, NormaliseThenSum(eps=0.0, batch_eps=0.0)).advantages
    np.testing.assert_allclose(got, [-(0.5**0.5), 0, 0.5**0.5], rtol=1e-6)


def test_an_advantage_that_needs_more_says_what() -> None:
    batch = AdvantageBatch(scores=np.ones(2), groups=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="needs mask, which the batch does not have"):
        resolve_advantage(LengthWeighted())(batch)


def test_every_advantage_can_be_computed_from_a_batch() -> None:
    batch = AdvantageBatch(scores=np.array([0.0, 2.0]), groups=np.zeros(2, np.int64))
    got = resolve_advantage(GroupRelative(std="none"))(batch)
    assert got.advantages.tolist() == [-1, 1]
    assert got.returns is None


def test_a_score_that_is_no_number_is_refused() -> None:
    for spec in (LeaveOneOut(), PassAtK(), GPG(), MaxRL()):
        with pytest.raises(RewardError, match="not finite"):
            computed(spec, [1.0, float("inf")], [0, 0])


def test_a_batch_of_one_has_the_deviation_1() -> None:
    spec = GroupRelative(std="batch", mean="group", singleton="raw", eps=1.0)
    assert computed(spec, [3.0], [0]).tolist() == [1.5]
    # With the population's deviation it is 0, and the score stays.
    assert computed(replace(spec, ddof=0), [3.0], [0]).tolist() == [3.0]


def test_scores_and_groups_are_one_number_a_sample() -> None:
    for scores, groups in (([[1.0, 2.0]], [[0, 0]]), ([1.0, 2.0], [0]), ([1.0], [[0]])):
        with pytest.raises(ValueError, match="must both be"):
            computed(LeaveOneOut(), scores, groups)
