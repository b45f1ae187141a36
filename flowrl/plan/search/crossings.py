"""Pairs of points that are worth joining where both parts work at once and nothing passes.

What such a pair takes is max(seconds1, seconds2). All else that counts of the pair follows from the
same numbers of both points, whatever the blocks: bytes, further chunks, syncs, splits. So points
fall into classes of which all those numbers are equal. Of a class only the seconds by the size of
the block are left, and they fall with it. Of two classes on a block, then, one split beats all
others: the first size of the first part on which it is not the slower one, or the size before it.

So where one schedule is wanted, a pair of classes is one pair of points on each block instead of
one for every split. Where points of equal numbers are rare, there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowrl.plan.search.frontier import Frontier
from flowrl.plan.search.points import SECONDS
from flowrl.plan.search.space import Floats, Ints, Space

WORTH = 4
"""By which factor pairs must become fewer."""

FEW_PAIRS = 1 << 14
"""Fewer than so many are joined as they are."""

AT_A_TIME = 1 << 18
"""Pairs of classes on a block that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Classes:
    """The classes of a frontier.

    Attributes:
        seconds: `[classes, K]`, least seconds on a block of each size, idle devices allowed.
        row: `[classes, K]`, the point that takes so long.
    """

    seconds: Floats
    row: Ints


def crossings(
    space: Space,
    parts: tuple[Frontier, Frontier],
    columns: list[int],
    blocks: Ints,
    num_pairs: int,
) -> Iterator[tuple[Ints, Ints, Ints]] | None:
    """Blocks with the rows of both points of pairs that no other pair beats, and of some more.

    Args:
        parts: Both sides.
        columns: Which numbers of points count besides seconds.
        blocks: Where pairs are wanted.
        num_pairs: How many there are without this.

    Returns:
        None where it does not pay.
    """
    if num_pairs < FEW_PAIRS:
        return None
    rows = [_exact_rows(part) for part in parts]
    names = [_class_of(part, own, columns) for part, own in zip(parts, rows, strict=True)]
    num_ways = (1 + int(names[0].max())) * (1 + int(names[1].max()))
    if num_ways * len(blocks) * WORTH > num_pairs:
        return None
    one, two = (
        _classes(part, own, name, len(space.sizes))
        for part, own, name in zip(parts, rows, names, strict=True)
    )
    return _pairs(space, one, two, blocks)


def _exact_rows(part: Frontier) -> Ints:
    """Points that stand on exactly their block: all there are, once."""
    starts = np.cumsum(part.fresh) - part.fresh
    found: Ints = np.arange(int(part.fresh.sum())) + np.repeat(part.start - starts, part.fresh)
    return found


def _class_of(part: Frontier, rows: Ints, columns: list[int]) -> Ints:
    table = part.points.values[columns][:, rows]
    order = np.lexsort(table)
    begins = np.zeros(len(rows), dtype=np.int64)
    begins[1:] = (np.diff(table[:, order], axis=1) != 0).any(axis=0)
    found = np.empty_like(begins)
    found[order] = np.cumsum(begins)
    return found


def _classes(part: Frontier, rows: Ints, names: Ints, count: int) -> _Classes:
    points = part.points
    block, taken = points.block[rows], points.values[SECONDS, rows]
    seconds = np.full((1 + int(names.max()), count), np.inf)
    row = np.zeros(seconds.shape, dtype=np.int64)
    order = np.argsort(-taken, kind="stable")  # of several on a block, the fastest is entered last
    seconds[names[order], block[order]] = taken[order]
    row[names[order], block[order]] = rows[order]
    least = np.minimum.accumulate(seconds, axis=1)
    # Where a block has nothing faster, the fastest is on the one below.
    better = np.ones(seconds.shape, dtype=np.bool_)
    better[:, 1:] = seconds[:, 1:] < least[:, :-1]
    origin = np.maximum.accumulate(np.where(better, np.arange(count), 0), axis=1)
    return _Classes(seconds=least, row=np.take_along_axis(row, origin, axis=1))


def _pairs(
    space: Space, one: _Classes, two: _Classes, blocks: Ints
) -> Iterator[tuple[Ints, Ints, Ints]]:
    count = len(space.sizes)
    # A first part beyond all sizes is faster than any other, a second one that is left nothing is
    # slower: so the crossing is somewhere.
    first_s = np.append(one.seconds, np.full((len(one.seconds), 1), -np.inf), axis=1)
    second_s = np.append(two.seconds, np.full((len(two.seconds), 1), np.inf), axis=1)
    rests = np.where(space.rests < 0, count, space.rests).reshape(count, count + 1)
    class1 = np.arange(len(first_s))[:, None, None]
    class2 = np.arange(len(second_s))[:, None]
    width = max(1, AT_A_TIME // (len(first_s) * len(second_s)))
    for start in range(0, len(blocks), width):
        block = blocks[start : start + width]
        low = np.zeros((len(first_s), len(second_s), len(block)), dtype=np.int64)
        high = np.full(low.shape, count)
        for _ in range(count.bit_length()):
            middle = (low + high) >> 1
            slower = first_s[class1, middle] <= second_s[class2, rests[block, middle]]
            high = np.where(slower, middle, high)
            low = np.where(slower, low, np.minimum(middle + 1, high))
        before = np.maximum(low - 1, 0)
        after_s, before_s = (
            np.maximum(first_s[class1, at], second_s[class2, rests[block, at]])
            for at in (low, before)
        )
        first = np.where(before_s <= after_s, before, low)
        second = rests[block, first]
        name1, name2, at = np.nonzero(np.isfinite(np.minimum(before_s, after_s)))
        first, second = first[name1, name2, at], second[name1, name2, at]
        yield block[at], one.row[name1, first], two.row[name2, second]
