"""Which rows of unequal length attend together.

One product over all rows reads every row as far as the longest. Where few rows are much longer than
the others, two products, of the first rows and of the rest, read less and cost a few calls more.
How little they read depends on the order of the rows: best is the longest first. Rows keep the
places they happen to have until what was read in vain would have paid for moving them.

Lengths and counts here are of tokens in keys and values of one layer; all logical, so that a run
that is repeated splits and moves the same rows.
"""

from __future__ import annotations

import numpy as np

from flowrl.backend.batch import Ints
from flowrl_backends.torch.slots import RowSpan

__all__ = ["RowOrder", "split_rows"]

_SPLIT_NBYTES = 200_000
"""What the calls of one more product cost, as keys and values read instead: 20 us at 10 GB/s, of a
layer on a processor core."""
_MOVE_NBYTES = 1_000_000
"""The same of moving rows, which copies besides what it moves."""
_PASSES = 2
"""Times that moving a token touches it, beside reading it."""


def split_rows(lengths: Ints) -> tuple[int, int]:
    """The row at which two products read fewest tokens, and how many.

    Args:
        lengths: int64 `[n]`, two rows at least.

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
    """Follows the rows of an engine.

    Attributes:
        wasted: Tokens read since rows were last moved that rows in order would have spared.
    """

    def __init__(self) -> None:
        self.wasted = 0
        self._waste = 0
        self._row = 0
        self._first = self._rest = 0

    def follow(self, stored: Ints, token_nbytes: int) -> None:
        """Takes note of rows that came, went or moved.

        Args:
            stored: int64 `[n]`, the length of each row.
            token_nbytes: Bytes of a token's keys and values in one layer; 0 where unknown.
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
        """The rows that attend together in a step that gives each one token; () for all."""
        self.wasted += self._waste
        if not self._row:
            return ()
        self._first += 1
        self._rest += 1
        return RowSpan(0, self._row, self._first), RowSpan(self._row, n, self._rest)

    def moves(self, stored: Ints, token_nbytes: int) -> tuple[list[int], list[int]]:
        """Which rows to move to bring the longest first: from, to; none while it does not pay."""
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
