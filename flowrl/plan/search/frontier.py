"""Partial schedules that none other beats, and the joins that make them.

A point is a partial schedule as numbers: seconds, least seconds for a further chunk, seconds of
syncs, resident bytes, peak bytes, splits, and tokens (`flowrl.plan.search.space`). One point beats
another on the same block when no number is larger and no token is missing: in every schedule that
holds the other, it can take its place. So all that is ever needed is the points that are beaten by
fewer than `keep` others, where `keep` schedules are wanted.

How a point came about is a record, so that the schedule can be built when the search is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from flowrl.plan.search.bounds import Splits
from flowrl.plan.search.schedule import (
    Asynchronous,
    Leaf,
    Schedule,
    Spatial,
    Temporal,
    signature,
)
from flowrl.plan.search.space import Bools, Cut, Floats, Ints, Space

__all__ = [
    "PEAK",
    "SECONDS",
    "SPLITS",
    "SYNC_S",
    "Frontier",
    "Points",
    "Records",
    "Sides",
    "concatenate",
    "gather",
    "join_splits",
    "join_turns",
    "leaf_points",
    "no_points",
    "prune",
]

SECONDS, CHUNK_S, SYNC_S, RESIDENT, PEAK, SPLITS = range(6)

PAIRS_AT_ONCE = 1 << 19
"""Joins are made in pieces, which bounds the memory that they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Points, one a row.

    Attributes:
        block: `[P]`, index of the block's size.
        values: `[P, 6]`, in the order of the constants of this module.
        tokens: `[P]`, bits.
        record: `[P]`, how each came about.
        name: `[P]`, equal exactly for equal `schedule.signature`s but for collisions of hashes.
        turns: `[P]`, whether it is a Temporal.
    """

    block: Ints
    values: Floats
    tokens: Ints
    record: Ints
    name: Ints
    turns: Bools

    def take(self, rows: Ints) -> Points:
        """The points of these rows."""
        return Points(
            block=self.block[rows],
            values=self.values[rows],
            tokens=self.tokens[rows],
            record=self.record[rows],
            name=self.name[rows],
            turns=self.turns[rows],
        )


def concatenate(parts: list[Points]) -> Points:
    """All points of `parts`, which are not empty."""
    return Points(
        block=np.concatenate([part.block for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        record=np.concatenate([part.record for part in parts]),
        name=np.concatenate([part.name for part in parts]),
        turns=np.concatenate([part.turns for part in parts]),
    )


@dataclass(slots=True)
class Records:
    """How points came about: kind, chunks or option, and the records of both parts."""

    rows: list[Ints] = field(default_factory=list)  # `[n, 4]` each
    count: int = 0

    def add(self, kind: int, chunks: Ints, first: Ints, second: Ints) -> Ints:
        """Numbers of new records."""
        number = np.arange(self.count, self.count + len(first))
        row = np.empty((len(first), 4), dtype=np.int64)
        row[:, 0], row[:, 1], row[:, 2], row[:, 3] = kind, chunks, first, second
        self.rows.append(row)
        self.count += len(first)
        return number

    def schedule(self, space: Space, number: int) -> Schedule:
        """The schedule of a record."""
        table = np.concatenate(self.rows) if len(self.rows) > 1 else self.rows[0]
        self.rows = [table]
        kind, chunks, first, second = (int(value) for value in table[number])
        if kind == LEAF:
            return Leaf(task=space.tasks[first].id, option=space.leaves[first].options[second])
        parts = (self.schedule(space, first), self.schedule(space, second))
        if kind == TURNS:
            return Temporal(first=parts[0], second=parts[1])
        if kind == SPLIT:
            return Spatial(first=parts[0], second=parts[1], chunks=max(chunks, 1))
        return Asynchronous(first=parts[0], second=parts[1])


LEAF, TURNS, SPLIT, AHEAD = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The points of one set of tasks that are worth having, by block.

    Attributes:
        points: Grouped by block. The points of a block are those that stand on exactly it (`fresh`
            of them, first), and those of smaller blocks that leave a part of it idle, which hold no
            tokens here.
        start: `[K]`, where a block's points begin.
        fresh: `[K]`, how many stand on exactly the block.
        length: `[K]`, how many there are in all.
    """

    points: Points
    start: Ints
    fresh: Ints
    length: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The two frontiers of a cut, and what a join needs to know.

    Attributes:
        first: Of the first set.
        second: Of the second.
        memory_bytes: Most peak bytes.
        named: Names are wanted.
        split: What a split counts: 1, or 0 where their number does not matter.
    """

    first: Frontier
    second: Frontier
    memory_bytes: float
    named: bool
    split: float


def prune(points: Points, exact_tokens: int, keep: int) -> Ints:
    """Rows that fewer than `keep` others beat, all of one block, ascending by seconds.

    Of points that are the same schedule but for nesting (`Points.name`), one that is beaten is
    worth nothing, however many are wanted, and a name counts once among those that beat a point.
    """
    order = np.lexsort(points.values.T[::-1])
    values, tokens = points.values[order], points.tokens[order]
    columns = [at for at in range(1, values.shape[1]) if np.ptp(values[:, at]) > 0]
    equal_tokens = bool((tokens == tokens[0]).all())
    names = points.name[order]
    first_of_name = np.zeros(len(order), dtype=bool)
    if keep > 1:
        first_of_name[np.unique(names, return_index=True)[1]] = True

    def beats(others: Ints, rows: Ints) -> Bools:
        """`[others, rows]`; `others` stand before `rows`, so their seconds are no more."""
        result = np.ones((len(others), len(rows)), dtype=bool)
        for column in columns:
            result &= values[others, column][:, None] <= values[rows, column]
        if not equal_tokens:
            mine, theirs = tokens[others][:, None], tokens[rows]
            result &= (theirs & ~mine) == 0
            if exact_tokens:
                result &= ((theirs ^ mine) & exact_tokens) == 0
        return result

    kept = np.zeros(0, dtype=np.int64)
    at, width = 0, 32
    while at < len(order):
        rows = np.arange(at, min(at + width, len(order)))
        at, width = at + width, min(width * 2, 512)
        others = np.concatenate([kept, rows])
        by = beats(others, rows)
        by[len(kept) :] = np.triu(by[len(kept) :], 1)
        if keep == 1:
            gone = by.any(axis=0)
        else:
            gone = (by & first_of_name[others][:, None]).sum(axis=0) >= keep
            gone |= (by & (names[others][:, None] == names[rows])).any(axis=0)
        kept = np.concatenate([kept, rows[~gone]])
    return order[kept]


def leaf_points(
    space: Space, owner: int, limit: Floats, records: Records, *, named: bool
) -> list[Points]:
    """The options of the task that the set `owner` holds alone, within the limits of seconds."""
    task = space.alone[owner]
    if task < 0:
        return []
    leaves = space.leaves[task]
    rows = np.flatnonzero(leaves.seconds <= limit[leaves.size])
    if not len(rows):
        return []
    zero = np.zeros(len(rows))
    block = leaves.size[rows]
    values = np.column_stack(
        [
            leaves.seconds[rows],
            leaves.chunk_s[rows],
            zero,
            leaves.resident[rows],
            leaves.peak[rows],
            zero,
        ]
    )
    record = records.add(LEAF, np.zeros_like(rows), np.full_like(rows, task), rows)
    return [
        Points(
            block=block,
            values=values,
            tokens=leaves.tokens[rows] & space.relevant[owner][block],
            record=record,
            name=_leaf_names(space, task)[rows] if named else np.zeros_like(rows),
            turns=np.zeros(len(rows), dtype=bool),
        )
    ]


def join_turns(
    space: Space, owner: int, cut: Cut, sides: Sides, limit: Floats, records: Records
) -> list[Points]:
    """Temporals of the set `owner`: on each block, every pair of which one stands on exactly it."""
    first, second = sides.first, sides.second
    blocks = np.flatnonzero((first.length > 0) & (second.length > 0) & (limit > -np.inf))
    found = []
    lifted = first.length - first.fresh
    for start1, length1, length2 in (
        (first.start, first.fresh, second.length),
        (first.start + first.fresh, lifted, second.fresh),
    ):
        counts = (length1[blocks], length2[blocks])
        for pair, row1, row2 in _pairs(start1[blocks], second.start[blocks], *counts):
            block = blocks[pair]
            seconds = first.points.values[row1, SECONDS] + second.points.values[row2, SECONDS]
            use = seconds <= limit[block]
            rows = (block[use], row1[use], row2[use])
            found += _turns(space, owner, cut, sides, rows, records)
    return found


def join_splits(
    space: Space, cut: Cut, sides: Sides, splits: Splits, limit: Floats, records: Records
) -> list[Points]:
    """Spatials, or Asynchronous roots, over all splits of blocks.

    A point of the first side that leaves a part of its block idle is met with more for the second
    side where its block is smaller, so only those that stand on exactly their block are joined.
    """
    first, second = sides.first, sides.second
    counts = (first.fresh[splits.first], second.length[splits.second])
    starts = (first.start[splits.first], second.start[splits.second])
    found = []
    for pair, row1, row2 in _pairs(*starts, *counts):
        block, chunks = splits.block[pair], splits.chunks[pair]
        one, two = first.points.values, second.points.values
        extra = np.maximum(chunks - 1, 0)
        u1 = one[row1, SECONDS] + extra * one[row1, CHUNK_S]
        u2 = two[row2, SECONDS] + extra * two[row2, CHUNK_S]
        streamed = np.minimum(u1, u2) / np.maximum(chunks, 1)
        seconds = np.maximum(u1, u2) + np.where(chunks > 0, streamed, 0.0)
        use = seconds <= limit[block]
        rows = (block[use], row1[use], row2[use])
        found += _splits(space, cut, sides, rows, (chunks[use], seconds[use]), records)
    return found


def gather(space: Space, found: list[Points], limit: Floats, keep: int) -> Frontier:
    """The frontier of a set from all points that were made for it."""
    count = len(space.sizes)
    start, fresh, length = (np.zeros(count, dtype=np.int64) for _ in range(3))
    if not found:
        return Frontier(points=no_points(), start=start, fresh=fresh, length=length)
    points = concatenate(found)
    points = points.take(np.argsort(points.block, kind="stable"))
    edges = np.searchsorted(points.block, np.arange(count + 1))
    parts: list[Points] = []
    total = 0
    carried: Points | None = None
    for block in np.flatnonzero(limit > -np.inf):
        low, high = edges[block], edges[block + 1]
        own = points.take(np.arange(low, high))
        here = own
        if carried is not None:
            within = np.flatnonzero(carried.values[:, SECONDS] <= limit[block])
            here = concatenate([own, carried.take(within)])
        if not len(here.block):
            continue
        rows = prune(here, space.exact_tokens, keep)
        rows = np.concatenate([rows[rows < len(own.block)], rows[rows >= len(own.block)]])
        part = here.take(rows)
        start[block], length[block] = total, len(rows)
        fresh[block] = int((rows < len(own.block)).sum())
        total += len(rows)
        parts.append(part)
        carried = replace(part, tokens=np.zeros_like(part.tokens))
    merged = concatenate(parts) if parts else no_points()
    return Frontier(points=merged, start=start, fresh=fresh, length=length)


def no_points() -> Points:
    """None at all."""
    none = np.zeros(0, dtype=np.int64)
    return Points(
        block=none,
        values=np.zeros((0, 6)),
        tokens=none,
        record=none,
        name=none,
        turns=np.zeros(0, dtype=bool),
    )


def _pairs(
    start1: Ints, start2: Ints, length1: Ints, length2: Ints
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Every row of one range with every row of the other: the pair of ranges, both rows."""
    products = length1 * length2
    low = 0
    while low < len(products):
        high = int(np.searchsorted(np.cumsum(products[low:]), PAIRS_AT_ONCE)) + low + 1
        here = products[low:high]
        pair = np.repeat(np.arange(low, low + len(here)), here)
        within = np.arange(len(pair)) - np.repeat(np.cumsum(here) - here, here)
        if len(pair):
            width = length2[pair]
            yield pair, start1[pair] + within // width, start2[pair] + within % width
        low = high


def _turns(
    space: Space,
    owner: int,
    cut: Cut,
    sides: Sides,
    rows: tuple[Ints, Ints, Ints],
    records: Records,
) -> list[Points]:
    block, row1, row2 = rows
    one, two = sides.first.points.values[row1], sides.second.points.values[row2]
    token1, token2 = sides.first.points.tokens[row1], sides.second.points.tokens[row2]
    values = one + two
    values[:, PEAK] = np.maximum(one[:, PEAK] + two[:, RESIDENT], two[:, PEAK] + one[:, RESIDENT])
    twice = token1 & token2 & space.weight_tokens
    if twice.any():
        for bit, nbytes in enumerate(space.weight_bytes):
            shared = np.where(twice >> bit & 1, nbytes[block], 0.0)
            values[:, RESIDENT] -= shared
            values[:, PEAK] -= shared
    both = token1 | token2
    for number in cut.crossing:
        ends = space.sync_tokens[number][0] | space.sync_tokens[number][1]
        sync = space.syncs[number]
        values[:, SYNC_S] += np.where((both & ends) == ends, sync.together_s, sync.apart_s)
    use = np.flatnonzero(values[:, PEAK] <= sides.memory_bytes)
    if not len(use):
        return []
    name = np.zeros_like(use)
    if sides.named:
        name = _turn_names(sides.first.points, row1[use]) + _turn_names(
            sides.second.points, row2[use]
        )
    return [
        Points(
            block=block[use],
            values=values[use],
            tokens=both[use] & space.relevant[owner][block[use]],
            record=records.add(
                TURNS,
                np.zeros_like(use),
                sides.first.points.record[row1[use]],
                sides.second.points.record[row2[use]],
            ),
            name=name,
            turns=np.ones(len(use), dtype=bool),
        )
    ]


def _splits(
    space: Space,
    cut: Cut,
    sides: Sides,
    rows: tuple[Ints, Ints, Ints],
    stream: tuple[Ints, Floats],
    records: Records,
) -> list[Points]:
    block, row1, row2 = rows
    chunks, seconds = stream
    if not len(block):
        return []
    one, two = sides.first.points.values[row1], sides.second.points.values[row2]
    values = one + two
    values[:, SECONDS] = seconds
    values[:, SYNC_S] += sum(space.syncs[number].apart_s for number in cut.crossing)
    values[:, RESIDENT] = np.maximum(one[:, RESIDENT], two[:, RESIDENT])
    values[:, PEAK] = np.maximum(one[:, PEAK], two[:, PEAK])
    values[:, SPLITS] += sides.split
    name = np.zeros_like(block)
    if sides.named:
        ends = [_mixed(_whole_names(sides.first.points, row1))]
        ends.append(_mixed(_whole_names(sides.second.points, row2)))
        name = _mixed(ends[0] * (3 if cut.runs_ahead else 1) + ends[1] + chunks)
    return [
        Points(
            block=block,
            values=values,
            tokens=np.zeros_like(block),
            record=records.add(
                AHEAD if cut.runs_ahead else SPLIT,
                chunks,
                sides.first.points.record[row1],
                sides.second.points.record[row2],
            ),
            name=name,
            turns=np.zeros(len(block), dtype=bool),
        )
    ]


def _mixed(name: Ints) -> Ints:
    """Spreads numbers over 64 bits; products wrap around."""
    name = name ^ (name >> 31)
    name = name * np.int64(0x7FB5D329728EA185)
    name = name ^ (name >> 27)
    name = name * np.int64(0x81DADEF4BC2DD44D - (1 << 64))
    return name ^ (name >> 33)


def _leaf_names(space: Space, task: int) -> Ints:
    """Equal for options that a person could not tell apart."""
    seen: dict[object, int] = {}
    numbers = [
        seen.setdefault(signature(Leaf(task="", option=option)), len(seen))
        for option in space.leaves[task].options
    ]
    return _mixed(np.array(numbers, dtype=np.int64) * 64 + task + 1)


def _turn_names(points: Points, rows: Ints) -> Ints:
    """What a part adds to the name of a Temporal around it."""
    return np.where(points.turns[rows], points.name[rows], _mixed(points.name[rows]))


def _whole_names(points: Points, rows: Ints) -> Ints:
    """The name of a part as a whole."""
    return np.where(points.turns[rows], _mixed(points.name[rows] + 1), points.name[rows])
