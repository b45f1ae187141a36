"""Lower bounds of seconds, and what they leave to look at.

The bound of a set of tasks on a block is its least time when memory and syncs are forgotten: a
number instead of a frontier, so it is cheap at thousands of block sizes. Given a limit for the
whole step, going through the sets from the whole downwards then yields, for every set and block,
the most seconds that a partial schedule may take in any schedule within the limit, and the splits
of blocks that can be part of one. Both are safe: nothing within the limit is lost.

With u the bounds of the two sides (chunks included), a stream takes the largest a u1 + b u2 of its
lines (`space.Stream`), which grows with both; independent sides have the lines u1 and u2. Where the
first part runs ahead, its steady seconds are a third number that the whole is no shorter than.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowrl.plan.search.arrivals import Line
from flowrl.plan.search.overlap import age_periods
from flowrl.plan.search.space import AT_ONCE, Cut, Floats, Ints, Space, Stream, largest

__all__ = ["Bounds", "Splits", "limits", "lower_bounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of each set on a block of each size; infinite where it is impossible.

    Attributes:
        seconds: `[sets, K]`.
        steady: `[sets, K]`, of steady seconds; 0 of sets that cannot run ahead.
        dense: `[sets, K]`, of dense seconds; 0 of those, and of several tasks, for all of them may
            take turns.
    """

    seconds: Floats
    steady: Floats
    dense: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Ways to share blocks out that the bounds leave to look at, for one cut.

    Attributes:
        block: Index of the block's size.
        first: Index of the size of the first part's block.
        second: Index of the largest size that is left for the second.
        chunks: Chunk count of each; 0 where nothing passes.
    """

    block: Ints
    first: Ints
    second: Ints
    chunks: Ints


def lower_bounds(space: Space) -> Bounds:
    """The bounds of all sets."""
    bounds = np.full((len(space.sets), len(space.sizes)), np.inf)
    steady, dense = np.zeros_like(bounds), np.zeros_like(bounds)
    lower = Bounds(seconds=bounds, steady=steady, dense=dense)
    for at, task in enumerate(space.alone):
        best = bounds[at]
        if task >= 0:
            leaves = space.leaves[task]
            rows = space.rows[at]
            use = slice(None) if rows is None else rows
            np.minimum.at(best, leaves.size[use], leaves.seconds[use])
        for cut in space.cuts[at]:
            if cut.turns:
                np.minimum(best, bounds[cut.first] + bounds[cut.second], out=best)
        for cut in space.cuts[at]:
            for stream in () if cut.runs_ahead else cut.streams:
                if stream.in_turns and cut.turns:
                    continue  # one after the other on a part each is slower than on all
                u1, u2 = _with_chunks(space, cut, bounds, stream)
                if _may_be_faster(space, u1, u2, best):
                    np.minimum(best, _of_streams(space, u1, u2, stream), out=best)
            if cut.runs_ahead:
                np.minimum(best, _of_ahead(space, cut, lower), out=best)
        np.minimum.accumulate(best, out=best)
        for cut in space.cuts[at]:
            if cut.runs_ahead:
                _lower_ahead(space, cut, lower, best)
                continue
            for stream in cut.streams:
                if stream.chunks == 0 or (stream.in_turns and cut.turns):
                    continue  # the crossing was the best of the former, a Temporal of the latter
                u1, u2 = _with_chunks(space, cut, bounds, stream)
                if not _may_be_faster(space, u1, u2, best):
                    continue
                possible = np.where(np.isfinite(best), best, -np.inf)
                block, first_at, second_at = _windows(space, u1, u2, stream, possible)
                np.minimum.at(best, block, _streamed(u1[first_at], u2[second_at], stream))
        np.minimum.accumulate(best, out=best)
        if space.ahead[at]:
            steady[at] = _steady_bound(space, at, lower)
            if task >= 0:
                dense[at] = _least(space, at, space.leaves[task].dense)
    return lower


def _least(space: Space, at: int, values: Floats) -> Floats:
    """`[K]`: least of the values of a single task's options that fit a block."""
    leaves, rows = space.leaves[space.alone[at]], space.rows[at]
    use = slice(None) if rows is None else rows
    best = np.full(len(space.sizes), np.inf)
    np.minimum.at(best, leaves.size[use], values[use])
    return np.minimum.accumulate(best)


def _steady_bound(space: Space, at: int, lower: Bounds) -> Floats:
    """`[K]`: least steady seconds of a set that may run ahead."""
    bounds, steady = lower.seconds, lower.steady
    if space.alone[at] >= 0:
        return _least(space, at, space.leaves[space.alone[at]].steady)
    best = np.full(len(space.sizes), np.inf)
    for cut in space.cuts[at]:
        if cut.turns:
            np.minimum(best, bounds[cut.first] + bounds[cut.second], out=best)
        if cut.streams:
            fewest = min(cut.streams, key=lambda stream: stream.chunks)
            s1, s2 = _with_chunks(space, cut, steady, fewest)
            np.minimum(best, _of_streams(space, s1, s2, AT_ONCE), out=best)
    return np.minimum.accumulate(best)


def _of_ahead(space: Space, cut: Cut, lower: Bounds) -> Floats:
    """`[K]`: seconds of a split on each block with the first part ahead of the second.

    The second part alone decides where it takes at least s1 and u1 / a.
    """
    ahead = _Ahead(space, cut, lower)
    decides = np.maximum(ahead.steady, ahead.drawn / space.staleness)
    return _crossing(space, decides, ahead.learned, ahead.seconds)


def _lower_ahead(space: Space, cut: Cut, lower: Bounds, best: Floats) -> None:
    """Lowers `best`, what some split takes on each block, to what the best one takes."""
    ahead = _Ahead(space, cut, lower)
    possible = np.where(np.isfinite(best), best, -np.inf)
    sides = (ahead.drawn, ahead.learned)
    block, first, second = _windows(space, *sides, cut.streams[0], possible, ahead)
    np.minimum.at(best, block, ahead.seconds(first, second))


class _Ahead:
    """The bounds of a part that runs ahead and of the other, `[K]` each."""

    def __init__(self, space: Space, cut: Cut, lower: Bounds) -> None:
        stream = cut.streams[0]
        self.staleness = space.staleness
        self.drawn, self.learned = _with_chunks(space, cut, lower.seconds, stream)
        self.steady, _ = _with_chunks(space, cut, lower.steady, stream)
        self.dense = lower.dense[cut.first]

    def seconds(self, first: Ints, second: Ints) -> Floats:
        """Of splits, by the sizes of both sides."""
        learned = self.learned[second]
        ages = age_periods(self.drawn[first], self.dense[first], learned, self.staleness)
        return np.maximum(np.maximum(learned, self.steady[first]), ages)


def limits(
    space: Space, lower: Bounds, at_root: Floats, asked: Floats | None = None
) -> tuple[Floats, list[list[Splits | None]]]:
    """Most seconds of each set on each block, and what each cut leaves to look at.

    Args:
        space: The space.
        lower: Its lower bounds.
        at_root: `[K]`, most seconds of the whole on each block.
        asked: `[sets, K]`, likewise of sets that are wanted for themselves.

    Returns:
        `[sets, K]`, minus infinity where nothing is to be looked at; and for each cut of each set
        its splits, None where there is none.
    """
    bounds = lower.seconds
    most = np.full_like(bounds, -np.inf) if asked is None else asked.copy()
    most[-1] = at_root
    splits: list[list[Splits | None]] = [[None] * len(cuts) for cuts in space.cuts]
    for at in range(len(space.sets) - 1, -1, -1):
        limit = most[at]
        # A partial schedule may leave devices of its block idle: what is wanted on a larger block
        # is wanted on a smaller one. The whole is looked at on each block for itself.
        if at < len(space.sets) - 1:
            limit[:] = np.maximum.accumulate(limit[::-1])[::-1]
        limit[bounds[at] > limit] = -np.inf
        if np.isneginf(limit).all():
            continue
        for number, cut in enumerate(space.cuts[at]):
            first, second = bounds[cut.first], bounds[cut.second]
            if cut.turns:
                use = first + second <= limit
                np.maximum(most[cut.first], limit - second, out=most[cut.first], where=use)
                np.maximum(most[cut.second], limit - first, out=most[cut.second], where=use)
            splits[at][number] = _wanted(space, cut, lower, limit, most)
    return most, splits


def _wanted(space: Space, cut: Cut, lower: Bounds, limit: Floats, most: Floats) -> Splits | None:
    """The splits of a cut within the limit; raises the limits of its parts."""
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    for stream in cut.streams:
        u1, u2 = _with_chunks(space, cut, lower.seconds, stream)
        ahead = _Ahead(space, cut, lower) if cut.runs_ahead else None
        block, first, second = _windows(space, u1, u2, stream, limit, ahead)
        if not len(block):
            continue
        extra = max(stream.chunks - 1, 0)
        for part, part_at, other, lines in (
            (cut.first, first, u2[second], stream.lines),
            (cut.second, second, u1[first], stream.turned),
        ):
            room = _room(limit[block], other, lines) - extra * space.chunk_s[part]
            np.maximum.at(most[part], part_at, room)
        found.append((block, first, second, np.full(len(block), stream.chunks, dtype=np.int64)))
    if not found:
        return None
    block, first, second, counts = (np.concatenate(column) for column in zip(*found, strict=True))
    return Splits(block=block, first=first, second=second, chunks=counts)


def _with_chunks(space: Space, cut: Cut, bounds: Floats, stream: Stream) -> tuple[Floats, Floats]:
    extra = max(stream.chunks - 1, 0)
    u1, u2 = (
        bounds[part] + extra * space.chunk_s[part] if extra else bounds[part]
        for part in (cut.first, cut.second)
    )
    if space.least[cut.first] or space.least[cut.second]:
        u1 = np.where(space.sizes < space.least[cut.first], np.inf, u1)
        u2 = np.where(space.sizes < space.least[cut.second], np.inf, u2)
    return u1, u2


def _may_be_faster(space: Space, u1: Floats, u2: Floats, best: Floats) -> bool:
    """Whether each side on all that can be left for it is faster than `best`, on any block."""
    left = space.fitting[space.sizes - space.sizes[0]]
    use = left >= 0
    return bool((np.maximum(u1[left[use]], u2[left[use]]) < best[use]).any())


def _streamed(u1: Floats, u2: Floats, stream: Stream) -> Floats:
    if stream.even:
        slower = np.maximum(u1, u2)
        return slower + np.minimum(u1, u2) / stream.chunks if stream.chunks else slower
    return largest(stream.lines, u1, u2)


def _room(limit: Floats, other: Floats, lines: tuple[Line, ...]) -> Floats:
    """Most seconds of one side, chunks included, when the other takes `other`.

    Args:
        lines: Factors of this side, and of the other.
    """
    room = np.full(len(limit), np.inf)
    for mine, theirs in lines:
        if mine:
            np.minimum(room, (limit - theirs * other if theirs else limit) / mine, out=room)
    return room


def _of_streams(space: Space, u1: Floats, u2: Floats, stream: Stream) -> Floats:
    """`[K]`: seconds of the split at which the slower side changes, for each block.

    Of the last split with u1 > u2 and the first with u1 <= u2, one has the least max(u1, u2). Where
    chunks are not even, the slower side is that of the first and the last line which is larger.
    """
    early, late = stream.lines[0], stream.lines[-1]
    one, two = u1, u2
    if not stream.even and late[0] > early[0]:
        one, two = (late[0] - early[0]) * u1, (early[1] - late[1]) * u2
    return _crossing(
        space, one, two, lambda first, second: _streamed(u1[first], u2[second], stream)
    )


def _crossing(
    space: Space, one: Floats, two: Floats, seconds: Callable[[Ints, Ints], Floats]
) -> Floats:
    """`[K]`: seconds of the split at which the larger of two sides changes, for each block.

    `one` falls and what the second side is left with rises along the first side's sizes. The better
    of the last split with one > two and the first with one <= two.

    Args:
        seconds: Of splits, by the sizes of both sides.
    """
    count = len(space.sizes)
    block = np.arange(count)
    # A side that is left nothing takes for ever, and so does a first side beyond all sizes: the
    # last entry is that, which an index of -1 means too.
    two = np.append(two, np.inf)
    one = np.append(one, -np.inf)
    rests, row = space.rests, block * (count + 1)
    low, high = np.zeros(count, dtype=np.int64), np.full(count, count, dtype=np.int64)
    for _ in range(count.bit_length()):
        # At `high` the second side is the slower one, so a search that is done stays where it is.
        middle = (low + high) >> 1
        slower = one[middle] <= two[rests[row + middle]]
        high = np.where(slower, middle, high)
        low = np.where(slower, low, middle + 1)
    best = np.full(count, np.inf)
    for first in (low, low - 1):
        inside = (first >= 0) & (first < count)
        first = np.clip(first, 0, count - 1)
        second = rests[row + first]
        inside &= second >= 0
        np.minimum(best, np.where(inside, seconds(first, second), np.inf), out=best)
    return best


def _windows(
    space: Space,
    u1: Floats,
    u2: Floats,
    stream: Stream,
    limit: Floats,
    ahead: _Ahead | None = None,
) -> tuple[Ints, Ints, Ints]:
    """All splits of blocks that take at most `limit` by the bounds: block, first, second.

    Args:
        ahead: Of a first part that runs ahead.
    """
    count = len(space.sizes)
    empty = np.zeros(0, dtype=np.int64)
    blocks = np.flatnonzero(limit > -np.inf)
    if not len(blocks) or np.isinf(u1[-1]) or np.isinf(u2[-1]):
        return empty, empty, empty
    most = limit[blocks]
    left = space.fitting[space.sizes[blocks] - space.sizes[0]]  # for one side at most
    blocks, most, left = blocks[left >= 0], most[left >= 0], left[left >= 0]
    # Each side is least on all that can be left for it.
    low = np.searchsorted(-u1, -_room(most, u2[left], stream.lines), side="left")
    if ahead is not None:
        low = np.maximum(low, np.searchsorted(-ahead.steady, -most, side="left"))
    least = np.searchsorted(-u2, -_room(most, u1[left], stream.turned), side="left")
    inside = (low < count) & (least < count)
    blocks, low, least = blocks[inside], low[inside], least[inside]
    rest = space.sizes[blocks] - space.sizes[least]
    high = np.where(rest > 0, space.fitting[np.maximum(rest, 0)], -1)
    lengths = np.maximum(high - low + 1, 0)
    block = np.repeat(blocks, lengths)
    if not len(block):
        return empty, empty, empty
    starts = np.cumsum(lengths) - lengths
    first = np.arange(len(block)) - np.repeat(starts - low, lengths)
    second = space.fitting[space.sizes[block] - space.sizes[first]]
    use = second >= 0
    first, second, block = first[use], second[use], block[use]
    if ahead is None:
        least_s = _streamed(u1[first], u2[second], stream)
    else:
        least_s = ahead.seconds(first, second)
    use = least_s <= limit[block]
    return block[use], first[use], second[use]
