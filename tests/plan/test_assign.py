"""Schedules on numbered devices: who stands where, when each works, what counts are tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrl.cost.episodes import CallSeconds
from flowrl.plan.assign import bars, bottleneck, busy_seconds, pieces, schedule_step, slots
from flowrl.plan.problem_of import device_counts
from flowrl.plan.search import (
    Arrivals,
    Asynchronous,
    Leaf,
    Option,
    Problem,
    Schedule,
    Spatial,
    Task,
    Temporal,
    block,
    evaluate,
    leaves,
)
from flowrl.plan.ways.regions import Played, Split

SIZES = device_counts(32, 8)


def leaf(task: str, devices: int, seconds: float = 1.0) -> Leaf:
    return Leaf(task=task, option=Option(devices=devices, seconds=seconds))


def problem_of(*leaves: Leaf, chunks: tuple[int, ...] = (1, 2, 4)) -> Problem:
    """A chain of tasks, each of which reads the one before."""
    tasks = []
    for i, one in enumerate(leaves):
        after = (leaves[i - 1].task,) if i else ()
        tasks.append(Task(id=one.task, after=after, options=(one.option,), max_chunks=4))
    return Problem(
        tasks=tuple(tasks),
        num_devices=32,
        counts=SIZES,
        memory_bytes=1,
        chunks=chunks,
        staleness=1,
        ahead=frozenset({leaves[0].task}),
    )


def test_device_counts_are_parts_of_a_node_and_whole_nodes():
    assert device_counts(24, 8) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24)
    assert device_counts(4, 8) == (1, 2, 3, 4)
    assert device_counts(12, 6) == (1, 2, 3, 4, 5, 6, 12)
    assert device_counts(16, 16) == (*range(1, 9), 10, 12, 14, 16)


def test_of_many_nodes_parts_are_divisors_and_powers_of_two():
    assert device_counts(1024, 8)[:5] == (1, 2, 4, 8, 16)
    assert device_counts(60, 6)[:6] == (1, 2, 3, 4, 6, 12)
    assert device_counts(50, 5)[:5] == (1, 2, 4, 5, 10)


def test_of_large_pools_a_block_and_what_it_leaves_are_both_tried():
    counts = device_counts(1024, 8)
    assert len(counts) < 60
    whole = [count for count in counts if count >= 8 and count < 1024]
    assert {1024 - count for count in whole} == set(whole)
    assert {8 * nodes for nodes in range(1, 9)} <= set(counts)


def test_the_larger_part_comes_first_and_turns_share():
    generate, score, update = leaf("generate", 16), leaf("score", 4), leaf("update", 8)
    schedule = Spatial(first=score, second=Spatial(first=update, second=generate))
    assert slots(schedule, SIZES, 8) == {
        "generate": range(16),
        "update": range(16, 24),
        "score": range(24, 28),
    }
    turns = Temporal(first=generate, second=update)
    assert slots(turns, SIZES, 8) == {"generate": range(16), "update": range(8)}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num=st.integers(2, 5))
def test_parts_that_stand_apart_never_meet_and_none_crosses_a_node(data: st.DataObject, num: int):
    leaves = [leaf(f"t{i}", data.draw(st.sampled_from(SIZES[:10]))) for i in range(num)]
    schedule: Schedule = leaves[0]
    apart: set[frozenset[str]] = set()
    for i, one in enumerate(leaves[1:], start=1):
        if data.draw(st.booleans()):
            schedule = Temporal(first=schedule, second=one)
        else:
            schedule = Spatial(first=schedule, second=one)
            apart |= {frozenset({one.task, other.task}) for other in leaves[:i]}
    assume(block(schedule, SIZES) in SIZES)  # others are larger than the pool
    places = slots(schedule, SIZES, 8)
    for one, other in combinations(places, 2):
        if frozenset({one, other}) in apart:
            assert not set(places[one]) & set(places[other])
    for numbers in places.values():
        inside = len(numbers) <= 8
        first, last = numbers[0] // 8, numbers[-1] // 8
        assert first == last if inside else numbers[0] % 8 == 0


def test_a_pipelines_reader_begins_with_the_first_chunk_and_ends_with_the_step():
    first, second = leaf("a", 8, 8.0), leaf("b", 8, 4.0)
    problem = problem_of(first, second)
    schedule = Spatial(first=first, second=second, chunks=4)
    found = {bar.task: (bar.begin_s, bar.end_s) for bar in bars(problem, schedule)}
    # (8 + 4) / 4 + 8 * 3 / 4 = 9 seconds.
    assert found == {"a": (0.0, 8.0), "b": (2.0, 9.0)}
    assert evaluate(problem, schedule).step_s == pytest.approx(9.0)
    assert pieces(problem, schedule) == {"b": 4}
    assert bottleneck(problem, schedule) == "a"
    assert busy_seconds(problem, schedule) == 8 * 8.0 + 8 * 4.0


def in_turns_behind(*chain: Leaf, chunks: int) -> tuple[Problem, Spatial]:
    """A stream from the first task to the others, which take turns."""
    first, second, third = chain
    behind = Temporal(first=second, second=third)
    return problem_of(*chain), Spatial(first=first, second=behind, chunks=chunks)


def test_readers_that_take_turns_do_so_in_each_chunk_of_a_stream():
    problem, schedule = in_turns_behind(
        leaf("a", 8, 8.0), leaf("b", 8, 1.0), leaf("c", 8, 3.0), chunks=4
    )
    assert evaluate(problem, schedule).step_s == pytest.approx(9.0)
    found = {bar.task: bar for bar in bars(problem, schedule)}
    # Chunks are there at 2, 4, 6 and 8 s, and take b a quarter of a second, then c three quarters.
    assert (found["b"].begin_s, found["b"].end_s) == pytest.approx((2.0, 8.25))
    assert (found["c"].begin_s, found["c"].end_s) == pytest.approx((2.25, 9.0))
    assert (found["c"].first_s, found["c"].last_s) == pytest.approx((0.75, 0.75))


def test_bars_of_an_uneven_stream_have_the_chunks_that_its_step_is_made_of():
    arrivals = Arrivals(ready=(0.5, 1.0), work=(0.25, 1.0))
    generate = Leaf(task="a", option=Option(devices=8, seconds=8.0, arrivals=arrivals))
    score = Leaf(task="b", option=Option(devices=8, seconds=1.0, chunk_s=0.4))
    problem, schedule = in_turns_behind(generate, score, leaf("c", 8, 3.0), chunks=2)
    # A second chunk makes b and c 4.4 s together: a quarter of it at 4 s, the rest at 8 s.
    assert evaluate(problem, schedule).step_s == pytest.approx(8.0 + 0.75 * 4.4)
    found = {bar.task: (bar.begin_s, bar.end_s) for bar in bars(problem, schedule)}
    assert found["b"] == pytest.approx((4.0, 8.0 + 0.75 * 4.4 / 4))
    assert found["c"] == pytest.approx((4.0 + 0.25 * 4.4 / 4, 8.0 + 0.75 * 4.4))


def critic(chunks: int) -> tuple[Problem, Spatial]:
    """A rollout, scores, values and a critic in turns; an update elsewhere reads all but that."""
    after: dict[str, tuple[str, ...]] = {
        "draw": (),
        "score": ("draw",),
        "value": ("draw",),
        "critic": ("draw", "value"),
        "update": ("draw", "score", "value"),
    }
    seconds = {"draw": 12.0, "score": 4.0, "value": 2.0, "critic": 6.0, "update": 8.0}
    own = {name: leaf(name, 8, seconds[name]) for name in after}
    tasks = tuple(
        Task(
            id=name,
            after=after[name],
            options=(own[name].option,),
            max_chunks=4,
            in_one=name == "draw",
        )
        for name in after
    )
    turns = Temporal(
        first=Temporal(first=own["draw"], second=own["score"]),
        second=Temporal(first=own["value"], second=own["critic"]),
    )
    problem = replace(problem_of(own["draw"]), tasks=tasks)
    return problem, Spatial(first=turns, second=own["update"], chunks=chunks)


@pytest.mark.parametrize(
    ("chunks", "step_s", "expected"),
    [
        # One after the other; the update reads all but the critic.
        (1, 26.0, {"score": (12, 16), "value": (16, 18), "critic": (18, 24), "update": (18, 26)}),
        # Halves of 2 s and 1 s in turns; the update takes 4 s of each, from 15 s on.
        (2, 24.0, {"score": (12, 17), "value": (14, 18), "critic": (18, 24), "update": (15, 23)}),
    ],
)
def test_what_takes_turns_before_a_stream_has_the_bars_that_its_step_is_made_of(
    chunks: int, step_s: float, expected: dict[str, tuple[float, float]]
):
    problem, schedule = critic(chunks)
    assert evaluate(problem, schedule).step_s == step_s
    found = {bar.task: (bar.begin_s, bar.end_s) for bar in bars(problem, schedule)}
    assert found == {"draw": (0, 12), **expected}
    [first, *_] = schedule_step(problem, schedule).ready or (None,)
    assert first == (None if chunks == 1 else round(15 / 24, 3))


def test_what_reads_nothing_of_its_neighbour_takes_no_longer_for_it():
    first, second = leaf("a", 8, 8.0), leaf("b", 8, 4.0)
    tasks = tuple(Task(id=one.task, options=(one.option,)) for one in (first, second))
    problem = replace(problem_of(first, second), tasks=tasks)
    found = bars(problem, Spatial(first=first, second=second))
    assert [(bar.task, bar.begin_s, bar.end_s) for bar in found] == [("a", 0, 8), ("b", 0, 4)]


def played(policy_s: float, environment_s: float, **split: object) -> Played:
    return Played(
        split=Split(at_once=1.0, **split),  # type: ignore[arg-type]
        calls=CallSeconds(),
        policy_s=policy_s,
        environment_s=environment_s,
        bound="environment",
    )


def test_who_waits_for_an_environment_or_a_policy_is_idle_meanwhile():
    first, second = leaf("a", 8, 20.0), leaf("b", 8, 4.0)
    problem, schedule = problem_of(first, second), Temporal(first=first, second=second)

    def busy(one: Played) -> float:
        return busy_seconds(problem, schedule, {"a": one}) - 8 * 4.0

    # On cores of its hosts, on two of its eight devices, on 16 others, and in turns on all.
    assert busy(played(5.0, 20.0, mode="together", policy=8)) == 8 * 5.0
    assert busy(played(5.0, 20.0, mode="apart", policy=6, own=2)) == 6 * 5.0 + 2 * 20.0
    assert busy(played(20.0, 3.0, mode="apart", policy=8, elsewhere=16)) == 8 * 20.0 + 16 * 3.0
    turns = played(12.0, 8.0, mode="together", policy=8, takes_turns=True)
    assert busy(turns) == 8 * (12.0 + 8.0)
    # Nobody works longer than a step takes.
    assert busy(played(5.0, 90.0, mode="apart", policy=6, own=2)) == 6 * 5.0 + 2 * 24.0


def test_turns_follow_each_other_and_what_runs_ahead_does_not_wait():
    first, second = leaf("a", 8, 8.0), leaf("b", 8, 4.0)
    problem = problem_of(first, second)
    turns = {bar.task: bar.begin_s for bar in bars(problem, Temporal(first=first, second=second))}
    assert turns == {"a": 0.0, "b": 8.0}
    ahead = Asynchronous(first=first, second=second)
    assert {bar.task: bar.begin_s for bar in bars(problem, ahead)} == {"a": 0.0, "b": 0.0}
    assert bottleneck(problem, ahead) == "a"


def drawn_ahead(drawn_s: float, steady_s: float, learned_s: float, staleness: int):
    first = Leaf(task="a", option=Option(devices=8, seconds=drawn_s, steady_s=steady_s))
    second = leaf("b", 4, learned_s)
    problem = replace(problem_of(first, second), staleness=staleness)
    return problem, Asynchronous(first=first, second=second)


def test_a_batch_that_is_drawn_ahead_may_end_after_the_step_and_keeps_its_devices_busy():
    problem, schedule = drawn_ahead(30.0, 8.0, 6.0, staleness=2)
    assert evaluate(problem, schedule).step_s == 12.0  # (30 + 6) / 3
    found = {bar.task: (bar.begin_s, bar.end_s) for bar in bars(problem, schedule)}
    assert found == {"a": (0.0, 30.0), "b": (0.0, 6.0)}
    assert busy_seconds(problem, schedule) == 8 * 12.0 + 4 * 6.0


@pytest.mark.parametrize(
    ("drawn_s", "steady_s", "learned_s", "waits_for"),
    [
        (30.0, 8.0, 16.0, "b"),  # 16 beside 8 and 46 / 3
        (30.0, 18.0, 6.0, "a"),  # 18 beside 12
        (30.0, 8.0, 6.0, "a"),  # the age: 12 beside 8
        (12.0, 8.0, 13.0, "b"),
    ],
)
def test_the_bottleneck_of_what_runs_ahead_is_in_the_side_that_decides(
    drawn_s, steady_s, learned_s, waits_for
):
    assert bottleneck(*drawn_ahead(drawn_s, steady_s, learned_s, staleness=2)) == waits_for


def test_the_schedule_is_kept_as_a_tree_and_drawn():
    schedule = Spatial(
        first=leaf("a", 16), second=Temporal(first=leaf("b", 8), second=leaf("c", 1)), chunks=2
    )
    kept = schedule_step(problem_of(*leaves(schedule)), schedule)
    assert kept.draw() == (
        "spatial on 24 devices, 2 chunks",
        "|-- a on 16 devices",
        "`-- temporal on 8 devices",
        "    |-- b on 8 devices",
        "    `-- c on 1 device",
    )


def test_a_step_has_the_devices_of_its_parts_and_not_the_whole_nodes_that_hold_them():
    schedule = Temporal(
        first=leaf("a", 12), second=Spatial(first=leaf("b", 4), second=leaf("c", 4), chunks=1)
    )
    problem = replace(problem_of(*leaves(schedule)), num_devices=12, counts=(1, 2, 3, 4, 6, 12))
    assert schedule_step(problem, schedule).draw() == (
        "temporal on 12 devices",
        "|-- a on 12 devices",
        "`-- spatial on 8 devices",
        "    |-- b on 4 devices",
        "    `-- c on 4 devices",
    )
