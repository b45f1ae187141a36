"""Lengths that stand for as many drawn ones, as an array."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flowrl.cost.lengths import Lengths, expected_maximum, quantiles

Floats = npt.NDArray[np.float64]


@lru_cache(maxsize=256)
def spread(lengths: Lengths, num: int) -> Floats:
    """`num` lengths that stand for as many drawn ones, shortest first: float64 `[num]`.

    The longest is the expected longest of so many; the others are quantiles at `(i + 1/2) / num`,
    times one factor with which all of them have the mean of the distribution, and none above the
    longest.
    """
    longest = expected_maximum(lengths, num)
    values = np.array(quantiles(lengths, [(i + 0.5) / num for i in range(num)]), np.float64)
    rest = float(values[:-1].sum())
    if rest > 0:
        values[:-1] *= max(0.0, lengths.mean * num - longest) / rest
    values[-1] = longest
    values = np.minimum(values, longest)
    values.setflags(write=False)
    return values
