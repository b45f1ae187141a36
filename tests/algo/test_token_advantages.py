"""Advantages of a token: rewards-to-go, GAE, baselines of a step, turns; by hand and by loops."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algo.advantages import AdvantageBatch, Turns, rewards_to_go, token_rewards, whiten
from flowrl.algo.advantages.batch import last_token
from flowrl.algo.advantages.token import (
    estimate,
    gae,
    group_in_group,
    length_lambda,
    optimal_token_baseline,
    reinforce_pp,
    remax,
    turn_returns,
)
from flowrl.algo.kl import estimate as estimate_kl
from flowrl.algo.resolve import resolve_advantage
from flowrl.specs.advantage import (
    GAE,
    Centre,
    GroupInGroup,
    Masking,
    OptimalTokenBaseline,
    ReinforcePP,
    ReMax,
)
from flowrl.specs.kl import Estimator

MASKINGS: tuple[Masking, ...] = get_args(Masking)
Array = npt.NDArray[np.float64]


def hole() -> Array:
    """One sample whose third token the environment wrote."""
    return np.array([[1.0, 1.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("masking", "want"),
    [
        # The recorded reward 4 at the hole is the environment's and counts for `none` and `reset`.
        ("carry", [1 + 2 * (2 + 2 * 8), 2 + 2 * 8, 8, 8]),
        ("zero", [1 + 2 * (2 + 2 * 16), 2 + 2 * 16, 16, 8]),
        ("none", [1 + 2 * (2 + 2 * 20), 2 + 2 * 20, 20, 8]),
        ("reset", [1 + 2 * 2, 2, 20, 8]),
    ],
)
def test_rewards_to_go_across_a_hole(masking: Masking, want: list[float]) -> None:
    got = rewards_to_go([[1, 2, 4, 8]], hole(), 2.0, masking)
    np.testing.assert_allclose(got, [want])


def test_the_score_stands_on_the_last_token_of_the_mask() -> None:
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert last_token(mask).tolist() == [
        [False, False, True, False],
        [False] * 4,
        [False, False, False, True],
    ]
    got = token_rewards([2, 7, -1], mask, np.ones((3, 4)), kl_coefficient=0.5)
    want = [[-0.5, -0.5, 1.5, -0.5], [-0.5] * 4, [-0.5, -0.5, -0.5, -1.5]]
    np.testing.assert_allclose(got, want)


def test_whitening_over_the_tokens_of_the_mask() -> None:
    # 1, 3, 5: mean 3, variance 4 with ddof 1 and 8/3 with ddof 0
    values, mask = [[1, 99, 3], [5, 99, 99]], [[1, 0, 1], [1, 0, 0]]
    got = whiten(values, mask, eps=0.0)
    np.testing.assert_allclose(got, [[-1, 0, 0], [1, 0, 0]])
    for place, divisor in {"inside": 5**0.5, "outside": 3.0, "floor": 2.0}.items():
        found = whiten(values, mask, eps=1.0, place=place)  # type: ignore[arg-type]
        np.testing.assert_allclose(found[0, 0], -2 / divisor)
    floored = whiten(values, mask, eps=16.0, place="floor")
    np.testing.assert_allclose(floored[0, 0], -0.5)
    population = whiten(values, mask, ddof=0, eps=0.0)
    np.testing.assert_allclose(population[0, 0], -2 / (8 / 3) ** 0.5)


def test_whitening_what_has_no_spread_gives_exactly_zero() -> None:
    assert whiten([[0.1, 0.1, 0.1]], [[1, 1, 1]], eps=0.0).tolist() == [[0, 0, 0]]
    assert whiten([[3.0, 9.0]], [[1, 0]], eps=0.0).tolist() == [[0, 0]]
    assert whiten([[3.0, 9.0]], [[0, 0]], eps=0.0).tolist() == [[0, 0]]


def test_generalised_advantages_by_hand() -> None:
    # gamma 1, lambda 0.5; V = 1, 2, 3; reward 4 at the end.
    # delta = 2 - 1, 3 - 2, 4 - 3 = 1, 1, 1; A = 1 + .5 * (1.5), 1 + .5, 1
    advantages, returns = estimate([[0, 0, 4]], [[1, 2, 3]], [[1, 1, 1]], 1.0, 0.5)
    np.testing.assert_allclose(advantages, [[1.75, 1.5, 1.0]])
    np.testing.assert_allclose(returns, [[2.75, 3.5, 4.0]])


@pytest.mark.parametrize("masking", MASKINGS)
def test_all_maskings_agree_on_trailing_zeros(masking: Masking) -> None:
    mask = np.array([[1, 1, 1, 0, 0]])
    rewards, values = [[0.5, 0, 2, 0, 0]], [[1, -2, 0.25, 0, 0]]
    advantages, returns = estimate(rewards, values, mask, 0.9, 0.8, masking)
    plain, _ = estimate([[0.5, 0, 2]], [[1, -2, 0.25]], [[1, 1, 1]], 0.9, 0.8)
    np.testing.assert_allclose(advantages[:, :3], plain)
    np.testing.assert_allclose(returns[:, :3], plain + np.array([[1, -2, 0.25]]))


def test_carried_advantages_are_those_of_the_response_without_its_holes() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 3, 9))
    mask = rng.integers(0, 2, (3, 9))
    mask[2] = 0
    advantages, returns = estimate(rewards, values, mask, 0.9, 0.7)
    to_go = rewards_to_go(rewards, mask, 0.9)
    for i in range(3):
        live = mask[i] > 0
        r, v = rewards[i][live][None], values[i][live][None]
        ones = np.ones_like(r)
        want, target = estimate(r, v, ones, 0.9, 0.7, "none")
        np.testing.assert_allclose(advantages[i][live][None], want)
        np.testing.assert_allclose(returns[i][live][None], target)
        np.testing.assert_allclose(to_go[i][live][None], rewards_to_go(r, ones, 0.9, "none"))


@pytest.mark.parametrize("masking", MASKINGS)
def test_with_lambda_one_and_no_critic_advantages_are_rewards_to_go(masking: Masking) -> None:
    rng = np.random.default_rng(1)
    rewards, mask = rng.normal(size=(4, 7)), rng.integers(0, 2, (4, 7))
    advantages, _ = estimate(rewards, np.zeros((4, 7)), mask, 0.9, 1.0, masking)
    np.testing.assert_allclose(advantages, rewards_to_go(rewards, mask, 0.9, masking))


@given(st.integers(0, 2**32 - 1))
def test_garbage_off_the_mask_changes_nothing_where_the_mask_is_looked_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (3, 6))
    rewards, values = rng.normal(size=(2, 3, 6))
    other_rewards = np.where(mask > 0, rewards, 1e9)
    other_values = np.where(mask > 0, values, -1e9)
    for masking in ("carry", "zero"):
        one, _ = estimate(rewards, values, mask, 0.9, 0.8, masking)
        two, _ = estimate(other_rewards, other_values, mask, 0.9, 0.8, masking)
        np.testing.assert_array_equal(one[mask > 0], two[mask > 0])


def test_lambda_grows_with_the_length() -> None:
    np.testing.assert_allclose(length_lambda([0, 1, 20, 40, 400], 0.05), [0, 0, 0, 0.5, 0.95])


def batch_of(**fields: object) -> AdvantageBatch:
    """Three samples of two groups; the last has no tokens."""
    base: dict[str, object] = {
        "scores": np.array([1.0, 0.0, 3.0]),
        "groups": np.array([0, 0, 1]),
        "mask": np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]]),
    }
    return AdvantageBatch(**{**base, **fields})  # type: ignore[arg-type]


def test_ppo_has_critic_targets_of_another_lambda() -> None:
    values = np.array([[0.5, 0.25, 0.0], [0.0, 7.0, 1.0], [9.0, 9.0, 9.0]])
    spec = GAE(gamma=1.0, lam=0.0, lam_value=1.0, whiten=False)
    got = gae(batch_of(values=values), spec)
    # lambda 0: delta. lambda 1: the score itself is every token's return.
    np.testing.assert_allclose(
        got.advantages, [[-0.25, -0.25, 1.0], [1.0, 0, -1.0], [0, 0, 0]], atol=1e-7
    )
    assert got.returns is not None
    np.testing.assert_allclose(got.returns, [[1, 1, 1], [0, 0, 0], [0, 0, 0]], atol=1e-7)
    adapted = gae(batch_of(values=values), GAE(length_alpha=0.5, whiten=False))
    one, _ = estimate([[0, 0, 1]], values[:1], [[1, 1, 1]], 1.0, 1 - 1 / 1.5)
    np.testing.assert_allclose(adapted.advantages[:1], one, rtol=1e-6)


def test_reinforce_pp_spreads_penalties_back_and_whitens_over_the_batch() -> None:
    logprobs = np.array([[0.0, 0.0, 0.0], [0.0, -99.0, 0.0], [5.0, 5.0, 5.0]])
    reference = np.array([[-1.0, 1.0, 0.0], [0.0, 99.0, -2.0], [0.0, 0.0, 0.0]])
    batch = batch_of(logprobs=logprobs, reference_logprobs=reference)
    spec = ReinforcePP(gamma=0.5, kl_coefficient=0.5, whiten=False)
    got = reinforce_pp(batch, spec)
    # rewards: -.5, +.5, 1 | 0, skipped, -1: G = -.5 + .5 * 1, .5 + .5, 1 | 0 + .5 * -1, -1
    want = [[0.0, 1.0, 1.0], [-0.5, 0.0, -1.0], [0, 0, 0]]
    np.testing.assert_allclose(got.advantages, want, atol=1e-7)
    whitened = reinforce_pp(batch, ReinforcePP(gamma=0.5, kl_coefficient=0.5, whiten_eps=0.0))
    assert whitened.returns is not None
    np.testing.assert_allclose(whitened.returns, want, atol=1e-7)
    live = np.array([0.0, 1.0, 1.0, -0.5, -1.0])
    standard = (live - live.mean()) / live.std(ddof=1)
    mask = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], bool)
    np.testing.assert_allclose(whitened.advantages[mask], standard, rtol=1e-6)


def test_each_token_may_answer_for_its_own_penalty() -> None:
    batch = batch_of(logprobs=np.ones((3, 3)), reference_logprobs=np.zeros((3, 3)))
    spec = ReinforcePP(mean="group", kl_coefficient=0.1, kl_credit="token", whiten=False)
    got = reinforce_pp(batch, spec).advantages
    np.testing.assert_allclose(got, [[0.4] * 3, [-0.6, 0, -0.6], [0] * 3], rtol=1e-6)


def process(mean: Centre, **options: object) -> list[list[float]]:
    """Three samples of a prompt, of 3, 1 and 2 tokens; garbage at padding."""
    batch = AdvantageBatch(
        scores=np.array([1.0, 0.0, 0.0]),
        groups=np.zeros(3, np.int64),
        mask=np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        process_rewards=np.array([[0.3, 0.6, 0.0], [0.5, 9.0, 9.0], [-0.2, 0.4, 9.0]]),
    )
    spec = ReinforcePP(mean=mean, whiten=False, token_rewards="added", **options)  # type: ignore[arg-type]
    return reinforce_pp(batch, spec).advantages.round(6).tolist()


def test_process_rewards_add_to_the_score_less_the_means_of_the_others_as_in_prime() -> None:
    # Means of the samples 0.3, 0.5, 0.1, of the others 0.3, 0.2, 0.4; of the others' scores 0, .5,
    # .5. Rewards 0, 0.3, -0.3 + 1; 0.3 - 0.5; -0.6, 0 - 0.5.
    want = [[1.0, 1.0, 0.7], [-0.2, 0.0, 0.0], [-1.1, -0.5, 0.0]]
    np.testing.assert_allclose(process("group_others"), want)
    # Without a mean, rewards are 0.3, 0.6, 1; 0.5; -0.2, 0.4.
    want = [[1.9, 1.6, 1.0], [0.5, 0.0, 0.0], [0.2, 0.4, 0.0]]
    np.testing.assert_allclose(process("none"), want)
    # A token that answers for its own penalty alone still answers for all later rewards.
    np.testing.assert_allclose(process("none", kl_credit="token"), want)
    halved = process("none", gamma=0.5)
    np.testing.assert_allclose(halved, [[0.85, 1.1, 1.0], [0.5, 0, 0], [0.0, 0.4, 0]], atol=1e-7)


def test_process_rewards_count_in_generalised_advantages_beside_those_of_turns() -> None:
    batch = AdvantageBatch(
        scores=np.array([4.0]),
        groups=np.zeros(1, np.int64),
        mask=np.ones((1, 3)),
        values=np.array([[1.0, 2.0, 3.0]]),
        process_rewards=np.array([[0.5, -0.5, 1.0]]),
    )
    spec = GAE(lam=0.5, whiten=False, token_rewards="added")
    # delta = .5 + 2 - 1, -.5 + 3 - 2, 1 + 4 - 3; A = 1.5 + .75, .5 + 1, 2
    result = gae(batch, spec)
    np.testing.assert_allclose(result.advantages, [[2.25, 1.5, 2.0]])
    assert result.returns is not None
    np.testing.assert_allclose(result.returns, [[3.25, 3.5, 5.0]])
    # 1 of the 4 was given at the first token: delta = 2.5, .5, 1.
    turns = gae(replace(batch, token_rewards=np.array([[1.0, 0.0, 0.0]])), spec)
    np.testing.assert_allclose(turns.advantages, [[3.0, 1.0, 1.0]])
    alone = gae(replace(batch, scores=np.zeros(1)), replace(spec, token_rewards="alone"))
    np.testing.assert_allclose(alone.advantages, [[1.25, -0.5, -2.0]])
    with pytest.raises(ValueError, match="needs process_rewards"):
        gae(replace(batch, process_rewards=None), spec)


def test_a_penalty_needs_reference_logprobs() -> None:
    with pytest.raises(ValueError, match="needs logprobs"):
        reinforce_pp(batch_of(), ReinforcePP(kl_coefficient=0.1))


def test_remax_subtracts_the_score_of_the_greedy_answer() -> None:
    got = remax(batch_of(baselines=np.array([0.25, 1.0, 1.0])), ReMax())
    np.testing.assert_allclose(got.advantages, [[0.75] * 3, [-1, 0, -1], [0] * 3])


def test_the_optimal_baseline_weighs_returns_by_the_variance_of_the_path() -> None:
    # w = 1 - 2 pi + sum of squares: with pi = .5 and sums .5 and 1.5, w = .5 and 1.5 a step.
    logprobs = np.full((3, 2), np.log(0.5))
    squares = np.array([[0.5, 0.5], [1.5, 99.0], [0.5, 0.5]])
    batch = AdvantageBatch(
        scores=np.array([1.0, 5.0, 2.0]),
        groups=np.array([0, 0, 1]),
        mask=np.array([[1, 1], [1, 0], [1, 1]]),
        logprobs=logprobs,
        sum_pi_squared=squares,
    )
    got = optimal_token_baseline(batch, OptimalTokenBaseline(eps=0.0)).advantages
    # Step 1: (.5 * 1 + 1.5 * 5) / 2 = 4. Step 2: the first sample alone, its own return.
    np.testing.assert_allclose(got, [[-3, 0], [1, 0], [0, 0]], atol=1e-6)
    open_tail = OptimalTokenBaseline(eps=0.0, lone_tail="zero", singleton="raw")
    got = optimal_token_baseline(batch, open_tail).advantages
    np.testing.assert_allclose(got, [[-3, 1], [1, 0], [2, 2]], atol=1e-6)


def test_turns_are_compared_with_turns_from_the_same_state() -> None:
    # Episodes of group 0 score 1 and 0; group 1 is alone. Turns: two of sample 0, one each else.
    turns = Turns(
        samples=np.array([0, 0, 1, 2]),
        rewards=np.array([0.0, 1.0, 0.0, 1.0]),
        states=np.array([7, 8, 7, 7]),
        tokens=np.array([[0, 0, 1, -1], [2, 2, -1, -1], [3, -1, -1, -1]]),
    )
    batch = AdvantageBatch(
        scores=np.array([1.0, 0.0, 1.0]),
        groups=np.array([0, 0, 1]),
        mask=np.array([[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]]),
        turns=turns,
    )
    np.testing.assert_allclose(turn_returns(turns, 0.5), [0.5, 1.0, 0.0, 1.0])
    got = group_in_group(batch, GroupInGroup(weight=2.0, gamma=0.5, std="none")).advantages
    # Episodes: .5, -.5, 0. State 7 of group 0 has returns .5 and 0: +-.25. State 8 is met once;
    # state 7 of group 1 is another group's.
    want = [[1.0, 1.0, 0.5, 0], [-1.0, 0, -0.5, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(got, want, atol=1e-7)


def test_turns_out_of_order_are_refused() -> None:
    turns = Turns(
        samples=np.array([1, 0]),
        rewards=np.zeros(2),
        states=np.zeros(2, np.int64),
        tokens=np.zeros((2, 1), np.int64),
    )
    with pytest.raises(ValueError, match="ordered by sample"):
        turn_returns(turns, 1.0)


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_estimates_of_numpy_arrays_equal_those_of_tensors(estimator: Estimator) -> None:
    one, two = np.random.default_rng(3).normal(size=(2, 5)) * 6
    for bounds in ((None, None), (4.0, 2.0)):
        got = estimate_kl(one, two, estimator, clamp_input=bounds[0], clamp_output=bounds[1])
        want = estimate_kl(
            torch.from_numpy(one),
            torch.from_numpy(two),
            estimator,
            clamp_input=bounds[0],
            clamp_output=bounds[1],
        )
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


def test_token_advantages_resolve_by_their_specification() -> None:
    got = resolve_advantage(ReinforcePP(whiten=False))(batch_of())
    assert got.advantages.dtype == np.float32
    np.testing.assert_allclose(got.advantages, [[1] * 3, [0] * 3, [0] * 3])
