"""Advantages: scores of samples in, one number a sample out. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.errors import RewardError
from flowrl.specs.advantage import GroupRelative, Scale

__all__ = ["group_relative"]


def group_relative(
    scores: npt.ArrayLike, groups: npt.ArrayLike, spec: GroupRelative
) -> npt.NDArray[np.float32]:
    """Group-relative advantages.

    For sample i of group g, with mean and standard deviation over the group (`std="group"`) or the
    standard deviation over the whole batch (`std="batch"`)::

        A_i = (r_i - mean_g) / (std + eps)    GRPO: Shao et al., DeepSeekMath, 2024, section 4.1.2
        A_i =  r_i - mean_g                   `std="none"`: Liu et al., Dr.GRPO, 2025, section 3.2

    The paper writes no eps; it is added outside the root, as TRL and verl do. Scores are centred in
    float64, and a group of equal scores gets exactly 0, so that round-off is never amplified by a
    tiny standard deviation. A group of one has no standard deviation: it gets 0, or with
    `singleton="raw"` its score divided by 1 + eps (by 1 where nothing is divided; by the batch's
    standard deviation for `std="batch"`), which is mean 0 and deviation 1 as in verl.

    Args:
        scores: `[N]`, one score a sample.
        groups: `[N]` integers; samples with equal numbers form a group, adjacent or not.
        spec: Conventions.

    Returns:
        float32 `[N]`.

    Raises:
        ValueError: the arrays are not one-dimensional and of equal length.
        RewardError: a score is not finite.
    """
    r = np.asarray(scores, np.float64)
    g = np.asarray(groups)
    if r.ndim != 1 or r.shape != g.shape:
        raise ValueError(f"scores {r.shape} and groups {g.shape} must be [N] alike")
    if not np.isfinite(r).all():
        row = int(np.argmin(np.isfinite(r)))
        raise RewardError("a score is not finite", where=f"sample {row}", found=str(r[row]))
    if not len(r):
        return np.zeros(0, np.float32)

    _, number, size = np.unique(g, return_inverse=True, return_counts=True)
    mean = np.bincount(number, weights=r) / size
    high = np.full(len(size), -np.inf)
    low = np.full(len(size), np.inf)
    np.maximum.at(high, number, r)
    np.minimum.at(low, number, r)
    centred = np.where((high == low)[number], 0.0, r - mean[number])

    alone = size == 1
    group_std = np.where(
        alone,
        1.0,
        _std(np.bincount(number, weights=centred**2).astype(np.float64), size, spec.ddof),
    )
    batch_std = float(_std(((r - r.mean()) ** 2).sum(), np.int64(len(r)), spec.ddof))
    if spec.singleton == "raw":
        centred = np.where(alone[number], r, centred)
    scales: dict[Scale, npt.NDArray[np.float64]] = {
        "group": group_std[number] + spec.eps,
        "batch": np.full(len(r), batch_std + spec.eps),
        "none": np.ones(len(r)),
    }
    scale = scales[spec.std]
    # With eps = 0 a batch of equal scores would divide 0 by 0.
    return np.divide(centred, scale, out=np.zeros(len(r)), where=scale > 0).astype(np.float32)


def _std(
    squares: npt.NDArray[np.float64] | np.float64,
    count: npt.NDArray[np.int64] | np.int64,
    ddof: int,
) -> npt.NDArray[np.float64]:
    """Standard deviation from a sum of squared deviations; 0 where `count` <= `ddof`."""
    return np.sqrt(squares / np.maximum(count - ddof, 1))
