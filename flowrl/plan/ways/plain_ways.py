"""Plainer ways to run the tasks of a schedule.

Each task takes the plainest way (`Candidate.plainness`) with which the step is at most `PLAIN`
longer: times are estimates, and a layout that is a hundredth faster on paper is not worth a
pipeline or a recomputation more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flowrl.plan.problem_of import Posed
from flowrl.plan.search import Evaluation, Found, Leaf, Option, Schedule, evaluate, leaves

PLAIN = 0.01
"""Of a step's time, given for a plainer way to run one task."""


def plainer(
    posed: Posed, schedule: Schedule, syncs_s: Callable[[Schedule], float] | None = None
) -> Found:
    """The same schedule with plainer ways, where the step is hardly longer.

    Args:
        syncs_s: What syncs take for a schedule's own layouts; None takes the search's price.
    """
    best = evaluate(posed.problem, schedule)
    limit = _objective(best, schedule, syncs_s) * (1 + PLAIN)
    for leaf in list(leaves(schedule)):
        for option in plainer_options(posed, leaf):
            changed = with_option(schedule, leaf.task, option)
            found = evaluate(posed.problem, changed)
            if found.fits and _objective(found, changed, syncs_s) <= limit:
                schedule = changed
                break
    return Found(schedule=schedule, evaluation=evaluate(posed.problem, schedule))


def _objective(
    found: Evaluation, schedule: Schedule, syncs_s: Callable[[Schedule], float] | None
) -> float:
    """What the best schedule has least of, with its own syncs."""
    if syncs_s is None or not found.step_s:
        return found.objective
    own_s = found.step_s - found.sync_s + syncs_s(schedule)
    return found.objective * own_s / found.step_s


def plainer_options(posed: Posed, leaf: Leaf) -> list[Option]:
    """Plainer ways to run a task on as many devices, the plainest first; of equally plain ones
    the fastest.

    Those that the search does without are among them: one layout may be as fast as another in less
    memory, and still the other be plainer. One that is there for batches that overlap is not taken
    for the sake of plainness.
    """
    now, task = posed.candidate(leaf.task, leaf.option), posed.problem.task(leaf.task)
    found = {
        option: posed.candidate(leaf.task, option)
        for option in (*task.options, *task.beside)
        if option.devices == leaf.option.devices
    }
    plainer = [
        option
        for option, way in found.items()
        if way.plainness < now.plainness and (now.overlaps or not way.overlaps)
    ]
    return sorted(plainer, key=lambda option: (found[option].plainness, option.seconds))


def with_option(schedule: Schedule, task: str, option: Option) -> Schedule:
    """The same schedule with another way to run one task."""
    if isinstance(schedule, Leaf):
        return replace(schedule, option=option) if schedule.task == task else schedule
    return replace(
        schedule,
        first=with_option(schedule.first, task, option),
        second=with_option(schedule.second, task, option),
    )
