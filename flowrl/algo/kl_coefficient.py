"""A KL coefficient that follows the measured divergence. No tensors: one number a step."""

from __future__ import annotations

from flowrl.specs.kl import AdaptiveKL

__all__ = ["adapted"]


def adapted(coefficient: float, kl: float, samples: int, spec: AdaptiveKL) -> float:
    """The coefficient after `samples` samples with the mean divergence `kl`.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2, with
    the gain written as samples / horizon::

        e     = clip(kl / target - 1, -clip, clip)
        beta' = beta (1 + e samples / horizon)

    Args:
        coefficient: Of the step that was measured, beta.
        kl: Mean of the penalty's estimate over the response tokens of the step, as an update
            reports it under `kl`; of one that is no number, nothing comes but NaN.
        samples: That the step trained on.

    Raises:
        ValueError: target or horizon is not above 0.
    """
    if spec.target <= 0 or spec.horizon <= 0:
        raise ValueError(f"target {spec.target} and horizon {spec.horizon} must be above 0")
    error = min(max(kl / spec.target - 1.0, -spec.clip), spec.clip)
    return coefficient * (1.0 + error * samples / spec.horizon)
