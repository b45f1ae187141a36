"""Surrogates of policy losses: those that bound the ratio, then those that weigh the gradient.

PPO, GSPO, GMPO, SAPO and DPPO bound the ratio of the policy to its anchor. REINFORCE, CISPO, TOPR
and VESPO have L = -sg(weight) * A * logprob and differ in the weight alone; KL-Cov and Kimi add a
penalty.

Notation: r_t = exp(logprob_t - anchor logprob_t), A_t the advantage, sg(x) x without gradient; the
anchor and A never carry a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

from flowrl.algo.corrections import within
from flowrl.algo.losses import PolicyStep, TokenLoss, most_covariant, policy_loss
from flowrl.specs.loss import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    TOPR,
    VESPO,
    Kimi,
    KLCov,
    PolicyClip,
    Reinforce,
)


@policy_loss
def policy_clip(step: PolicyStep, spec: PolicyClip) -> TokenLoss:
    """Computes the negative clipped objective (Schulman et al., PPO, 2017, equation 7).

    ::

        L = max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))

    Separate bounds are DAPO's clip-higher (Yu et al., 2025, equation 8). The derivative is 0 if the
    maximum is the clipped term. Further choices:

    - `dual_clip=c`: L = min(L, -A * c) where A < 0 (Ye et al., arXiv 1912.09729).
    - `ratio_cap=d`: r becomes min(r, d) in the first term (INTELLECT-2, arXiv 2505.07291).
    - `ratio="sequence"`: r is s = exp(mean over the sample of log r_t), the gradient that of s
      (GSPO; Zheng et al., arXiv 2507.18071, equations 5 and 7).
    - `ratio="sequence-token"`: r_t = sg(s) * exp(logprob_t - sg(logprob_t)): the value of s, while
      each token's gradient carries its own A_t (GSPO-token, equation 14).
    - `average_advantages`: A is its mean over the sample (AReaL with sequence ratios).

    The log-ratio is not clamped by default (verl, SkyRL and OpenRLHF clamp it to 20, where the
    gradient is then 0).

    Metrics: `clip_fraction_low` and `clip_fraction_high`, the share of tokens whose gradient the
    lower and the upper bound removed; `dual_clip_fraction`, where the dual clip did. With
    `ratio="sequence"` they are shares of samples, as in TRL: each sample counts once.
    """
    ratio = step.ratio(spec.ratio)
    advantages = step.segments.means(step.advantages) if spec.average_advantages else None
    advantages = step.advantages if advantages is None else advantages
    capped = ratio if spec.ratio_cap is None else ratio.clamp(max=spec.ratio_cap)
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    plain_loss, clipped_loss = -advantages * capped, -advantages * clipped
    removed = clipped_loss > plain_loss
    values = torch.where(removed, clipped_loss, plain_loss)
    acted = {
        "clip_fraction_low": removed & (ratio < 1),
        "clip_fraction_high": removed & (ratio > 1),
    }
    if spec.dual_clip is not None:
        bound = -advantages * spec.dual_clip
        above = (advantages < 0) & (values > bound)
        values = torch.where(above, bound, values)
        acted["dual_clip_fraction"] = above
    measured = {name: step.measured(tokens, spec.ratio) for name, tokens in acted.items()}
    return TokenLoss(
        values=values,
        means={"ratio_mean": step.measured(ratio, spec.ratio), **measured},
        maxima={"ratio_max": ratio.detach()},
    )


@policy_loss
def gmpo(step: PolicyStep, spec: GMPO) -> TokenLoss:
    """Geometric-mean policy optimization (Zhao et al., arXiv 2507.20673).

    With the sign s_t of A_t and the mean over a sample's tokens::

        l_t = s_t * min(s_t * log r_t, s_t * clip(log r_t, -clip_low, clip_high))
        L = -mean(A) * exp(mean(l))

    This is the same number at each token of a sample, so that `sequence-mean-token-mean` is the
    paper's mean over samples.

    Metrics: `clip_fraction_low`, `clip_fraction_high`: tokens of negative and of positive advantage
    whose log-ratio lies outside the bounds.
    """
    log_ratio = step.clamped(step.gap)
    sign = step.advantages.sign()
    clipped = log_ratio.clamp(-spec.clip_low, spec.clip_high)
    bounded = sign * torch.minimum(sign * log_ratio, sign * clipped)
    segments = step.segments
    values = -segments.means(step.advantages) * segments.means(bounded).exp()
    outside = (log_ratio != clipped).detach()
    means = {
        "clip_fraction_low": (outside & (sign < 0)).to(values.dtype),
        "clip_fraction_high": (outside & (sign > 0)).to(values.dtype),
    }
    return TokenLoss(values=values, means=means)


@policy_loss
def sapo(step: PolicyStep, spec: SAPO) -> TokenLoss:
    """Soft adaptive policy optimization (Gao et al., arXiv 2511.20347, equations 5 and 6).

    ::

        L = -A * sigmoid(tau * (r - 1)) * 4 / tau     tau = tau_positive if A > 0,
                                                            else tau_negative

    The slope in r is -A at r = 1, and decreases on both sides without a kink.
    """
    ratio = step.ratio(spec.ratio)
    tau = torch.where(step.advantages > 0, spec.tau_positive, spec.tau_negative).to(ratio.dtype)
    return TokenLoss(values=-step.advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau))


@policy_loss
def dppo(step: PolicyStep, spec: DPPO) -> TokenLoss:
    """Divergence proximal policy optimization with binary total variation (arXiv 2602.04879).

    With p = exp(logprob) and q = exp(anchor logprob)::

        L = -A * r, or 0 if A > 0 and p - q > limit, or A < 0 and p - q < -limit

    The mask carries no gradient. Metrics: `clip_fraction_low`, `clip_fraction_high`.
    """
    values = -step.advantages * step.clamped(step.gap).exp()
    with torch.no_grad():
        moved = step.logprobs.exp() - step.anchor.exp()
        high = (step.advantages > 0) & (moved > spec.limit)
        low = (step.advantages < 0) & (moved < -spec.limit)
        means = {"clip_fraction_low": low, "clip_fraction_high": high}
    return TokenLoss(
        values=torch.where(low | high, torch.zeros_like(values), values),
        means={name: value.to(values.dtype) for name, value in means.items()},
    )


@policy_loss
def reinforce(step: PolicyStep, spec: Reinforce) -> TokenLoss:
    """Computes the plain policy gradient: L = -A * logprob (Williams, 1992; GPG, 2504.02546)."""
    return TokenLoss(values=-step.advantages * step.logprobs)


@policy_loss
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


@policy_loss
def topr(step: PolicyStep, spec: TOPR) -> TokenLoss:
    """Tapered off-policy REINFORCE (Le Roux et al., arXiv 2503.14286).

    ::

        L = -sg(clip(w, positive_low, positive_high)) * A * logprob   if A >= 0
        L = -sg(clip(w, negative_low, negative_high)) * A * logprob   else

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


@policy_loss
def vespo(step: PolicyStep, spec: VESPO) -> TokenLoss:
    """Variational sequence-level soft policy optimization (Shen et al., arXiv 2602.10693).

    With w = exp(sum over the sample of log r_t), and k and lambda by the sign of A::

        phi = w^k * exp(lambda * (1 - w))
        L = -sg(phi) * A * logprob

    so that phi = 1 on policy, and goes to 0 if w goes to 0 or to infinity.

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


@policy_loss
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


@policy_loss
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
