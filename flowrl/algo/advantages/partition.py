"""Samples cut into groups, and statistics of each group, with and without the sample itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Partition"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Partition:
    """N samples in G groups.

    Attributes:
        number: int `[N]`, 0 to G - 1, the group of each sample.
        size: int `[G]`.
    """

    number: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    @classmethod
    def of(cls, groups: npt.ArrayLike) -> Partition:
        """Samples with equal entries form a group, adjacent or not."""
        _, number, size = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
        return cls(number.reshape(-1), size)

    @classmethod
    def whole(cls, count: int) -> Partition:
        """All samples in one group."""
        return cls(np.zeros(count, np.int64), np.array([count]))

    @property
    def alone(self) -> npt.NDArray[np.bool_]:
        """bool `[N]`, whether a sample's group has no other member."""
        return np.asarray((self.size == 1)[self.number], np.bool_)

    def sum(self, values: Array) -> Array:
        """`[G]`, the sum of each group."""
        total = np.bincount(self.number, weights=values, minlength=len(self.size))
        return total.astype(np.float64)

    def mean(self, values: Array) -> Array:
        """`[G]`, the mean of each group."""
        return self.sum(values) / self.size

    def extremes(self, values: Array) -> tuple[Array, Array]:
        """`[G]` each: the least and the greatest value of each group."""
        low, high = np.full(len(self.size), np.inf), np.full(len(self.size), -np.inf)
        np.minimum.at(low, self.number, values)
        np.maximum.at(high, self.number, values)
        return low, high

    def centred(self, values: Array) -> Array:
        """`[N]`, value - mean of its group; exactly 0 where all values of the group are equal.

        The mean of equal numbers can differ from them in the last bit, and the quotient of two such
        round-offs can be anything.
        """
        low, high = self.extremes(values)
        equal = (low == high)[self.number]
        return np.where(equal, 0.0, values - self.mean(values)[self.number])

    def minus_others(self, values: Array) -> Array:
        """`[N]`, value - mean of the group's other values = n / (n - 1) (value - mean); 0 alone."""
        size = self.size[self.number]
        return self.centred(values) * size / np.maximum(size - 1, 1)

    def variance(self, values: Array, ddof: int, about: Array | None = None) -> Array:
        """`[N]`, the variance of each sample's group; 1 where it has at most `ddof` members.

        Args:
            about: `[N]` deviations to use in place of those from the group's mean.
        """
        deviations = self.centred(values) if about is None else about
        squares = self.sum(deviations**2)
        free = self.size - ddof
        return np.where(free > 0, squares / np.maximum(free, 1), 1.0)[self.number]

    def variance_of_others(self, values: Array, ddof: int) -> Array:
        """`[N]`, the variance of the group's other values; 0 where they are equal or too few.

        With d the deviation from the group's mean and Q the sum of d^2 over the group, the others
        have the sum of squares Q - d_i^2 n / (n - 1).
        """
        d = self.centred(values)
        size = self.size[self.number]
        squares = self.sum(d**2)[self.number] - d**2 * size / np.maximum(size - 1, 1)
        free = size - 1 - ddof
        variance = np.maximum(squares, 0.0) / np.maximum(free, 1)
        return np.where((free > 0) & ~self._others_equal(values), variance, 0.0)

    def _others_equal(self, values: Array) -> npt.NDArray[np.bool_]:
        """bool `[N]`, whether the other values of the group are all equal, without round-off."""
        order = np.lexsort((values, self.number))
        ranked = values[order]
        start = np.concatenate([[0], np.cumsum(self.size)])[:-1][self.number]
        last = start + self.size[self.number] - 1
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        low = ranked[np.minimum(np.where(place == start, start + 1, start), len(values) - 1)]
        high = ranked[np.maximum(np.where(place == last, last - 1, last), 0)]
        return np.asarray(low >= high, np.bool_)
