"""Surrogates that bound the ratio of the policy to its anchor: PPO, GSPO, GMPO, SAPO, DPPO.

Notation: r_t = exp(logprob_t - anchor logprob_t), A_t the advantage, sg(x) x without gradient; the
anchor and A carry no gradient anywhere.
"""

from __future__ import annotations

import torch

from flowrl.algo.losses import PolicyStep, TokenLoss, policy_loss
from flowrl.specs.loss import DPPO, GMPO, SAPO, PolicyClip

__all__ = ["dppo", "gmpo", "policy_clip", "sapo"]


@policy_loss(PolicyClip)
def policy_clip(step: PolicyStep, spec: PolicyClip) -> TokenLoss:
    """The clipped policy-gradient objective, negated (Schulman et al., PPO, 2017, equation 7).

    ::

        L = max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))

    Separate bounds are DAPO's clip-higher (Yu et al., 2025, equation 8). The derivative is 0 where
    the maximum takes the clipped term. Further choices:

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


@policy_loss(GMPO)
def gmpo(step: PolicyStep, spec: GMPO) -> TokenLoss:
    """Geometric-mean policy optimization (Zhao et al., arXiv 2507.20673).

    With the sign s_t of A_t and the mean over a sample's tokens::

        l_t = s_t * min(s_t * log r_t, s_t * clip(log r_t, -clip_low, clip_high))
        L = -mean(A) * exp(mean(l))

    the same number at each token of a sample, so that `sequence-mean-token-mean` is the paper's
    mean over samples.

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


@policy_loss(SAPO)
def sapo(step: PolicyStep, spec: SAPO) -> TokenLoss:
    """Soft adaptive policy optimization (Gao et al., arXiv 2511.20347, equations 5 and 6).

    ::

        L = -A * sigmoid(tau * (r - 1)) * 4 / tau     tau = tau_positive where A > 0,
                                                            tau_negative elsewhere

    whose slope in r is -A at r = 1, and fades on both sides without a kink.
    """
    ratio = step.ratio(spec.ratio)
    tau = torch.where(step.advantages > 0, spec.tau_positive, spec.tau_negative).to(ratio.dtype)
    return TokenLoss(values=-step.advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau))


@policy_loss(DPPO)
def dppo(step: PolicyStep, spec: DPPO) -> TokenLoss:
    """Divergence proximal policy optimization with binary total variation (arXiv 2602.04879).

    With p = exp(logprob) and q = exp(anchor logprob)::

        L = -A * r, or 0 where A > 0 and p - q > limit, or A < 0 and p - q < -limit

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
