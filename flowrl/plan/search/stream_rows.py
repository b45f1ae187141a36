"""Bounds of streams: the ways to share blocks out between two parts, many streams at a time.

A row is one stream of one cut, with the bounds u1 and u2 of its sides on a block of each size,
chunks included. Both fall with the size. Rows of many sets are looked at together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from flowrl.plan.search.overlap import age_periods
from flowrl.plan.search.space import Bools, Cut, Floats, Ints, Space
from flowrl.plan.search.streams import AT_ONCE, Stream

BEYOND = 1e300
"""Seconds that stand for infinitely many, for no share of those is nothing."""

Way = tuple[int, int, Cut, Stream]
"""A set, which of its cuts, that cut, and one of its streams."""


class Rows(TypedDict):
    """`StreamRows` without lines."""

    space: Space
    owner: Ints
    number: Ints
    parts: Ints
    chunks: Ints
    u1: Floats
    u2: Floats


AT_A_TIME = 1 << 12
"""Blocks of all rows that are looked at together."""

NEVER = 1e100
"""Sums with a share of them are above this, whose square is a number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamRows:
    """Rows with the bounds of their sides.

    Attributes:
        space: The space.
        owner: `[rows]`, index of the set that is cut.
        number: `[rows]`, which of its cuts it is.
        parts: `[2, rows]`, indices of the sets that are its sides.
        chunks: `[rows]`.
        lines: `[rows, lines, 2]`, the factors of both sides; the last line is there again where
            others have more.
        u1, u2: `[rows, K]`; `BEYOND` where a side is impossible.
    """

    space: Space
    owner: Ints
    number: Ints
    parts: Ints
    chunks: Ints
    lines: Floats
    u1: Floats
    u2: Floats

    @classmethod
    def of(cls, space: Space, bounds: Floats, owners: Iterable[int]) -> StreamRows:
        """Those of all cuts of some sets.

        Args:
            bounds: `[sets, K]`, of each set on a block of each size.
        """
        ways = [
            (owner, number, cut, stream)
            for owner in owners
            for number, cut in enumerate(space.cuts[owner])
            if not cut.runs_ahead
            for stream in cut.streams
        ]
        return cls(lines=_lines([stream for *_, stream in ways]), **rows_of(space, bounds, ways))

    def only(self, rows: Bools) -> StreamRows:
        """Some of the rows."""
        return replace(
            self,
            owner=self.owner[rows],
            number=self.number[rows],
            parts=self.parts[:, rows],
            chunks=self.chunks[rows],
            lines=self.lines[rows],
            u1=self.u1[rows],
            u2=self.u2[rows],
        )

    def not_in_turns(self) -> StreamRows:
        """But for streams in turns that may be a Temporal: one after the other on a part each is
        slower than on all."""
        turns = [
            self.space.cuts[owner][number].turns
            for owner, number in zip(self.owner.tolist(), self.number.tolist(), strict=True)
        ]
        in_turns = (self.lines == 1.0).all(axis=(1, 2))
        return self.only(~(in_turns & np.array(turns, dtype=np.bool_)))

    def in_chunks(self) -> StreamRows:
        """Those in which something passes."""
        return self.only(self.chunks > 0)

    def in_parts(self) -> Iterator[StreamRows]:
        """So many at a time that they do not take much memory, and that what the first ones find
        spares later ones where there are many sizes."""
        most = max(1, AT_A_TIME // len(self.space.sizes))
        if len(self.owner) <= most:
            yield self
            return
        for first in range(0, len(self.owner), most):
            rows = np.zeros(len(self.owner), dtype=np.bool_)
            rows[first : first + most] = True
            yield self.only(rows)

    def at_once(self) -> StreamRows:
        """As if nothing passed between the sides, which take their chunks' time."""
        lines = np.tile(_lines([AT_ONCE]), (len(self.lines), 1, 1))
        return replace(self, lines=lines)

    def faster(self, best: Floats) -> StreamRows:
        """Those of which each side on all that can be left for it takes less than the best of its
        owner, on some block.

        Args:
            best: `[sets, K]`.
        """
        left = self.space.fitting[self.space.sizes - self.space.sizes[0]]
        use = left >= 0
        longer = np.maximum(self.u1[:, left[use]], self.u2[:, left[use]])
        rows: Bools = np.any(longer < best[:, use][self.owner], axis=1)
        return self.only(rows)

    def seconds(self, row: Ints, first: Ints, second: Ints) -> Floats:
        """That splits take at least, by the sizes of both sides; infinite where impossible."""
        u1, u2 = self.u1[row, first], self.u2[row, second]
        found: Floats = np.zeros(u1.shape)
        for line in range(self.lines.shape[1]):
            a, b = self.lines[row, line, 0], self.lines[row, line, 1]
            np.maximum(found, a * u1 + b * u2, out=found)
        found[found > NEVER] = np.inf
        return found

    def rooms(self, row: Ints, limit: Floats, first: Ints, second: Ints) -> tuple[Floats, Floats]:
        """Most seconds of each side of splits within limits, given the bound of the other side.

        Returns:
            Of the first sides, and of the second ones.
        """
        lines = self.lines[row]
        further = further_chunks(self.space, self.parts, self.chunks)[:, row]
        return (
            _room(limit, self.u2[row, second], lines) - further[0],
            _room(limit, self.u1[row, first], lines[:, :, ::-1]) - further[1],
        )

    def at_crossing(self) -> Floats:
        """`[rows, K]`: seconds of the split at which the slower side changes.

        Of the last split with u1 > u2 and the first with u1 <= u2, one has the least
        max(u1, u2). In chunks, the slower side is that of the first and of the last line which is
        larger.
        """
        space, count = self.space, len(self.space.sizes)
        one, two = self._sides()
        num = len(one)
        # A side that is left nothing takes for ever, and so does a first side beyond all sizes.
        one = np.append(one, np.full((num, 1), -np.inf), axis=1).ravel()
        two = np.append(two, np.full((num, 1), np.inf), axis=1).ravel()
        rests = np.where(space.rests < 0, count, space.rests)
        start = np.arange(num)[:, None] * (count + 1)
        block = np.arange(count) * (count + 1)
        low = np.zeros((num, count), dtype=np.int64)
        high = np.full((num, count), count, dtype=np.int64)
        for _ in range(count.bit_length()):
            # At `high` the second side is the slower one: a search that is done stays there.
            middle = (low + high) >> 1
            slower = one[start + middle] <= two[start + rests[block + middle]]
            high = np.where(slower, middle, high)
            low = np.where(slower, low, middle + 1)
        first = np.concatenate([low, low - 1], axis=1)
        inside = (first >= 0) & (first < count)
        first = np.clip(first, 0, count - 1)
        second = space.rests[np.tile(block, 2) + first]
        inside &= second >= 0
        taken = self.seconds(np.arange(num)[:, None], first, second)
        taken[~inside] = np.inf
        return np.minimum(taken[:, :count], taken[:, count:])

    def _sides(self) -> tuple[Floats, Floats]:
        """What the crossing is one of."""
        early, late = self.lines[:, 0], self.lines[:, -1]
        same = late[:, 0] <= early[:, 0]
        one = np.where(same, 1.0, late[:, 0] - early[:, 0])[:, None]
        two = np.where(same, 1.0, early[:, 1] - late[:, 1])[:, None]
        return one * self.u1, two * self.u2

    def within(self, limit: Floats) -> tuple[Ints, Ints, Ints, Ints]:
        """All splits of blocks that take at most what their owner may, by the bounds.

        Args:
            limit: `[sets, K]`; minus infinity where nothing is to be looked at.

        Returns:
            Of each split its row, and the sizes of its block, its first and its second side.
        """
        space, count = self.space, len(self.space.sizes)
        left = space.fitting[space.sizes - space.sizes[0]]  # for one side at most
        most = limit[self.owner]
        asked = (most > -np.inf) & (left >= 0)
        asked &= ((self.u1[:, -1] < BEYOND) & (self.u2[:, -1] < BEYOND))[:, None]
        low, least = self._smallest(most, np.maximum(left, 0))
        asked &= (low < count) & (least < count)
        row, block = np.nonzero(asked)
        low, least = low[row, block], least[row, block]
        rest = space.sizes[block] - space.sizes[least]
        high = np.where(rest > 0, space.fitting[np.maximum(rest, 0)], -1)
        lengths = np.maximum(high - low + 1, 0)
        starts = np.cumsum(lengths) - lengths
        first = np.arange(int(lengths.sum())) - np.repeat(starts - low, lengths)
        row, block = np.repeat(row, lengths), np.repeat(block, lengths)
        second = space.fitting[space.sizes[block] - space.sizes[first]]
        use = second >= 0
        row, block, first, second = row[use], block[use], first[use], second[use]
        use = self.seconds(row, first, second) <= most[row, block]
        return row[use], block[use], first[use], second[use]

    def _smallest(self, limit: Floats, left: Ints) -> tuple[Ints, Ints]:
        """`[rows, K]`: the smallest size of each side that may be within the limit, for each side
        is least on all that can be left for it.

        Args:
            limit: `[rows, K]`, of each block.
            left: Index of the largest size that is left for one side of each.
        """
        lines = self.lines[:, None]
        first_room = _room(limit, self.u2[:, left], lines)
        second_room = _room(limit, self.u1[:, left], lines[..., ::-1])
        return first_within(self.u1, first_room), first_within(self.u2, second_room)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AheadRow(StreamRows):
    """The row of a cut whose first part runs ahead of the second.

    Attributes:
        steady: `[K]`, steady seconds of the first part: a third number that the whole is no shorter
            than.
        dense: `[K]`, dense seconds of the first part.
    """

    steady: Floats
    dense: Floats

    @classmethod
    def of_cut(
        cls, space: Space, at: tuple[int, int], seconds: Floats, steady: Floats, dense: Floats
    ) -> AheadRow:
        """The row of one cut.

        Args:
            at: The set that is cut, and which of its cuts it is.
            seconds, steady, dense: `[sets, K]`, as `flowrl.plan.search.bounds.Bounds` has them.
        """
        owner, number = at
        cut = space.cuts[owner][number]
        sides, chunks = np.array([[cut.first], [cut.second]]), np.zeros(1, dtype=np.int64)
        small = space.sizes < space.least[cut.first]
        return cls(
            space=space,
            owner=np.array([owner]),
            number=np.array([number]),
            parts=sides,
            chunks=chunks,
            lines=_lines(cut.streams),
            u1=_with_chunks(space, seconds, sides[0], chunks),
            u2=_with_chunks(space, seconds, sides[1], chunks),
            steady=np.where(small, np.inf, steady[cut.first]),
            dense=dense[cut.first],
        )

    def seconds(self, row: Ints, first: Ints, second: Ints) -> Floats:
        """That splits take at least, by the sizes of both sides."""
        drawn, learned = self.u1[row, first], self.u2[row, second]
        ages = age_periods(
            np.minimum(drawn, NEVER),
            self.dense[first],
            np.minimum(learned, NEVER),
            self.space.staleness,
        )
        found: Floats = np.maximum(np.maximum(learned, self.steady[first]), ages)
        found[np.maximum(drawn, learned) > NEVER] = np.inf
        return found

    def _sides(self) -> tuple[Floats, Floats]:
        """The second part alone decides where it takes at least s1 and u1 / a."""
        return np.maximum(self.steady, self.u1 / self.space.staleness), self.u2

    def _smallest(self, limit: Floats, left: Ints) -> tuple[Ints, Ints]:
        first, second = StreamRows._smallest(self, limit, left)
        return np.maximum(first, first_within(self.steady[None], limit)), second


def first_within(seconds: Floats, most: Floats) -> Ints:
    """`[rows, K]`: the smallest size on which what falls with the size is within each limit."""
    found = [
        np.searchsorted(-own, -limit, side="left") for own, limit in zip(seconds, most, strict=True)
    ]
    return np.array(found, dtype=np.int64).reshape(most.shape)


def _lines(streams: Sequence[Stream]) -> Floats:
    most = max((len(stream.lines) for stream in streams), default=1)
    lines = [stream.lines + stream.lines[-1:] * (most - len(stream.lines)) for stream in streams]
    return np.array(lines, dtype=np.float64).reshape(len(streams), most, 2)


def _with_chunks(space: Space, bounds: Floats, sets: Ints, chunks: Ints) -> Floats:
    """`[rows, K]`: the bounds of one side of each."""
    seconds = bounds[sets] + further_chunks(space, sets, chunks)[:, None]
    seconds[space.sizes < space.least[sets][:, None]] = BEYOND
    found: Floats = np.minimum(seconds, BEYOND, out=seconds)
    return found


def further_chunks(space: Space, sets: Ints, chunks: Ints) -> Floats:
    """Seconds of all chunks but the first of each set."""
    found: Floats = np.maximum(chunks - 1, 0) * np.minimum(space.chunk_s[sets], BEYOND)
    return found


def _room(limit: Floats, other: Floats, lines: Floats) -> Floats:
    """Most seconds of one side, chunks included, when the other takes `other`.

    Args:
        lines: `[..., lines, 2]`, factors of this side, and of the other.
    """
    room: Floats = np.full(other.shape, np.inf)
    for line in range(lines.shape[-2]):
        mine, theirs = lines[..., line, 0], lines[..., line, 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            np.minimum(room, np.where(mine > 0, (limit - theirs * other) / mine, np.inf), out=room)
    return room


def rows_of(space: Space, bounds: Floats, ways: Sequence[Way]) -> Rows:
    """What rows are, but for their lines.

    Args:
        bounds: As of `StreamRows.of`.
        ways: A set, which of its cuts, that cut and one of its streams, for each row.
    """
    parts = [(cut.first, cut.second) for _, _, cut, _ in ways]
    sides = np.array(parts, dtype=np.int64).reshape(len(ways), 2).T
    chunks = np.array([stream.chunks for *_, stream in ways], dtype=np.int64)
    return Rows(
        space=space,
        owner=np.array([owner for owner, *_ in ways], dtype=np.int64),
        number=np.array([number for _, number, *_ in ways], dtype=np.int64),
        parts=sides,
        chunks=chunks,
        u1=_with_chunks(space, bounds, sides[0], chunks),
        u2=_with_chunks(space, bounds, sides[1], chunks),
    )
