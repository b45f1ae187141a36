"""Splits rows of unequal length into two attention products, and reorders rows for it.

One product over all rows reads every row up to the longest length. If few rows are much longer than
the others, two products, of the first rows and of the rest, read less and cost a few more calls.
The saving depends on the order of the rows: the longest first is best. Rows keep their places until
the tokens read unnecessarily have cost as much as moving the rows.

Lengths and counts are tokens of keys and values in one layer. They do not depend on timing, so a
repeated run splits and moves the same rows.
"""

from __future__ import annotations

import numpy as np

from flowrl.backend.batch import Ints
from flowrl_backends.torch.slots import RowSpan

_SPLIT_NBYTES = 200_000
"""The cost of one more product's calls, in bytes of keys and values that could be read instead: 20
us at 10 GB/s, for a layer on a processor core."""
_MOVE_NBYTES = 1_000_000
"""The fixed cost of moving rows, in the same unit."""
_PASSES = 2
"""The number of accesses to a token when it is moved, besides reading it."""


def split_rows(lengths: Ints) -> tuple[int, int]:
    """Returns the row at which two products read the fewest tokens, and that number.

    Args:
        lengths: int64 `[n]`, with at least two rows.

    Returns:
        1 to n-1, and `row * max(lengths[:row]) + (n - row) * max(lengths[row:])`.
    """
    n = len(lengths)
    first = np.maximum.accumulate(lengths)[:-1]
    rest = np.maximum.accumulate(lengths[::-1])[-2::-1]
    rows = np.arange(1, n)
    read = rows * first + (n - rows) * rest
    best = int(read.argmin())
    return best + 1, int(read[best])


class RowOrder:
    """The order of an engine's rows.

    Attributes:
        wasted: The number of tokens read since the last move that ordered rows would not have read.
    """

    def __init__(self) -> None:
        self.wasted = 0
        self._waste = 0
        self._row = 0
        self._first = self._rest = 0

    def follow(self, stored: Ints, token_nbytes: int) -> None:
        """Recomputes the split after rows were added, removed or moved.

        Args:
            stored: int64 `[n]`, the length of each row.
            token_nbytes: The size of a token's keys and values in one layer; 0 if unknown.
        """
        n = len(stored)
        self._row = self._waste = 0
        if n < 2 or token_nbytes == 0:
            return
        together, extra = n * int(stored.max()), _SPLIT_NBYTES // token_nbytes
        _, least = split_rows(np.sort(stored)[::-1])
        if least + extra >= together:
            return
        row, read = split_rows(stored)
        if read + extra < together:
            self._row = row
            self._first, self._rest = int(stored[:row].max()), int(stored[row:].max())
        self._waste = min(read + extra, together) - least - extra

    def step(self, n: int) -> tuple[RowSpan, ...]:
        """Returns the rows that attend together in the next decode step; () for all rows."""
        self.wasted += self._waste
        if not self._row:
            return ()
        self._first += 1
        self._rest += 1
        return RowSpan(0, self._row, self._first), RowSpan(self._row, n, self._rest)

    def moves(self, stored: Ints, token_nbytes: int) -> tuple[list[int], list[int]]:
        """Returns the moves (from, to) that put the longest rows first; none if not worth it."""
        if self.wasted * token_nbytes <= _MOVE_NBYTES:
            return [], []
        order = np.argsort(-stored, kind="stable")
        targets = np.flatnonzero(order != np.arange(len(stored)))
        sources = order[targets]
        moved = len(targets) * int(stored[sources].max(initial=0))
        if self.wasted * token_nbytes <= _MOVE_NBYTES + _PASSES * moved * token_nbytes:
            return [], []
        self.wasted = 0
        return sources.tolist(), targets.tolist()
