"""Points that differ in bytes that there is room for anyway."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from flowrl.plan.search import Objective, Option, Problem, Task, search
from flowrl.plan.search.best import _next_step as following
from flowrl.plan.search.points import NO_ROOM, Points, Room, prune, sieve
from tests.proofs.planner_cases import count_schedules, draw_problem
from tests.proofs.planner_optimality import compare
from tests.sizes import every


def points(rows: list[tuple[float, float, float, int]]) -> Points:
    """Of seconds, resident bytes, peak bytes and tokens, all on one block."""
    values = np.zeros((6, len(rows)))
    for at, (seconds, resident, peak, _) in enumerate(rows):
        values[[0, 3, 4], at] = seconds, resident, peak
    none = np.zeros(len(rows), dtype=np.int64)
    return Points(
        block=none,
        values=values,
        tokens=np.array([token for *_, token in rows]),
        record=np.arange(len(rows)),
        name=np.arange(len(rows)),
        turns=none > 0,
    )


def test_what_is_faster_beats_what_has_fewer_bytes_where_there_is_room_for_both() -> None:
    room = Room(resident=20.0, peak=50.0, weight_tokens=0b011)
    some = points(
        [
            (1.0, 20.0, 50.0, 0b000),
            (2.0, 10.0, 40.0, 0b011),  # beaten, its weights are of no use
            (2.0, 10.0, 40.0, 0b100),  # an end of a sync still is
            (1.0, 10.0, 40.0, 0b000),  # as fast, with fewer bytes
            (0.5, 21.0, 22.0, 0b000),  # more than there is room for
        ]
    )
    assert sorted(prune(some, 0, 1, 0)) == [1, 2, 3, 4]
    assert sorted(prune(some, 0, 1, 0, room)) == [2, 3, 4]
    # Two that beat it are needed where two are wanted: those of rows 0 and 3 are.
    assert sorted(prune(some, 0, 2, 0, room)) == [0, 2, 3, 4]
    assert sorted(prune(some, 0, 3, 0, room)) == [0, 1, 2, 3, 4]


def test_of_many_points_the_sieve_leaves_what_is_not_beaten() -> None:
    rng = random.Random(0)
    rows = [
        (rng.randint(1, 40), rng.randint(0, 30), rng.randint(30, 60), rng.choice([0, 1, 2, 3]))
        for _ in range(400)
    ]
    some = points([(float(s), float(r), float(p), token) for s, r, p, token in rows])
    for resident, peak in ((-1.0, -1.0), (10.0, 40.0), (40.0, 70.0), (40.0, 35.0)):
        room = Room(resident=resident, peak=peak, weight_tokens=0b01)
        kept, left = prune(some, 0, 1, 0, room), sieve(some, 0, 1, 0, room)
        assert set(kept) <= set(left)
        assert set(kept) <= set(prune(some, 0, 1, 0))
    assert len(kept) < len(prune(some, 0, 1, 0, NO_ROOM))


@pytest.mark.parametrize("share", every(4, [0.8, 0.5, 1.0, 1.6]))
def test_room_for_some_of_the_bytes_changes_no_answer(share: float) -> None:
    """Memory from what binds all to what binds none."""
    compared = 0
    for number in range(300, 360):
        problem = draw_problem(random.Random(number))
        if count_schedules(problem) > 2_000:
            continue
        most = sum(max((o.peak for o in task.options), default=0) for task in problem.tasks)
        result = compare(replace(problem, memory_bytes=max(1, round(share * most))))
        assert result.gap == 0, number
        compared += 1
    assert compared > 5


def chain(memory_bytes: int) -> Problem:
    """Six tasks with twelve ways each, of which the faster ones take more bytes."""
    tasks = tuple(
        Task(
            id=f"task{at}",
            after=(f"task{at - 1}",) if at else (),
            options=tuple(
                Option(
                    devices=4,
                    seconds=100.0 + at * 0.37 + 1.013**way,
                    resident=60 - way,
                    peak=100 - way + (way * 7 + at) % 5,
                )
                for way in range(12)
            ),
        )
        for at in range(6)
    )
    return Problem(
        tasks=tasks,
        num_devices=4,
        counts=(4,),
        memory_bytes=memory_bytes,
        objective=Objective.STEP_TIME,
    )


def test_where_memory_is_ample_few_points_are_looked_at() -> None:
    # All with the most bytes: 5 x 60 and no more than 104.
    ample, scarce = search(chain(500)), search(chain(395))
    assert ample.best[0].evaluation.step_s == pytest.approx(600 + 15 * 0.37 + 6)
    assert ample.num_points <= 4_000
    assert scarce.num_points > ample.num_points
    assert scarce.best[0].evaluation.step_s > ample.best[0].evaluation.step_s


def test_limits_rise_in_small_steps_where_there_are_many_points() -> None:

    assert following(None, 0, many=False) == 0.002
    assert following(0.002, 500, many=False) == 0.01
    assert following(0.002, 5_000, many=False) == pytest.approx(0.005)
    assert following(0.002, 50_000, many=False) == pytest.approx(0.003)
    assert following(0.04, 50_000, many=False) == pytest.approx(0.06)
    assert following(0.002, 50_000, many=True) == 0.01
    assert following(2.0, 500, many=False) is None
