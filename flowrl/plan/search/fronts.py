"""Schedules of parts of a step: all that may be wanted where the rest is on other devices.

What two parts on devices of their own take together (`flowrl.plan.search.evaluate`) follows from
what each takes: its seconds, those of a further chunk, of syncs, and when its results are there; of
one that runs ahead, what overlapping batches take too.
So of all schedules of a part those are worth having that no other one beats in all of these; the
best step is made of two of them, however they are put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flowrl.plan.search.bounds import limits, lower_bounds
from flowrl.plan.search.dynamic import NO_LIMIT, SLACK, Aim, points_of_sets
from flowrl.plan.search.frontier import Frontier, Records, gather
from flowrl.plan.search.masks import members
from flowrl.plan.search.points import PEAK, RESIDENT, Points, concatenate, prune
from flowrl.plan.search.problem import Problem
from flowrl.plan.search.schedule import Schedule
from flowrl.plan.search.space import Floats, Ints, Space, compile_space, families

__all__ = ["fronts", "least_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of the dynamic programme over a family of schedules."""

    space: Space
    frontiers: tuple[Frontier, ...]
    records: Records


def fronts(
    problem: Problem,
    wanted: Mapping[frozenset[str], float],
    *,
    beside: int | None = None,
    keep: int = 1,
    ahead: bool = False,
    feeds: bool = False,
) -> dict[frozenset[str], tuple[Schedule, ...]]:
    """For each of some sets of tasks, all schedules that no other one of them beats.

    Args:
        problem: On whose devices they are to stand. Its objective does not matter.
        wanted: Sets of tasks, of which each only feeds the rest or only reads from it, with the
            most seconds that a schedule of each may take.
        beside: Where devices count, how many the rest has at least. Then a schedule on fewer
            devices is worth having too, and `wanted` is seconds by all devices.
        keep: How many must beat a schedule for it to be left out.
        ahead: They may run ahead of the rest.
        feeds: They may feed the rest.

    Returns:
        Empty where nothing fits.
    """
    found: dict[frozenset[str], list[Schedule]] = {tasks: [] for tasks in wanted}
    for family in families(problem):
        space = compile_space(family)
        every = (True,) * len(space.sets)
        if ahead:
            space = replace(space, ahead=every)
        if feeds:
            space = space.handing_on(every)
        asked = _asked(space, wanted, beside)
        run = _run(space, asked, problem.memory_bytes, keep)
        for at, mask in enumerate(run.space.sets):
            tasks = _names(run.space, mask)
            if tasks in found:
                found[tasks] += _schedules(run, at, by_devices=beside is not None, keep=keep)
    return {tasks: tuple(schedules) for tasks, schedules in found.items()}


def least_seconds(
    problem: Problem, wanted: Iterable[frozenset[str]], *, beside: int | None = None
) -> dict[frozenset[str], float]:
    """Lower bounds of the seconds of some sets of tasks; infinite where one cannot run.

    Args:
        beside: As of `fronts`: then they are of seconds by all devices.
    """
    found = dict.fromkeys(wanted, math.inf)
    for family in families(problem):
        space = compile_space(family)
        bounds = lower_bounds(space)
        by = 1 if beside is None else space.sizes + beside
        for at, mask in enumerate(space.sets):
            tasks = _names(space, mask)
            if tasks in found:
                found[tasks] = min(found[tasks], float(np.min(bounds.seconds[at] * by)))
    return found


def _names(space: Space, mask: int) -> frozenset[str]:
    return frozenset(space.tasks[task].id for task in members(mask))


def _asked(space: Space, wanted: Mapping[frozenset[str], float], beside: int | None) -> Floats:
    """`[sets, K]`: most seconds of each set on each block, minus infinity of those not wanted."""
    asked = np.full((len(space.sets), len(space.sizes)), -np.inf)
    for at, mask in enumerate(space.sets):
        most = wanted.get(_names(space, mask))
        if most is not None:
            by = 1 if beside is None else space.sizes + beside
            asked[at] = min(most, NO_LIMIT) * (1 + SLACK) / by
    return asked


def _run(space: Space, asked: Floats, memory_bytes: float, keep: int) -> _Run:
    most, splits = limits(space, lower_bounds(space), asked[-1], asked)
    aim = Aim(objective=None, memory_bytes=memory_bytes, keep=keep)
    records, frontiers = Records(), list[Frontier]()
    for owner, found in points_of_sets(space, most, splits, aim, (records, frontiers), split=1.0):
        if owner == len(space.sets) - 1:
            frontiers.append(gather(space, found, most[owner], keep))
    return _Run(space=space, frontiers=tuple(frontiers), records=records)


def _schedules(run: _Run, at: int, *, by_devices: bool, keep: int) -> list[Schedule]:
    """Those of one set: memory is of no concern any more, since nothing else is on the devices."""
    frontier = run.frontiers[at]
    parts = [
        frontier.points.take(np.arange(start, start + fresh))
        for start, fresh in zip(frontier.start, frontier.fresh, strict=True)
        if fresh
    ]
    if not parts:
        return []
    points = concatenate(parts)
    values: Floats = points.values.copy()
    values[RESIDENT] = 0.0
    values[PEAK] = points.block if by_devices else 0.0
    rows = prune(_without_tokens(points, values), 0, keep, run.space.places[0])
    return [run.records.schedule(run.space, int(points.record[row])) for row in rows]


def _without_tokens(points: Points, values: Floats) -> Points:
    none: Ints = np.zeros_like(points.tokens)
    return Points(
        block=points.block,
        values=values,
        tokens=none,
        record=points.record,
        name=points.name,
        turns=points.turns,
    )
