"""A step time that the schedules which a plan tells are likely to keep.

A plan tells the best schedule of each kind. Of each kind one is made here: all tasks in turn on all
devices, and each task on devices of its own, the one with the most work on half of them, the next
on a quarter, and so on. The best of its kind is no longer, and no part of a schedule is shorter
than a task in it, so ways that take longer alone need no price. Weight sync is
priced at the ways that are known, so this holds but for what it changes by: who leaves ways out by
a ceiling looks whether what was found keeps it (`flowrl.plan.many`).

Only where no batch is drawn ahead of its step: those that overlap take longer than a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowrl.plan.candidate import Candidate
from flowrl.plan.search import (
    Evaluator,
    Kind,
    Leaf,
    Option,
    Problem,
    Schedule,
    Spatial,
    Temporal,
    search,
)
from flowrl.plan.search.evaluate import readers
from flowrl.plan.tasks import TaskWork

__all__ = ["step_ceiling"]

WaysOn = Callable[[TaskWork, int], Sequence[Candidate]]
Pose = Callable[[Mapping[str, tuple[Candidate, ...]]], Problem]


def step_ceiling(
    tasks: Sequence[TaskWork], ways_on: WaysOn, pose: Pose, counts: Sequence[int]
) -> float:
    """Seconds; infinite where such schedules do not fit, or are too few to know.

    Args:
        tasks: In an order in which they could run.
        ways_on: Of a task, on so many devices.
        pose: The problem with these ways.
        counts: Sizes that blocks may have, ascending; the last is the pool.
    """
    if len(tasks) < 2:
        return math.inf
    largest = counts[::-1]
    together = {str(task.id): _first(task, largest, ways_on) for task in tasks}
    if not all(together.values()):
        return math.inf
    work = {name: min(way.seconds * way.devices for way in ways) for name, ways in together.items()}
    left, apart = counts[-1], dict[str, tuple[Candidate, ...]]()
    by_work = sorted(tasks, key=lambda task: -work[task.id])
    for task in by_work:
        most = left if task is by_work[-1] else left // 2
        apart[task.id] = _first(task, [one for one in largest if one <= most], ways_on)
        if not apart[task.id]:
            return math.inf
        left -= apart[task.id][0].devices
    in_turns, on_own = pose(together), pose(apart)
    return max(_turns_s(in_turns), _on_own_s(on_own))


def _first(task: TaskWork, counts: Sequence[int], ways_on: WaysOn) -> tuple[Candidate, ...]:
    """The ways to run a task on the first of these counts on which it has any."""
    return next((ways for count in counts if (ways := tuple(ways_on(task, count)))), ())


def _turns_s(problem: Problem) -> float:
    """Seconds of all tasks in turn: in their fastest ways, or else the best that fits."""
    *before, last = _leaves(problem, _seconds)
    schedule: Schedule = last
    for leaf in reversed(before):
        schedule = Temporal(first=leaf, second=schedule)
    found = Evaluator(problem).measure(schedule)
    if found.fits:
        return found.step_s
    best = search(replace(problem, kinds=frozenset({Kind.TEMPORAL}))).best
    return best[0].evaluation.step_s if best else math.inf


def _on_own_s(problem: Problem) -> float:
    """Seconds of all tasks on devices of their own, in the best number of chunks: in their fastest
    ways, or else in those that take least of a device."""
    evaluator = Evaluator(problem)
    for key in (_seconds, _peak):
        leaves = _leaves(problem, key)
        every = (evaluator.measure(_on_own(problem, leaves, some)) for some in problem.chunks)
        fitting = [found.step_s for found in every if found.fits]
        if fitting:
            return min(fitting)
    return math.inf


def _leaves(problem: Problem, key: Callable[[Option], tuple[float, float]]) -> list[Leaf]:
    """All tasks in the ways that take least."""
    return [Leaf(task=task.id, option=min(task.options, key=key)) for task in problem.tasks]


def _seconds(option: Option) -> tuple[float, float]:
    return (option.seconds, option.peak)


def _peak(option: Option) -> tuple[float, float]:
    return (option.peak, option.seconds)


def _on_own(problem: Problem, leaves: Sequence[Leaf], chunks: int) -> Schedule:
    """In streams of so many chunks, where what reads takes so many."""
    *before, last = leaves
    schedule: Schedule = last
    for leaf in reversed(before):
        stream = Spatial(first=leaf, second=schedule)
        reading = [problem.task(name) for name in readers(problem, stream)]
        passes = bool(reading) and all(task.max_chunks >= chunks for task in reading)
        schedule = replace(stream, chunks=chunks if passes else 1)
    return schedule
