"""Filters: which groups reach the update. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.partition import Partition
from flowrl.specs.filters import Difficulty, FilterSpec, ZeroVariance

__all__ = ["difficulty", "zero_variance"]


def zero_variance(
    scores: npt.ArrayLike,
    groups: npt.ArrayLike,
    spec: FilterSpec,
    live: npt.ArrayLike | None = None,
) -> npt.NDArray[np.bool_]:
    """Keeps the samples of groups whose scores differ (dynamic sampling: DAPO, 2025, section 3.2).

    A group is kept where max - min > tolerance, or with `measure="std"` where the standard
    deviation is. DAPO's condition, 0 < number correct < group size, is the same for scores of 0 and
    1. A group of equal scores has the deviation 0 whatever rounding does. A group of one has no
    spread and is not kept, unless `singleton="keep"`.

    Args:
        scores: `[N]`, one score a sample.
        groups: `[N]` integers; samples with equal numbers form a group, adjacent or not.
        live: `[N]`, true for samples that carry a loss; only their scores are compared, and a group
            with at most one of them counts as a group of one. All, if not given.

    Returns:
        bool `[N]`, true for samples that stay; a group stays or goes as a whole.
    """
    assert isinstance(spec, ZeroVariance)
    r, g = _pair(scores, groups)
    if not len(r):
        return np.zeros(0, np.bool_)
    counted = np.ones(len(r), np.bool_) if live is None else np.asarray(live, np.bool_)
    _, number = np.unique(g, return_inverse=True)
    size = int(number.max()) + 1
    stays = np.full(size, spec.singleton == "keep")
    if counted.any():
        part = Partition.of(number[counted])
        chosen = r[counted]
        if spec.measure == "spread":
            low, high = part.extremes(chosen)
            differs = high - low > spec.tolerance
        else:
            deviation = np.zeros(len(part.size))
            deviation[part.number] = np.sqrt(part.variance(chosen, spec.ddof))
            differs = deviation > spec.tolerance
        present = np.unique(number[counted])
        several = part.size > 1
        stays[present[several]] = differs[several]
    return np.asarray(stays[number], np.bool_)


def difficulty(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: FilterSpec
) -> npt.NDArray[np.bool_]:
    """Keeps the samples of groups with low < mean score < high.

    For scores of 0 and 1 the mean is the solve rate of the prompt.

    Args and returns as `zero_variance`.
    """
    assert isinstance(spec, Difficulty)
    r, g = _pair(scores, groups)
    if not len(r):
        return np.zeros(0, np.bool_)
    part = Partition.of(g)
    low, high = part.extremes(r)
    # The mean of equal scores is that score, not what rounding makes of their sum.
    mean = np.where(low == high, low, part.mean(r))
    return np.asarray(((spec.low < mean) & (mean < spec.high))[part.number], np.bool_)


def _pair(
    scores: npt.ArrayLike, groups: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.generic]]:
    r, g = np.asarray(scores, np.float64), np.asarray(groups)
    if r.ndim != 1 or r.shape != g.shape:
        raise ValueError(f"scores {r.shape} and groups {g.shape} must be [N] alike")
    return r, g
