"""The divergence of two policies, from logprobs of tokens that the first one sampled.

`estimate` is an estimator a token, `mismatch` the metrics of a step, `adapted` the next coefficient
of a penalty. The module works without torch; `flowrl.algo.logprobs` computes the exact divergence
of whole distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from flowrl.specs.kl import KL, Estimator

if TYPE_CHECKING:
    import torch

Values = TypeVar("Values", "torch.Tensor", npt.NDArray[np.float64])


def estimate(
    logprobs: Values,
    other_logprobs: Values,
    estimator: Estimator,
    *,
    clamp_input: float | None = None,
    clamp_output: float | None = None,
) -> Values:
    """Returns a per-token estimate of KL(policy || other), in the shape of the logprobs.

    With d = logprob - other logprob of the sampled token (Schulman, "Approximating KL divergence",
    2020; k3 is equation 4 of DeepSeekMath, 2024)::

        k1  = d                     gradient 1: as a loss it has expectation 0, see below
        abs = |d|                   sign(d), 0 at d = 0
        k2  = d^2 / 2               d: in expectation the gradient of KL(policy || other)
        k3  = exp(-d) - 1 + d       1 - exp(-d)

    Values are estimates of the divergence (k1 and k3 without bias, k2 with a small one). Gradients
    are the derivatives of these formulas; only that of k2 is the divergence's, for tokens sampled
    from the policy. Under samples of another policy, k3 times policy / that policy, *not* detached,
    has no bias, and neither has its gradient (DeepSeek-V3.2, 2025, section 3.1). Nothing is clamped
    by default, as in the papers; verl clamps d to 20 and k3 to 10, OpenRLHF and AReaL clamp every
    result to 10. If a clamp acts, the gradient is 0. k3 is computed with `expm1`, so it is exact
    and non-negative for small d.

    Args:
        logprobs: The policy's logprobs of the tokens, torch or numpy.
        other_logprobs: The other policy's logprobs of the same tokens.
        estimator: The estimator.
        clamp_input: The bound to which |d| is clamped; None for no clamp.
        clamp_output: The bound to which |result| is clamped; None for no clamp.
    """
    d: Any = logprobs - other_logprobs
    if clamp_input is not None:
        d = d.clip(-clamp_input, clamp_input)
    expm1: Callable[[Any], Any] = np.expm1 if isinstance(d, np.ndarray) else type(d).expm1
    match estimator:
        case "k1":
            result = d
        case "abs":
            result = abs(d)
        case "k2":
            result = 0.5 * d**2
        case "k3":
            result = expm1(-d) + d
    kl: Values = result if clamp_output is None else result.clip(-clamp_output, clamp_output)
    return kl


QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""The reported quantiles of the token ratios."""

_LARGEST = 700.0
"""The bound to which log-ratios are clamped before they are exponentiated, so that metrics stay
finite."""


def mismatch(
    trainer_logprobs: npt.ArrayLike, behaviour_logprobs: npt.ArrayLike, samples: npt.ArrayLike
) -> dict[str, float]:
    """Returns metrics of the gap between the trainer's policy and the one that sampled the tokens.

    With d = trainer logprob - behaviour logprob at each of R response tokens, and D its sum over
    each sample::

        mismatch/k1               mean of -d              estimates KL(behaviour || trainer)
        mismatch/k3               mean of exp(d) - 1 - d  the same, never negative
        mismatch/abs_mean         mean of |d|
        mismatch/abs_max          largest |d|
        mismatch/prob_abs_mean    mean of |p_trainer - p_behaviour|, of probabilities
        mismatch/prob_abs_max     the largest
        mismatch/ratio_q01 ...    quantiles of exp(d) (linear interpolation)
        mismatch/ratio_min, _max  extremes of exp(d)
        mismatch/ess              (sum of w)^2 / (R * sum of w^2), w = exp(d): 1 without mismatch
        mismatch/sequence_k1      mean over samples of -D
        mismatch/sequence_ess     the effective sample size of exp(D), as a share of the samples

    Arguments are `[R]`, the samples equal for tokens of one sample. Without tokens there are no
    metrics.
    """
    new = np.asarray(trainer_logprobs, np.float64)
    old = np.asarray(behaviour_logprobs, np.float64)
    _, number = np.unique(np.asarray(samples), return_inverse=True)
    if not new.shape == old.shape == number.shape or new.ndim != 1:
        raise ValueError(f"logprobs {new.shape}, {old.shape} and samples {number.shape} differ")
    if not len(new):
        return {}
    d = new - old
    ratio = np.exp(np.clip(d, -_LARGEST, _LARGEST))
    moved = np.abs(np.exp(new) - np.exp(old))
    by_sample = np.bincount(number, weights=d).astype(np.float64)
    metrics = {
        "k1": -d.mean(),
        "k3": (np.expm1(np.clip(d, -_LARGEST, _LARGEST)) - d).mean(),
        "abs_mean": np.abs(d).mean(),
        "abs_max": np.abs(d).max(),
        "prob_abs_mean": moved.mean(),
        "prob_abs_max": moved.max(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ess": _effective_share(d),
        "sequence_k1": -by_sample.mean(),
        "sequence_ess": _effective_share(by_sample),
    }
    for share, value in zip(QUANTILES, np.quantile(ratio, QUANTILES), strict=True):
        metrics[f"ratio_q{round(100 * share):02d}"] = value
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def _effective_share(log_weights: npt.NDArray[np.float64]) -> float:
    """Returns (sum w)^2 / (n sum w^2), with the weights scaled so that the largest is 1."""
    w = np.exp(log_weights - log_weights.max())
    return float(w.sum() ** 2 / (len(w) * np.square(w).sum()))


def adapted(coefficient: float, kl: float, samples: int, spec: KL) -> float:
    """Returns the coefficient after `samples` samples with the mean divergence `kl`.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2, with
    the gain written as samples / horizon::

        e     = clip(kl / target - 1, -step_clip, step_clip)
        beta' = beta (1 + e samples / horizon)

    Args:
        coefficient: The coefficient beta of the measured step.
        kl: The mean of the penalty's estimate over the response tokens of the step, which an update
            reports as the metric `kl`. If it is NaN, the result is NaN.
        samples: The number of samples in the step.
        spec: The penalty, with its target, horizon and bound.
    """
    if spec.target is None or spec.target <= 0 or spec.horizon <= 0:
        raise ValueError(f"target {spec.target} and horizon {spec.horizon} must be above 0")
    error = min(max(kl / spec.target - 1.0, -spec.step_clip), spec.step_clip)
    return coefficient * (1.0 + error * samples / spec.horizon)
