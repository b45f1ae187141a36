"""Lines through measured times, with coefficients that are times: none is negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def fit_line(
    features: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[list[float], float]:
    """Coefficients c >= 0 with `features @ c` near `seconds`, by least squares of relative errors.

    There are few features, so every subset of them is tried, and the best one whose coefficients
    are positive wins; that is the non-negative least squares solution (Lawson and Hanson, 1974).

    Args:
        features: One row a measurement, one column a coefficient.

    Returns:
        The coefficients, and the largest relative error at what was measured.

    >>> fit_line([[1, 10], [1, 20], [1, 30]], [3.0, 5.0, 7.0])
    ([1.0, 0.2], 0.0)
    """
    matrix = np.asarray(features, np.float64)
    target = np.asarray(seconds, np.float64)
    weights = 1.0 / np.maximum(target, 1e-9)
    columns = range(matrix.shape[1])
    best: Matrix = np.zeros(matrix.shape[1])
    least = float(np.sum((target * weights) ** 2))
    for size in range(1, matrix.shape[1] + 1):
        for subset in combinations(columns, size):
            chosen = matrix[:, subset]
            found, *_ = np.linalg.lstsq(chosen * weights[:, None], target * weights, rcond=None)
            left = float(np.sum(((chosen @ found - target) * weights) ** 2))
            # A subset that is no better by more than rounding only divides a time among more names.
            if (found >= 0).all() and left < least * (1 - 1e-9) - 1e-18:
                least = left
                best = np.zeros(matrix.shape[1])
                best[list(subset)] = found
    errors = np.abs(matrix @ best - target) * weights
    return [_short(value) for value in best], _short(float(errors.max(initial=0.0)))


def _short(value: float) -> float:
    """Six digits: no measurement has more."""
    return float(f"{value:.6g}") if abs(value) > 1e-12 else 0.0
