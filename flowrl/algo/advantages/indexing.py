"""Index arrays of a batch: samples in groups with their statistics, and tokens in padded arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Padding",
    "Partition",
]


Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Partition:
    """N samples in G groups, with statistics of each group with and without the sample itself.

    Attributes:
        number: int `[N]`, the group of each sample, from 0 to G - 1.
        size: int `[G]`, the number of samples in each group.
    """

    number: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    @classmethod
    def of(cls, groups: npt.ArrayLike) -> Partition:
        """Makes a group of the samples with equal entries, adjacent or not."""
        _, number, size = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
        return cls(number.reshape(-1), size)

    @classmethod
    def whole(cls, count: int) -> Partition:
        """Puts all samples in one group."""
        return cls(np.zeros(count, np.int64), np.array([count]))

    @property
    def alone(self) -> npt.NDArray[np.bool_]:
        """bool `[N]`, true for samples without another member in their group."""
        return np.asarray((self.size == 1)[self.number], np.bool_)

    def sum(self, values: Array) -> Array:
        """Returns `[G]`, the sum of each group."""
        total = np.bincount(self.number, weights=values, minlength=len(self.size))
        return total.astype(np.float64)

    def mean(self, values: Array) -> Array:
        """Returns `[G]`, the mean of each group."""
        return self.sum(values) / self.size

    def extremes(self, values: Array) -> tuple[Array, Array]:
        """Returns the minimum and the maximum of each group, `[G]` each."""
        low, high = np.full(len(self.size), np.inf), np.full(len(self.size), -np.inf)
        np.minimum.at(low, self.number, values)
        np.maximum.at(high, self.number, values)
        return low, high

    def centred(self, values: Array) -> Array:
        """Returns `[N]`, value - mean of its group; exactly 0 if all values of the group are equal.

        The mean of equal numbers can differ from them in the last bit, and the quotient of two such
        round-offs can be anything.
        """
        low, high = self.extremes(values)
        equal = (low == high)[self.number]
        return np.where(equal, 0.0, values - self.mean(values)[self.number])

    def minus_others(self, values: Array) -> Array:
        """Returns `[N]`, value - mean of the group's other values; 0 in a group of one.

        It is computed as n / (n - 1) (value - mean).
        """
        size = self.size[self.number]
        return self.centred(values) * size / np.maximum(size - 1, 1)

    def variance(self, values: Array, ddof: int, about: Array | None = None) -> Array:
        """Returns `[N]`, the variance of each sample's group; 1 if it has at most `ddof` members.

        Args:
            values: `[N]`.
            ddof: The number of degrees of freedom that are subtracted.
            about: `[N]` deviations to use in place of those from the group's mean.
        """
        deviations = self.centred(values) if about is None else about
        squares = self.sum(deviations**2)
        free = self.size - ddof
        return np.where(free > 0, squares / np.maximum(free, 1), 1.0)[self.number]

    def variance_of_others(self, values: Array, ddof: int) -> Array:
        """Returns `[N]`, the variance of the group's other values; 0 if equal or too few.

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
        """Returns bool `[N]`, true if the group's other values are all equal, without round-off."""
        order = np.lexsort((values, self.number))
        ranked = values[order]
        start = np.concatenate([[0], np.cumsum(self.size)])[:-1][self.number]
        last = start + self.size[self.number] - 1
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        low = ranked[np.minimum(np.where(place == start, start + 1, start), len(values) - 1)]
        high = ranked[np.maximum(np.where(place == last, last - 1, last), 0)]
        return np.asarray(low >= high, np.bool_)


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padding:
    """The positions of `[N, T]` arrays in the concatenated tokens of all samples.

    Column 0 is the first token that the policy produced, the last column of a sample the last one;
    the tokens between them are included, so that environment tokens make holes in the mask.

    >>> places = Padding.of([0, 3, 5], [False, True, True, False, True])
    >>> places.pad(np.array([9.0, 1.0, 2.0, 9.0, 3.0])).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    >>> places.flat(np.array([[1.0, 2.0], [3.0, 0.0]])).tolist()
    [0.0, 1.0, 2.0, 0.0, 3.0]

    Attributes:
        rows: int `[P]`, the sample of each of the P tokens in the padded array.
        columns: int `[P]`, their columns.
        tokens: int `[P]`, their positions in the concatenated tokens.
        shape: N and T.
        total: The number of tokens of all samples.
    """

    rows: Ints
    columns: Ints
    tokens: Ints
    shape: tuple[int, int]
    total: int

    @classmethod
    def of(cls, offsets: npt.ArrayLike, response_mask: npt.ArrayLike) -> Padding:
        """Makes the padding of `SequenceBatch.offsets` `[N + 1]` and bool `response_mask`."""
        starts, mask = np.asarray(offsets, np.int64), np.asarray(response_mask, np.bool_)
        count = len(starts) - 1
        produced = np.flatnonzero(mask)
        # The range of each sample in the produced tokens.
        begin = np.searchsorted(produced, starts[:-1])
        end = np.searchsorted(produced, starts[1:])
        filled = end > begin
        first, length = np.zeros((2, count), np.int64)
        first[filled] = produced[begin[filled]]
        length[filled] = produced[end[filled] - 1] - first[filled] + 1
        rows = np.repeat(np.arange(count), length)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(length) - length, length)
        width = int(length.max()) if count else 0
        return cls(rows, columns, first[rows] + columns, (count, width), len(mask))

    def pad(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns `[N, T]` from one value a token of all samples; 0 at padding."""
        out = np.zeros(self.shape)
        out[self.rows, self.columns] = np.asarray(values, np.float64)[self.tokens]
        return out

    def flat(self, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Returns float32, one value a token of all samples; 0 at tokens outside `[N, T]`."""
        out = np.zeros(self.total, np.float32)
        out[self.tokens] = np.asarray(values)[self.rows, self.columns]
        return out
