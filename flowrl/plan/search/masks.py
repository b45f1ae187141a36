"""Sets of tasks as masks: bit i is the i-th task of the problem."""

from __future__ import annotations

from flowrl.plan.search.problem import Problem


def members(mask: int) -> list[int]:
    """The tasks of a set, ascending."""
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def read_masks(problem: Problem) -> tuple[list[int], int]:
    """What each task reads from, and the tasks that may run ahead."""
    number = {task.id: at for at, task in enumerate(problem.tasks)}
    reads = [sum(1 << number[read] for read in set(task.after)) for task in problem.tasks]
    return reads, sum(1 << number[name] for name in problem.ahead)


def numbers(problem: Problem, names: frozenset[str]) -> int:
    """Some tasks as a set."""
    return sum(1 << at for at, task in enumerate(problem.tasks) if task.id in names)


def follows(reads: list[int]) -> list[int]:
    """Of each task, itself and those that read from it, directly or through others."""
    found = [1 << task for task in range(len(reads))]
    for task in range(len(reads) - 1, -1, -1):
        for read in members(reads[task]):
            found[read] |= found[task]
    return found


def downward_closed(tasks: int, reads: list[int]) -> list[int]:
    """The proper, non-empty parts of `tasks` that read nothing from the rest of it."""
    closed = {0}
    for task in members(tasks):  # in an order in which they could run
        inside = reads[task] & tasks
        closed |= {part | 1 << task for part in closed if not inside & ~part}
    return sorted(closed - {0, tasks})


def feeds(first: int, second: int, reads: list[int]) -> bool:
    """Whether anything of `second` reads from `first`."""
    return any(reads[task] & first for task in members(second))


def crossing(problem: Problem, first: int, second: int) -> tuple[int, ...]:
    """Indices of the syncs with one end in each part."""
    number = {task.id: 1 << at for at, task in enumerate(problem.tasks)}
    found = []
    for at, sync in enumerate(problem.syncs):
        source, destination = number[sync.source], number[sync.destination]
        if (source & first and destination & second) or (source & second and destination & first):
            found.append(at)
    return tuple(found)
