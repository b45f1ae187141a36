"""Losses: logprobs of response tokens in, one number a token out; and how those become one number.

Losses see response tokens only, end to end and without padding: every tensor is `[R]`. A loss
returns per-token values, which `aggregate` turns into the mini-batch's number with weights whose
denominators count the whole mini-batch. The sum over micro-batches of the aggregated parts is
therefore the aggregate of the whole, however the mini-batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from flowrl.specs.loss import Aggregation, CrossEntropy, LossSpec, PolicyClip

__all__ = [
    "TokenBatch",
    "TokenLoss",
    "aggregate",
    "cross_entropy",
    "policy_clip",
    "sample_weights",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What a loss may read beside the logprobs; float `[R]`, one value a response token."""

    advantages: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What a loss returns.

    Attributes:
        values: `[R]`, the loss of each token, with gradient.
        means: Metrics `[R]` without gradient; the mean over tokens is reported.
        maxima: Metrics `[R]` without gradient; the maximum is reported.
    """

    values: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)


def policy_clip(logprobs: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """The clipped policy-gradient objective, negated (Schulman et al., PPO, 2017, equation 7).

    With ratio = exp(logprob - behaviour logprob) and advantage A::

        L = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    Separate bounds are DAPO's clip-higher (Yu et al., 2025, equation 8). The log-ratio is not
    clamped (verl clamps it to 20). The derivative is 0 where the minimum takes the clipped term.

    Metrics: `ratio_mean`, `ratio_max`; `clip_fraction_low` and `clip_fraction_high`, the share of
    tokens whose gradient the lower and the upper bound removed; `approx_kl`, k3 of behaviour policy
    against the policy: (ratio - 1) - log ratio.
    """
    assert isinstance(spec, PolicyClip)
    advantages, behaviour = batch.advantages, batch.behaviour_logprobs
    if advantages is None or behaviour is None:
        raise ValueError("policy_clip needs advantages and behaviour_logprobs")
    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    plain_loss, clipped_loss = -advantages * ratio, -advantages * clipped
    removed = clipped_loss > plain_loss
    values = torch.where(removed, clipped_loss, plain_loss)
    with torch.no_grad():
        means = {
            "ratio_mean": ratio,
            "clip_fraction_low": removed & (ratio < 1),
            "clip_fraction_high": removed & (ratio > 1),
            "approx_kl": torch.expm1(log_ratio) - log_ratio,
        }
        means = {name: value.detach().to(logprobs.dtype) for name, value in means.items()}
    return TokenLoss(values=values, means=means, maxima={"ratio_max": ratio.detach()})


def cross_entropy(logprobs: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Negative log-likelihood: L = -logprob."""
    assert isinstance(spec, CrossEntropy)
    return TokenLoss(values=-logprobs)


def sample_weights(
    response_lengths: npt.ArrayLike, aggregation: Aggregation, *, max_tokens: int
) -> npt.NDArray[np.float64]:
    """The weight that each token of a sample has in the mini-batch's loss.

    Over S samples of n_i response tokens each, N in all::

        token-mean                  1 / N                  DAPO, 2025, equation 12
        sequence-mean-token-mean    1 / (S * n_i)          GRPO, DeepSeekMath, 2024, equation 3
        sequence-mean-token-sum     1 / S
        constant                    1 / (S * max_tokens)   Dr.GRPO, 2025, section 3.2

    Every sample counts in S, also one without response tokens (as in TRL, SkyRL and ROLL; verl and
    OpenRLHF leave such samples out).

    Args:
        response_lengths: int `[S]` of every sample of the mini-batch.
        max_tokens: Of the rollout; read by `constant`.

    Returns:
        float64 `[S]`; 0 for a sample without response tokens.

    Raises:
        ValueError: the mini-batch has no response token, or `constant` has no positive max_tokens.
    """
    n = np.asarray(response_lengths, np.float64)
    total = n.sum()
    if total <= 0:
        raise ValueError("a mini-batch without response tokens has no loss")
    if aggregation == "constant" and max_tokens <= 0:
        raise ValueError(f"constant aggregation needs max_tokens > 0, not {max_tokens}")
    present = (n > 0).astype(np.float64)
    weights: dict[Aggregation, npt.NDArray[np.float64]] = {
        "token-mean": present / total,
        "sequence-mean-token-mean": present / (len(n) * np.maximum(n, 1)),
        "sequence-mean-token-sum": present / len(n),
        "constant": present / (len(n) * max(max_tokens, 1)),
    }
    return weights[aggregation]


def aggregate(values: torch.Tensor, token_weights: torch.Tensor) -> torch.Tensor:
    """Sum of per-token losses times weights; all of `[R]`, the result a scalar.

    Args:
        token_weights: `sample_weights` of each token's sample.
    """
    return torch.dot(values, token_weights.to(values.dtype))
