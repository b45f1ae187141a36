"""Pairs of points by classes, and first limits of very many sizes, beside every schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from flowrl.plan.search import Kind, Option, Problem, Task, evaluate, joins
from flowrl.plan.search import best as best_of_search
from flowrl.plan.search import crossings as by_classes
from flowrl.plan.search.bounds import lower_bounds
from flowrl.plan.search.dynamic import Aim, run
from flowrl.plan.search.space import compile_space
from tests.proofs.planner_cases import count_schedules, draw_problem
from tests.proofs.planner_optimality import compare
from tests.sizes import small_or_large


def small(seeds: range) -> Iterator[Problem]:
    """Random problems whose schedules are soon enumerated."""
    for seed in seeds:
        problem = draw_problem(random.Random(seed))
        if count_schedules(problem) <= 800:
            yield problem


@pytest.fixture
def used(monkeypatch) -> list[int]:
    """How many pairs of points each join by classes made."""
    found: list[int] = []
    told = joins.crossings

    def counted(*given):
        pairs = told(*given)
        if pairs is None:
            return None
        parts = list(pairs)
        found.append(sum(len(block) for block, _, _ in parts))
        return iter(parts)

    monkeypatch.setattr(joins, "crossings", counted)
    return found


@pytest.mark.parametrize("cases", small_or_large(40, 100))
def test_no_schedule_is_better_where_all_joins_are_by_classes(monkeypatch, used, cases) -> None:
    monkeypatch.setattr(by_classes, "FEW_PAIRS", 0)
    monkeypatch.setattr(by_classes, "WORTH", 0)
    for problem in small(range(cases)):
        assert compare(problem).gap == 0, problem
    assert sum(used) > cases // 2


def test_a_few_classes_stand_for_all_splits(monkeypatch, used) -> None:
    # Two layouts of each task, of which the faster one needs more memory: 2 times 2 classes.
    options = tuple(
        Option(
            devices=devices,
            seconds=(60 if wide else 80) / devices + 1,
            resident=9 if wide else 1,
            peak=9 if wide else 1,
        )
        for devices in range(1, 121)
        for wide in (True, False)
    )
    tasks = tuple(Task(id=name, options=options) for name in ("one", "two", "three"))
    problem = Problem(
        tasks=tasks, num_devices=120, memory_bytes=12, kinds=frozenset({Kind.SPATIAL})
    )
    space = compile_space(problem)
    aim = Aim(objective=problem.objective, memory_bytes=problem.memory_bytes)
    few = run(space, lower_bounds(space), 90.0, aim)
    assert 0 < max(used) <= 4 * 4 * 120
    monkeypatch.setattr(by_classes, "FEW_PAIRS", 1 << 60)
    every = run(space, lower_bounds(space), 90.0, aim)
    # 40 devices each on the faster layout.
    assert [evaluate(problem, found.schedules[0]).step_s for found in (few, every)] == [2.5, 2.5]


@pytest.mark.parametrize("cases", small_or_large(20, 70))
def test_limits_of_very_many_sizes_change_no_answer(monkeypatch, cases) -> None:
    monkeypatch.setattr(best_of_search, "MANY_SIZES", 2)
    monkeypatch.setattr(best_of_search, "FEW_SIZES", 1)
    for problem in small(range(150, 150 + cases)):
        assert compare(problem).gap == 0, problem
