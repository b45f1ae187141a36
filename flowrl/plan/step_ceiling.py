"""A step time that the schedules which a plan tells are likely to keep.

A plan tells the best schedule of each kind. Of few device counts, the pool and its halves, they are
found quickly; of all counts they take hardly longer, and no part of a schedule is shorter than a
task in it. So ways that take longer alone need no price. Who leaves them out looks whether what was
found keeps the ceiling (`flowrl.plan.many`): then none of them would have been of use.

Only where no batch is drawn ahead of its step: those that overlap take longer than a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowrl.plan.search import Evaluator, Kind, Leaf, Problem, Schedule, Temporal, search
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork

PLAINER = 1.05
"""Times as long may a schedule be that is told: plainer ways are taken where they cost little, and
weight sync is priced with the layouts that are."""


def step_ceiling(
    tasks: Sequence[TaskWork],
    ways_on: Callable[[TaskWork, int], Sequence[Candidate]],
    pose: Callable[[Mapping[str, tuple[Candidate, ...]]], Problem],
    counts: Sequence[int],
) -> float:
    """Seconds; infinite where nothing fits in this way.

    Args:
        ways_on: Of a task, on so many devices.
        pose: The problem with these ways.
        counts: Sizes that blocks may have, ascending; the last is the pool.
    """
    halves = [counts[-1]]
    while len(halves) < len(tasks) and halves[-1] >= 2 * counts[0]:
        halves.append(max(count for count in counts if 2 * count <= halves[-1]))
    ways = {
        str(task.id): tuple(way for count in halves for way in ways_on(task, count))
        for task in tasks
    }
    if len(halves) == len(counts) or not all(ways.values()):
        return math.inf
    problem = replace(pose(ways), counts=tuple(reversed(halves)))
    return PLAINER * max(_in_turns_s(problem), _best_s(problem, Kind.SPATIAL))


def _in_turns_s(problem: Problem) -> float:
    """Of all tasks in turn: in their fastest ways, where these fit together."""
    *before, last = (
        Leaf(task=task.id, option=min(task.options, key=lambda option: option.seconds))
        for task in problem.tasks
    )
    schedule: Schedule = last
    for leaf in reversed(before):
        schedule = Temporal(first=leaf, second=schedule)
    found = Evaluator(problem).measure(schedule)
    return found.step_s if found.fits else _best_s(problem, Kind.TEMPORAL)


def _best_s(problem: Problem, kind: Kind) -> float:
    """Of a good schedule of a kind."""
    best = search(replace(problem, kinds=frozenset({kind})), most_rounds=1).best
    return best[0].evaluation.step_s if best else math.inf
