"""Filters: which groups reach the update. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.specs.filters import ZeroVariance

__all__ = ["zero_variance"]


def zero_variance(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: ZeroVariance
) -> npt.NDArray[np.bool_]:
    """Keeps the samples of groups whose scores differ (dynamic sampling: DAPO, 2025, section 3.2).

    A group is kept where max - min > tolerance. DAPO's condition, 0 < number correct < group size,
    is the same for scores of 0 and 1. A group of one has no spread and is not kept.

    Args:
        scores: `[N]`, one score a sample.
        groups: `[N]` integers; samples with equal numbers form a group, adjacent or not.

    Returns:
        bool `[N]`, true for samples that stay.
    """
    r = np.asarray(scores, np.float64)
    g = np.asarray(groups)
    if r.ndim != 1 or r.shape != g.shape:
        raise ValueError(f"scores {r.shape} and groups {g.shape} must be [N] alike")
    if not len(r):
        return np.zeros(0, np.bool_)
    _, number = np.unique(g, return_inverse=True)
    high = np.full(int(number.max()) + 1, -np.inf)
    low = -high
    np.maximum.at(high, number, r)
    np.minimum.at(low, number, r)
    return np.asarray((high - low > spec.tolerance)[number], np.bool_)
