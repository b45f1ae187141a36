"""Samples of replicas that have more or less work than others.

The work of a sample of L tokens in a cache is what it holds of it at all of its steps together,
w = L (L / 2 + held). Of m samples the work is about X times its mean, X lognormal with mean 1 and
variance var[w] / (m E[w]^2) (Fenton 1960, IRE Transactions on Communications Systems 8, 57). Given
that, a sample has the length L with the density that it has anyway, times

    1 + (X - 1) m / n  (w - E[w]) E[w] / var[w]                           (and 0 where that is less)

n being the samples of a replica of which m differ from those of others. That is the regression of
the density on the sum, and with it the work has the mean that is given. So a replica with much work
has more of the longest samples than others, two where these have one.

Some X stand for all, by the rule of Gauss and Hermite, and densities of each length are divided by
their mean over these, so that all replicas together have the lengths that they have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flowrl.cost.ended import shares_ended
from flowrl.cost.lengths import Lengths
from flowrl.cost.spread import Floats, spread

LENGTHS = 256
"""That the variance of samples' work is taken from."""

_NODES = np.array((-1.3556261799742659, 0.0, 1.3556261799742659, 2.8569700138728056))
_SHARES = np.array((0.2333333333333333, 0.5333333333333333, 0.2220759220056126, 0.0112574113277207))
"""Points of a normal number and their shares, by the rule for five (Abramowitz and Stegun 1964,
table 25.10); what is of the lowest one is with its neighbour."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Uneven:
    """Lengths of samples on some of the replicas.

    Attributes:
        replicas: Share of them that are so.
        ages: Tokens that rise.
        shares: Of samples, that have ended at each age.
    """

    replicas: float
    ages: Floats
    shares: Floats

    def spread(self, num: int, at: float) -> Floats:
        """So many that stand for drawn ones, shortest first: quantiles at `(i + at) / num`."""
        found: Floats = np.interp((np.arange(num) + at) / num, self.shares, self.ages)
        return found

    def log_ended(self, age: Floats) -> Floats:
        """Of samples of an age, the logarithm of the share that has ended."""
        found = np.interp(age, self.ages, self.shares, left=0.0, right=1.0)
        return np.log(np.maximum(found, 1e-300))


@lru_cache(maxsize=128)
def uneven(lengths: Lengths, *, held: float, samples: int, varied: int) -> tuple[Uneven, ...]:
    """Replicas with little, more and much work.

    Args:
        lengths: That differ.
        held: Of its prompt, that a sample holds.
        samples: Of a replica.
        varied: Of these, that differ from one replica to the other.
    """
    ages, shares = shares_ended(lengths)
    mass = np.diff(shares, prepend=0.0)
    mass[-1] += 1 - shares[-1]
    work = ages * (ages / 2 + held)
    mean = float(work @ mass)
    variance = float((work - mean) ** 2 @ mass)
    scale = math.sqrt(math.log1p(variance / mean**2 / varied))
    more = (np.exp(scale * _NODES - scale**2 / 2) - 1) * varied / samples
    density = np.maximum(0.0, 1 + more[:, None] * ((work - mean) * (mean / variance)))
    ended = (density / (_SHARES @ density) * mass).cumsum(axis=1)
    return tuple(
        Uneven(replicas=share, ages=ages, shares=one / one[-1])
        for share, one in zip(_SHARES.tolist(), ended, strict=True)
    )


@lru_cache(maxsize=64)
def work_variation(lengths: Lengths, held: float) -> float:
    """Coefficient of variation of what a sample takes of a cache."""
    values = spread(lengths, LENGTHS)
    work = values * (values / 2 + held)
    return float(work.std() / work.mean())
