"""The best steps over two pools of devices, of which each holds a part of the tasks.

    pair = Pair(whole, first, second)
    for tasks in cuts(whole):
        best = pair.best(fronts(first, ...)[tasks], fronts(second, ...)[others], top=4)

The first part feeds the second one, which works at once, in chunks, or a step behind. What a step
takes is as `flowrl.plan.search.evaluate` has it, of both parts as one schedule; where devices
count, those of both pools do. Exact: no schedules of the two parts make a better step than `best`
finds among those that `fronts` keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count

from flowrl.plan.search.evaluate import Evaluation, Evaluator, rounded
from flowrl.plan.search.problem import Kind, Objective, Problem
from flowrl.plan.search.schedule import Asynchronous, Schedule, Spatial, leaves

__all__ = ["Joined", "Pair", "cuts", "restricted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A step over two pools.

    Attributes:
        step_s: With the syncs inside of each pool, and without those between them.
        devices: Of both, and those that are counted beside.
        objective: What is to be small.
        num_splits: Spatial and Asynchronous nodes.
    """

    schedule: Spatial | Asynchronous
    step_s: float
    devices: int
    objective: float
    num_splits: int

    @property
    def key(self) -> tuple[float, int]:
        """Orders them: the objective to 12 digits, then the fewest moving parts."""
        return (float(rounded(self.objective)), self.num_splits)


class Pair:
    """Two pools.

    Args:
        whole: All tasks with the options of both pools, what may run ahead, the kinds of steps
            that are wanted, the objective, and what counts besides.
        first, second: The tasks on each pool.

    Attributes:
        runs_ahead: The first part may run ahead of the second.
    """

    def __init__(self, whole: Problem, first: Problem, second: Problem) -> None:
        self.whole = whole
        self._both = Evaluator(replace(whole, syncs=()))
        self._sides = (Evaluator(first), Evaluator(second))
        self.runs_ahead = Kind.ASYNCHRONOUS in whole.kinds and whole.staleness > 0

    def best(
        self, firsts: Sequence[Schedule], seconds: Sequence[Schedule], top: int = 1
    ) -> list[Joined]:
        """The best steps that schedules of two parts make, best first."""
        one, two = (
            [side.measure(part) for part in parts]
            for side, parts in zip(self._sides, (firsts, seconds), strict=True)
        )
        pairs = sorted(
            (self._least(first, second), i, j)
            for i, first in enumerate(one)
            for j, second in enumerate(two)
        )
        number = count()
        found: list[tuple[float, int, int, Joined]] = []  # the best, as a heap: the worst is first
        for least, i, j in pairs:
            if len(found) == top and least > -found[0][0]:
                break
            for schedule in self.forms(firsts[i], seconds[j]):
                new = self._joined(schedule, (one[i], two[j]))
                heapq.heappush(found, (-new.objective, -new.num_splits, -next(number), new))
                if len(found) > top:
                    heapq.heappop(found)
        return sorted((entry[-1] for entry in found), key=lambda joined: joined.key)

    def forms(self, first: Schedule, second: Schedule) -> Iterator[Spatial | Asynchronous]:
        """The ways in which both parts may work at once."""
        here = {leaf.task for leaf in leaves(first)}
        tasks = [self.whole.task(leaf.task) for leaf in leaves(second)]
        readers = [task for task in tasks if here & set(task.after)]
        if self.whole.kinds & {Kind.HYBRID, Kind.SPATIAL}:
            most = min((task.max_chunks for task in readers), default=1)
            for chunks in self.whole.chunks if readers else (1,):
                if chunks <= most:
                    yield Spatial(first=first, second=second, chunks=chunks)
        if self.runs_ahead and here <= self.whole.ahead:
            yield Asynchronous(first=first, second=second)

    def joined(self, schedule: Spatial | Asynchronous) -> Joined | None:
        """What a step takes; None where a part of it does not fit its pool."""
        one, two = (
            side.measure(part)
            for side, part in zip(self._sides, (schedule.first, schedule.second), strict=True)
        )
        return self._joined(schedule, (one, two)) if one.fits and two.fits else None

    def most_seconds(self, objective: float) -> tuple[float, float]:
        """Of the first and the second part, in a step with this objective; where devices count,
        by the devices of the step."""
        return objective * (self.whole.staleness + 1 if self.runs_ahead else 1), objective

    def in_turns(self, first: frozenset[str], second: frozenset[str]) -> bool:
        """Whether the second part can only begin when the first one has ended, in the same step."""
        if self.runs_ahead and first <= self.whole.ahead:
            return False
        tasks = [self.whole.task(name) for name in second]
        readers = [task for task in tasks if not first.isdisjoint(task.after)]
        if min((task.max_chunks for task in readers), default=2) > 1:
            return False
        # Of tasks that take turns, some may follow those that are read.
        read = first & {name for task in readers for name in task.after}
        goes_on = read <= self.whole.in_one() or not first.isdisjoint(self.whole.unread())
        return len(first) == 1 or not goes_on

    def _joined(
        self, schedule: Spatial | Asynchronous, parts: tuple[Evaluation, Evaluation]
    ) -> Joined:
        step_s = self._both.measure(schedule).step_s + sum(part.sync_s for part in parts)
        devices = sum(part.devices for part in parts) + self.whole.beside
        by_time = self.whole.objective is Objective.STEP_TIME
        return Joined(
            schedule=schedule,
            step_s=step_s,
            devices=devices,
            objective=step_s if by_time else step_s * devices,
            num_splits=sum(part.num_splits for part in parts) + 1,
        )

    def _least(self, first: Evaluation, second: Evaluation) -> float:
        """A lower bound of the objective. A part that runs `staleness` steps ahead may take so
        many steps longer than one."""
        one, two = first.step_s - first.sync_s, second.step_s - second.sync_s
        if self.runs_ahead:
            one /= self.whole.staleness + 1
        step_s = max(one, two) + first.sync_s + second.sync_s
        if self.whole.objective is Objective.STEP_TIME:
            return step_s
        return step_s * (first.devices + second.devices + self.whole.beside)


def cuts(problem: Problem) -> list[frozenset[str]]:
    """All sets of tasks that may be the first part: nothing in them reads from the others."""
    names = [task.id for task in problem.tasks]
    found = []
    for size in range(1, len(names)):
        for some in combinations(names, size):
            here = frozenset(some)
            if all(here.issuperset(problem.task(name).after) for name in some):
                found.append(here)
    return found


def restricted(problem: Problem, tasks: frozenset[str]) -> Problem:
    """The problem of some of the tasks alone; they run ahead of nothing."""
    return replace(
        problem,
        tasks=tuple(
            replace(task, after=tuple(name for name in task.after if name in tasks))
            for task in problem.tasks
            if task.id in tasks
        ),
        syncs=tuple(sync for sync in problem.syncs if {sync.source, sync.destination} <= tasks),
        staleness=0,
        ahead=frozenset(),
        pinned={name: size for name, size in problem.pinned.items() if name in tasks},
        places={name: some for name, some in problem.places.items() if name in tasks},
    )
