"""A KL coefficient that follows the measured divergence. No tensors: one number a step."""

from __future__ import annotations

import math

from flowrl.specs.kl import KL, AdaptiveKL

__all__ = ["adapted", "next_coefficient"]


def next_coefficient(spec: KL, coefficient: float, measured_kl: float, num_samples: int) -> float:
    """The coefficient of the next step; the same where the penalty has no target.

    Args:
        spec: The penalty; its own coefficient is that of the first step.
        coefficient: Of the step that was measured.
        measured_kl: Mean of `spec`'s estimate over the response tokens of the step, as an update
            reports it under `kl`.
        num_samples: That the step trained on.

    Raises:
        ValueError: the divergence is not finite.
    """
    rule = spec.adaptive
    if rule is None:
        return coefficient
    if not math.isfinite(measured_kl):
        raise ValueError(f"a KL of {measured_kl} steers no coefficient")
    return adapted(coefficient, measured_kl, num_samples, rule)


def adapted(coefficient: float, kl: float, samples: int, spec: AdaptiveKL) -> float:
    """The coefficient after `samples` samples with the mean divergence `kl`.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2, with
    the gain written as samples / horizon::

        e     = clip(kl / target - 1, -clip, clip)
        beta' = beta (1 + e samples / horizon)

    Raises:
        ValueError: target or horizon is not above 0.
    """
    if spec.target <= 0 or spec.horizon <= 0:
        raise ValueError(f"target {spec.target} and horizon {spec.horizon} must be above 0")
    error = min(max(kl / spec.target - 1.0, -spec.clip), spec.clip)
    return coefficient * (1.0 + error * samples / spec.horizon)
