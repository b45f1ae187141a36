"""Steps over two pools of devices, against every pair of schedules that there is."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from flowrl.plan.search import (
    EVERY_KIND,
    Asynchronous,
    Evaluator,
    Joined,
    Kind,
    Objective,
    Option,
    Pair,
    Parts,
    Problem,
    Schedule,
    Spatial,
    Task,
    cuts,
    kind_of,
    leaves,
    restricted,
)
from tests.proofs.planner_cases import count_schedules, draw_problem, every_schedule
from tests.sizes import small_or_large

MOST_PAIRS = 12_000


def two_pools(rng: random.Random) -> tuple[Problem, Problem, Problem]:
    """All tasks with the options of both pools, and the tasks on each of them."""
    drawn = replace(draw_problem(rng), pinned={})
    sides = rng.choice([Kind.HYBRID, Kind.HYBRID, Kind.SPATIAL])
    first = replace(drawn, kinds=frozenset({sides}), staleness=0, ahead=frozenset())
    second = replace(
        first,
        tasks=tuple(
            replace(
                task,
                options=tuple(
                    faster(rng, replace(one, chunk_s=rng.randint(0, 8) / 8)) for one in task.options
                ),
            )
            for task in first.tasks
        ),
        num_devices=rng.choice([1, 2, 4, 8]),
        memory_bytes=rng.choice([40, 70, 100, 1000]),
        syncs=tuple(replace(sync, apart_s=rng.randint(0, 200) / 8) for sync in first.syncs),
    )
    kinds = frozenset({Kind.SPATIAL}) if sides is Kind.SPATIAL else drawn.kinds
    tasks = zip(first.tasks, second.tasks, strict=True)
    both = tuple(replace(one, options=one.options + other.options) for one, other in tasks)
    whole = replace(drawn, tasks=both, kinds=kinds, num_devices=99, counts=(), syncs=())
    return whole, first, second


def faster(rng: random.Random, option: Option) -> Option:
    """Other seconds, of batches that overlap too."""
    seconds = rng.randint(1, 400)
    steady = rng.randint(0, seconds)
    times = (seconds / 8, steady / 8, rng.randint(0, steady) / 8)
    return replace(option, seconds=times[0], steady_s=times[1], dense_s=times[2])


def fitting(problem: Problem, tasks: frozenset[str]) -> list[Schedule]:
    part = restricted(problem, tasks)
    measure = Evaluator(part).measure
    return [one for one in every_schedule(part) if measure(one).fits]


def step(
    whole: Problem, first: Problem, second: Problem, schedule: Spatial | Asynchronous
) -> float:
    """The objective, from the evaluator's word on each part and on both."""
    one, two = Evaluator(first).measure(schedule.first), Evaluator(second).measure(schedule.second)
    step_s = Evaluator(whole).measure(schedule).step_s + one.sync_s + two.sync_s
    if whole.objective is Objective.STEP_TIME:
        return step_s
    return step_s * (one.devices + two.devices + whole.beside)


def forms(whole: Problem, one: Schedule, two: Schedule) -> list[Spatial | Asynchronous]:
    here = {leaf.task for leaf in leaves(one)}
    readers = [task for leaf in leaves(two) if here & set((task := whole.task(leaf.task)).after)]
    found: list[Spatial | Asynchronous] = []
    if whole.kinds != {Kind.ASYNCHRONOUS}:
        chunks = whole.chunks if readers else (1,)
        most = min((task.max_chunks for task in readers), default=1)
        found += [Spatial(first=one, second=two, chunks=c) for c in chunks if c <= most]
    if whole.staleness and Kind.ASYNCHRONOUS in whole.kinds and here <= whole.ahead:
        found.append(Asynchronous(first=one, second=two))
    return found


def every_step(
    whole: Problem, first: Problem, second: Problem, tasks: frozenset[str]
) -> float | None:
    """The best objective of all; None where there are too many to look at."""
    others = frozenset(task.id for task in whole.tasks) - tasks
    pairs = count_schedules(restricted(first, tasks)) * count_schedules(restricted(second, others))
    if pairs > MOST_PAIRS:
        return None
    return min(
        (
            step(whole, first, second, schedule)
            for one in fitting(first, tasks)
            for two in fitting(second, others)
            for schedule in forms(whole, one, two)
        ),
        default=math.inf,
    )


def found_step(
    whole: Problem,
    first: Problem,
    second: Problem,
    tasks: frozenset[str],
    within: float = math.inf,
) -> Joined | None:
    others = frozenset(task.id for task in whole.tasks) - tasks
    pair = Pair(whole, first, second)
    ahead = whole.ahead if pair.runs_ahead else frozenset[str]()
    sides = Parts(first, ahead=ahead, feeds=True), Parts(second)
    least = sides[0].least([tasks])[tasks], sides[1].least([others])[others]
    bounds = pair.bounds((tasks, others), first, least)
    assert pair.least(bounds) <= within
    most = pair.most_seconds(bounds, within)
    dear = whole.objective is not Objective.STEP_TIME
    one = sides[0].fronts({tasks: most[0]}, by_devices=dear)[tasks]
    two = sides[1].fronts({others: most[1]}, by_devices=dear)[others]
    return next(iter(pair.best(one, two, within=within * (1 + 1e-9))), None)


@pytest.mark.parametrize("cases", small_or_large(30, 70))
def test_no_step_over_two_pools_is_better_than_the_one_that_is_found(cases: int):
    kinds: Counter[str] = Counter()
    for number in range(cases):
        rng = random.Random(number)
        whole, first, second = two_pools(rng)
        whole = replace(whole, beside=rng.choice([0, 0, 3]))
        for tasks in rng.sample(cuts(whole), min(2, len(cuts(whole)))):
            best = every_step(whole, first, second, tasks)
            if best is None:
                continue
            found = found_step(whole, first, second, tasks)
            if found is None:
                assert best == math.inf, number
                kinds["nothing fits"] += 1
                continue
            said = step(whole, first, second, found.schedule)
            assert found.objective == pytest.approx(said, rel=1e-12), number
            assert found.objective == pytest.approx(best, rel=1e-12), number
            again = found_step(whole, first, second, tasks, within=best)
            assert again is not None, number
            assert again.objective == pytest.approx(best, rel=1e-12), number
            others = frozenset(task.id for task in whole.tasks) - tasks
            if Pair(whole, first, second).in_turns(tasks, others):
                parts = zip(
                    (first, second), (found.schedule.first, found.schedule.second), strict=True
                )
                both = sum(Evaluator(pool).measure(part).step_s for pool, part in parts)
                assert found.step_s == pytest.approx(both), number
                kinds["in turns"] += 1
            kinds[kind_of(found.schedule)] += 1
            kinds[whole.objective] += 1
    assert min(kinds[kind] for kind in ("hybrid", "spatial", "asynchronous", "nothing fits")) > 2
    assert kinds["device_seconds"] > 3
    assert kinds["in turns"] > 3


def test_each_side_at_its_fastest_is_not_always_the_fastest_step():
    """A first side that takes longer may have its chunks for less, and a step is as long as its
    chunks are late."""
    draws = (Option(devices=1, seconds=10.0, chunk_s=5.0), Option(devices=1, seconds=11.0))
    tasks = (
        Task(id="generate", options=draws),
        Task(
            id="update",
            after=("generate",),
            options=(Option(devices=1, seconds=10.0),),
            max_chunks=8,
        ),
    )
    pool = Problem(tasks=tasks, num_devices=1, memory_bytes=0, kinds=EVERY_KIND)
    found = found_step(pool, pool, pool, frozenset({"generate"}))
    assert found is not None
    # 11 + 10 / 8; with the faster one 10 + 5 + 10 / 2 = 20, or 10 + 10 in one piece.
    assert found.step_s == pytest.approx(12.25)
    assert isinstance(found.schedule, Spatial)
    assert found.schedule.chunks == 8


def test_where_devices_count_fewer_of_both_pools_may_do():
    def task(id: str, after: tuple[str, ...] = ()) -> Task:  # noqa: A002
        sizes = {1: 12.0, 4: 10.0}
        options = tuple(Option(devices=n, seconds=s) for n, s in sizes.items())
        return Task(id=id, after=after, options=options)

    tasks = (task("generate"), task("update", ("generate",)))
    pool = Problem(tasks=tasks, num_devices=4, memory_bytes=0)
    dear = replace(pool, objective=Objective.DEVICE_SECONDS)
    for whole, devices, step_s in ((pool, 8, 20.0), (dear, 2, 24.0)):
        found = found_step(whole, pool, pool, frozenset({"generate"}))
        assert found is not None
        assert (found.devices, found.step_s) == (devices, step_s)


def test_a_first_part_reads_from_nothing_of_the_other_pool():
    ends = {"generate": (), "values": ("generate",), "update": ("generate", "values")}
    tasks = tuple(
        Task(id=name, after=after, options=(Option(devices=1, seconds=1.0),))
        for name, after in ends.items()
    )
    problem = Problem(tasks=tasks, num_devices=1, memory_bytes=0)
    assert cuts(problem) == [frozenset({"generate"}), frozenset({"generate", "values"})]
