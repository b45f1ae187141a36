"""Lower bounds of the published planner's model, and what they leave to look at.

A part of a schedule is three numbers there (`flowrl.testing.planner_fixture_search`): `total`,
`warm` and `pace`. The search's own bounds know the first one. Where one stage sets the pace, nearly
all that is left to choose is the warm-up, and a bound of `total` leaves nearly everything. So there
is a bound of each number here, the least of it over all schedules of a set of tasks on so many
devices, whatever the others are:

    one after the other   the sums of both parts' bounds
    at once               pace    the least over the splits of max(pace1, pace2)
                          warm    likewise of warm1 + warm2 where first feeds second, else of
                                  max(warm1, warm2)
                          total   likewise of max(total1, total2), and where first feeds second
                                  at least warm + pace (B - 1) of these two

By induction over a schedule B pace <= total <= warm + pace (B - 1): so parts whose pace is above
the most seconds of a step by B are part of nothing that is looked for, and bounds leave them out.
From total <= warm + pace (B - 1) of each part, a stream takes at least total1 + warm2, and
warm1 + total2.

Given a limit for the whole, going downwards yields the most of each number that a part may have, as
in `flowrl.plan.search.bounds`.
"""

from __future__ import annotations

import numpy as np

from flowrl.plan.search.bounds import Splits, levels
from flowrl.plan.search.space import Cut, Floats, Ints, Space
from flowrl.plan.search.stream_rows import StreamRows, first_within

__all__ = ["PACE", "TOTAL", "WARM", "least_numbers", "most_numbers"]

TOTAL, WARM, PACE = range(3)


def least_numbers(space: Space, batch: int, seconds: float) -> Floats:
    """`[3, sets, K]`: the least of each number of each set on a block of each size.

    Args:
        space: Of tasks whose options have nothing but devices and seconds, in `batch` chunks.
        batch: B, prompts of a step.
        seconds: Most that the whole may take; bounds of parts of nothing else are infinite.
    """
    least = np.full((3, len(space.sets), len(space.sizes)), np.inf)
    for level in levels(space):
        for at in level:
            if space.alone[at] >= 0:
                leaves = space.leaves[space.alone[at]]
                np.minimum.at(least[TOTAL, at], leaves.size, leaves.seconds)
                np.minimum.accumulate(least[TOTAL, at], out=least[TOTAL, at])
                least[1:, at] = least[TOTAL, at] / batch
            for cut in space.cuts[at]:
                if cut.turns:
                    both = least[:, cut.first] + least[:, cut.second]
                    both[:, both[PACE] * batch > seconds] = np.inf
                    np.minimum(least[:, at], both, out=least[:, at])
        _lower_streams(space, least, level, batch)
        for at in level:
            least[:, at, least[PACE, at] * batch > seconds] = np.inf
    _mend_whole(space, least, batch)
    return least


def _lower_streams(space: Space, least: Floats, level: range, batch: int) -> None:
    """Lowers the bounds of a level's sets to what parts at once have."""
    rows = StreamRows.of(space, least[TOTAL], level)
    if not len(rows.owner):
        return
    feeds = rows.chunks > 0
    pace = StreamRows.of(space, least[PACE], level).at_once().at_crossing()
    warm = np.empty_like(pace)
    warm[~feeds] = StreamRows.of(space, least[WARM], level).only(~feeds).at_once().at_crossing()
    warm[feeds] = _least_sums(space, least[WARM], rows.parts[:, feeds])
    total = rows.at_once().at_crossing()
    total[feeds] = np.maximum(total[feeds], warm[feeds] + _further(pace[feeds], batch))
    for number, found in ((TOTAL, total), (WARM, warm), (PACE, pace)):
        np.minimum.at(least[number], rows.owner, found)
        own = least[number, level.start : level.stop]
        np.minimum.accumulate(own, axis=1, out=own)


def _least_sums(space: Space, values: Floats, parts: Ints) -> Floats:
    """`[rows, K]`: the least sum of a number of two sets over all splits of a block.

    Args:
        values: `[sets, K]`, falling with the size.
        parts: `[2, rows]`, the sets.
    """
    one, two = values[parts[0]], values[parts[1]]
    devices = np.arange(len(space.fitting))
    # By devices that are left, of which any number may be.
    other = np.where(space.fitting < 0, np.inf, two[:, np.maximum(space.fitting, 0)])
    found = np.full((len(one), len(devices)), np.inf)
    # A size on which no row is better than on the one below it makes no better sum.
    better = np.any(one[:, 1:] < one[:, :-1], axis=0)
    for at in np.flatnonzero(np.append(np.isfinite(one[:, 0]).any(), better)):
        size = int(space.sizes[at])
        sums = one[:, at, None] + other[:, : len(devices) - size]
        np.minimum(found[:, size:], sums, out=found[:, size:])
    return found[:, space.sizes]


def _mend_whole(space: Space, least: Floats, batch: int) -> None:
    """Raises the bound of the whole's `total` on all devices to the least over single splits."""
    at = len(space.sets) - 1
    best = np.inf
    for cut in space.cuts[at]:
        if cut.turns:
            best = min(best, float(least[TOTAL, cut.first, -1] + least[TOTAL, cut.second, -1]))
        for stream in cut.streams:
            second = space.fitting[space.sizes[-1] - space.sizes]
            first = np.flatnonzero(second >= 0)
            one, two = least[:, cut.first, first], least[:, cut.second, second[first]]
            taken = _together(one, two, batch, feeds=stream.chunks > 0)[TOTAL]
            best = min(best, float(taken.min(initial=np.inf)))
    if space.alone[at] < 0:
        least[TOTAL, at, -1] = max(least[TOTAL, at, -1], best)


def _together(one: Floats, two: Floats, batch: int, *, feeds: bool) -> Floats:
    """`[3, ...]`: the least of each number of two parts at once."""
    found: Floats = np.maximum(one, two)
    if feeds:
        found[WARM] = one[WARM] + two[WARM]
        found[TOTAL] = found[WARM] + _further(found[PACE], batch)
        np.maximum(found[TOTAL], one[TOTAL] + two[WARM], out=found[TOTAL])
        np.maximum(found[TOTAL], one[WARM] + two[TOTAL], out=found[TOTAL])
    return found


def _further(pace: Floats, batch: int) -> Floats:
    """Seconds from the first prompt to the last one; none where there is but one."""
    return pace * (batch - 1) if batch > 1 else np.zeros_like(pace)


def most_numbers(
    space: Space, batch: int, least: Floats, limit: float
) -> tuple[Floats, list[list[Splits | None]]]:
    """Most of each number of each set on each block, and what each cut leaves to look at.

    Args:
        space, batch: As of `least_numbers`.
        least: What that found.
        limit: Most seconds of the whole.

    Returns:
        `[3, sets, K]`, minus infinity where nothing is to be looked at; and for each cut of each
        set its splits, None where there is none.
    """
    most = np.full_like(least, -np.inf)
    most[:2, -1], most[PACE, -1] = limit, limit / batch
    splits: list[list[Splits | None]] = [[None] * len(cuts) for cuts in space.cuts]
    for at in range(len(space.sets) - 1, -1, -1):
        own = most[:, at]
        if at < len(space.sets) - 1:
            # A part may leave devices of its block idle.
            own[:] = np.maximum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
        own[:, (least[:, at] > own).any(axis=0)] = -np.inf
        blocks = np.flatnonzero(own[TOTAL] > -np.inf)
        if not len(blocks):
            continue
        for number, cut in enumerate(space.cuts[at]):
            if cut.turns:
                one, two = least[:, cut.first, blocks], least[:, cut.second, blocks]
                rows = np.flatnonzero((one + two <= own[:, blocks]).all(axis=0))
                here = blocks[rows]
                _raise(most[:, cut.first], here, own[:, here] - two[:, rows])
                _raise(most[:, cut.second], here, own[:, here] - one[:, rows])
            for stream in cut.streams:
                found = _splits(space, cut, stream.chunks, batch, (least, most, at, blocks))
                if len(found.block):
                    splits[at][number] = found
    return most, splits


def _raise(most: Floats, blocks: Ints, numbers: Floats) -> None:
    for own, some in zip(most, numbers, strict=True):
        np.maximum.at(own, blocks, some)


def _splits(
    space: Space,
    cut: Cut,
    chunks: int,
    batch: int,
    within: tuple[Floats, Floats, int, Ints],
) -> Splits:
    """The splits of a set within its limits; raises those of its parts.

    Args:
        within: The bounds, the limits, the set, and its blocks that are looked at.
    """
    least, most, at, blocks = within
    feeds = chunks > 0
    sides = least[:, cut.first], least[:, cut.second]
    own = most[:, at, blocks]
    block, first, second = _candidates(space, sides, own, blocks, feeds=feeds)
    limit = most[:, at, block]
    one, two = sides[0][:, first], sides[1][:, second]
    rows = np.flatnonzero((_together(one, two, batch, feeds=feeds) <= limit).all(axis=0))
    block, first, second = block[rows], first[rows], second[rows]
    limit, one, two = limit[:, rows], one[:, rows], two[:, rows]
    pace = np.maximum(one[PACE], two[PACE])
    for part, here, other in ((cut.first, first, two), (cut.second, second, one)):
        room = limit.copy()
        if feeds:
            room[TOTAL] -= other[WARM]
            room[WARM] = np.minimum(limit[WARM], limit[TOTAL] - _further(pace, batch)) - other[WARM]
            if batch > 1:
                warm = one[WARM] + two[WARM]
                np.minimum(room[PACE], (limit[TOTAL] - warm) / (batch - 1), out=room[PACE])
        _raise(most[:, part], here, room)
    return Splits(block=block, first=first, second=second, chunks=np.full(len(block), chunks))


def _candidates(
    space: Space, sides: tuple[Floats, Floats], own: Floats, blocks: Ints, *, feeds: bool
) -> tuple[Ints, Ints, Ints]:
    """Splits of which each side may be within the limits, were the other as good as it can be.

    Args:
        sides: `[3, K]` each, the bounds of both.
        own: `[3, blocks]`, the limits.

    Returns:
        Indices of the block, of the first and of the second side's size.
    """
    left = space.fitting[space.sizes[blocks] - space.sizes[0]]
    blocks, own, left = blocks[left >= 0], own[:, left >= 0], left[left >= 0]
    lows: list[Ints] = []
    for mine, other in (sides, sides[::-1]):
        room = own.copy()
        if feeds:
            room[:2] -= other[WARM, left]
        lows.append(first_within(mine, room).max(axis=0))
    use = np.maximum(lows[0], lows[1]) < len(space.sizes)
    blocks, low, least = blocks[use], lows[0][use], lows[1][use]
    rest = space.sizes[blocks] - space.sizes[least]
    high = np.where(rest > 0, space.fitting[np.maximum(rest, 0)], -1)
    lengths = np.maximum(high - low + 1, 0)
    starts = np.cumsum(lengths) - lengths
    first = np.arange(int(lengths.sum())) - np.repeat(starts - low, lengths)
    block = np.repeat(blocks, lengths)
    return block, first, space.fitting[space.sizes[block] - space.sizes[first]]
