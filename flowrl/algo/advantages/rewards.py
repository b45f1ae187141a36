"""Several rewards a sample: their weighted sum, or each normalised first. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, field_of
from flowrl.algo.advantages.group import standardise
from flowrl.specs.advantage import AdvantageSpec, GroupRelative, NormaliseThenSum

__all__ = ["normalise_then_sum", "weighted_sum"]

Array = npt.NDArray[np.float64]


def weighted_sum(rewards: npt.ArrayLike, weights: npt.ArrayLike) -> Array:
    """Sum of weight times reward, over the rewards that a sample has.

    Args:
        rewards: `[N, K]`; NaN where a reward does not apply to a sample.
        weights: `[K]`.

    Returns:
        float64 `[N]`; NaN for a sample without any reward.
    """
    r, w = np.asarray(rewards, np.float64), np.asarray(weights, np.float64)
    if r.ndim != 2 or w.shape != r.shape[1:]:
        raise ValueError(f"rewards {r.shape} must be [N, K] and weights {w.shape} [K]")
    none = np.isnan(r).all(1)
    return np.where(none, np.nan, np.nansum(r * w, axis=1))


def normalise_then_sum(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """GDPO (Liu et al., "Group reward-Decoupled Normalization Policy Optimization", 2026)::

        A_ik = (r_ik - mean_g r_k) / (std_g r_k + eps)      each reward by itself
        S_i  = sum_k w_k A_ik
        A_i  = (S_i - mean S) / (std S + batch_eps)         over the batch

    A reward that does not apply to a sample (NaN) takes no part in the mean and deviation of its
    group and adds nothing to the sample's sum; a sample without any reward takes no part in the
    batch's either, and gets 0.

    All rewards weigh 1 where the specification does not say otherwise.

    Raises:
        ValueError: another number of weights than of rewards.
    """
    assert isinstance(spec, NormaliseThenSum)
    rewards = field_of(batch, "rewards", spec.kind)
    weights = np.array(spec.weights or (1.0,) * rewards.shape[1])
    groups = np.asarray(batch.groups)
    each = GroupRelative(
        std=spec.std,
        ddof=spec.ddof,
        eps=spec.eps,
        mean=spec.mean,
        singleton=spec.singleton,
        zero_std=spec.zero_std,
    )
    parts = np.full(rewards.shape, np.nan)
    for k in range(rewards.shape[1]):
        has = ~np.isnan(rewards[:, k])
        parts[has, k] = standardise(rewards[has, k], groups[has], each)
    total = weighted_sum(parts, weights)
    has = ~np.isnan(total)
    whole = GroupRelative(mean="batch", std="batch", ddof=spec.ddof, eps=spec.batch_eps)
    advantages = np.zeros(len(rewards))
    advantages[has] = standardise(total[has], groups[has], whole)
    return AdvantageResult(advantages=advantages.astype(np.float32))
