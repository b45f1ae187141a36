"""Lower bounds of seconds, and what they leave to look at.

The bound of a set of tasks on a block is its least time when memory and syncs are forgotten: a
number instead of a frontier, so it is cheap at thousands of block sizes. Given a limit for the
whole step, going through the sets from the whole downwards then yields, for every set and block,
the most seconds that a partial schedule may take in any schedule within the limit, and the splits
of blocks that can be part of one. Both are safe: nothing within the limit is lost.

A stream takes the largest a u1 + b u2 of its lines (`streams.Stream`), which grows with both sides'
bounds u; independent sides have the lines u1 and u2 (`stream_rows`). One whose first part takes
turns has lines of its own (`turn_rows`); which of both a part has is not known, so it is bounded by
either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flowrl.plan.search.space import Bools, Floats, Ints, Space
from flowrl.plan.search.stream_rows import AheadRow, StreamRows
from flowrl.plan.search.turn_rows import TurnRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of each set on a block of each size; infinite where it is impossible.

    Attributes:
        seconds: `[sets, K]`.
        steady: `[sets, K]`, of steady seconds; 0 of sets that cannot run ahead.
        dense: `[sets, K]`, of dense seconds; 0 of those, and of several tasks, for all of them may
            take turns.
        ready: `[sets, K]`, of seconds until all is over that somebody reads, where the tasks of a
            set take turns or do not.
        streams: Those of the sets of as many tasks each, small sets first.
        turns: Likewise those whose first part takes turns.
    """

    seconds: Floats
    steady: Floats
    dense: Floats
    ready: Floats
    streams: list[StreamRows]
    turns: list[TurnRows]


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
    ready = np.zeros_like(bounds)
    lower = Bounds(seconds=bounds, steady=steady, dense=dense, ready=ready, streams=[], turns=[])
    for level in levels(space):
        for at in level:
            if space.alone[at] >= 0:
                bounds[at] = _least(space, at, space.leaves[space.alone[at]].seconds)
            for cut in space.cuts[at]:
                if cut.turns:
                    both = bounds[cut.first] + bounds[cut.second]
                    np.minimum(bounds[at], both, out=bounds[at])
        lower.streams.append(StreamRows.of(space, bounds, level))
        lower.turns.append(TurnRows.of_turns(space, bounds, ready, level))
        _lower_streams(bounds, lower.streams[-1].not_in_turns(), level)
        _lower_streams(bounds, lower.turns[-1], level)
        for at in level:
            for row in _ahead_rows(space, at, lower):
                _lower_ahead(bounds, row)
            if space.hands_on[at]:
                ready[at] = _ready_bound(space, at, lower)
            if space.ahead[at]:
                steady[at] = _steady_bound(space, at, lower)
                if space.alone[at] >= 0:
                    dense[at] = _least(space, at, space.leaves[space.alone[at]].dense)
    return lower


def levels(space: Space) -> list[range]:
    """The sets of equally many tasks each, small ones first: parts have fewer tasks."""
    counts = [mask.bit_count() for mask in space.sets]  # ascending
    starts = [at for at in range(len(counts)) if not at or counts[at - 1] < counts[at]]
    return [range(low, high) for low, high in pairwise([*starts, len(counts)])]


def _lower_streams(bounds: Floats, rows: StreamRows, level: range) -> None:
    """Lowers the bounds of a level's sets to what the best of some streams take."""
    own = bounds[level.start : level.stop]
    for some in rows.in_parts():
        part = some.faster(bounds)
        if part.owner.size:
            np.minimum.at(bounds, part.owner, part.at_crossing())
    np.minimum.accumulate(own, axis=1, out=own)
    # The crossing was the best of streams in which nothing passes.
    for some in rows.in_chunks().in_parts():
        part = some.faster(bounds)
        if part.owner.size:
            row, block, first, second = part.within(np.where(np.isfinite(bounds), bounds, -np.inf))
            np.minimum.at(bounds, (part.owner[row], block), part.seconds(row, first, second))
            np.minimum.accumulate(own, axis=1, out=own)


def _lower_ahead(bounds: Floats, row: AheadRow) -> None:
    best = bounds[row.owner[0]]
    np.minimum(best, row.at_crossing()[0], out=best)
    np.minimum.accumulate(best, out=best)
    at, block, first, second = row.within(np.where(np.isfinite(bounds), bounds, -np.inf))
    np.minimum.at(best, block, row.seconds(at, first, second))
    np.minimum.accumulate(best, out=best)


def _ahead_rows(space: Space, at: int, lower: Bounds) -> list[AheadRow]:
    return [
        AheadRow.of_cut(space, (at, number), lower.seconds, lower.steady, lower.dense)
        for number, cut in enumerate(space.cuts[at])
        if cut.runs_ahead
    ]


def _least(space: Space, at: int, values: Floats) -> Floats:
    """`[K]`: least of the values of a single task's options that fit a block."""
    leaves, rows = space.leaves[space.alone[at]], space.rows[at]
    use = slice(None) if rows is None else rows
    best = np.full(len(space.sizes), np.inf)
    np.minimum.at(best, leaves.size[use], values[use])
    return np.minimum.accumulate(best)


def _ready_bound(space: Space, at: int, lower: Bounds) -> Floats:
    """`[K]`: least seconds until all of a set is over that somebody reads."""
    best: Floats = lower.seconds[at].copy()
    for cut in space.cuts[at] if space.sets[at] & space.unread else ():
        if cut.turns:
            parts = [part for part in (cut.first, cut.second) if space.sets[part] & ~space.unread]
            np.minimum(best, sum(lower.ready[part] for part in parts), out=best)
    return best


def _steady_bound(space: Space, at: int, lower: Bounds) -> Floats:
    """`[K]`: least steady seconds of a set that may run ahead."""
    bounds = lower.seconds
    if space.alone[at] >= 0:
        return _least(space, at, space.leaves[space.alone[at]].steady)
    best = np.full(len(space.sizes), np.inf)
    for cut in space.cuts[at]:
        if cut.turns:
            np.minimum(best, bounds[cut.first] + bounds[cut.second], out=best)
    streams = StreamRows.of(space, lower.steady, [at]).at_once()
    if streams.owner.size:
        np.minimum(best, streams.at_crossing().min(axis=0), out=best)
    return np.minimum.accumulate(best)


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
    for level, streams, turns in reversed(
        list(zip(levels(space), lower.streams, lower.turns, strict=True))
    ):
        limit = most[level.start : level.stop]
        # A partial schedule may leave devices of its block idle: what is wanted on a larger block
        # is wanted on a smaller one. The whole is looked at on each block for itself.
        if level.stop < len(space.sets):
            limit[:] = np.maximum.accumulate(limit[:, ::-1], axis=1)[:, ::-1]
        limit[bounds[level.start : level.stop] > limit] = -np.inf
        looked_at: Bools = np.any(most > -np.inf, axis=1)
        for at in level:
            if looked_at[at]:
                _raise_in_turns(space, at, lower, most)
                for row in _ahead_rows(space, at, lower):
                    _wanted([row], most, splits)
        every = [rows.only(looked_at[rows.owner]) for rows in (streams, turns)]
        _wanted(every, most, splits)
    return most, splits


def _raise_in_turns(space: Space, at: int, lower: Bounds, most: Floats) -> None:
    """Raises the limits of the parts of a set's Temporals."""
    bounds, limit = lower.seconds, most[at]
    for cut in space.cuts[at]:
        if cut.turns:
            first, second = bounds[cut.first], bounds[cut.second]
            use = first + second <= limit
            np.maximum(most[cut.first], limit - second, out=most[cut.first], where=use)
            np.maximum(most[cut.second], limit - first, out=most[cut.second], where=use)


def _wanted(rows: Sequence[StreamRows], most: Floats, splits: list[list[Splits | None]]) -> None:
    """Notes the splits within the limits of their owners; raises the limits of their parts."""
    found: list[tuple[Ints, ...]] = []
    for some in (part for every in rows for part in every.in_parts()):
        row, block, first, second = some.within(most)
        limit = most[some.owner[row], block]
        for part, at, room in zip(
            some.parts, (first, second), some.rooms(row, limit, first, second), strict=True
        ):
            np.maximum.at(most, (part[row], at), room)
        found.append((some.owner[row], some.number[row], block, first, second, some.chunks[row]))
    if not found:
        return
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    if not len(columns[0]):
        return
    if len(rows) > 1 and len(rows[-1].owner):
        columns = _distinct(columns)
    owner, number, block, first, second, chunks = columns
    # Those of a cut follow each other.
    starts = 1 + np.flatnonzero((np.diff(owner) != 0) | (np.diff(number) != 0))
    for low, high in pairwise([0, *starts.tolist(), len(owner)]):
        here = slice(low, high)
        splits[int(owner[low])][int(number[low])] = Splits(
            block=block[here], first=first[here], second=second[here], chunks=chunks[here]
        )


def _distinct(columns: list[Ints]) -> list[Ints]:
    """Each row of some columns of small numbers once, ascending."""
    names = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        names = names * (1 + int(column.max())) + column
    rows = np.unique(names, return_index=True)[1]
    return [column[rows] for column in columns]
