"""Between samples laid end to end, as batches travel, and the padded arrays of formulas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Padding"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padding:
    """Where each token of `[N, T]` lies among the tokens of all samples, end to end.

    Column 0 is the first token that the policy produced, the last column of a sample the last one;
    what lies between belongs to it too, so that environment tokens make holes in the mask.

    >>> places = Padding.of([0, 3, 5], [False, True, True, False, True])
    >>> places.pad(np.array([9.0, 1.0, 2.0, 9.0, 3.0])).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    >>> places.flat(np.array([[1.0, 2.0], [3.0, 0.0]])).tolist()
    [0.0, 1.0, 2.0, 0.0, 3.0]

    Attributes:
        rows: int `[P]`, the sample of each placed token.
        columns: int `[P]`.
        tokens: int `[P]`, its position end to end.
        shape: N and T.
        total: Tokens of all samples.
    """

    rows: Ints
    columns: Ints
    tokens: Ints
    shape: tuple[int, int]
    total: int

    @classmethod
    def of(cls, offsets: npt.ArrayLike, response_mask: npt.ArrayLike) -> Padding:
        """From `SequenceBatch.offsets` `[N + 1]` and `response_mask`, bool, of all tokens."""
        starts, mask = np.asarray(offsets, np.int64), np.asarray(response_mask, np.bool_)
        count = len(starts) - 1
        produced = np.flatnonzero(mask)
        # Of each sample, which of the produced tokens are its own.
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
        """`[N, T]` of one value a token of all samples; 0 at padding."""
        out = np.zeros(self.shape)
        out[self.rows, self.columns] = np.asarray(values, np.float64)[self.tokens]
        return out

    def flat(self, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """float32, one value a token of all samples, end to end; 0 where `[N, T]` has no place."""
        out = np.zeros(self.total, np.float32)
        out[self.tokens] = np.asarray(values)[self.rows, self.columns]
        return out
