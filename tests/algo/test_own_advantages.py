"""Advantages of the user's own, and what recursions make of an environment's rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.algo.advantages import AdvantageBatch, token_rewards
from flowrl.algo.advantages.token import gae, optimal_token_baseline, reinforce_pp, remax
from flowrl.algo.resolve import resolve_advantage
from flowrl.errors import TraceError
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.specs import GroupRelative, spec_from_json
from flowrl.specs.advantage import (
    GAE,
    Distill,
    GroupInGroup,
    NormaliseThenSum,
    OptimalTokenBaseline,
    OwnAdvantage,
    ReinforcePP,
    ReMax,
)
from tests.algo import own_functions as own


def batch_of(**more: Any) -> AdvantageBatch:
    """Two samples of three tokens; the environment wrote the second token of the first."""
    found = AdvantageBatch(
        scores=np.array([4.0, -1.0]),
        groups=np.array([0, 0]),
        mask=np.array([[1, 0, 1], [1, 1, 0]]),
        values=np.array([[1.0, 7.0, 2.0], [3.0, 0.5, 7.0]]),
        token_rewards=np.array([[1.0, 0.0, 2.5], [-1.0, 0.0, 0.0]]),
    )
    return replace(found, **more)


@pytest.mark.parametrize(
    "spec", [own.doubled.spec(factor=3), own.to_go.spec(), own.to_go.spec(gamma=0.5)]
)
def test_an_own_advantage_reads_back_from_its_text_and_its_json(spec: OwnAdvantage) -> None:
    assert parse_attr(format_attr(spec)) == spec
    assert spec_from_json("advantage", spec.to_json()) == spec


def test_what_an_advantage_declares_can_be_asked() -> None:
    assert own.doubled.spec().needs == ()
    assert not own.doubled.spec().per_token
    spec = own.to_go.spec()
    assert spec.needs == ("mask", "values", "token_rewards")
    assert spec.per_token
    assert spec.gives_returns
    assert spec.needs_scores
    assert own.to_go.__doc__ == "Rewards-to-go minus values."


def test_an_own_advantage_of_scores_is_called_like_ours() -> None:
    spec = own.doubled.spec(factor=3.0)
    batch = AdvantageBatch(scores=np.array([1.0, 2.0]), groups=np.array([0, 0]))
    got = resolve_advantage(spec)(batch).advantages
    assert got.tolist() == [3.0, 6.0]
    assert got.dtype == np.float32
    assert resolve_advantage(spec)(batch_of()).advantages.tolist() == [12.0, -3.0]


def test_an_own_advantage_of_tokens_is_0_off_the_mask() -> None:
    got = resolve_advantage(own.to_go.spec())(batch_of())
    # First sample: 1, then 2.5 and the rest of the score, 4 - 3.5.
    assert got.advantages.tolist() == [[4 - 1, 0, 3 - 2], [-1 - 3, 0 - 0.5, 0]]
    assert got.returns is not None
    assert got.returns.tolist() == [[4, 0, 3], [-1, 0, 0]]


def test_an_own_advantage_sees_what_it_declares_and_no_more() -> None:
    seen: list[AdvantageBatch] = []
    wide = batch_of(logprobs=np.zeros((2, 3)), rewards=np.zeros((2, 1)))
    spec = fl.advantage.own(needs="mask")(watch).spec()
    watch.seen = seen  # type: ignore[attr-defined]
    resolve_advantage(spec)(wide)
    assert seen == [AdvantageBatch(scores=wide.scores, groups=wide.groups, mask=wide.mask)]


def watch(batch: AdvantageBatch) -> Any:
    watch.seen.append(batch)  # type: ignore[attr-defined]
    return batch.scores


@pytest.mark.parametrize(
    ("advantage", "message", "more"),
    [
        (
            own.per_sample_by_mistake,
            "gives 'advantages' of the wrong shape",
            "found: [2]; expected: float32 [2, 3], one a token",
        ),
        (own.infinite, "gives 'advantages' that is not finite", "found: inf at [0]"),
    ],
)
def test_an_advantage_of_no_use_is_told_with_the_functions_line(
    advantage: Any, message: str, more: str
) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        resolve_advantage(advantage.spec())(batch_of())
    assert "own_functions.py:" in str(caught.value.where)
    assert more in str(caught.value)


def test_a_field_that_no_advantage_has_is_told_the_nearest() -> None:
    with pytest.raises(TraceError, match=r"reads batch\.masks, which does not exist") as caught:
        resolve_advantage(own.close.spec())(batch_of())
    assert caught.value.hint == "did you mean 'mask'?"
    assert caught.value.found == "it declares mask"


def test_what_an_advantage_declares_must_be_there() -> None:
    with pytest.raises(ValueError, match="own_functions:to_go needs values"):
        resolve_advantage(own.to_go.spec())(batch_of(values=None))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"needs": "valuess"}, "did you mean 'values'"),
        ({"per": "turn"}, "no per of fl.advantage.own is called"),
    ],
)
def test_a_declaration_of_an_advantage_that_makes_no_sense_is_refused(
    declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        fl.advantage.own(**declared)


def test_options_of_an_advantage_are_those_of_its_function() -> None:
    with pytest.raises(TraceError, match="doubled has no option 'facto'"):
        own.doubled.spec(facto=3)


def with_rollout(batch: AdvantageBatch, *, rollout: int = 0) -> Any:
    return batch.scores


def test_options_cannot_have_the_name_of_an_argument_in_a_program() -> None:
    with pytest.raises(TraceError, match="the name 'rollout' is reserved"):
        fl.advantage.own()(with_rollout)


def test_rewards_add_up_to_the_score_with_an_environments_and_without() -> None:
    batch = batch_of()
    assert batch.mask is not None
    plain = token_rewards(batch.scores, batch.mask)
    given = token_rewards(batch.scores, batch.mask, given=batch.token_rewards)
    assert plain.tolist() == [[0, 0, 4], [0, -1, 0]]
    assert given.tolist() == [[1, 0, 3], [-1, 0, 0]]
    # What stands off the mask is not a reward of the policy's.
    off = np.array([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    assert token_rewards(batch.scores, batch.mask, given=off).tolist() == plain.tolist()


def test_recursions_take_an_environments_rewards_where_they_were_given() -> None:
    batch = batch_of(baselines=np.array([1.0, 1.0]))
    got = gae(batch, GAE(lam=1.0, whiten=False))
    assert got.advantages.tolist() == [[3, 0, 1], [-4, -0.5, 0]]
    got = remax(batch, ReMax())
    assert got.advantages.tolist() == [[3, 0, 2], [-2, -1, 0]]
    got = reinforce_pp(batch, ReinforcePP(gamma=0.5, whiten=False))
    assert got.advantages.tolist() == [[1 + 0.5 * 3, 0, 3], [-1, 0, 0]]
    # Centred scores: 2.5 and -2.5; the difference is the last token's.
    got = reinforce_pp(batch, ReinforcePP(mean="group", whiten=False))
    assert got.advantages.tolist() == [[2.5, 0, 1.5], [-2.5, -1.5, 0]]
    tokens = np.full((2, 3), np.log(0.5))
    got = optimal_token_baseline(
        replace(batch, logprobs=tokens, sum_pi_squared=np.full((2, 3), 0.5)),
        OptimalTokenBaseline(eps=0.0),
    )
    assert got.returns is not None
    assert got.returns.tolist() == [[4, 0, 3], [-1, 0, 0]]


def test_every_advantage_says_what_it_reads_and_gives() -> None:
    assert GAE().needs == ("mask", "values")
    assert GAE().gives_returns
    assert ReMax().needs == ("mask", "baselines")
    assert not ReMax().gives_returns
    assert GroupInGroup().needs == ("mask", "turns")
    assert OptimalTokenBaseline().needs == ("mask", "logprobs", "sum_pi_squared")
    assert NormaliseThenSum().needs == ("rewards",)
    assert Distill().needs == ("mask", "logprobs", "reference_logprobs")
    assert GroupRelative().needs == ()
    for spec in (GAE(), ReMax(), GroupInGroup(), OptimalTokenBaseline(), Distill()):
        assert spec.per_token
    assert not Distill().needs_scores
    assert Distill(score_weight=0.5).needs_scores


def test_weights_of_rewards_travel_in_the_specification() -> None:
    spec = NormaliseThenSum(reward_weights="1.0, 0.5", eps=0.0, batch_eps=0.0)
    assert spec.weights == (1.0, 0.5)
    assert parse_attr(format_attr(spec)) == spec
    batch = AdvantageBatch(
        scores=np.zeros(2),
        groups=np.zeros(2, np.int64),
        rewards=np.array([[0.0, 200.0], [2.0, 0.0]]),
    )
    got = resolve_advantage(spec)(batch).advantages
    np.testing.assert_allclose(got, [-(0.5**0.5), 0.5**0.5], rtol=1e-6)
    # Without weights the two rewards cancel out.
    even = NormaliseThenSum(eps=0.0, batch_eps=0.0)
    np.testing.assert_allclose(resolve_advantage(even)(batch).advantages, [0, 0], atol=1e-6)
    with pytest.raises(ValueError, match="weights"):
        resolve_advantage(replace(spec, reward_weights="1.0"))(batch)


def test_distillation_by_hand() -> None:
    batch = batch_of(
        logprobs=np.array([[-1.0, 9.0, -2.0], [-3.0, -1.0, 9.0]]),
        reference_logprobs=np.array([[-1.5, 0.0, -1.0], [-1.0, -1.0, 0.0]]),
    )
    resolve = resolve_advantage
    got = resolve(Distill(coefficient=2.0))(batch).advantages
    assert got.tolist() == [[-1.0, 0, 2.0], [4.0, 0.0, 0]]
    # The hole takes no time: the first token sees half of the third.
    got = resolve(Distill(coefficient=2.0, discount=0.5))(batch).advantages
    assert got.tolist() == [[-1.0 + 1.0, 0, 2.0], [4.0, 0.0, 0]]
    got = resolve(Distill(discount=1.0))(batch).advantages
    assert got.tolist() == [[0.5, 0, 1.0], [2.0, 0.0, 0]]
    # Scores 4 and -1, centred 2.5 and -2.5, a tenth of it at each token.
    got = resolve(Distill(score_weight=0.1))(batch).advantages
    np.testing.assert_allclose(got, [[-0.25, 0, 1.25], [1.75, -0.25, 0]], rtol=1e-6)
    got = resolve(Distill(score_weight=0.1, mean="none"))(batch).advantages
    np.testing.assert_allclose(got, [[-0.1, 0, 1.4], [1.9, -0.1, 0]], rtol=1e-6)


def test_distillation_descends_the_reverse_kl() -> None:
    # One token of three: the expected policy gradient with A = log teacher - log student is minus
    # the gradient of KL(student || teacher), here in closed form with respect to the logits.
    logits, teacher = np.array([0.3, -0.2, 0.9]), np.log([0.5, 0.2, 0.3])
    student = logits - np.log(np.exp(logits).sum())
    p = np.exp(student)
    gap = student - teacher
    descent = -p * (gap - p @ gap)
    batch = AdvantageBatch(
        scores=np.zeros(3),
        groups=np.zeros(3, np.int64),
        mask=np.ones((3, 1)),
        logprobs=student[:, None],
        reference_logprobs=teacher[:, None],
    )
    advantages = resolve_advantage(Distill())(batch).advantages[:, 0]
    score_function = np.eye(3) - p  # d log p(v) / d logits
    np.testing.assert_allclose((p * advantages) @ score_function, descent, rtol=1e-6)
