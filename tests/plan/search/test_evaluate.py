"""What a schedule takes, computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import PlanError
from flowrl.plan.search import (
    Arrivals,
    Asynchronous,
    Evaluator,
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
    block,
    draw,
    evaluate,
    kind_of,
    leaves,
    stream_lines,
)
from flowrl.plan.search.overlap import age_period_s, age_periods
from flowrl.plan.search.schedule import signature
from tests.proofs.planner_cases import draw_problem

GENERATE = Option(
    devices=4, seconds=12.0, chunk_s=1.0, resident=20, peak=50, weight_bytes=20, form="a"
)
GENERATE_ON_2 = Option(devices=2, seconds=20.0, resident=40, peak=60, weight_bytes=40, form="a")
SCORE = Option(devices=1, seconds=3.0, resident=5, peak=6)
UPDATE = Option(
    devices=4, seconds=16.0, chunk_s=0.5, resident=30, peak=70, weight_bytes=20, form="a"
)
UPDATE_OTHER_FORM = replace(UPDATE, form="b")

PROBLEM = Problem(
    tasks=(
        Task(id="generate", options=(GENERATE, GENERATE_ON_2), weights="policy"),
        Task(id="score", after=("generate",), options=(SCORE,), max_chunks=8),
        Task(
            id="update",
            after=("generate", "score"),
            options=(UPDATE, UPDATE_OTHER_FORM),
            weights="policy",
            max_chunks=4,
        ),
    ),
    num_devices=8,
    memory_bytes=100,
    chunks=(1, 2, 4, 8),
    syncs=(Sync(source="update", destination="generate", together_s=0.25, apart_s=2.0),),
    staleness=1,
    ahead=frozenset({"generate", "score"}),
)

generate = Leaf(task="generate", option=GENERATE)
generate_on_2 = Leaf(task="generate", option=GENERATE_ON_2)
score = Leaf(task="score", option=SCORE)
update = Leaf(task="update", option=UPDATE)


def test_turns_add_seconds_and_residents_and_hold_equal_weights_once() -> None:
    schedule = Temporal(first=Temporal(first=generate, second=score), second=update)
    found = evaluate(PROBLEM, schedule)
    assert found.step_s == 12 + 3 + 16 + 0.25
    # Residents 20 + 5 + 30 less the 20 that generate and update share; at its fullest while
    # update works: 70 + 25 - 20.
    assert (found.resident, found.peak) == (35, 75)
    assert (found.devices, found.num_splits, found.num_forms) == (4, 0, 1)


def test_weights_in_another_form_are_held_twice() -> None:
    other = Leaf(task="update", option=UPDATE_OTHER_FORM)
    schedule = Temporal(first=Temporal(first=generate, second=score), second=other)
    found = evaluate(PROBLEM, schedule)
    assert (found.resident, found.peak, found.num_forms) == (55, 95, 2)
    assert found.sync_s == 0.25  # they still share the devices


def test_a_leaf_that_leaves_devices_idle_shares_nothing() -> None:
    schedule = Temporal(first=Temporal(first=generate_on_2, second=score), second=update)
    found = evaluate(PROBLEM, schedule)
    assert found.sync_s == 2.0
    assert (found.resident, found.peak, found.fits) == (75, 115, False)


def test_a_stream_takes_the_first_chunk_through_both_and_then_the_slower_pace() -> None:
    first = Temporal(first=generate, second=score)
    found = evaluate(PROBLEM, Spatial(first=first, second=update, chunks=4))
    u1, u2 = 15 + 3 * 1.0, 16 + 3 * 0.5
    assert found.step_s == (u1 + u2) / 4 + max(u1, u2) * 3 / 4 + 2.0
    assert (found.resident, found.peak, found.devices) == (30, 70, 8)


def test_parts_that_exchange_nothing_run_at_once() -> None:
    problem = replace(
        PROBLEM,
        tasks=(
            Task(id="one", options=(SCORE,)),
            Task(id="two", options=(replace(SCORE, seconds=5.0),)),
        ),
        syncs=(),
        ahead=frozenset(),
    )
    one, two = (Leaf(task=task.id, option=task.options[0]) for task in problem.tasks)
    assert evaluate(problem, Spatial(first=one, second=two)).step_s == 5.0


def test_what_runs_ahead_is_hidden_behind_the_slower_side() -> None:
    schedule = Asynchronous(first=Temporal(first=generate, second=score), second=update)
    found = evaluate(PROBLEM, schedule)
    assert (found.step_s, found.sync_s, found.num_splits) == (16 + 2.0, 2.0, 1)


def steady(leaf: Leaf, seconds: float) -> Leaf:
    return replace(leaf, option=replace(leaf.option, steady_s=seconds))


def period_s(first: Schedule, staleness: int) -> float:
    """Of PROBLEM's update, which takes 16 s, behind `first`; without the weights' way."""
    problem = replace(PROBLEM, staleness=staleness, tasks=(*with_options(first), PROBLEM.tasks[-1]))
    found = evaluate(problem, Asynchronous(first=first, second=update))
    return found.step_s - found.sync_s


def with_options(schedule: Schedule) -> list[Task]:
    return [replace(PROBLEM.task(leaf.task), options=(leaf.option,)) for leaf in leaves(schedule)]


@pytest.mark.parametrize(
    ("staleness", "step_s"),
    [(1, (60 + 3 + 16) / 2), (2, (60 + 3 + 16) / 3), (3, 20.0), (9, 20.0)],
)
def test_batches_overlap_as_far_as_ages_let_them(staleness: int, step_s: float) -> None:
    """Generation of 60 s that takes 20 s a batch without a gap, and scores of 3 s beside it."""
    slow = replace(GENERATE, seconds=60.0, steady_s=20.0, chunk_s=0.0)
    drawn = Spatial(first=replace(generate, option=slow), second=score, chunks=1)
    assert period_s(drawn, staleness) == step_s


def test_batches_that_overlap_take_longer_by_what_is_each_ones_own() -> None:
    """Of 60 s 12 are the batch's own. Every 26 s one is begun, so that 14 of 26 s are left for all
    of them, and one takes 48 * 26 / 14 s; with the 16 s that its update takes, that is 4 * 26 s and
    not much more."""
    slow = replace(GENERATE, seconds=60.0, steady_s=20.0, dense_s=12.0, chunk_s=0.0)
    drawn = Temporal(first=replace(generate, option=slow), second=score)
    assert period_s(drawn, 3) == 63.0  # a batch is through before the next one
    alone = replace(SCORE, seconds=0.0)
    drawn = Spatial(first=replace(generate, option=slow), second=replace(score, option=alone))
    found = period_s(drawn, 3)
    assert 4 * found == pytest.approx(48 * found / (found - 12) + 16)
    assert 20.0 < found < 27.0
    assert age_period_s(60.0, 12.0, 60.0, 1) == pytest.approx(60.0)  # one at a time


@given(
    st.floats(0.01, 100),
    st.floats(0, 1),
    st.floats(0.01, 100),
    st.integers(1, 8),
    st.integers(0, 2),
)
def test_a_period_is_no_shorter_for_what_takes_longer(
    drawn: float, share: float, learned: float, staleness: int, what: int
) -> None:
    """Which the search relies on where it drops what is nowhere better."""

    def period(drawn: float, dense: float, learned: float) -> float:
        return max(learned, age_period_s(drawn, dense, learned, staleness))

    dense = share * drawn
    longer = [
        (drawn + 1, dense, learned),
        (drawn, dense + 0.5 * (drawn - dense), learned),
        (drawn, dense, learned + 1),
    ][what]
    now = period(drawn, dense, learned)
    assert period(*longer) >= now * (1 - 1e-9)
    assert now >= (drawn + learned) / (staleness + 1) * (1 - 1e-9)
    [same] = age_periods(*np.array([[drawn], [dense], [learned]]), staleness)
    assert same == age_period_s(drawn, dense, learned, staleness)


def test_a_stream_ahead_is_as_fast_as_its_slower_side_with_what_chunks_cost() -> None:
    # 60 and 20 s, 7 chunks more at 0.75 s each.
    slow = replace(GENERATE, seconds=60.0, steady_s=20.0, chunk_s=0.75)
    drawn = Spatial(first=replace(generate, option=slow), second=score, chunks=8)
    assert period_s(drawn, 9) == 20 + 7 * 0.75


def test_what_takes_turns_ahead_is_through_with_a_batch_before_the_next_one() -> None:
    drawn = Temporal(first=steady(generate, 1.0), second=score)
    assert period_s(drawn, 9) == 16.0
    slow = replace(GENERATE, seconds=60.0, steady_s=20.0)
    assert period_s(Temporal(first=replace(generate, option=slow), second=score), 9) == 63.0


def test_steady_seconds_are_at_most_those_of_a_batch() -> None:
    for wrong in (-1.0, 12.5, float("nan")):
        with pytest.raises(PlanError, match="steady_s"):
            period_s(Spatial(first=steady(generate, wrong), second=score), 1)


def test_blocks_are_rounded_up_to_allowed_sizes() -> None:
    schedule = Spatial(first=generate_on_2, second=score)
    assert block(schedule, (1, 2, 4, 8)) == 4
    assert block(Spatial(first=schedule, second=score), (1, 2, 4, 8)) == 8
    assert block(Spatial(first=schedule, second=score), (1, 2, 4)) == 5  # fits nowhere


def test_device_seconds_count_the_whole_block() -> None:
    problem = replace(PROBLEM, objective=Objective.DEVICE_SECONDS)
    schedule = Temporal(first=Temporal(first=generate, second=score), second=update)
    assert evaluate(problem, schedule).objective == 31.25 * 4


def test_a_schedule_is_drawn_as_a_tree() -> None:
    schedule = Spatial(first=Temporal(first=generate, second=score), second=update, chunks=4)
    assert draw(schedule) == (
        "Spatial, 4 chunks\n"
        "|-- Temporal\n"
        "|   |-- generate on 4 devices, 12 s, a\n"
        "|   `-- score on 1 device, 3 s\n"
        "`-- update on 4 devices, 16 s, a"
    )


def test_nesting_of_turns_does_not_make_another_schedule() -> None:
    left = Temporal(first=Temporal(first=generate, second=score), second=update)
    right = Temporal(first=generate, second=Temporal(first=score, second=update))
    assert signature(left) == signature(right)
    apart = Spatial(first=Temporal(first=generate, second=score), second=update, chunks=4)
    assert len({signature(left), signature(apart), signature(replace(apart, chunks=2))}) == 3


def test_kinds_of_schedules() -> None:
    turns = Temporal(first=Temporal(first=generate, second=score), second=update)
    spatial = Spatial(first=Spatial(first=generate, second=score), second=update)
    assert kind_of(turns) is Kind.TEMPORAL
    assert kind_of(spatial) is Kind.SPATIAL
    assert kind_of(Spatial(first=turns.first, second=update)) is Kind.HYBRID
    assert kind_of(Asynchronous(first=turns.first, second=update)) is Kind.ASYNCHRONOUS


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Temporal(first=generate, second=update), "every task exactly once"),
        (
            Temporal(first=update, second=Temporal(first=generate, second=score)),
            "'second' feeds 'first'",
        ),
        (
            Spatial(first=Temporal(first=generate, second=score), second=update, chunks=8),
            "8 chunks are not allowed",
        ),
        (
            Asynchronous(first=generate, second=Asynchronous(first=score, second=update)),
            "Only a whole schedule",
        ),
        (
            Temporal(
                first=Temporal(first=generate, second=score),
                second=Leaf(task="update", option=SCORE),
            ),
            "an option that is none",
        ),
    ],
)
def test_what_is_no_schedule_of_the_problem_is_refused(schedule, message) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(PROBLEM, schedule)


def test_only_what_may_run_ahead_does() -> None:
    schedule = Asynchronous(first=Temporal(first=generate, second=score), second=update)
    with pytest.raises(PlanError, match="may not run ahead"):
        evaluate(replace(PROBLEM, ahead=frozenset({"generate"})), schedule)
    with pytest.raises(PlanError, match="breaks a pin"):
        evaluate(replace(PROBLEM, pinned={"generate": 2}), schedule)
    with pytest.raises(PlanError, match="The schedule is asynchronous"):
        evaluate(replace(PROBLEM, kinds=frozenset({Kind.HYBRID})), schedule)


def test_a_stream_waits_for_each_of_its_chunks() -> None:
    # Two chunks: after 9/10 of the time one with a quarter of the work, and then the rest.
    late = replace(GENERATE, arrivals=Arrivals(ready=(0.9, 1.0), work=(0.25, 1.0)))
    problem = Problem(
        tasks=(
            Task(id="generate", options=(late,)),
            Task(id="score", after=("generate",), options=(SCORE,), max_chunks=2),
        ),
        num_devices=16,
        memory_bytes=1000,
        chunks=(1, 2),
    )
    first, second = Leaf(task="generate", option=late), Leaf(task="score", option=SCORE)
    for chunks, lines in ((1, [(1.0, 1.0)]), (2, [(0.9, 1.0), (1.0, 0.75)])):
        u1 = late.seconds + (chunks - 1) * late.chunk_s
        u2 = SCORE.seconds + (chunks - 1) * SCORE.chunk_s
        stream = Spatial(first=first, second=second, chunks=chunks)
        expected = max(a * u1 + b * u2 for a, b in lines)
        assert evaluate(problem, stream).step_s == pytest.approx(expected)


def test_only_what_is_read_makes_a_stream_uneven() -> None:
    late = Arrivals(ready=(1.0, 1.0), work=(0.5, 1.0))
    option = Option(devices=1, seconds=4.0)
    uneven = replace(option, arrivals=late)
    tasks = (
        Task(id="draw", options=(uneven,)),
        Task(id="other", options=(option,)),
        Task(id="read", after=("other",), options=(option,), max_chunks=2),
    )
    problem = Problem(tasks=tasks, num_devices=3, memory_bytes=0, chunks=(2,))
    turns = Temporal(
        first=Leaf(task="draw", option=uneven), second=Leaf(task="other", option=option)
    )
    stream = Spatial(first=turns, second=Leaf(task="read", option=option), chunks=2)
    # What nobody reads comes last: 4 s of the other in halves, then 2 s; both turns take 8 s.
    assert evaluate(problem, stream).step_s == 8.0
    behind = replace(tasks[1], after=("draw",))
    problem = replace(problem, tasks=(tasks[0], behind, tasks[2]))
    assert evaluate(problem, stream).step_s == 12.0  # both in full, one after the other


ALONE = Option(devices=1, seconds=4.0, chunk_s=0.5)
DRAWN = replace(ALONE, seconds=12.0, arrivals=Arrivals(ready=(0.5, 1.0), work=(0.25, 1.0)))


def chain(**after: tuple[str, ...]) -> Problem:
    """Tasks by what they read; draws take 12 s, the others 4 s, and 0.5 s for a second chunk."""
    return Problem(
        tasks=tuple(
            Task(
                id=name,
                after=reads,
                options=(DRAWN if name.startswith("draw") else ALONE,),
                max_chunks=2,
                in_one=name.startswith("draw"),
            )
            for name, reads in after.items()
        ),
        num_devices=8,
        memory_bytes=0,
        chunks=(1, 2),
    )


def tree(problem: Problem, *parts: str | Schedule, chunks: int = 0) -> Schedule:
    """Tasks by name that take turns, or work at once in so many chunks."""
    made: list[Schedule] = [
        Leaf(task=part, option=problem.task(part).options[0]) if isinstance(part, str) else part
        for part in parts
    ]
    first, second = made.pop(0), made.pop()
    for part in made:
        first = Temporal(first=first, second=part)
    if chunks:
        return Spatial(first=first, second=second, chunks=chunks)
    return Temporal(first=first, second=second)


CRITIC = chain(
    draw=(),
    score=("draw",),
    value=("draw",),
    learn_values=("draw", "value"),
    update=("draw", "score", "value"),
)


def test_what_takes_turns_with_a_rollout_hands_on_when_that_is_over() -> None:
    """12 s are drawn, then 4 s are scored; an update of 4 s elsewhere reads both."""
    problem = chain(draw=(), score=("draw",), update=("draw", "score"))

    def step_s(chunks: int) -> float:
        return evaluate(problem, tree(problem, "draw", "score", "update", chunks=chunks)).step_s

    assert step_s(1) == 12 + 4 + 4
    # A second chunk costs 0.5 s of each of the three: 5 s of scores are there in two halves, at
    # 14.5 and 17 s, and the halves of the update take 2.25 s.
    assert step_s(2) == 17 + 2.25


def test_what_nobody_waits_for_does_not_delay_a_stream() -> None:
    """The update begins after scores and values, while the critic learns."""
    turns = tree(CRITIC, "draw", "score", "value", "learn_values")
    assert evaluate(CRITIC, tree(CRITIC, turns, "update", chunks=1)).step_s == 12 + 4 + 4 + 4
    # In halves: 10 s with what chunks cost after 12 s, and 2.25 s after the second one; the first
    # part ends at 24 + 2 s.
    assert evaluate(CRITIC, tree(CRITIC, turns, "update", chunks=2)).step_s == 26.0
    slow = replace(ALONE, seconds=8.0)
    tasks = (*CRITIC.tasks[:-1], replace(CRITIC.tasks[-1], options=(slow,)))
    problem = replace(CRITIC, tasks=tasks)
    # Halves are there at 12 + (8 + 2) / 2 and at 22 s; each takes 4.25 s.
    assert evaluate(problem, tree(problem, turns, "update", chunks=2)).step_s == 26.25


def test_of_turns_only_what_is_read_is_waited_for() -> None:
    """Values need what is drawn, and not the scores that are computed on its devices after it."""
    problem = chain(draw=(), score=("draw",), value=("draw",), update=("score", "value"))
    problem = replace(
        problem,
        tasks=tuple(
            replace(task, options=(replace(ALONE, seconds=8.0),)) if task.id == "value" else task
            for task in problem.tasks
        ),
    )
    for chunks, step_s in (
        (1, 12 + 8),
        # Half of the groups, a quarter of the work, after 6.5 s; the rest, 3/4 of 8.5 s, at 13 s.
        (2, 13 + 0.75 * 8.5),
    ):
        both = tree(problem, tree(problem, "draw", "score"), "value", chunks=chunks)
        assert evaluate(problem, tree(problem, both, "update")).step_s == step_s + 4


def test_rollouts_in_turns_are_read_as_the_last_of_them_comes() -> None:
    """Two of 12 s each: what reads both, or the second one, waits for the second one's groups."""
    for reads, halves, late in (
        (("draw", "draw_again"), (12 + 6.5, 12 + 13), 0.5),  # most work is in the first one's
        (("draw_again",), (12 + 6.5, 12 + 13), 0.75),
        (("draw",), (6.5, 13), 0.75),
    ):
        problem = chain(draw=(), draw_again=(), update=reads)
        stream = tree(problem, "draw_again", "draw", "update", chunks=2)
        u1 = 24 + 1.0
        expected = max(u1, halves[0] + 4.5, halves[1] + late * 4.5)
        assert evaluate(problem, stream).step_s == expected, reads


def test_a_stream_from_a_stream_waits_for_what_takes_turns_in_it() -> None:
    """Values are read from what is drawn, and the update from those and the scores after it."""
    inner = tree(CRITIC, tree(CRITIC, "draw", "score"), "value", chunks=2)
    stream = Spatial(first=inner, second=tree(CRITIC, "update", "learn_values"), chunks=2)
    # The inner stream: draw and score 17 s with their second chunks, values at most 13 + 3.375 s.
    # Two chunks of it cost 1.5 s more; from 12 s on half of these 6.5 s, then an update of 9 s.
    assert evaluate(CRITIC, stream).step_s == max(12 + 6.5 / 2 + 9, 18.5 + 9 / 2)


@given(st.integers(0, 30_000))
def test_nesting_of_turns_does_not_change_when_they_hand_on(seed: int) -> None:
    rng = random.Random(seed)
    problem = draw_problem(rng)
    first = [task.id for task in problem.tasks[:-1]]
    last = problem.tasks[-1]
    own = {task.id: Leaf(task=task.id, option=rng.choice(task.options)) for task in problem.tasks}

    def nested(names: list[str]) -> Schedule:
        if len(names) == 1:
            return own[names[0]]
        at = rng.randint(1, len(names) - 1)
        return Temporal(first=nested(names[:at]), second=nested(names[at:]))

    chunks = rng.choice([1, 2, 4]) if set(last.after) & set(first) else 1
    found = {
        Evaluator(problem).seconds(Spatial(first=nested(first), second=own[last.id], chunks=chunks))
        for _ in range(4)
    }
    assert max(found) - min(found) <= 1e-9


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 16])
def test_arrivals_in_equal_steps_are_even_chunks(chunks) -> None:
    steps = tuple((i + 1) / 16 for i in range(16))
    even = Arrivals(ready=steps, work=steps)
    for u1, u2 in ((3.0, 5.0), (5.0, 3.0), (4.0, 4.0), (7.0, 0.0)):
        lines = stream_lines(frozenset({even}), chunks)
        assert max(a * u1 + b * u2 for a, b in lines) == pytest.approx(
            max(u1, u2) + min(u1, u2) / chunks
        )


@given(
    points=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=8),
    u1=st.integers(0, 20),
    u2=st.integers(0, 20),
)
def test_lines_that_are_left_out_are_never_the_largest(points, u1, u2) -> None:
    ready, work = (sorted(one) for one in zip(*points, strict=True))
    arrivals = Arrivals(
        ready=(*(at / 8 for at in ready), 1.0), work=(*(at / 8 for at in work), 1.0)
    )
    every = arrivals.chunk_lines(len(points) + 1)
    kept = stream_lines(frozenset({arrivals}), len(points) + 1)
    assert set(kept) <= set(every)
    assert max(a * u1 + b * u2 for a, b in kept) == max(a * u1 + b * u2 for a, b in every)
    assert list(kept) == sorted(kept)
    assert [b for _, b in kept] == sorted((b for _, b in kept), reverse=True)


@pytest.mark.parametrize(
    ("ready", "work", "message"),
    [
        ((0.5, 0.9), (0.5, 1.0), "rise from at least 0 to 1"),
        ((0.5, 0.4, 1.0), (0.2, 0.4, 1.0), "rise from"),
        ((0.5, 1.0), (0.2, 0.4, 1.0), "a share of work for each step"),
    ],
)
def test_arrivals_that_contradict_themselves_are_refused(ready, work, message) -> None:
    with pytest.raises(PlanError, match=message):
        Arrivals(ready=ready, work=work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"num_devices": 0}, "num_devices must be positive"),
        ({"counts": (0, 2)}, "counts must be positive"),
        ({"chunks": ()}, "chunks must be"),
        ({"kinds": frozenset()}, "at least one kind"),
        ({"pinned": {"updat": 4}}, "'pinned' names a task that there is not"),
        ({"ahead": frozenset({"score"})}, "which it reads from"),
        (
            {"syncs": (Sync(source="update", destination="update", together_s=0, apart_s=0),)},
            "a sync needs two tasks",
        ),
        ({"tasks": (Task(id="a", after=("b",), options=()),)}, "which is no earlier task"),
        (
            {"tasks": (Task(id="a", options=(replace(SCORE, peak=1),)),)},
            "0 <= weight_bytes <= resident <= peak",
        ),
        (
            {
                "tasks": (
                    Task(
                        id="a", options=(GENERATE, replace(GENERATE, weight_bytes=5)), weights="w"
                    ),
                )
            },
            "20 bytes in one option and others in another",
        ),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(change, message) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PROBLEM, **change)
