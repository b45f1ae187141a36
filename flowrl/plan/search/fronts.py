"""Schedules of parts of a step: all that may be wanted where the rest is on other devices.

What two parts on devices of their own take together (`flowrl.plan.search.evaluate`) follows from
what each takes: its seconds, those of a further chunk, of syncs, and when its results are there; of
one that runs ahead, what overlapping batches take too.
So of all schedules of a part those are worth having that no other one beats in all of these; the
best step is made of two of them, however they are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from flowrl.plan.search.bounds import Bounds, limits, lower_bounds
from flowrl.plan.search.dynamic import NO_LIMIT, SLACK, Aim, points_of_sets
from flowrl.plan.search.frontier import Frontier, Records, gather
from flowrl.plan.search.masks import members
from flowrl.plan.search.points import PEAK, RESIDENT, Points, concatenate, prune
from flowrl.plan.search.problem import Problem
from flowrl.plan.search.schedule import Schedule
from flowrl.plan.search.space import Floats, Ints, Space, compile_space, families
from flowrl.plan.search.two_pools import Least


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of the dynamic programme over a family of schedules."""

    space: Space
    frontiers: tuple[Frontier, ...]
    records: Records


class Parts:
    """The parts of a step that stand on the devices of a problem. Its objective does not matter.

    Args:
        problem: The tasks and devices.
        ahead: Tasks that may run ahead of the rest; those of a part do where all of them may.
        feeds: The parts may feed the rest.
    """

    def __init__(
        self, problem: Problem, *, ahead: frozenset[str] = frozenset(), feeds: bool = False
    ) -> None:
        self._problem = problem
        self._spaces: list[tuple[Space, Bounds]] = []
        for family in families(problem):
            space = compile_space(family)
            if ahead:
                sets = tuple(_names(space, mask) <= ahead for mask in space.sets)
                space = replace(space, ahead=sets)
            if feeds:
                space = space.handing_on((True,) * len(space.sets))
            self._spaces.append((space, lower_bounds(space)))

    def least(self, wanted: Iterable[frozenset[str]]) -> dict[frozenset[str], Least]:
        """What some sets of tasks take at least; infinitely long where one cannot run."""
        none = np.full(len(self._problem.block_sizes()), np.inf)
        found = {tasks: Least(seconds=none, chunk_s=0.0) for tasks in wanted}
        for space, bounds in self._spaces:
            for at, mask in enumerate(space.sets):
                tasks = _names(space, mask)
                if tasks in found:
                    found[tasks] = Least(
                        seconds=np.minimum(found[tasks].seconds, bounds.seconds[at]),
                        chunk_s=min(float(space.chunk_s[at]), NO_LIMIT),
                    )
        return found

    def fronts(
        self,
        wanted: Mapping[frozenset[str], Floats],
        *,
        by_devices: bool = False,
        keep: int = 1,
    ) -> dict[frozenset[str], tuple[Schedule, ...]]:
        """For each of some sets of tasks, all schedules that no other one of them beats; none where
        nothing fits.

        Args:
            wanted: Sets of tasks, of which each only feeds the rest or only reads from it, with the
                most seconds that a schedule of each may take on a block of each size; minus
                infinity where it is of no use.
            by_devices: Devices count: a schedule on fewer of them is worth having too.
            keep: How many must beat a schedule for it to be left out.
        """
        found: dict[frozenset[str], list[Schedule]] = {tasks: [] for tasks in wanted}
        for space, bounds in self._spaces:
            asked = _asked(space, wanted)
            run = _run(space, bounds, asked, self._problem.memory_bytes, keep)
            for at, mask in enumerate(run.space.sets):
                tasks = _names(run.space, mask)
                if tasks in found:
                    found[tasks] += _schedules(run, at, by_devices=by_devices, keep=keep)
        return {tasks: tuple(schedules) for tasks, schedules in found.items()}


def _names(space: Space, mask: int) -> frozenset[str]:
    return frozenset(space.tasks[task].id for task in members(mask))


def _asked(space: Space, wanted: Mapping[frozenset[str], Floats]) -> Floats:
    """`[sets, K]`: most seconds of each set on each block, minus infinity of those not wanted."""
    asked = np.full((len(space.sets), len(space.sizes)), -np.inf)
    for at, mask in enumerate(space.sets):
        most = wanted.get(_names(space, mask))
        if most is not None:
            asked[at] = np.minimum(most, NO_LIMIT) * (1 + SLACK)
    return asked


def _run(space: Space, bounds: Bounds, asked: Floats, memory_bytes: float, keep: int) -> _Run:
    most, splits = limits(space, bounds, asked[-1], asked)
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
