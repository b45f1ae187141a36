"""One run of the dynamic programme: all schedules of a space within a limit, but the beaten ones.

First lower bounds for every set and block (`bounds`), then from the whole downwards what they leave
to look at, then from single tasks upwards the points (`frontier`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowrl.plan.search.bounds import Bounds, Splits, limits
from flowrl.plan.search.evaluate import rounded
from flowrl.plan.search.frontier import Frontier, Records, gather
from flowrl.plan.search.joins import Join, join_splits, join_turns, leaf_points
from flowrl.plan.search.points import (
    NO_ROOM,
    PEAK,
    SECONDS,
    SPLITS,
    SYNC_S,
    Points,
    Room,
    concatenate,
)
from flowrl.plan.search.problem import Objective
from flowrl.plan.search.schedule import Schedule
from flowrl.plan.search.space import Floats, Space

NO_LIMIT = 1e200
"""A limit that no schedule reaches."""

TIES = 64
"""Most schedules that are looked at beyond those wanted because they tie with the last of them."""

SLACK = 1e-9
"""Relative room that limits leave for rounding, so that nothing is lost by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a run looks for.

    Attributes:
        objective: What is to be least; None = the peak bytes.
        memory_bytes: Most peak bytes.
        keep: How many distinct schedules are wanted.
        least_peak: Schedules with fewer bytes are better, even where others fit.
    """

    objective: Objective | None
    memory_bytes: float
    keep: int = 1
    least_peak: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run found.

    Attributes:
        schedules: The best ones, ascending by objective and splits, with all that tie.
        num_states: Sets on blocks that it looked into.
        num_points: Points that it compared.
    """

    schedules: tuple[Schedule, ...]
    num_states: int
    num_points: int


def least_objective(space: Space, bounds: Bounds, aim: Aim) -> float:
    """A lower bound of the objective; infinite where no schedule exists."""
    weight = _weights(space, aim)
    return float(np.min((bounds.seconds[-1] + _least_sync_s(space)) * weight))


def run(space: Space, bounds: Bounds, limit: float, aim: Aim) -> Outcome:
    """The best schedules whose objective is at most `limit`.

    Args:
        space: What to look through.
        bounds: Its `lower_bounds`.
        limit: Most of the objective.
        aim: What to look for.
    """
    weight = _weights(space, aim)
    at_root = limit * (1 + SLACK) / weight - _least_sync_s(space)
    most, splits = limits(space, bounds, at_root)
    records = Records()
    num_points = 0
    split = 0.0 if aim.objective is None else 1.0
    found: list[Points] = []
    kept = (records, list[Frontier]())
    top_s = float(at_root.max())
    for _, found in points_of_sets(space, most, splits, aim, kept, split=split, most_steady=top_s):
        num_points += sum(len(points.block) for points in found)
    return Outcome(
        schedules=_best(space, found, limit * (1 + SLACK), aim, records),
        num_states=int((most > -np.inf).sum()),
        num_points=num_points,
    )


def points_of_sets(
    space: Space,
    most: Floats,
    splits: list[list[Splits | None]],
    aim: Aim,
    kept: tuple[Records, list[Frontier]],
    *,
    split: float,
    most_steady: float = NO_LIMIT,
) -> Iterator[tuple[int, list[Points]]]:
    """Each set with the points that were made for it, smaller sets first.

    Args:
        most, splits: What `limits` leaves to look at.
        kept: Where points are entered, and where the frontier of each set but the whole goes.
        split: What a split counts: 1, or 0 where their number does not matter.
        most_steady: Most steady seconds of what may run ahead.
    """
    records, frontiers = kept
    rooms = _rooms(space, most, aim)
    for owner in range(len(space.sets)):
        found = leaf_points(space, owner, most[owner], records, named=aim.keep > 1)
        for cut, left in zip(space.cuts[owner], splits[owner], strict=True):
            join = Join(
                space=space,
                owner=owner,
                cut=cut,
                first=frontiers[cut.first],
                second=frontiers[cut.second],
                limit=most[owner],
                most_steady=most_steady,
                memory_bytes=aim.memory_bytes,
                keep=aim.keep,
                room=rooms[owner],
                split=split,
                records=records,
            )
            if cut.turns:
                found += join_turns(join)
            if left is not None:
                found += join_splits(join, left)
        yield owner, found
        if owner < len(space.sets) - 1:
            frontiers.append(gather(space, found, most[owner], aim.keep, rooms[owner]))


def _rooms(space: Space, most: Floats, aim: Aim) -> list[Room]:
    """For each set, the bytes that there is room for whatever the tasks outside of it hold.

    In a Temporal of all of them, the others keep no more than what each keeps at most, and one of
    them works with no more besides than any does; in Spatials less is on a device.
    """
    if aim.least_peak:
        return [NO_ROOM] * len(space.sets)
    keep, besides = np.zeros(len(space.tasks)), np.zeros(len(space.tasks))
    for at, task in enumerate(space.alone):
        if task >= 0:
            leaves = space.leaves[task]
            use = leaves.seconds <= most[at, leaves.size]
            resident, peak = leaves.resident[use], leaves.peak[use]
            keep[task] = max(keep[task], resident.max(initial=0.0))
            besides[task] = max(besides[task], (peak - resident).max(initial=0.0))
    found: dict[int, Room] = {}
    for mask in dict.fromkeys(space.sets):
        others = [task for task in range(len(space.tasks)) if not mask >> task & 1]
        left = aim.memory_bytes - keep[others].sum()
        found[mask] = Room(
            resident=left - besides[others].max(initial=0.0),
            peak=left,
            weight_tokens=space.weight_tokens,
        )
    return [found[mask] for mask in space.sets]


def _weights(space: Space, aim: Aim) -> Floats:
    """`[K]`: what a second counts on each block."""
    if aim.objective is Objective.DEVICE_SECONDS:
        return (space.sizes + space.beside).astype(np.float64)
    return np.ones(len(space.sizes))


def _least_sync_s(space: Space) -> float:
    return sum(min(sync.together_s, sync.apart_s) for sync in space.syncs)


def _best(
    space: Space, found: list[Points], limit: float, aim: Aim, records: Records
) -> tuple[Schedule, ...]:
    """The points of the whole that are beaten by fewer than `keep` in objective and splits."""
    if not found:
        return ()
    points = concatenate(found)
    if aim.objective is None:
        value = points.values[PEAK]
    else:
        value = points.values[SECONDS] + points.values[SYNC_S]
        value = rounded(value * _weights(space, aim)[points.block])
        rows = np.flatnonzero(value <= limit)
        points, value = points.take(rows), value[rows]
    splits = points.values[SPLITS]
    chosen: list[int] = []
    names: set[int] = set()
    last = None
    for row in np.lexsort((splits, value)):
        key = (value[row], splits[row])
        if len(names) >= aim.keep and (key != last or len(chosen) >= aim.keep + TIES):
            break
        if aim.keep > 1 and int(points.name[row]) in names:
            continue
        names.add(int(points.name[row]) if aim.keep > 1 else 0)
        chosen.append(int(row))
        last = key
    return tuple(records.schedule(space, int(points.record[row])) for row in chosen)
