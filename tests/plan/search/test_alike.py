"""Arrivals of few kinds, and the answer that does not depend on them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.plan.search import (
    EVERY_KIND,
    Alike,
    Arrivals,
    Kind,
    Leaf,
    Objective,
    Option,
    Problem,
    Spatial,
    Task,
    evaluate,
    leaves,
    search,
)
from tests.sizes import every

STEPS = 4
EVERY = 10**6
"""More kinds than there are arrivals."""

EARLY = Arrivals(ready=(0.25, 1.0), work=(0.5, 1.0))
HEAVY = Arrivals(ready=(0.75, 1.0), work=(0.75, 1.0))


def rollout(*options: Option) -> Problem:
    """A rollout whose results pass to an update in two chunks, at once with it."""
    return Problem(
        tasks=(
            Task(id="rollout", options=options),
            Task(
                id="update",
                after=("rollout",),
                options=(Option(devices=1, seconds=8.0),),
                max_chunks=2,
            ),
        ),
        num_devices=2,
        memory_bytes=1,
        chunks=(2,),
        kinds=frozenset({Kind.SPATIAL}),
    )


EARLY_OPTION = Option(devices=1, seconds=8.0, arrivals=EARLY, label=0)
HEAVY_OPTION = Option(devices=1, seconds=7.9, arrivals=HEAVY, label=1)


def test_a_kind_is_as_early_as_its_earliest_and_its_schedules_are_found_again() -> None:
    problem = rollout(EARLY_OPTION, HEAVY_OPTION)
    alike = Alike(problem, 1)
    shared = Arrivals(ready=(0.25, 1.0), work=(0.75, 1.0))
    options = alike.problem.task("rollout").options
    assert [one.arrivals for one in options] == [shared, shared]
    assert alike.problem.task("update") == problem.task("update")

    update = Leaf(task="update", option=problem.task("update").options[0])
    joined = Spatial(first=Leaf(task="rollout", option=options[1]), second=update, chunks=2)
    own = alike.own(joined)
    assert [leaf.option for leaf in leaves(own)] == [HEAVY_OPTION, update.option]
    # 0.25 x 7.9 + 8, 7.9 + 0.25 x 8; and with its own, 0.75 x 7.9 + 8.
    assert evaluate(alike.problem, joined).step_s == pytest.approx(9.975)
    assert evaluate(problem, own).step_s == pytest.approx(13.925)

    assert alike.part([own])
    assert [one.arrivals for one in alike.problem.task("rollout").options] == [EARLY, HEAVY]
    assert not alike.part([own])


def test_the_best_of_a_kind_by_others_arrivals_is_not_taken_for_the_best() -> None:
    found = search(rollout(EARLY_OPTION, HEAVY_OPTION), top=2, most_kinds=1).best
    rollouts = [next(leaves(one.schedule)).option for one in found]
    assert rollouts == [EARLY_OPTION, HEAVY_OPTION]
    # 8 + 0.5 x 8 of the second chunk; 0.75 x 7.9 + 8.
    assert [one.evaluation.step_s for one in found] == pytest.approx([12.0, 13.925])


@st.composite
def profiles(draw: st.DrawFn) -> list[Arrivals]:
    share = st.integers(0, 64).map(lambda part: part / 64)
    column = st.lists(share, min_size=STEPS - 1, max_size=STEPS - 1).map(sorted)
    return [
        Arrivals(ready=(*draw(column), 1.0), work=(*draw(column), 1.0))
        for _ in range(draw(st.integers(2, 6)))
    ]


@given(profiles(), st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_no_chunk_of_a_kind_comes_later_or_with_more_behind_it_than_a_members(
    every: list[Arrivals], chunks: int
) -> None:
    options = [Option(devices=1, seconds=1.0, arrivals=one) for one in every]
    for option, joined in zip(
        options, Alike(rollout(*options), 1).problem.task("rollout").options, strict=True
    ):
        assert option.arrivals is not None
        assert joined.arrivals is not None
        pairs = zip(
            joined.arrivals.chunk_lines(chunks), option.arrivals.chunk_lines(chunks), strict=True
        )
        for (a, b), (own_a, own_b) in pairs:
            assert a <= own_a + 1e-12
            assert b <= own_b + 1e-12


def with_many_arrivals(rng: random.Random) -> Problem:
    """A chain or a diamond of tasks that take about as long, with many arrivals."""
    after = rng.choice([((), (0,), (1,)), ((), (0,), (0, 1)), ((), (0,), (0,), (1, 2))])
    sizes = rng.choice([(1, 2, 3, 4), (1, 2, 4)])
    tasks = []
    for number, reads in enumerate(after):
        options = []
        for label in range(rng.randint(5, 9) if number < 2 else 3):
            ready, work = (sorted(rng.random() for _ in range(STEPS - 1)) for _ in range(2))
            arrivals = Arrivals(ready=(*ready, 1.0), work=(*work, 1.0))
            devices = rng.choice(sizes)
            options.append(
                Option(
                    devices=devices,
                    seconds=rng.uniform(30, 40) / devices,
                    arrivals=arrivals if rng.random() < 0.9 else None,
                    label=label,
                    resident=10,
                    peak=rng.choice([10, 20]),
                )
            )
        tasks.append(
            Task(
                id=f"t{number}",
                after=tuple(f"t{one}" for one in reads),
                options=tuple(options),
                max_chunks=8,
            )
        )
    return Problem(
        tasks=tuple(tasks),
        num_devices=8,
        memory_bytes=rng.choice([20, 30, 100]),
        chunks=(1, 2, 8),
        staleness=rng.choice([0, 1]),
        ahead=frozenset({"t0", "t1"}),
        kinds=rng.choice([EVERY_KIND, frozenset({Kind.SPATIAL})]),
        objective=rng.choice([Objective.STEP_TIME, Objective.DEVICE_SECONDS]),
    )


@pytest.mark.parametrize(
    ("top", "most", "cases"), every(4, [(6, 3, 4), (1, 1, 6), (1, 3, 6), (6, 1, 4)])
)
def test_however_few_kinds_there_are_at_first_the_best_schedules_are_as_good(
    top: int, most: int, cases: int
) -> None:
    rng = random.Random(f"alike {top} {most}")
    parted = 0
    for _ in range(cases):
        problem = with_many_arrivals(rng)
        exact = search(problem, top=top, most_kinds=EVERY).best
        found = search(problem, top=top, most_kinds=most).best
        # Of schedules that tie in these, either may be found.
        assert [one.evaluation.key[:2] for one in found] == [
            one.evaluation.key[:2] for one in exact
        ]
        for one in found:
            assert evaluate(problem, one.schedule) == one.evaluation
        coarse = search(Alike(problem, most).problem, top=top, most_kinds=EVERY).best
        parted += [one.evaluation.key for one in coarse] != [one.evaluation.key for one in exact]
    assert parted > cases // 10, "of these problems, some are only right where kinds are parted"
