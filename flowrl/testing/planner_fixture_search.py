"""The best schedule by the published planner's model (`planner_fixtures`), exactly.

That model takes a pipeline inside of a pipeline to be slower than the search does: prompts leave a
part at the pace of its slowest stage, so a part is three numbers, not one. Here they are, of B
prompts: `total` of all, `warm` of the first one, `pace` from prompt to prompt.

    a stage of t seconds         total = t                      warm = t / B    pace = t / B
    one after the other          total1 + total2                warm1 + warm2   pace1 + pace2
    at once, first feeds second  warm + pace (B - 1)            warm1 + warm2   max(pace1, pace2)
    at once, nothing passes      max(total1, total2)            max of warms    max of paces

Everything grows with each of the three, so of the schedules of a set of tasks on so many devices
only those are kept that no other one equals or beats in all of them.

What is looked at comes from bounds of all three (`planner_fixture_bounds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flowrl.plan.search import Problem, Schedule
from flowrl.plan.search.bounds import Splits
from flowrl.plan.search.frontier import LEAF, SPLIT, TURNS, Records
from flowrl.plan.search.space import Cut, Floats, Ints, Space, compile_space, families
from flowrl.testing.planner_fixture_bounds import PACE, TOTAL, WARM, least_numbers, most_numbers

__all__ = ["best_below"]

STEPS = (1e-9, 3e-4, 2e-3, 1e-2, 4e-2, 0.15, 0.5)
"""By how much limits lie above the lower bound, one after the other."""

FURTHER = 1.1
"""Bounds are made anew where a limit is lower by this than the one that they were made for."""

SLACK = 1e-12
"""Relative room of limits, for rounding."""

AT_A_TIME = 1 << 20
"""Pairs of parts that are joined together."""

FEW = 256
"""Points that are compared each with each."""


def best_below(problem: Problem, batch: int, seconds: float) -> Schedule | None:
    """The best of all schedules that take less than some do; None where none takes less.

    Args:
        problem: Tasks whose options have nothing but devices and seconds, in `batch` chunks.
        batch: B, prompts of a step.
        seconds: What some schedule takes.
    """
    best: tuple[float, Schedule] | None = None
    for family in families(problem):
        space = compile_space(family)
        ends = known = (seconds if best is None else best[0]) * (1 - SLACK)
        least = least_numbers(space, batch, ends * (1 + SLACK))
        bound = float(least[TOTAL, -1].min())
        for step in (*STEPS, np.inf):
            if bound > ends:
                break
            limit = min(ends, bound * (1 + step))
            if limit * FURTHER < known:
                known = limit
                least = least_numbers(space, batch, limit * (1 + SLACK))
            most, splits = most_numbers(space, batch, least, limit * (1 + SLACK))
            found = _Run(space=space, batch=batch, most=most).best(splits)
            if found is not None and found[0] < ends:
                best = found
                break
            if limit == ends:
                break
    return None if best is None else best[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Partial schedules.

    Attributes:
        block: `[n]`, index of the size of the smallest block of each.
        values: `[3, n]`.
        record: `[n]`, how each came about.
    """

    block: Ints
    values: Floats
    record: Ints

    def take(self, rows: Ints) -> _Parts:
        return _Parts(block=self.block[rows], values=self.values[:, rows], record=self.record[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Front:
    """The parts of a set of tasks that are worth having.

    Attributes:
        parts: Grouped by the block that they are kept on: first those that need all of it, then
            those of smaller ones.
        start, fresh, length: `[K]`, of each block: where its parts are, how many need all of it,
            and how many there are.
    """

    parts: _Parts
    start: Ints
    fresh: Ints
    length: Ints


def _joined(some: list[_Parts]) -> _Parts:
    if not some:
        none = np.zeros(0, dtype=np.int64)
        return _Parts(block=none, values=np.zeros((3, 0)), record=none)
    return _Parts(
        block=np.concatenate([one.block for one in some]),
        values=np.concatenate([one.values for one in some], axis=1),
        record=np.concatenate([one.record for one in some]),
    )


class _Run:
    """All schedules within the limits of a space, but the beaten ones."""

    def __init__(self, *, space: Space, batch: int, most: Floats) -> None:
        self._space, self._batch, self._most = space, batch, most
        self._records = Records()
        self._fronts: list[_Front] = []

    def best(self, splits: list[list[Splits | None]]) -> tuple[float, Schedule] | None:
        """The best one and its seconds; None where nothing is within."""
        made: list[_Parts] = []
        for owner, left in enumerate(splits):
            made = self._stages(owner)
            for cut, own in zip(self._space.cuts[owner], left, strict=True):
                if cut.turns:
                    made += self._in_turns(owner, cut)
                if own is not None:
                    made += self._at_once(owner, cut, own)
            if owner < len(splits) - 1:
                self._fronts.append(_front(_joined(made), self._most[:, owner]))
        whole = _joined(made)
        if not len(whole.block):
            return None
        at = int(np.argmin(whole.values[TOTAL]))
        schedule = self._records.schedule(self._space, int(whole.record[at]))
        return float(whole.values[TOTAL, at]), schedule

    def _stages(self, owner: int) -> list[_Parts]:
        task = self._space.alone[owner]
        if task < 0:
            return []
        leaves = self._space.leaves[task]
        seconds = leaves.seconds
        values = np.stack([seconds, seconds / self._batch, seconds / self._batch])
        rows = np.flatnonzero((values <= self._most[:, owner, leaves.size]).all(axis=0))
        values = values[:, rows]
        record = self._records.add(LEAF, np.zeros_like(rows), np.full_like(rows, task), rows)
        return [_Parts(block=leaves.size[rows], values=values, record=record)]

    def _in_turns(self, owner: int, cut: Cut) -> list[_Parts]:
        """On each block all pairs of which one needs all of it."""
        first, second = self._fronts[cut.first], self._fronts[cut.second]
        blocks = np.flatnonzero(self._most[TOTAL, owner] > -np.inf)
        old = first.length - first.fresh
        found = []
        for start, length1, length2 in (
            (first.start, first.fresh, second.length),
            (first.start + first.fresh, old, second.fresh),
        ):
            spans = (start[blocks], length1[blocks], second.start[blocks], length2[blocks])
            for pair, one, two in _pairs(*spans):
                values = first.parts.values[:, one] + second.parts.values[:, two]
                found.append(
                    self._made(owner, TURNS, blocks[pair], values, (first, one, second, two))
                )
        return found

    def _at_once(self, owner: int, cut: Cut, splits: Splits) -> list[_Parts]:
        """For each split all pairs of which the first part needs all devices of its block."""
        first, second = self._fronts[cut.first], self._fronts[cut.second]
        spans = (
            first.start[splits.first],
            first.fresh[splits.first],
            second.start[splits.second],
            second.length[splits.second],
        )
        found = []
        for pair, one, two in _pairs(*spans):
            value1, value2 = first.parts.values[:, one], second.parts.values[:, two]
            values = np.maximum(value1, value2)
            feeds = splits.chunks[pair] > 0
            values[WARM, feeds] = value1[WARM, feeds] + value2[WARM, feeds]
            rest = values[PACE, feeds] * (self._batch - 1)
            values[TOTAL, feeds] = values[WARM, feeds] + rest
            block = splits.block[pair]
            found.append(self._made(owner, SPLIT, block, values, (first, one, second, two)))
        return found

    def _made(
        self,
        owner: int,
        kind: int,
        block: Ints,
        values: Floats,
        of: tuple[_Front, Ints, _Front, Ints],
    ) -> _Parts:
        """Those within the limits, entered."""
        first, one, second, two = of
        rows = np.flatnonzero((values <= self._most[:, owner, block]).all(axis=0))
        block, values = block[rows], values[:, rows]
        rows = rows[own := _unbeaten_by_block(block, values)]
        record = self._records.add(
            kind,
            np.full_like(rows, self._batch),
            first.parts.record[one[rows]],
            second.parts.record[two[rows]],
        )
        return _Parts(block=block[own], values=values[:, own], record=record)


def _pairs(
    start1: Ints, length1: Ints, start2: Ints, length2: Ints
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Every pair of rows of two spans, for many spans: the span, the row of each side."""
    counts = length1 * length2
    ends = np.cumsum(counts)
    low = 0
    while low < len(counts):
        before = ends[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + AT_A_TIME, side="right")))
        span = np.repeat(np.arange(low, high), counts[low:high])
        at = np.arange(len(span)) - (ends[span] - counts[span] - before)
        yield span, start1[span] + at // length2[span], start2[span] + at % length2[span]
        low = high


def _front(made: _Parts, most: Floats) -> _Front:
    """What is worth having of the parts of a set, on each block."""
    made = made.take(np.argsort(made.block, kind="stable"))
    count = most.shape[1]
    edges = np.searchsorted(made.block, np.arange(count + 1))
    start, fresh, length = (np.zeros(count, dtype=np.int64) for _ in range(3))
    kept: list[_Parts] = []
    total = 0
    carried = _joined([])
    for block in np.flatnonzero(most[TOTAL] > -np.inf):
        own = np.arange(edges[block], edges[block + 1])
        within = np.flatnonzero((carried.values <= most[:, block, None]).all(axis=0))
        if len(own) or len(within) < len(carried.block) or not kept:
            both = _joined([carried.take(within), made.take(own)])
            rows = _unbeaten(both.values)
            new = rows >= len(within)
            carried = both.take(np.concatenate([rows[new], rows[~new]]))
            start[block], fresh[block] = total, new.sum()
            kept.append(carried)
            total += len(carried.block)
        else:
            start[block] = total - len(carried.block)
        length[block] = len(carried.block)
    return _Front(parts=_joined(kept), start=start, fresh=fresh, length=length)


def _unbeaten_by_block(block: Ints, values: Floats) -> Ints:
    """Rows that no row of the same block equals or beats; of equal ones the first."""
    order = np.argsort(block, kind="stable")
    edges = [0, *(1 + np.flatnonzero(np.diff(block[order]))).tolist(), len(order)]
    found = [
        order[low:high][_unbeaten(values[:, order[low:high]])]
        for low, high in pairwise(edges)
        if low < high
    ]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _unbeaten(values: Floats) -> Ints:
    """Rows that no row equals or beats in all; of equal ones the first. Ascending."""
    if values.shape[1] == 1:
        return np.zeros(1, dtype=np.int64)
    order = np.lexsort((np.arange(values.shape[1]), values[PACE], values[WARM], values[TOTAL]))
    kept = np.zeros(0, dtype=np.int64)
    for low in range(0, len(order), FEW):
        rows = order[low : low + FEW]
        for at in range(0, len(kept), FEW):
            other = values[:, kept[at : at + FEW], None]
            rows = rows[~(other <= values[:, None, rows]).all(axis=0).any(axis=0)]
        beats = (values[:, rows, None] <= values[:, None, rows]).all(axis=0)
        rows = rows[~np.triu(beats, 1).any(axis=0)]  # who is beaten comes later
        kept = np.concatenate([kept, rows])
    return np.sort(kept)
