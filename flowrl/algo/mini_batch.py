"""What some losses must know of a whole mini-batch before its micro-batches are computed.

Two choices need it: normalised importance weights, whose mean is taken over the mini-batch, and
KL-Cov, which ranks all its tokens. `prepare` finds both, so that micro-batches add up to the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from flowrl.algo.losses import TokenBatch, given, policy_weights
from flowrl.specs.loss import KLCov, LossSpec, PolicyLoss

__all__ = ["most_covariant", "prepare", "prepares"]


def prepares(spec: LossSpec) -> Literal["nothing", "batch", "logprobs"]:
    """What `prepare` reads for a loss: nothing, fields of the batch, or the logprobs too."""
    if isinstance(spec, KLCov):
        return "logprobs"
    return "batch" if isinstance(spec, PolicyLoss) and spec.weights_normalise else "nothing"


def prepare(logprobs: torch.Tensor | None, batch: TokenBatch, spec: LossSpec) -> TokenBatch:
    """The whole mini-batch, with what its micro-batches have to know of it.

    Args:
        logprobs: `[N]` of the policy before the update, without gradient; read where
            `prepares(spec)` is `logprobs`.
        batch: All N response tokens of the mini-batch.

    With data parallelism both must be the whole mini-batch's, of all ranks.

    Returns:
        The batch with `weight_scale` and `penalised`, which a micro-batch takes its part of.
    """
    if isinstance(spec, PolicyLoss) and spec.weights_normalise:
        weights = policy_weights(batch, replace(spec, weights_normalise=False))
        assert weights is not None
        batch = replace(batch, weight_scale=1 / weights.mean())
    if isinstance(spec, KLCov):
        if logprobs is None:
            raise ValueError("kl_cov ranks all tokens of a mini-batch by their logprobs")
        chosen = most_covariant(logprobs, given(batch, "advantages", spec.kind), spec.fraction)
        batch = replace(batch, penalised=chosen)
    return batch


def most_covariant(
    logprobs: torch.Tensor, advantages: torch.Tensor, fraction: float
) -> torch.Tensor:
    """bool `[N]`, the max(1, floor(fraction * N)) tokens whose logprob and advantage covary most.

    The covariance of a token is (A - mean A) * (logprob - mean logprob), means over all N.
    """
    with torch.no_grad():
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        if len(covariance):
            count = min(len(covariance), max(1, int(fraction * len(covariance))))
            chosen[covariance.topk(count).indices] = True
        return chosen
