"""Generalised advantage estimation, with a mask, and with lambdas of actor and critic apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, check_scores, field_of
from flowrl.algo.advantages.returns import token_rewards, whiten
from flowrl.algo.advantages.token import penalty_of
from flowrl.specs.advantage import AdvantageSpec
from flowrl.specs.token_advantage import GAE, Masking

__all__ = ["estimate", "gae", "length_lambda"]

Array = npt.NDArray[np.float64]


def gae(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """GAE over rewards of one score a sample, of an environment, and a KL penalty a token.

    Advantages are those of `estimate` with `lam`, or with `length_lambda` where `length_alpha` is
    above 0; they are whitened over the response tokens of the batch unless the specification says
    not to. Returns, which the critic learns, are those of `lam_value` (VC-PPO: Yuan et al., "What's
    Behind PPO's Collapse in Long-CoT?", 2025; VAPO: Yue et al., 2025, section 4), without
    whitening. Both are 0 off the mask.
    """
    assert isinstance(spec, GAE)
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    values = field_of(batch, "values", spec.kind)
    kl = penalty_of(batch, spec.kl_estimator, spec.kl_coefficient, spec.kind)
    rewards = token_rewards(
        scores, mask, kl, kl_coefficient=spec.kl_coefficient, given=batch.token_rewards
    )
    lam: float | Array = spec.lam
    if spec.length_alpha > 0:
        lam = length_lambda((mask > 0).sum(1), spec.length_alpha)
    advantages, returns = estimate(rewards, values, mask, spec.gamma, lam, spec.masking)
    lam_value = spec.lam if spec.lam_value is None else spec.lam_value
    _, returns = estimate(rewards, values, mask, spec.gamma, lam_value, spec.masking)
    if spec.whiten:
        advantages = whiten(
            advantages,
            mask,
            ddof=spec.whiten_ddof,
            eps=spec.whiten_eps,
            place=spec.whiten_eps_place,
        )
    live = mask > 0
    return AdvantageResult(
        advantages=np.where(live, advantages, 0.0).astype(np.float32),
        returns=np.where(live, returns, 0.0).astype(np.float32),
    )


def estimate(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    mask: npt.ArrayLike,
    gamma: float,
    lam: float | Array,
    masking: Masking = "carry",
) -> tuple[Array, Array]:
    """Advantages and returns (Schulman et al., GAE, 2015, equations 11 and 16)::

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}
        returns = A_t + V_t

    What lies after the last token has the value 0: a response has ended, or its end by length is
    taken for one. At a token off the mask, by `masking`::

        carry    A and V behind it pass through; the token before has them as its successors
        zero     r and V count as 0 there; gamma and lambda apply
        none     the mask is not looked at
        reset    the token before sees A = V = 0 there

    Args:
        rewards: `[N, T]`.
        values: `[N, T]`.
        mask: `[N, T]`.
        lam: lambda, one number or `[N]`.

    Returns:
        float64 `[N, T]` each; what stands off the mask is what the recursion had there.
    """
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    m = (np.asarray(mask) > 0).astype(np.float64)
    if masking == "zero":
        r, v = r * m, v * m
    advantages = np.zeros_like(r)
    running, following = np.zeros(len(r)), np.zeros(len(r))
    for t in reversed(range(r.shape[1])):
        step = r[:, t] + gamma * following - v[:, t] + gamma * lam * running
        live = m[:, t] > 0
        match masking:
            case "carry":
                advantages[:, t] = running = np.where(live, step, running)
                following = np.where(live, v[:, t], following)
            case "reset":
                advantages[:, t] = step
                running, following = step * m[:, t], v[:, t] * m[:, t]
            case _:
                advantages[:, t] = running = step
                following = v[:, t]
    return advantages, advantages + v


def length_lambda(lengths: npt.ArrayLike, alpha: float) -> Array:
    """lambda = 1 - 1 / (alpha l) for a response of l tokens (VAPO, 2025, section 4.2).

    Longer responses get a lambda nearer 1, so that the reward reaches their beginning. Where
    alpha * l is below 1, lambda is 0.

    Returns:
        float64 `[N]`, from 0 to 1.
    """
    return 1.0 - 1.0 / np.maximum(alpha * np.asarray(lengths, np.float64), 1.0)
