"""Arrivals of many options as those of few kinds, which are parted where the answer asks for it.

The search tells sets of tasks apart by arrivals, so it takes the longer the more of them there are
(`flowrl.plan.search.space`). Here options share the arrivals of their kind, which are as early as
its earliest: at every share of the results, no later than those of any member, and with no less of
the reader's work. What is found so is exact all the same:

1. No schedule takes less than it does with the arrivals of kinds. A chunk's line (a_k, b_k) of the
   kind is not above any member's: a_k is the time at one share, and b_k one less the work at
   another. (Between the steps of a profile both are linear, and the least of several such profiles
   at the steps is, between them, no more than each.) A stream takes the largest a u1 + b u2, and
   whatever a part is in takes no less where that part takes more.
2. Let the best N schedules with the arrivals of kinds take the same with their own. Any other one
   takes, with its own, at least what it does with those of kinds (1), which is at least what the
   last of the N does. So these are the best N, in this order. (Where others take just as long, any
   of them may be found, as in every search.)
3. Where one of the N takes more with its own arrivals, options of it that feed a stream share a
   kind with others that come earlier. They get kinds of their own, and the search is done again.
   There are only so many options, so that ends.

Where streams do not win, the first search is the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from flowrl.plan.search.arrivals import Arrivals
from flowrl.plan.search.problem import Option, Problem, Task
from flowrl.plan.search.schedule import Leaf, Schedule, leaves

MOST_KINDS = 3
"""Of a task's arrivals before any are parted. Of more, each search takes longer; of fewer, it is
done more often."""

NEAR = 0.01
"""Of a rollout's time or of its work: arrivals that differ less are parted last."""

WIDER = 1.5
"""By which factor arrivals of one kind may differ more, while there are too many kinds."""


class Alike:
    """A problem whose options have the arrivals of their kind.

    Attributes:
        problem: With the arrivals of kinds.
    """

    def __init__(self, problem: Problem, most: int = MOST_KINDS) -> None:
        self._own = problem
        self._kinds = {task.id: _kinds(task, most) for task in problem.tasks}
        self.problem = problem
        self._origin: dict[int, Option] = {}
        self._join()

    def own(self, schedule: Schedule) -> Schedule:
        """A schedule of `problem` with the options' own arrivals."""
        if isinstance(schedule, Leaf):
            option = self._origin.get(id(schedule.option))
            return schedule if option is None else replace(schedule, option=option)
        first, second = self.own(schedule.first), self.own(schedule.second)
        if first is schedule.first and second is schedule.second:
            return schedule
        return replace(schedule, first=first, second=second)

    def part(self, schedules: Iterable[Schedule]) -> bool:
        """Gives options of some schedules, with their own arrivals, kinds of their own; whether
        any had none."""
        parted = False
        for schedule in schedules:
            for leaf in leaves(schedule):
                arrivals, kinds = leaf.option.arrivals, self._kinds[leaf.task]
                if arrivals is None:
                    continue
                kind = next(kind for kind in kinds if arrivals in kind)
                if len(kind) > 1:
                    kinds.remove(kind)
                    kinds += [[arrivals], *_halves([one for one in kind if one != arrivals])]
                    parted = True
        if parted:
            self._join()
        return parted

    def _join(self) -> None:
        """Makes `problem` of the kinds."""
        self._origin = {}
        tasks = tuple(self._joined(task) for task in self._own.tasks)
        self.problem = replace(self._own, tasks=tasks) if self._origin else self._own

    def _joined(self, task: Task) -> Task:
        kinds = [kind for kind in self._kinds[task.id] if len(kind) > 1]
        if not kinds:
            return task
        earliest = {one: shared for kind in kinds for shared in [_earliest(kind)] for one in kind}
        options = []
        for option in task.options:
            shared = None if option.arrivals is None else earliest.get(option.arrivals)
            if shared is None:
                options.append(option)
                continue
            options.append(replace(option, arrivals=shared))
            self._origin[id(options[-1])] = option
        return replace(task, options=tuple(options))


def _kinds(task: Task, most: int) -> list[list[Arrivals]]:
    """The arrivals of a task's options, those that are alike together."""
    there = dict.fromkeys(o.arrivals for o in task.options if o.arrivals is not None)
    by_steps: dict[int, list[Arrivals]] = {}
    for one in there:
        by_steps.setdefault(len(one.ready), []).append(one)
    near, every = 0.0, [[one] for one in there]
    while len(every) > max(most, len(by_steps)):
        near = max(NEAR, near * WIDER)
        every = [kind for some in by_steps.values() for kind in _within(some, near)]
    return every


def _within(some: Sequence[Arrivals], near: float) -> list[list[Arrivals]]:
    """Each with the first one that differs no more than that."""
    table = _table(some)
    left = np.arange(len(some))
    found = []
    while len(left):
        close = np.abs(table[left] - table[left[0]]).max(axis=1) <= near
        found.append([some[at] for at in left[close]])
        left = left[~close]
    return found


def _halves(some: Sequence[Arrivals]) -> list[list[Arrivals]]:
    """Those nearer to the one and to the other of two that are far apart."""
    if len(some) < 2:
        return [list(some)] if some else []
    table = _table(some)
    far = np.abs(table - table[0]).max(axis=1)
    other = np.abs(table - table[int(far.argmax())]).max(axis=1)
    return [
        [one for one, here in zip(some, far <= other, strict=True) if here],
        [one for one, here in zip(some, far <= other, strict=True) if not here],
    ]


def _table(some: Sequence[Arrivals]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([(*one.ready, *one.work) for one in some])


def _earliest(kind: Sequence[Arrivals]) -> Arrivals:
    """No later than any of a kind, with no less of the work."""
    return Arrivals(
        ready=tuple(map(min, zip(*(one.ready for one in kind), strict=True))),
        work=tuple(map(max, zip(*(one.work for one in kind), strict=True))),
    )
