"""The period of a part that works ahead of another one, with batches that overlap.

A batch that takes t1 alone has d seconds that are its own (tokens of every sample, the fuller the
engine the longer a step) and t1 - d in which whatever is under way progresses together (steps that
read the weights once for all). With a batch begun every T seconds, T - d of each T are left for
progress, so a batch takes

    (t1 - d) T / (T - d)

until it is through, and t1 where T = t1. It is drawn with weights of a updates ago at the earliest,
and is learned from in t2: both are within a + 1 periods, so T is at least the larger root of

    (a + 1) T = (t1 - d) T / (T - d) + t2

which with d = 0 is (t1 + t2) / (a + 1). It grows with t1, d and t2 as long as T <= t1; where it
would be longer, it is at most t2, which then decides.
"""

from __future__ import annotations

import math

import numpy as np

from flowrl.plan.search.space import Floats


def age_period_s(drawn: float, dense: float, learned: float, staleness: int) -> float:
    """The least period that ages leave.

    Args:
        drawn, dense: t1 and d of the part ahead.
        learned: t2.
        staleness: a.
    """
    steps = staleness + 1
    both = staleness * dense + drawn + learned
    return (both + math.sqrt(max(0.0, both * both - 4 * steps * learned * dense))) / (2 * steps)


def age_periods(drawn: Floats, dense: Floats, learned: Floats, staleness: int) -> Floats:
    """Of many, in the same arithmetic; infinite where a part is impossible."""
    steps = staleness + 1
    both = staleness * dense + drawn + learned
    with np.errstate(invalid="ignore"):
        root = np.sqrt(np.maximum(0.0, both * both - 4 * steps * learned * dense))
    found: Floats = np.where(np.isfinite(both), (both + root) / (2 * steps), np.inf)
    return found
