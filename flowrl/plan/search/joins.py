"""Joins: from the points of two sets, those of the set that both make up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flowrl.plan.search.bounds import Splits
from flowrl.plan.search.crossings import crossings
from flowrl.plan.search.frontier import AHEAD, LEAF, SPLIT, TURNS, Frontier, Records
from flowrl.plan.search.overlap import age_periods
from flowrl.plan.search.points import (
    CHUNK_S,
    DENSE,
    PEAK,
    RESIDENT,
    SECONDS,
    SPLITS,
    STEADY,
    SYNC_S,
    Points,
    Room,
    sieve,
)
from flowrl.plan.search.schedule import Leaf, signature
from flowrl.plan.search.space import Bools, Cut, Floats, Ints, Space
from flowrl.plan.search.streams import largest, largest_in_turns

PAIRS_AT_ONCE = 1 << 19
"""Joins are made in pieces, which bounds the memory that they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What a join needs to know.

    Attributes:
        space: The space.
        owner: Index of the set that the points are for.
        cut: How it is parted.
        first: The points of the first part.
        second: The points of the second.
        limit: `[K]`, most seconds on each block.
        most_steady: Most steady seconds, of sets that may run ahead.
        memory_bytes: Most peak bytes.
        keep: How many distinct schedules are wanted.
        room: Bytes that there is room for.
        split: What a split counts: 1, or 0 where their number does not matter.
        records: Where new points are entered.
    """

    space: Space
    owner: int
    cut: Cut
    first: Frontier
    second: Frontier
    limit: Floats
    most_steady: float
    memory_bytes: float
    keep: int
    room: Room
    split: float
    records: Records


def leaf_points(
    space: Space, owner: int, limit: Floats, records: Records, *, named: bool
) -> list[Points]:
    """The options of the task that the set `owner` holds alone, within the limits of seconds."""
    task = space.alone[owner]
    if task < 0:
        return []
    leaves = space.leaves[task]
    use = leaves.seconds <= limit[leaves.size]
    mine = space.rows[owner]
    rows = np.flatnonzero(use if mine is None else use & mine)
    if not len(rows):
        return []
    block = leaves.size[rows]
    values = np.zeros((space.num_values, len(rows)))
    values[SECONDS] = leaves.seconds[rows]
    values[CHUNK_S] = leaves.chunk_s[rows]
    values[RESIDENT] = leaves.resident[rows]
    values[PEAK] = leaves.peak[rows]
    if space.ahead[owner]:
        values[STEADY] = leaves.steady[rows]
        values[DENSE] = leaves.dense[rows]
    _, _, ready = space.places
    if ready and space.hands_on[owner]:
        values[ready] = values[SECONDS]
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


def join_turns(join: Join) -> list[Points]:
    """Temporals: on each block, every pair of which one stands on exactly it."""
    first, second = join.first, join.second
    blocks = np.flatnonzero((first.length > 0) & (second.length > 0) & (join.limit > -np.inf))
    found = []
    lifted = first.length - first.fresh
    for start1, length1, length2 in (
        (first.start, first.fresh, second.length),
        (first.start + first.fresh, lifted, second.fresh),
    ):
        counts = (length1[blocks], length2[blocks])
        for pair, row1, row2 in _pairs(start1[blocks], second.start[blocks], *counts):
            block = blocks[pair]
            seconds = first.points.values[SECONDS, row1] + second.points.values[SECONDS, row2]
            use = seconds <= join.limit[block]
            found += _turns(join, block[use], row1[use], row2[use])
    return found


def join_splits(join: Join, splits: Splits) -> list[Points]:
    """Spatials, or Asynchronous roots, over the splits of blocks.

    A point of the first side that leaves a part of its block idle is met with more for the second
    side where its block is smaller, so only those that stand on exactly their block are joined; all
    of them where its tasks must have devices that a smaller block has not.
    """
    first, second = join.first, join.second
    own = first.length if join.space.least[join.cut.first] else first.fresh
    counts = (own[splits.first], second.length[splits.second])
    few = _of_classes(join, splits, int((counts[0] * counts[1]).sum()))
    if few is not None:
        return few
    starts = (first.start[splits.first], second.start[splits.second])
    one, two = first.points.values, second.points.values
    found = []
    for pair, row1, row2 in _pairs(*starts, *counts):
        block, chunks = splits.block[pair], splits.chunks[pair]
        u1, u2 = one[SECONDS, row1], two[SECONDS, row2]
        if join.cut.runs_ahead:
            ages = age_periods(u1, one[DENSE, row1], u2, join.space.staleness)
            seconds = np.maximum(np.maximum(u2, one[STEADY, row1]), ages)
        elif chunks.any():
            extra = np.maximum(chunks - 1, 0)
            u1 = u1 + extra * one[CHUNK_S, row1]
            u2 = u2 + extra * two[CHUNK_S, row2]
            seconds = _streamed(join.cut, chunks, u1, u2)
            _from_turns(join, chunks, row1, (u1, u2), seconds)
        else:
            seconds = np.maximum(u1, u2)
        use = seconds <= join.limit[block]
        found += _splits(join, block[use], row1[use], row2[use], (chunks[use], seconds[use]))
    return found


def _of_classes(join: Join, splits: Splits, num_pairs: int) -> list[Points] | None:
    """Spatials in which nothing passes, of few pairs of points; None where all must be tried.

    What a Spatial's numbers follow from besides the seconds of both parts are the columns below
    (`_splits`): where a number of its own is added there, it belongs here.
    """
    space = join.space
    if join.keep > 1 or join.cut.runs_ahead or num_pairs == 0 or splits.chunks.any():
        return None
    if space.least[join.cut.first] or space.least[join.cut.second]:
        return None
    columns = [CHUNK_S, SYNC_S, RESIDENT, PEAK, SPLITS]
    columns += [STEADY, DENSE] if space.ahead[join.owner] else []
    columns += [at for at in space.places[:2] if at and space.hands_on[join.owner]]
    blocks = np.flatnonzero(np.bincount(splits.block))
    pairs = crossings(space, (join.first, join.second), columns, blocks, num_pairs)
    if pairs is None:
        return None
    found = []
    for block, row1, row2 in pairs:
        seconds = np.maximum(
            join.first.points.values[SECONDS, row1], join.second.points.values[SECONDS, row2]
        )
        use = np.flatnonzero(seconds <= join.limit[block])
        chunks = np.zeros(len(use), dtype=np.int64)
        found += _splits(join, block[use], row1[use], row2[use], (chunks, seconds[use]))
    return found


def _streamed(cut: Cut, chunks: Ints, u1: Floats, u2: Floats) -> Floats:
    """Seconds of streams in so many chunks."""
    if all(stream.even for stream in cut.streams):
        streamed = np.minimum(u1, u2) / np.maximum(chunks, 1)
        return np.maximum(u1, u2) + np.where(chunks > 0, streamed, 0.0)
    seconds = np.empty_like(u1)
    for stream in cut.streams:
        here = np.flatnonzero(chunks == stream.chunks)
        if len(here):
            seconds[here] = largest(stream.lines, u1[here], u2[here])
    return seconds


def _from_turns(
    join: Join, chunks: Ints, row1: Ints, sides: tuple[Floats, Floats], seconds: Floats
) -> None:
    """Puts the seconds of streams in their place whose first part takes turns.

    Args:
        row1: The first parts.
        sides: What both sides take, chunks included.
    """
    values = join.first.points.values
    head, early, ready = join.space.places
    for stream in join.cut.streams:
        if not stream.turns:
            continue
        here = np.flatnonzero(chunks == stream.chunks)
        rows = row1[here]
        waits = np.zeros(len(rows), dtype=bool)
        if head:
            waits |= values[head, rows] > 0
        if ready:
            waits |= values[ready, rows] < values[SECONDS, rows]
        here, rows = here[waits], rows[waits]
        if len(rows):
            none = np.zeros(len(rows))
            seconds[here] = largest_in_turns(
                stream.turns,
                sides[0][here],
                values[early, rows] if early else none,
                values[head, rows] if head else none,
                values[ready or SECONDS, rows],
                (stream.chunks - 1) * values[CHUNK_S, rows],
                sides[1][here],
            )


def _steady(one: Floats, two: Floats, chunks: Ints) -> Floats:
    """Steady seconds of parts that stand apart."""
    extra = np.maximum(chunks - 1, 0)
    found: Floats = np.maximum(
        one[STEADY] + extra * one[CHUNK_S], two[STEADY] + extra * two[CHUNK_S]
    )
    return found


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


def _turns(join: Join, block: Ints, row1: Ints, row2: Ints) -> list[Points]:
    space = join.space
    first, second = join.first.points, join.second.points
    one, two = first.values[:, row1], second.values[:, row2]
    token1, token2 = first.tokens[row1], second.tokens[row2]
    values = one + two
    if any(space.ahead):
        values[STEADY] = values[SECONDS] if space.ahead[join.owner] else 0.0
        values[DENSE] = 0.0
    values[space.first_turn :] = 0.0
    if space.hands_on[join.owner]:
        _when_in_turns(join, values, (one, two), (first.turns[row1], second.turns[row2]))
    values[PEAK] = np.maximum(one[PEAK] + two[RESIDENT], two[PEAK] + one[RESIDENT])
    twice = token1 & token2 & space.weight_tokens
    if twice.any():
        for bit, nbytes in enumerate(space.weight_bytes):
            shared = np.where(twice >> bit & 1, nbytes[block], 0.0)
            values[RESIDENT] -= shared
            values[PEAK] -= shared
    tokens = token1 | token2
    for number in join.cut.crossing:
        ends = space.sync_tokens[number][0] | space.sync_tokens[number][1]
        sync = space.syncs[number]
        values[SYNC_S] += np.where((tokens & ends) == ends, sync.together_s, sync.apart_s)
    tokens &= space.relevant[join.owner][block]
    name = np.zeros_like(block)
    if join.keep > 1:
        name = _turn_names(first, row1) + _turn_names(second, row2)
    return _made(join, TURNS, (block, row1, row2), values, tokens, name, np.zeros_like(block))


def _when_in_turns(
    join: Join, values: Floats, parts: tuple[Floats, Floats], turns: tuple[Bools, Bools]
) -> None:
    """When the results of Temporals are there (`flowrl.plan.search.evaluate`).

    Args:
        values: Of the Temporals.
        parts: Of their parts.
        turns: Which of these are Temporals.
    """
    space = join.space
    head, early, ready = space.places
    masks = [space.sets[join.cut.first], space.sets[join.cut.second]]
    if ready:
        values[ready] = sum(
            part[ready] for part, mask in zip(parts, masks, strict=True) if mask & ~space.unread
        )
    in_one = [mask & space.in_one for mask in masks]
    if not head or not any(in_one):
        return
    through = [
        np.where(are, part[head], part[SECONDS] if own else 0.0)
        for part, are, own in zip(parts, turns, in_one, strict=True)
    ]
    values[head] = through[0] + through[1]
    if early:
        later = int(in_one[1] > in_one[0])
        part, several = parts[later], in_one[later].bit_count() > 1
        begun = np.where(turns[later], part[early], part[SECONDS] if several else 0.0)
        values[early] = through[1 - later] + begun


def _when_at_once(join: Join, values: Floats, one: Floats, two: Floats) -> None:
    """When those of Spatials are."""
    space = join.space
    head, early, ready = space.places
    if ready:
        values[ready] = values[SECONDS]
    if not head:
        return
    values[head] = np.maximum(one[head], two[head])
    if early:
        values[early] = np.maximum(one[early], two[early])
    if all(space.sets[part] & space.in_one for part in (join.cut.first, join.cut.second)):
        last = np.where(values[head] > 0, values[SECONDS], 0.0)
        values[head] = last
        if early:
            values[early] = last


def _splits(
    join: Join, block: Ints, row1: Ints, row2: Ints, stream: tuple[Ints, Floats]
) -> list[Points]:
    chunks, seconds = stream
    first, second = join.first.points, join.second.points
    one, two = first.values[:, row1], second.values[:, row2]
    values = one + two
    values[SECONDS] = seconds
    if any(join.space.ahead):
        ahead = join.space.ahead[join.owner]
        values[STEADY] = _steady(one, two, chunks) if ahead else 0.0
        values[DENSE] = np.maximum(one[DENSE], two[DENSE]) if ahead else 0.0
    values[join.space.first_turn :] = 0.0
    if join.space.hands_on[join.owner]:
        _when_at_once(join, values, one, two)
    values[SYNC_S] += sum(join.space.syncs[number].apart_s for number in join.cut.crossing)
    values[RESIDENT] = np.maximum(one[RESIDENT], two[RESIDENT])
    values[PEAK] = np.maximum(one[PEAK], two[PEAK])
    values[SPLITS] += join.split
    name = np.zeros_like(block)
    if join.keep > 1:
        ends = (_mixed(_whole_names(first, row1)), _mixed(_whole_names(second, row2)))
        name = _mixed(ends[0] * (3 if join.cut.runs_ahead else 1) + ends[1] + chunks)
    kind = AHEAD if join.cut.runs_ahead else SPLIT
    return _made(join, kind, (block, row1, row2), values, np.zeros_like(block), name, chunks)


def _made(
    join: Join,
    kind: int,
    rows: tuple[Ints, Ints, Ints],
    values: Floats,
    tokens: Ints,
    name: Ints,
    chunks: Ints,
) -> list[Points]:
    """New points, but those that do not fit and those that the sieve takes; enters the rest."""
    block, row1, row2 = rows
    points = Points(
        block=block,
        values=values,
        tokens=tokens,
        record=np.arange(len(block)),  # of what they are made, until they are entered
        name=name,
        turns=np.full(len(block), kind == TURNS),
    )
    fits = values[PEAK] <= join.memory_bytes
    if join.space.ahead[join.owner]:
        fits &= values[STEADY] <= join.most_steady
    points = points.take(np.flatnonzero(fits))
    head = join.space.places[0]
    points = points.take(sieve(points, join.space.exact_tokens, join.keep, head, join.room))
    if not len(points.block):
        return []
    made = points.record
    record = join.records.add(
        kind,
        chunks[made],
        join.first.points.record[row1[made]],
        join.second.points.record[row2[made]],
    )
    return [replace(points, record=record)]


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
    # Far from the numbers of chunks, which are what a Spatial of the same parts adds.
    return np.where(points.turns[rows], _mixed(points.name[rows] + (1 << 40)), points.name[rows])
