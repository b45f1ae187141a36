"""Group-relative advantages and the zero-variance filter, against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from flowrl.algo.advantages import AdvantageBatch
from flowrl.algo.advantages.group import group_relative
from flowrl.algo.filters import difficulty, zero_variance
from flowrl.algo.resolve import resolve_advantage, resolve_filter
from flowrl.errors import GraphError, RewardError
from flowrl.specs import AdvantageSpec, GroupRelative
from flowrl.specs.filters import Difficulty, ZeroVariance


def test_a_group_is_centred_and_divided_by_its_sample_deviation() -> None:
    # mean 2, squared deviations 1 + 1 + 0 + 4 = 6 over 3 -> std sqrt(2)
    got = group_relative([1, 3, 2, 0, 5], [7, 7, 7, 9, 9], GroupRelative(eps=0.0))
    assert got.dtype == np.float32
    # group 7: mean 2, std 1; group 9: mean 2.5, std sqrt(12.5)
    want = [-1, 1, 0, -2.5 / 12.5**0.5, 2.5 / 12.5**0.5]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_groups_need_not_be_adjacent() -> None:
    got = group_relative([1, 0, 3, 5], [7, 9, 7, 9], GroupRelative(std="none"))
    np.testing.assert_allclose(got, [-1, -2.5, 1, 2.5])


def test_the_population_deviation_is_an_option() -> None:
    got = group_relative([0, 1], [0, 0], GroupRelative(ddof=0, eps=0.0))
    np.testing.assert_allclose(got, [-1, 1])


def test_the_batch_deviation_is_that_of_all_scores() -> None:
    # all scores: mean 1.5, squares 2.25 + .25 + .25 + 2.25 = 5 over 3
    got = group_relative([0, 1, 2, 3], [0, 0, 1, 1], GroupRelative(std="batch", eps=0.0))
    np.testing.assert_allclose(got, np.array([-0.5, 0.5, -0.5, 0.5]) / (5 / 3) ** 0.5, rtol=1e-6)


def test_eps_is_added_outside_the_root() -> None:
    got = group_relative([0, 2], [0, 0], GroupRelative(eps=1.0))
    np.testing.assert_allclose(got, np.array([-1, 1]) / (2**0.5 + 1.0), rtol=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_scores_give_exactly_zero(std: str) -> None:
    # 0.1 has no exact binary form: the mean of three differs from it in the last bit.
    spec = GroupRelative(std=std, eps=0.0)  # type: ignore[arg-type]
    assert group_relative([0.1] * 3, [0] * 3, spec).tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_gets_zero_or_its_own_score() -> None:
    assert group_relative([3.0], [0], GroupRelative()).tolist() == [0.0]
    raw = group_relative([3.0, 1.0, 2.0], [0, 1, 1], GroupRelative(singleton="raw", eps=0.5))
    np.testing.assert_allclose(raw[0], 3.0 / 1.5)
    undivided = group_relative([3.0], [0], GroupRelative(singleton="raw", std="none"))
    np.testing.assert_allclose(undivided, [3.0])


def test_a_score_that_is_no_number_is_refused_with_its_row() -> None:
    with pytest.raises(RewardError, match="not finite") as caught:
        group_relative([1.0, float("nan")], [0, 0], GroupRelative())
    assert caught.value.where == "sample 1"


def test_scores_and_groups_must_match() -> None:
    with pytest.raises(ValueError, match="must both be"):
        group_relative([1.0, 2.0], [0], GroupRelative())


def test_no_samples_give_no_advantages() -> None:
    assert group_relative([], [], GroupRelative()).shape == (0,)
    assert zero_variance([], [], ZeroVariance()).shape == (0,)


def test_the_filter_keeps_groups_whose_scores_differ() -> None:
    scores = [0.1, 0.1, 0.1, 0.0, 1.0, 0.0, 5.0]
    got = zero_variance(scores, [0, 0, 0, 1, 1, 1, 2], ZeroVariance())
    assert got.tolist() == [False] * 3 + [True] * 3 + [False]


def test_the_filter_has_a_tolerance() -> None:
    assert not zero_variance([0.0, 0.01], [0, 0], ZeroVariance(tolerance=0.01)).any()
    assert zero_variance([0.0, 0.011], [0, 0], ZeroVariance(tolerance=0.01)).all()


def test_specifications_resolve_to_their_functions() -> None:
    batch = AdvantageBatch(scores=np.array([0, 2]), groups=np.array([0, 0]))
    got = resolve_advantage(GroupRelative(std="none"))(batch).advantages
    np.testing.assert_allclose(got, [-1, 1])
    assert resolve_filter(ZeroVariance())([0, 2], [0, 0]).all()


def test_an_unknown_specification_names_the_known_ones() -> None:
    class Strange(AdvantageSpec):
        kind = "strange"

    with pytest.raises(GraphError, match="'strange'") as caught:
        resolve_advantage(Strange())
    assert "group_relative" in str(caught.value.expected)


def test_resolving_an_advantage_imports_no_torch() -> None:
    code = (
        "import sys; from flowrl.specs import GroupRelative\n"
        "from flowrl.specs.filters import ZeroVariance\n"
        "from flowrl.algo.advantages import AdvantageBatch\n"
        "from flowrl.algo.resolve import resolve_advantage, resolve_filter\n"
        "resolve_advantage(GroupRelative())(AdvantageBatch(scores=[1, 2], groups=[0, 0]))\n"
        "resolve_filter(ZeroVariance())([1, 2], [0, 0])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_group_at_either_bound_of_difficulty_is_removed() -> None:
    scores, groups = [0.2, 0.3, 0.5, 0.8, 0.9], [0, 1, 2, 3, 4]
    keep = difficulty(scores, groups, Difficulty(low=0.2, high=0.8))
    assert keep.tolist() == [False, True, True, False, False]


def test_the_deviation_that_a_filter_compares_has_its_ddof() -> None:
    # Scores 0 and 1 deviate by 0.5 with ddof 0 and by 0.71 with ddof 1.
    for ddof, stays in ((0, False), (1, True)):
        spec = ZeroVariance(measure="std", ddof=ddof, tolerance=0.6)
        assert zero_variance([0.0, 1.0], [0, 0], spec).tolist() == [stays] * 2
