"""Surrogates that weigh the policy gradient: L = -sg(weight) * A * logprob, and what is added.

Notation: r_t = exp(logprob_t - anchor logprob_t), A_t the advantage, sg(x) x without gradient; the
anchor and A carry no gradient anywhere. The weight is all that REINFORCE, CISPO, TOPR and VESPO
differ in.
"""

from __future__ import annotations

from typing import Literal

import torch

from flowrl.algo.corrections import within
from flowrl.algo.losses import PolicyStep, TokenLoss, policy_loss
from flowrl.algo.mini_batch import most_covariant
from flowrl.specs.loss import CISPO, TOPR, VESPO, Kimi, KLCov, Reinforce

__all__ = ["cispo", "kimi", "kl_cov", "reinforce", "topr", "vespo"]


@policy_loss(Reinforce)
def reinforce(step: PolicyStep, spec: Reinforce) -> TokenLoss:
    """The plain policy gradient: L = -A * logprob (Williams, 1992; GPG, arXiv 2504.02546)."""
    return TokenLoss(values=-step.advantages * step.logprobs)


@policy_loss(CISPO)
def cispo(step: PolicyStep, spec: CISPO) -> TokenLoss:
    """Clipped importance-sampling weights (CISPO; MiniMax-M1, arXiv 2506.13585).

    ::

        L = -sg(clip(r, ratio_low, ratio_high)) * A * logprob

    where r is the sample's geometric mean with `ratio="sequence"`. With `outside="zero"`, the
    weight is 0 outside the bounds and nothing is clipped: masked importance sampling, whatever the
    sign of A.

    Metrics: `clip_fraction_low`, `clip_fraction_high`: the share of tokens (with
    `ratio="sequence"`, of samples) whose ratio lies below and above.
    """
    with torch.no_grad():
        ratio = step.ratio(spec.ratio)
        weight = within(ratio, spec.ratio_low, spec.ratio_high, spec.outside)
        high = spec.ratio_high
        below = ratio < spec.ratio_low
        above = torch.zeros_like(below) if high is None else ratio > high
        means = {
            "ratio_mean": step.measured(ratio, spec.ratio),
            "clip_fraction_low": step.measured(below, spec.ratio),
            "clip_fraction_high": step.measured(above, spec.ratio),
        }
    return TokenLoss(values=-weight * step.advantages * step.logprobs, means=means)


@policy_loss(TOPR)
def topr(step: PolicyStep, spec: TOPR) -> TokenLoss:
    """Tapered off-policy REINFORCE (Le Roux et al., arXiv 2503.14286).

    ::

        L = -sg(clip(w, positive_low, positive_high)) * A * logprob   where A >= 0
        L = -sg(clip(w, negative_low, negative_high)) * A * logprob   elsewhere

    with w = exp(sum over the sample of log r_t), or r_t with `level="token"`. At the paper's bounds
    positive samples have weight 1, as in supervised fine-tuning, and negative ones at most 1.

    Metrics: `taper_mean`, the mean weight, over samples or with `level="token"` over tokens.
    """
    with torch.no_grad():
        log_ratio = _at_level(step, step.clamped(step.gap), spec.level)
        ratio = log_ratio.exp()
        weight = torch.where(
            step.advantages >= 0,
            ratio.clamp(spec.positive_low, spec.positive_high),
            ratio.clamp(spec.negative_low, spec.negative_high),
        )
    return TokenLoss(
        values=-weight * step.advantages * step.logprobs,
        means={"taper_mean": step.measured(weight, spec.level)},
    )


@policy_loss(VESPO)
def vespo(step: PolicyStep, spec: VESPO) -> TokenLoss:
    """Variational sequence-level soft policy optimization (Shen et al., arXiv 2602.10693).

    With w = exp(sum over the sample of log r_t), and k and lambda by the sign of A::

        phi = w^k * exp(lambda * (1 - w))
        L = -sg(phi) * A * logprob

    so that phi = 1 on policy, and 0 where w goes to 0 or to infinity.

    Metrics: `phi_mean`, over samples.
    """
    with torch.no_grad():
        log_weight = step.segments.sums(step.clamped(step.gap))
        positive = step.advantages >= 0
        shape = torch.where(positive, spec.k_positive, spec.k_negative).to(log_weight.dtype)
        rate = torch.where(positive, spec.lambda_positive, spec.lambda_negative)
        # expm1 of a large log-weight is infinite and phi then 0, as it should be.
        log_phi = shape * log_weight - rate.to(log_weight.dtype) * torch.expm1(log_weight)
        phi = log_phi.exp().nan_to_num(nan=0.0, posinf=0.0)
    return TokenLoss(
        values=-phi * step.advantages * step.logprobs,
        means={"phi_mean": step.measured(phi, "sequence")},
    )


@policy_loss(KLCov)
def kl_cov(step: PolicyStep, spec: KLCov) -> TokenLoss:
    """A KL penalty on the tokens of largest covariance (Cui et al., arXiv 2505.22617).

    ::

        L = -A * r + [penalised] * coefficient * |logprob - anchor logprob|

    The max(1, floor(fraction * N)) tokens of the mini-batch are penalised whose
    (A - mean A) * (logprob - mean logprob) is largest; the choice carries no gradient.

    Metrics: `penalised_fraction`.
    """
    gap = step.clamped(step.gap)
    penalised = step.batch.penalised
    if penalised is None:
        penalised = most_covariant(step.logprobs, step.advantages, spec.fraction)
    penalty = spec.coefficient * gap.abs()
    values = -step.advantages * gap.exp() + torch.where(
        penalised, penalty, torch.zeros_like(penalty)
    )
    return TokenLoss(values=values, means={"penalised_fraction": penalised.to(values.dtype)})


@policy_loss(Kimi)
def kimi(step: PolicyStep, spec: Kimi) -> TokenLoss:
    """Policy mirror descent with a squared log-ratio (Kimi k1.5, arXiv 2501.12599, section 2.3).

    With the log-ratio D = sum over the sample's n tokens of log r_t::

        L = -A * logprob + (tau / 2) * D^2 / n

    so that `sequence-mean-token-sum` gives the paper's -A * log pi(y) + (tau / 2) * D^2 for each
    sample. With `level="token"`, D^2 / n is the token's own (log r_t)^2.
    """
    gap = step.clamped(step.gap)
    if spec.level == "token":
        square = gap.square()
    else:
        segments = step.segments
        square = segments.sums(gap).square() / segments.lengths(gap)
    return TokenLoss(values=-step.advantages * step.logprobs + 0.5 * spec.tau * square)


def _at_level(
    step: PolicyStep, log_ratio: torch.Tensor, level: Literal["sequence", "token"]
) -> torch.Tensor:
    return log_ratio if level == "token" else step.segments.sums(log_ratio)
