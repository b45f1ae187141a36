"""Partial schedules as numbers, and which of them are worth keeping.

A point is a partial schedule as numbers: seconds, least seconds for a further chunk, seconds of
syncs, resident bytes, peak bytes, splits, and tokens (`flowrl.plan.search.space`); where a part may
run ahead of the rest, steady and dense seconds too, which are 0 of all others. One point beats
another on the same block when no number is larger and no token is missing: in every schedule that
holds the other, it can take its place. So all that is ever needed is the points that are beaten by
fewer than `keep` others, where `keep` schedules are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowrl.plan.search.space import Bools, Floats, Ints

__all__ = [
    "CHUNK_S",
    "DENSE",
    "NO_ROOM",
    "PEAK",
    "RESIDENT",
    "SECONDS",
    "SPLITS",
    "STEADY",
    "SYNC_S",
    "Points",
    "Room",
    "concatenate",
    "no_points",
    "prune",
    "sieve",
]

SECONDS, CHUNK_S, SYNC_S, RESIDENT, PEAK, SPLITS, STEADY, DENSE = range(8)

SIEVE_ROUNDS = 24

FEW_A_BLOCK = 24
"""Points a block below which the sieve is not worth its while."""

SIEVE_KEYS = (SECONDS, PEAK, RESIDENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Points, one a row.

    Attributes:
        block: `[P]`, index of the block's size.
        values: `[6, P]`, in the order of the constants of this module; `[8, P]` where a part of
            the space may run ahead; then what counts of turns (`flowrl.plan.search.space.Turns`).
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
            values=self.values[:, rows],
            tokens=self.tokens[rows],
            record=self.record[rows],
            name=self.name[rows],
            turns=self.turns[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that any whole schedule has room for, whatever else it holds.

    Where a point has no more, it fits in the place of every other one, and what weights it holds is
    of no concern.

    Attributes:
        resident, peak: The bytes.
        weight_tokens: Bits that are forms of weights.
    """

    resident: float
    peak: float
    weight_tokens: int


NO_ROOM = Room(resident=-1.0, peak=-1.0, weight_tokens=0)
"""Every byte counts."""


def concatenate(parts: list[Points]) -> Points:
    """All points of `parts`, which are not empty."""
    return Points(
        block=np.concatenate([part.block for part in parts]),
        values=np.concatenate([part.values for part in parts], axis=1),
        tokens=np.concatenate([part.tokens for part in parts]),
        record=np.concatenate([part.record for part in parts]),
        name=np.concatenate([part.name for part in parts]),
        turns=np.concatenate([part.turns for part in parts]),
    )


def no_points(num_values: int) -> Points:
    """None at all, of so many numbers each."""
    none = np.zeros(0, dtype=np.int64)
    return Points(
        block=none,
        values=np.zeros((num_values, 0)),
        tokens=none,
        record=none,
        name=none,
        turns=np.zeros(0, dtype=bool),
    )


def prune(points: Points, exact_tokens: int, keep: int, head: int, room: Room = NO_ROOM) -> Ints:
    """Rows that fewer than `keep` others beat, all of one block, ascending by seconds.

    Args:
        head: Place of H among the numbers, 0 where it does not count. A part that hands on after H
            and one that hands on from its beginning do not beat each other.
        room: Bytes that are there for every point. What beats another in this room takes fewer
            seconds: of those that take as long, the ones with fewer bytes and more weights in
            common have fewer parts that differ.

    Of points that are the same schedule but for nesting (`Points.name`), one that is beaten is
    worth nothing, however many are wanted, and a name counts once among those that beat a point.
    """
    order = np.lexsort(points.values[::-1])
    held = _Held.of(points.values[:, order], points.tokens[order], exact_tokens, room)
    columns = _that_differ(held.numbers[1:], held.numbers[head] if head else None)
    seconds = held.numbers[SECONDS]
    names = points.name[order]
    first_of_name = np.zeros(len(order), dtype=bool)
    if keep > 1:
        first_of_name[np.unique(names, return_index=True)[1]] = True

    def beats(others: Ints, rows: Ints) -> Bools:
        """`[others, rows]`; of equal ones only an earlier row beats a later one."""
        result = others[:, None] < rows
        for column in columns:
            result &= column[others][:, None] <= column[rows]
        held.need_tokens(result, others[:, None], rows)
        # Rows are in the order of their seconds: earlier ones do not take as long as any of these.
        tied = int(np.searchsorted(seconds[others], seconds[rows[0]]))
        held.need_bytes(result[tied:], others[tied:, None], rows)
        return result

    kept = np.zeros(0, dtype=np.int64)
    at, width = 0, 32
    while at < len(order):
        rows = np.arange(at, min(at + width, len(order)))
        at, width = at + width, min(width * 2, 256)
        others = np.concatenate([kept, rows])
        by = beats(others, rows)
        if keep == 1:
            gone = by.any(axis=0)
        else:
            gone = (by & first_of_name[others][:, None]).sum(axis=0) >= keep
            gone |= (by & (names[others][:, None] == names[rows])).any(axis=0)
        kept = np.concatenate([kept, rows[~gone]])
    return order[kept]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """Points as they are compared where there is room for some bytes.

    Attributes:
        numbers: As `Points.values`, with bytes that there is room for all alike.
        tokens: With all weights of those that have room; None where all are equal.
        exact_tokens: As of `prune`.
        own: The numbers and tokens as they are; None where there is no room for any of them.
    """

    numbers: Floats
    tokens: Ints | None
    exact_tokens: int
    own: tuple[Floats, Ints] | None

    @classmethod
    def of(cls, values: Floats, tokens: Ints, exact_tokens: int, room: Room) -> _Held:
        """Those of points with these numbers and tokens."""
        own, numbers = None, values
        if room.resident >= values[RESIDENT].min() or room.peak >= values[PEAK].min():
            own, numbers = (values, tokens), values.copy()
            free = (values[RESIDENT] <= room.resident) & (values[PEAK] <= room.peak)
            tokens = np.where(free, tokens | room.weight_tokens, tokens)
            np.maximum(values[RESIDENT], room.resident, out=numbers[RESIDENT])
            np.maximum(values[PEAK], room.peak, out=numbers[PEAK])
        alike = bool((tokens == tokens[0]).all())
        return cls(
            numbers=numbers, tokens=None if alike else tokens, exact_tokens=exact_tokens, own=own
        )

    def need_tokens(self, result: Bools, mine: Ints, theirs: Ints) -> None:
        """Takes those out of a result that do not beat others for their tokens."""
        if self.tokens is not None:
            result &= _covers(self.tokens[mine], self.tokens[theirs], self.exact_tokens)

    def need_bytes(self, result: Bools, mine: Ints, theirs: Ints) -> None:
        """Takes those out that beat others only for the room that there is, and take as long."""
        if self.own is None:
            return
        values, tokens = self.own
        seconds = values[SECONDS]
        at = np.nonzero(result & (seconds[mine] == seconds[theirs]))
        if not at[0].size:
            return
        one, other = (np.broadcast_to(rows, result.shape)[at] for rows in (mine, theirs))
        use = _covers(tokens[one], tokens[other], self.exact_tokens)
        for column in values[[RESIDENT, PEAK]]:
            use &= column[one] <= column[other]
        result[at] = use


def _that_differ(values: Floats, head: Floats | None) -> list[Floats]:
    """What points are compared by: of which less is better."""
    columns = [column for column in values if np.ptp(column) > 0]
    if head is not None:
        waits = np.where(head > 0, -1.0, 0.0)  # where this is less, H is larger
        columns += [waits] if np.ptp(waits) > 0 else []
    return columns


def _covers(mine: Ints, theirs: Ints, exact_tokens: int) -> Bools:
    """Whether no token of theirs is missing in mine."""
    result: Bools = (theirs & ~mine) == 0
    if exact_tokens:
        result &= ((theirs ^ mine) & exact_tokens) == 0
    return result


def sieve(points: Points, exact_tokens: int, keep: int, head: int, room: Room = NO_ROOM) -> Ints:
    """Rows that are left when a few strong points of each block were held against the others.

    Args:
        head, room: As of `prune`.

    A coarse `prune` for all blocks at once; most points of a large join go here. In each round a
    block's strong point is the one with the least seconds, peak or resident bytes in turn.
    """
    if len(points.block) <= FEW_A_BLOCK:
        return np.arange(len(points.block))
    rows = np.argsort(points.block, kind="stable")
    blocks = points.block[rows]
    if np.count_nonzero(blocks[1:] != blocks[:-1]) * FEW_A_BLOCK >= len(rows):
        return rows
    times_beaten = np.zeros(len(rows), dtype=np.int64)
    held = _Held.of(points.values, points.tokens, exact_tokens, room)
    columns = _that_differ(held.numbers, held.numbers[head] if head else None)
    is_used = np.zeros(len(rows), dtype=bool)  # by row of `points`: it was a strong point
    # One for each name and block; used ones beat nobody twice.
    name = points.name + points.block * np.int64(0x5851F42D4C957F2D)
    used_names = np.zeros(0, dtype=np.int64)
    for turn in range(SIEVE_ROUNDS + 2 * (keep - 1)):
        starts, group = _groups(points.block[rows])
        if len(starts) * FEW_A_BLOCK > len(rows):
            break
        key = points.values[SIEVE_KEYS[turn % len(SIEVE_KEYS)]][rows]
        key[is_used[rows]] = np.inf
        at_least = np.flatnonzero(key == np.minimum.reduceat(key, starts)[group])
        strong = rows[at_least[_groups(group[at_least])[0]]]
        beaten = strong[group] != rows
        for column in columns:
            beaten &= column[strong][group] <= column[rows]
        held.need_tokens(beaten, strong[group], rows)
        held.need_bytes(beaten, strong[group], rows)
        if keep > 1:
            counts = ~np.isin(name[strong], used_names)
            times_beaten += beaten & counts[group]
            beaten &= name[strong][group] == name[rows]
            beaten |= times_beaten >= keep
            used_names = np.concatenate([used_names, name[strong]])
        rows, times_beaten = rows[~beaten], times_beaten[~beaten]
        is_used[strong] = True
    return rows


def _groups(sorted_values: Ints) -> tuple[Ints, Ints]:
    """Where runs of equal values begin, and the number of its run for each value."""
    begins = np.empty(len(sorted_values), dtype=bool)
    begins[0] = True
    np.not_equal(sorted_values[1:], sorted_values[:-1], out=begins[1:])
    return np.flatnonzero(begins), np.cumsum(begins) - 1
