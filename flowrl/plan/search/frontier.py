"""The points of a set of tasks that are worth having, and how each came about."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from flowrl.plan.search.points import NO_ROOM, SECONDS, Points, Room, concatenate, no_points, prune
from flowrl.plan.search.schedule import Asynchronous, Leaf, Schedule, Spatial, Temporal
from flowrl.plan.search.space import Floats, Ints, Space

__all__ = ["AHEAD", "LEAF", "SPLIT", "TURNS", "Frontier", "Records", "gather"]

LEAF, TURNS, SPLIT, AHEAD = range(4)


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


def gather(
    space: Space, found: list[Points], limit: Floats, keep: int, room: Room = NO_ROOM
) -> Frontier:
    """The frontier of a set from all points that were made for it.

    Args:
        limit: `[K]`, most seconds on each block.
        keep: How many must beat a point for it to be left out.
        room: Bytes that there is room for.
    """
    count = len(space.sizes)
    start, fresh, length = (np.zeros(count, dtype=np.int64) for _ in range(3))
    if not found:
        none = no_points(space.num_values)
        return Frontier(points=none, start=start, fresh=fresh, length=length)
    points = concatenate(found)
    points = points.take(np.argsort(points.block, kind="stable"))
    edges = np.searchsorted(points.block, np.arange(count + 1))
    parts: list[Points] = []
    total = 0
    carried = no_points(space.num_values)  # of the block before, without tokens
    carried_at = 0
    for block in np.flatnonzero(limit > -np.inf):
        within = np.flatnonzero(carried.values[SECONDS] <= limit[block])
        num_own = edges[block + 1] - edges[block]
        if not num_own and len(within) == len(carried.block) and carried_at >= 0:
            start[block], length[block] = carried_at, len(within)
            continue
        own = points.take(np.arange(edges[block], edges[block + 1]))
        here = concatenate([own, carried.take(within)])
        if not len(here.block):
            carried, carried_at = no_points(space.num_values), 0
            continue
        rows = prune(here, space.exact_tokens, keep, space.places[0], room)
        is_own = rows < num_own
        part = here.take(np.concatenate([rows[is_own], rows[~is_own]]))
        start[block], fresh[block], length[block] = total, is_own.sum(), len(rows)
        total += len(rows)
        parts.append(part)
        carried = replace(part, tokens=np.zeros_like(part.tokens))
        carried_at = -1 if part.tokens.any() else int(start[block])
    merged = concatenate(parts) if parts else no_points(space.num_values)
    return Frontier(points=merged, start=start, fresh=fresh, length=length)
