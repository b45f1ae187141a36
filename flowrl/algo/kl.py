"""Estimators of the KL divergence between two policies from tokens that the first one sampled."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from flowrl.specs.kl import Estimator

__all__ = ["estimate", "full", "full_in_chunks"]

_CHUNK_ELEMENTS = 1 << 22
"""The number of logits per chunk, which bounds the temporary memory."""


def estimate(
    logprobs: torch.Tensor,
    other_logprobs: torch.Tensor,
    estimator: Estimator,
    *,
    clamp_input: float | None = None,
    clamp_output: float | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a per-token estimate of KL(policy || other), in the shape of the logprobs.

    With d = logprob - other logprob of the sampled token (Schulman, "Approximating KL divergence",
    2020; k3 is equation 4 of DeepSeekMath, 2024)::

        k1  = d                     gradient 1: as a loss it has expectation 0, see below
        abs = |d|                   sign(d), 0 at d = 0
        k2  = d^2 / 2               d: in expectation the gradient of KL(policy || other)
        k3  = exp(-d) - 1 + d       1 - exp(-d)

    Values are estimates of the divergence (k1 and k3 without bias, k2 with a small one). Gradients
    are the derivatives of these formulas; only that of k2 is the divergence's, for tokens sampled
    from the policy. Nothing is clamped by default, as in the papers; verl clamps d to 20 and k3 to
    10, OpenRLHF and AReaL clamp every result to 10. If a clamp acts, the gradient is 0. k3 is
    computed with `expm1`, so it is exact and non-negative for small d.

    Args:
        logprobs: The policy's logprobs of the tokens.
        other_logprobs: The other policy's logprobs of the same tokens.
        estimator: The estimator.
        clamp_input: The bound to which |d| is clamped; None for no clamp.
        clamp_output: The bound to which |result| is clamped, after weights; None for no clamp.
        weights: The factors of the tokens. With policy / behaviour policy *not* detached, the
            weighted k3 is an unbiased estimate under samples of another policy and so is its
            gradient (DeepSeek-V3.2, 2025, section 3.1).
    """
    d = logprobs - other_logprobs
    if clamp_input is not None:
        d = d.clamp(-clamp_input, clamp_input)
    result: torch.Tensor = _ESTIMATORS[estimator](d)
    if weights is not None:
        result = weights * result
    return result if clamp_output is None else result.clamp(-clamp_output, clamp_output)


_ESTIMATORS = {
    "k1": lambda d: d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1(-d) + d,
}


def full(logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """Returns the exact KL(policy || other) of the whole distributions of next tokens.

    ::

        KL = sum over v of p(v) (log p(v) - log q(v))

    Tokens whose probability under the policy is 0 (logit -inf) add nothing.

    Args:
        logits: `[R, V]`, the policy's logits at the rollout's temperature.
        other_logits: `[R, V]`, the other policy's logits at the same temperature.

    Returns:
        `[R]`.
    """
    p, q = logits.log_softmax(-1), other_logits.log_softmax(-1)
    # Where p is 0, the gap is replaced and not its product with p, whose gradient would be NaN.
    gap = torch.where(p == -torch.inf, 0.0, p - q)
    return (p.exp() * gap).sum(-1)


def full_in_chunks(
    logits: torch.Tensor, other_logprobs: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Returns `full` of logits / temperature, in float32 and in chunks of rows.

    The backward pass recomputes each chunk, so apart from the arguments only the gradient of the
    logits is ever in memory as a whole.

    Args:
        logits: `[K, V]`, the policy's logits.
        other_logprobs: `[K, V]`, the other policy's logprobs at the same temperature.
        temperature: The divisor of the logits; 0 means greedy decoding, with the distribution at 1.

    Returns:
        `[K]`.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0

    def divergence(part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        wide = part if part.dtype == torch.float64 else part.float()
        return full(wide * scale, other)

    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    parts = zip(torch.split(logits, size), torch.split(other_logprobs, size), strict=True)
    return torch.cat(
        [
            checkpoint(divergence, part, other, use_reentrant=False, preserve_rng_state=False)
            for part, other in parts
        ]
    )
