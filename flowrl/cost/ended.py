"""Whether all samples have ended, of those that start at steps that are known.

The chance of that is the product of F(t - s) over their starts s, F being the distribution of
lengths: its logarithm is a sum, to which samples that start together contribute alike.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from flowrl.cost.lengths import Lengths, quantiles
from flowrl.cost.spread import Floats

NEVER = -700.0
"""The logarithm of no chance."""

_DEVIATIONS = tuple(step / 16 for step in range(-64, 85))
"""Of a normal number: where the distribution of lengths is asked for."""


def last_ones(starts: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Some starts that stand for all, the last ones by themselves; and the samples of each.

    Args:
        starts: Of rows, last one first.
        weight: Samples of each.
    """
    edges = _edges(len(starts))
    each: Floats = np.add.reduceat(weight, edges)
    at: Floats = np.add.reduceat(starts * weight, edges) / each
    return at, each


@lru_cache(maxsize=64)
def _edges(rows: int) -> list[int]:
    """Where parts begin that are larger the earlier rows start."""
    edges = [0]
    while edges[-1] < rows:
        edges.append(edges[-1] + max(1, edges[-1] // 3))
    return edges[:-1]


def log_ended(lengths: Lengths, age: Floats) -> Floats:
    """Of samples of an age, the logarithm of the share that has ended."""
    ages, logs = _logs_ended(lengths)
    return np.interp(age, ages, logs, left=NEVER, right=0.0)


@lru_cache(maxsize=64)
def _logs_ended(lengths: Lengths) -> tuple[Floats, Floats]:
    ages, shares = shares_ended(lengths)
    return ages, np.array([math.log(share) for share in shares.tolist()], np.float64)


@lru_cache(maxsize=64)
def shares_ended(lengths: Lengths) -> tuple[Floats, Floats]:
    """Ages that rise, and the share of samples that has ended at each."""
    shares = [NormalDist().cdf(one) for one in _DEVIATIONS]
    return np.array(quantiles(lengths, shares), np.float64), np.array(shares, np.float64)
