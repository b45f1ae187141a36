"""Estimators of the KL divergence between two policies from tokens that the first one drew."""

from __future__ import annotations

import torch

from flowrl.specs.kl import Estimator

__all__ = ["estimate"]


def estimate(
    logprobs: torch.Tensor, other_logprobs: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """Per-token estimate of KL(policy || other), of the shape of its arguments.

    With d = logprob - other logprob of the drawn token (Schulman, "Approximating KL divergence",
    2020; k3 is equation 4 of DeepSeekMath, 2024)::

        k1 = d
        k2 = d^2 / 2
        k3 = exp(-d) - 1 + d

    Nothing is clamped, as in the papers; verl clamps d to 20 and k3 to 10, where the gradient is
    then 0. k3 is computed with `expm1`, so it stays exact and non-negative for small d.
    """
    d = logprobs - other_logprobs
    result: torch.Tensor = _ESTIMATORS[estimator](d)
    return result


_ESTIMATORS = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1(-d) + d,
}
