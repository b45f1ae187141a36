"""One advantage a token, without a critic: REINFORCE++, ReMax, baselines, distillation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, check_scores, field_of
from flowrl.algo.advantages.group import centre_scores
from flowrl.algo.advantages.partition import Partition
from flowrl.algo.advantages.returns import kl_penalty, rewards_to_go, token_rewards, whiten
from flowrl.specs.advantage import AdvantageSpec
from flowrl.specs.kl import Estimator
from flowrl.specs.token_advantage import Distill, OptimalTokenBaseline, ReinforcePP, ReMax

__all__ = [
    "distill",
    "optimal_baseline",
    "optimal_token_baseline",
    "penalty_of",
    "reinforce_pp",
    "remax",
]

Array = npt.NDArray[np.float64]


def penalty_of(
    batch: AdvantageBatch, estimator: Estimator, coefficient: float, kind: str
) -> Array | None:
    """The KL estimate `[N, T]` that a specification takes off the reward; None without a penalty.

    Raises:
        ValueError: there is a penalty, and the batch lacks logprobs or reference_logprobs.
    """
    if coefficient == 0:
        return None
    return kl_penalty(
        field_of(batch, "logprobs", kind), field_of(batch, "reference_logprobs", kind), estimator
    )


def reinforce_pp(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """REINFORCE++ (Hu et al., 2025, section 3) and its baseline form::

        c_i = score_i                           `mean="none"`
        c_i = score_i - mean of its group       `mean="group"`: REINFORCE++-baseline
        r_t = [t last] c_i - beta kl_t
        G_t = r_t + gamma G_{t+1}               `kl_credit="reward_to_go"`
        G_t = c_i - beta kl_t                   `kl_credit="token"`: each token answers for its own
        A_t = whitened G_t                      over all response tokens of the batch

    With `whiten=False` the advantages are G. The paper's kl is k1.

    Returns:
        Advantages, and G as returns, 0 off the mask.
    """
    assert isinstance(spec, ReinforcePP)
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    centred = centre_scores(scores, batch.groups, spec.mean, spec.singleton)
    beta = spec.kl_coefficient
    kl = penalty_of(batch, spec.kl_estimator, beta, spec.kind)
    if spec.kl_credit == "token":
        penalty = 0.0 if kl is None else beta * kl
        returns = np.broadcast_to(centred[:, None], mask.shape) - penalty
    else:
        rewards = token_rewards(centred, mask, kl, kl_coefficient=beta, given=batch.token_rewards)
        returns = rewards_to_go(rewards, mask, spec.gamma, spec.masking)
    returns = np.where(mask > 0, returns, 0.0)
    advantages = returns
    if spec.whiten:
        advantages = whiten(
            returns, mask, ddof=spec.whiten_ddof, eps=spec.whiten_eps, place=spec.whiten_eps_place
        )
    return _result(advantages, returns)


def remax(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """ReMax (Li et al., 2023, algorithm 2)::

        A_t = G_t - b_i,    G_t = sum over u >= t of r_u,    b_i = score of the greedy answer

    with the score on the last token and, where there is a coefficient, a KL penalty on each.
    """
    assert isinstance(spec, ReMax)
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    kl = penalty_of(batch, spec.kl_estimator, spec.kl_coefficient, spec.kind)
    rewards = token_rewards(
        scores, mask, kl, kl_coefficient=spec.kl_coefficient, given=batch.token_rewards
    )
    returns = np.where(mask > 0, rewards_to_go(rewards, mask), 0.0)
    baselines = field_of(batch, "baselines", spec.kind)
    return _result(np.where(mask > 0, returns - baselines[:, None], 0.0), returns)


def distill(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """On-policy distillation by reverse KL, as an advantage of each token::

        d_t = log teacher_t - log behaviour_t             of the tokens that the student drew
        G_t = coefficient d_t + discount G_{t+1}          over the mask
        A_t = G_t + score_weight (score_i - mean)         the second part where it has a weight

    Minus the mean of d estimates KL(student || teacher), and the policy gradient with A_t = d_t
    descends it as far as each token's own choice goes (Agarwal et al., "On-Policy Distillation of
    Language Models", arXiv 2306.13649, with samples of the student and reverse KL; Lu and Thinking
    Machines Lab, "On-Policy Distillation", 2025, which takes discount 0). With discount 1 a token
    answers for all later ones too, which is the whole gradient of the sequence's KL (Gu et al.,
    MiniLLM, arXiv 2306.08543, equation 3). The teacher's logprobs are the `reference_logprobs`, of
    the same tokenizer and at the temperature of the rollout.
    """
    assert isinstance(spec, Distill)
    mask = field_of(batch, "mask", spec.kind)
    drawn = field_of(batch, "logprobs", spec.kind)
    teacher = field_of(batch, "reference_logprobs", spec.kind)
    # Padding may hold anything.
    rewards = np.where(mask > 0, spec.coefficient * (teacher - drawn), 0.0)
    advantages = rewards_to_go(rewards, mask, spec.discount)
    if spec.score_weight:
        scores = check_scores(batch.scores, batch.groups)
        centred = centre_scores(scores, batch.groups, spec.mean, spec.singleton)
        advantages = advantages + spec.score_weight * centred[:, None]
    advantages = np.where(mask > 0, advantages, 0.0)
    return AdvantageResult(advantages=advantages.astype(np.float32))


def optimal_token_baseline(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """Reward-to-go minus the baseline of least variance of each time step; see `optimal_baseline`.

    The score is on the last token, nothing is discounted.
    """
    assert isinstance(spec, OptimalTokenBaseline)
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    rewards = token_rewards(scores, mask, given=batch.token_rewards)
    returns = np.where(mask > 0, rewards_to_go(rewards, mask), 0.0)
    baseline = optimal_baseline(
        returns,
        mask,
        batch.groups,
        field_of(batch, "logprobs", spec.kind),
        field_of(batch, "sum_pi_squared", spec.kind),
        spec,
    )
    return _result(np.where(mask > 0, returns - baseline, 0.0), returns)


def optimal_baseline(
    returns: npt.ArrayLike,
    mask: npt.ArrayLike,
    groups: npt.ArrayLike,
    logprobs: npt.ArrayLike,
    sum_pi_squared: npt.ArrayLike,
    spec: OptimalTokenBaseline,
    token_weights: npt.ArrayLike | None = None,
) -> Array:
    """The optimal token baseline ("The Optimal Token Baseline", 2026), float64 `[N, T]`.

    The squared length of the gradient of a token's logprob with respect to its logits is w_t; the
    variance that a path has gathered is its running sum, and it weighs the group's mean::

        w_t = 1 - 2 pi_t + sum over v of pi(v)^2,    pi_t = probability of the drawn token
        W_t = sum of w_u, u <= t, over the mask
        b_t = sum_i W_it G_it m_it / (sum_i W_it m_it + eps)    over the group, for each step t

    Args:
        returns: `[N, T]` rewards-to-go G.
        mask: `[N, T]`; m.
        groups: `[N]`.
        logprobs: `[N, T]` of the drawn tokens.
        sum_pi_squared: `[N, T]`.
        spec: eps, and what a group of one and the tail of its longest sample get.
        token_weights: `[N, T]` importance weights; w_t is multiplied by their square.
    """
    g, m = np.asarray(returns, np.float64), (np.asarray(mask) > 0).astype(np.float64)
    # Padding may hold anything; what is there must not overflow.
    drawn = np.where(m > 0, np.asarray(logprobs, np.float64), 0.0)
    w = 1 - 2 * np.exp(drawn) + np.where(m > 0, np.asarray(sum_pi_squared, np.float64), 0.0)
    if token_weights is not None:
        w = w * np.where(m > 0, np.asarray(token_weights, np.float64), 0.0) ** 2
    weight = np.cumsum(w * m, axis=1) * m
    group = Partition.of(groups)
    above, below = np.zeros((2, len(group.size), g.shape[1]))
    np.add.at(above, group.number, weight * np.where(m > 0, g, 0.0))
    np.add.at(below, group.number, weight)
    baseline: Array = (above / np.where(below + spec.eps == 0, 1.0, below + spec.eps))[group.number]
    if spec.lone_tail == "zero":
        baseline = np.where(_lone_tail(m, group), 0.0, baseline)
    if spec.singleton == "raw":
        return np.where(group.alone[:, None], 0.0, baseline)
    return np.where(group.alone[:, None], g, baseline)


def _lone_tail(mask: Array, group: Partition) -> npt.NDArray[np.bool_]:
    """bool `[N, T]`, where the one longest sample of a group is beyond the second longest."""
    length = mask.sum(1)
    tail = np.zeros(mask.shape, np.bool_)
    for number in np.flatnonzero(group.size > 1):
        members = np.flatnonzero(group.number == number)
        ranked = members[np.argsort(length[members], kind="stable")]
        longest, second = ranked[-1], ranked[-2]
        tail[longest, int(length[second]) :] = length[longest] > length[second]
    return tail


def _result(advantages: Array, returns: Array) -> AdvantageResult:
    return AdvantageResult(
        advantages=advantages.astype(np.float32), returns=returns.astype(np.float32)
    )
