"""Schedules that hosts hold, where the best ones put too much into their memory.

The search knows what each task puts on its host, and not what all tasks of a device do together.
Where its best schedule is too much for a host, one of the tasks that are on that host must put less
there: if all put more than their parts h cap / sum(h) of what it holds, that was too much again. So
each task is tried with no more than its part, and so on, the best of what is left first, at most
`MOST_SEARCHES` times. With less on its hosts nothing is faster, so what is tried is searched only
as far as the best of the others. The first schedule that the hosts hold is the answer: what was not
looked at takes longer, or has tasks apart that would be too much together. For those, each family
of schedules is begun with by itself; of others a faster one may be missed, and plans say so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from flowrl.plan.problem_of import Posed
from flowrl.plan.search import Found, Kind, Problem, Schedule, SearchResult, search
from flowrl.plan.ways.candidate import Candidate

MOST_SEARCHES = 60
"""Of one job."""

STEP = 0.002
"""How much further what is tried is searched at least, of a lower bound."""

_Trial = tuple[float, bool, int, Found | None, Problem, dict[str, int]]
"""A lower bound of the objective, or what it is; whether it is known; a number; the schedule; and
what is tried: a problem with most bytes of some tasks."""

FEW = 32
"""Schedules that are looked at for several that hosts hold."""


def host_bytes(numbers: Mapping[str, Sequence[int]], picked: Mapping[str, Candidate]) -> int:
    """That all tasks of the fullest device have on its host."""
    return sum(fullest_host(numbers, picked).values())


def fullest_host(
    numbers: Mapping[str, Sequence[int]], picked: Mapping[str, Candidate]
) -> dict[str, int]:
    """What each task of the device that has most on its host has there, in bytes."""
    on = _on_hosts(numbers, picked)
    return max(on.values(), key=lambda one: sum(one.values()), default={})


def overfull_host(
    numbers: Mapping[str, Sequence[int]],
    picked: Mapping[str, Candidate],
    holds: Callable[[str], int | None],
) -> tuple[dict[str, int], int] | None:
    """What each task of a device has on a host that holds less, and what that holds of a device;
    None where all hosts hold what is put on them.

    Args:
        holds: Bytes of its host that a device may fill, of the kind that a task is on; None where
            nobody knows.
    """
    full: list[tuple[int, dict[str, int], int]] = []
    for tasks in _on_hosts(numbers, picked).values():
        host = holds(next(iter(tasks)))
        if host is not None:
            full.append((sum(tasks.values()) - host, tasks, host))
    over, tasks, host = max(full, key=lambda one: one[0], default=(0, {}, 0))
    return (tasks, host) if over > 0 else None


def _on_hosts(
    numbers: Mapping[str, Sequence[int]], picked: Mapping[str, Candidate]
) -> dict[int, dict[str, int]]:
    """By device, what each task has on its host."""
    on: dict[int, dict[str, int]] = {}
    for name, way in picked.items():
        if way.host:
            for number in numbers[name]:
                on.setdefault(number, {})[name] = way.host
    return on


def search_within_hosts(
    posed: Posed,
    first: SearchResult,
    on_hosts: Callable[[Schedule], Mapping[str, int] | None],
    top: int = 1,
) -> SearchResult | None:
    """The best schedule that hosts hold; None where none was found.

    Args:
        first: What was found without a look at hosts.
        on_hosts: The `fullest_host` of a schedule; None where it cannot stand, which is no answer.
        top: How many schedules are wanted: others put no more on hosts than was tried last.
    """
    holds = posed.candidates.host or math.inf
    number = count()
    waiting: list[_Trial] = []
    seen: set[tuple[frozenset[Kind], frozenset[tuple[str, int]]]] = set()

    def enter(problem: Problem, most: dict[str, int], bound: float) -> None:
        name = (problem.kinds, frozenset(most.items()))
        if name not in seen and len(seen) < MOST_SEARCHES:
            seen.add(name)
            heapq.heappush(waiting, (bound, False, next(number), None, problem, most))

    if not first.best:
        return None
    least = first.best[0].evaluation.objective
    seen.add((posed.problem.kinds, frozenset()))
    waiting.append((least, True, next(number), first.best[0], posed.problem, {}))
    for kinds in _families(posed.problem):
        enter(replace(posed.problem, kinds=kinds), {}, least)
    while waiting:
        bound, _, at, found, problem, most = heapq.heappop(waiting)
        if found is None:
            within = max(waiting[0][0], bound * (1 + STEP)) if waiting else math.inf
            best = search(_with_less(posed, problem, most), within=within).best
            if best:
                bound = best[0].evaluation.objective
                heapq.heappush(waiting, (bound, True, at, best[0], problem, most))
            elif within < math.inf:
                heapq.heappush(waiting, (within, False, at, None, problem, most))
            continue
        asked = on_hosts(found.schedule)
        if asked is None:
            continue
        total = sum(asked.values())
        if total <= holds:
            wanted = _with_less(posed, problem, most)
            return search(wanted, top=1 if top == 1 else max(FEW, top))
        for task, nbytes in asked.items():
            enter(problem, most | {task: math.floor(holds * nbytes / total)}, bound)
    return None


def _families(problem: Problem) -> list[frozenset[Kind]]:
    """Kinds that are looked at by themselves: what stands apart is not too much for one host."""
    kinds = problem.kinds
    found = [frozenset({Kind.SPATIAL})] if Kind.HYBRID in kinds else []
    if Kind.ASYNCHRONOUS in kinds and problem.staleness:
        found.append(frozenset({Kind.ASYNCHRONOUS}))
    return [family for family in found if family != kinds]


def _with_less(posed: Posed, problem: Problem, most: Mapping[str, int]) -> Problem:
    """With those ways of some tasks that put no more on a host than a number of bytes."""
    tasks = tuple(
        replace(
            task,
            options=tuple(
                option
                for option in task.options
                if posed.candidate(task.id, option).host <= most[task.id]
            ),
        )
        if task.id in most
        else task
        for task in problem.tasks
    )
    return replace(problem, tasks=tasks)
