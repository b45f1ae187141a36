"""Schedules on the devices that pins name: the best of all that can stand there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flowrl.plan.search import (
    Asynchronous,
    Leaf,
    Option,
    Problem,
    Schedule,
    Spatial,
    Task,
    Temporal,
    evaluate,
    leaves,
    search,
)
from flowrl.plan.standing import stand
from tests.proofs.planner_cases import count_schedules, draw_problem, every_schedule
from tests.sizes import small_or_large


def leaf(task: str, devices: int) -> Leaf:
    return Leaf(task=task, option=Option(devices=devices, seconds=1.0))


def with_places(problem: Problem, rng: random.Random) -> Problem:
    """The problem with the devices of one to three of its tasks given, by number."""
    tasks = rng.sample(problem.tasks, min(len(problem.tasks), rng.randint(1, 3)))
    places = {}
    for task in tasks:
        counts = sorted({option.devices for option in task.options} & set(problem.block_sizes()))
        if counts:
            count = rng.choice(counts)
            first = rng.randrange(problem.num_devices - count + 1)
            places[task.id] = frozenset(range(first, first + count))
    pinned = {name: len(where) for name, where in places.items()}
    return replace(problem, pinned=pinned, places=places)


def cannot_stand(problem: Problem, schedule: Schedule) -> bool:
    """By the definition: parts that stand apart share no device, and have room for theirs."""
    sizes = problem.block_sizes()

    def needed(part: Schedule) -> set[int]:
        return {n for one in leaves(part) for n in problem.places.get(one.task, ())}

    def rounded_up(number: int) -> int:
        return min((size for size in sizes if size >= number), default=number)

    def room(part: Schedule) -> int:
        if isinstance(part, Leaf):
            return rounded_up(part.option.devices)
        if isinstance(part, Temporal):
            return max(room(part.first), room(part.second))
        return rounded_up(
            sum(max(room(one), rounded_up(len(needed(one)))) for one in (part.first, part.second))
        )

    def meets(part: Schedule) -> bool:
        if isinstance(part, Leaf):
            return False
        apart = not isinstance(part, Temporal)
        own = apart and bool(needed(part.first) & needed(part.second))
        return own or meets(part.first) or meets(part.second)

    return meets(schedule) or room(schedule) > problem.num_devices


@pytest.mark.parametrize(("cases", "most"), small_or_large((range(20), 1000), (range(80), 3000)))
def test_the_best_schedule_with_given_devices_is_found_among_all_that_can_stand(
    cases: range, most: int
):
    compared = 0
    for seed in cases:
        rng = random.Random(seed)
        problem = draw_problem(rng)
        if count_schedules(problem) <= most:
            compared += 1
            compare_with_all_that_can_stand(problem, rng)
    assert compared > len(cases) // 4


def compare_with_all_that_can_stand(problem: Problem, rng: random.Random) -> None:
    problem = with_places(problem, rng)
    standing = []
    sizes, total = problem.block_sizes(), problem.num_devices
    for schedule in every_schedule(problem):
        # One node: its borders are in nobody's way.
        where = stand(schedule, sizes, total, total, problem.places)
        assert (where is None) == cannot_stand(problem, schedule)
        if where is not None and evaluate(problem, schedule).fits:
            standing.append(evaluate(problem, schedule).objective)
            assert all(set(where[name]) == place for name, place in problem.places.items())
    result = search(problem)
    if not standing:
        assert not result.best
    else:
        assert result.best[0].evaluation.objective == pytest.approx(min(standing), rel=1e-9)


def test_what_stands_apart_avoids_the_others_pins_and_stays_in_a_node():
    sizes = (1, 2, 4, 8, 16)
    schedule = Spatial(first=Spatial(first=leaf("a", 4), second=leaf("b", 4)), second=leaf("c", 8))
    found = stand(schedule, sizes, 8, 16, {"c": range(8)})
    assert found is not None
    assert found["c"] == tuple(range(8))
    assert sorted([found["a"], found["b"]]) == [(8, 9, 10, 11), (12, 13, 14, 15)]
    # Both nodes have a pinned device, so that neither is left for a block of a node.
    assert stand(schedule, sizes, 8, 16, {"a": range(4), "b": range(8, 12)}) is None


def test_turns_may_be_on_any_pinned_parts_of_their_devices():
    turns = Temporal(first=leaf("a", 8), second=leaf("b", 16))
    found = stand(turns, (8, 16), 8, 16, {"a": range(8, 16)})
    assert found == {"a": tuple(range(8, 16)), "b": tuple(range(16))}
    ahead = Asynchronous(first=leaf("a", 8), second=leaf("b", 8))
    assert stand(ahead, (8, 16), 8, 16, {"a": range(8), "b": range(8)}) is None


def test_tasks_that_must_share_a_device_are_never_apart():
    tasks = (
        Task(id="a", options=(Option(devices=2, seconds=4.0),)),
        Task(id="b", after=("a",), options=(Option(devices=2, seconds=4.0),), max_chunks=4),
    )
    problem = Problem(tasks=tasks, num_devices=4, memory_bytes=1, pinned={"a": 2, "b": 2})
    free = search(problem).best[0]
    assert isinstance(free.schedule, Spatial)
    shared = replace(problem, places={"a": frozenset({0, 1}), "b": frozenset({0, 1})})
    assert isinstance(search(shared).best[0].schedule, Temporal)
    assert isinstance(
        search(replace(shared, places={"a": frozenset({0, 1}), "b": frozenset({2, 3})}))
        .best[0]
        .schedule,
        Spatial,
    )
