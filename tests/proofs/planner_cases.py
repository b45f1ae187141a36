"""Random search problems, and the enumeration of every schedule of a problem.

The enumeration follows the definition of a schedule alone: all trees over the tasks in which no
second part feeds a first, all chunk counts, all options. It remembers nothing, prunes nothing and
shares no code with the search.

Seconds and shares of arrival profiles are multiples of 1/8 and chunk counts are powers of two.
Sums, products and quotients are then exact in floating point, and every order of adding up a
schedule gives the same number. Where a part runs ahead of the rest the evaluator takes roots, and
12 digits are compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from flowrl.plan.search import (
    EVERY_KIND,
    Arrivals,
    Asynchronous,
    Kind,
    Leaf,
    Objective,
    Option,
    Problem,
    Schedule,
    Spatial,
    Sync,
    Task,
    Temporal,
)

__all__ = ["count_schedules", "draw_problem", "every_schedule"]

Shape = dict[str, tuple[str, ...]]


def every_schedule(problem: Problem) -> Iterator[Schedule]:
    """Yields all schedules of the problem's kinds, whether they fit or not."""
    alone = len(problem.tasks) == 1
    kinds = problem.kinds
    if Kind.HYBRID in kinds:
        yield from _trees(problem, problem.tasks, turns=True, splits=True)
    else:
        if Kind.TEMPORAL in kinds or (alone and Kind.SPATIAL in kinds):
            yield from _trees(problem, problem.tasks, turns=True, splits=False)
        if Kind.SPATIAL in kinds and not alone:
            yield from _trees(problem, problem.tasks, turns=False, splits=True)
    if Kind.ASYNCHRONOUS in kinds and problem.staleness > 0:
        for first, second in _partitions(problem.tasks):
            if {task.id for task in first} <= problem.ahead:
                for one in _trees(problem, first, turns=True, splits=True):
                    for two in _trees(problem, second, turns=True, splits=True):
                        yield Asynchronous(first=one, second=two)


def _trees(
    problem: Problem, tasks: tuple[Task, ...], *, turns: bool, splits: bool
) -> Iterator[Schedule]:
    if len(tasks) == 1:
        for option in _options(problem, tasks[0]):
            yield Leaf(task=tasks[0].id, option=option)
        return
    for first, second in _partitions(tasks):
        for one in _trees(problem, first, turns=turns, splits=splits):
            for two in _trees(problem, second, turns=turns, splits=splits):
                if turns:
                    yield Temporal(first=one, second=two)
                if splits:
                    for chunks in _chunks(problem, first, second):
                        yield Spatial(first=one, second=two, chunks=chunks)


def count_schedules(problem: Problem) -> int:
    """Returns how many schedules `every_schedule` yields, for problems of all or hybrid kinds."""
    counts: dict[tuple[str, ...], int] = {}

    def count(tasks: tuple[Task, ...]) -> int:
        name = tuple(task.id for task in tasks)
        if name not in counts:
            if len(tasks) == 1:
                counts[name] = len(_options(problem, tasks[0]))
            else:
                counts[name] = sum(
                    count(first) * count(second) * (1 + len(_chunks(problem, first, second)))
                    for first, second in _partitions(tasks)
                )
        return counts[name]

    total = count(problem.tasks)
    if problem.staleness > 0:
        for first, second in _partitions(problem.tasks):
            if {task.id for task in first} <= problem.ahead:
                total += count(first) * count(second)
    return total


def _partitions(
    tasks: tuple[Task, ...],
) -> Iterator[tuple[tuple[Task, ...], tuple[Task, ...]]]:
    """Yields all ordered pairs of parts in which no task of the first reads from the second."""
    for size in range(1, len(tasks)):
        for first in combinations(tasks, size):
            second = tuple(task for task in tasks if task not in first)
            names = {task.id for task in second}
            if not any(names & set(task.after) for task in first):
                yield first, second


def _options(problem: Problem, task: Task) -> list[Option]:
    return [
        option
        for option in task.options
        if (not problem.counts or option.devices in (*problem.counts, problem.num_devices))
        and problem.pinned.get(task.id, option.devices) == option.devices
    ]


def _chunks(problem: Problem, first: tuple[Task, ...], second: tuple[Task, ...]) -> tuple[int, ...]:
    names = {task.id for task in first}
    readers = [task for task in second if names & set(task.after)]
    if not readers:
        return (1,)
    most = min(task.max_chunks for task in readers)
    return tuple(chunks for chunks in problem.chunks if chunks <= most)


def draw_problem(rng: random.Random) -> Problem:
    """Samples a problem of 3 to 7 tasks on at most 8 devices."""
    shape = rng.choice([_chain, _diamond, _ppo, _any_order])(rng)
    num_devices = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 8])
    counts = rng.choice([(), (), (1, 2, 4, 8), (1, 2, 3, 4, 8), (2, 4, 6, 8)])
    sizes = [size for size in counts or range(1, num_devices + 1) if size <= num_devices]
    sizes = sizes or [num_devices]
    few = len(shape) > 4
    names = list(shape)
    crowded = rng.random() < 0.35  # all share devices, weights and little memory
    if crowded:
        sizes = sizes[-1:]
    weights = dict.fromkeys(names, "policy") if crowded else _draw_weights(rng, names)
    held: dict[tuple[str, str, int], int] = {}
    most = rng.choice([1, 2, 8])
    uneven = rng.choice([0.0, 0.3, 1.0])
    staleness = rng.choice([0, 0, 1, 2, 3])
    steady = rng.choice([0.0, 0.7, 1.0]) if staleness else 0.0
    tasks = tuple(
        Task(
            id=name,
            after=shape[name],
            options=tuple(
                _draw_steady(rng, one) if rng.random() < steady else one
                for option in _draw_options(rng, weights[name], held, sizes, few=few)
                for one in [_draw_arrivals(rng, option) if rng.random() < uneven else option]
            ),
            weights=weights[name],
            max_chunks=rng.choice([1, most, most]),
        )
        for name in names
    )
    problem = Problem(
        tasks=tasks,
        num_devices=num_devices,
        counts=counts if any(size <= num_devices for size in counts) else (),
        memory_bytes=rng.choice([30, 50, 70, 90] if crowded else [40, 70, 100, 130, 170, 1000]),
        chunks=rng.choice([(1,), (1, 2), (1, 4), (2, 8)]) if few else rng.choice([(1, 2, 8), (4,)]),
        syncs=_draw_syncs(rng, names),
        staleness=staleness,
        ahead=_draw_ahead(rng, shape) if staleness else frozenset(),
        pinned=_draw_pins(rng, tasks),
        kinds=EVERY_KIND if rng.random() < 0.8 else frozenset({Kind.HYBRID}),
        objective=rng.choice([Objective.STEP_TIME] * 3 + [Objective.DEVICE_SECONDS]),
    )
    return replace(problem, tasks=tuple(_draw_in_one(random.Random(repr(tasks)), tasks)))


def _chain(rng: random.Random) -> Shape:
    names = [f"t{at}" for at in range(rng.randint(3, 5))]
    return {name: (names[at - 1],) if at else () for at, name in enumerate(names)}


def _diamond(rng: random.Random) -> Shape:
    sides = [f"side{at}" for at in range(rng.randint(2, 3))]
    return {"top": (), **dict.fromkeys(sides, ("top",)), "bottom": tuple(sides)}


def _ppo(rng: random.Random) -> Shape:
    """Samples PPO: generation, then scores, values and reference logprobs, then updates."""
    judges = rng.choice([["scores", "values"], ["scores", "values", "logprobs"]])
    shape: Shape = {"generate": (), **dict.fromkeys(judges, ("generate",))}
    shape["update"] = ("generate", *judges)
    if rng.random() < 0.7:
        shape["update_critic"] = tuple(judges[:2])
    if rng.random() < 0.3:
        shape["log"] = ("update",)
    return shape


def _any_order(rng: random.Random) -> Shape:
    names = [f"n{at}" for at in range(rng.randint(3, 5))]
    return {
        name: tuple(earlier for earlier in names[:at] if rng.random() < 0.5)
        for at, name in enumerate(names)
    }


def _draw_weights(rng: random.Random, names: list[str]) -> dict[str, str | None]:
    """Samples names of weights; in about half of the problems some tasks share weights."""
    shared = rng.random() < 0.6
    return {
        name: (rng.choice(["policy", "policy", "critic"]) if shared else name)
        if rng.random() < 0.9
        else None
        for name in names
    }


def _draw_options(
    rng: random.Random,
    weights: str | None,
    held: dict[tuple[str, str, int], int],
    sizes: list[int],
    *,
    few: bool,
) -> tuple[Option, ...]:
    most = rng.choice([1, 1, 1, 2]) if few else rng.choice([1, 2, 3, 4])
    options = []
    for label in range(most):
        devices = min(rng.choice(sizes), rng.choice(sizes))
        form = rng.choice(["a", "a", "b"])
        nbytes = 0
        if weights is not None and rng.random() < 0.85:
            nbytes = held.setdefault((weights, form, devices), rng.randint(0, 30))
        resident = nbytes + rng.choice([0, 0, rng.randint(0, 15)])
        options.append(
            Option(
                devices=devices,
                seconds=rng.randint(1, 400) / 8,
                chunk_s=rng.choice([0, 0, rng.randint(0, 16)]) / 8,
                resident=resident,
                peak=resident + rng.randint(0, 30),
                weight_bytes=nbytes,
                form=form,
                label=label,
            )
        )
    return tuple(options)


def _draw_arrivals(rng: random.Random, option: Option) -> Option:
    """Samples an arrival profile: results come early or late, with any share of the work."""
    points = rng.choice([2, 4, 8])
    ready, work = (sorted(rng.randint(0, 8) / 8 for _ in range(points - 1)) for _ in range(2))
    if rng.random() < 0.1:
        ready = [1.0] * (points - 1)
    return replace(option, arrivals=Arrivals(ready=(*ready, 1.0), work=(*work, 1.0)))


def _draw_in_one(rng: random.Random, tasks: tuple[Task, ...]) -> Iterator[Task]:
    """Samples which tasks run in one go: the first task, some of all tasks, or none.

    Args:
        rng: A random stream for this alone, so that the rest of a problem keeps its seed.
        tasks: The tasks of the problem.
    """
    first, others = rng.choice([(0.0, 0.0), (1.0, 0.0), (1.0, 0.3), (0.5, 0.5)])
    for at, task in enumerate(tasks):
        yield replace(task, in_one=rng.random() < (others if at else first))


def _draw_steady(rng: random.Random, option: Option) -> Option:
    """Samples the seconds of successive batches, which are fewer than those of one alone."""
    steady = rng.randint(0, int(8 * option.seconds))
    dense = rng.choice([0, rng.randint(0, steady)])
    return replace(option, steady_s=steady / 8, dense_s=dense / 8)


def _draw_syncs(rng: random.Random, names: list[str]) -> tuple[Sync, ...]:
    return tuple(
        Sync(
            source=source,
            destination=destination,
            together_s=rng.randint(0, 40) / 8,
            apart_s=rng.randint(0, 200) / 8,
        )
        for source, destination in (rng.sample(names, 2) for _ in range(rng.choice([0, 1, 1, 2])))
    )


def _draw_ahead(rng: random.Random, shape: Shape) -> frozenset[str]:
    ahead: set[str] = set()
    for name, reads in shape.items():
        if set(reads) <= ahead and rng.random() < 0.7:
            ahead.add(name)
    return frozenset(ahead)


def _draw_pins(rng: random.Random, tasks: tuple[Task, ...]) -> dict[str, int]:
    if rng.random() < 0.8:
        return {}
    task = rng.choice(tasks)
    return {task.id: rng.choice(task.options).devices}
