"""What the search chooses, on problems whose answer can be seen, and against enumeration."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flowrl.errors import PlanError
from flowrl.plan.search import (
    ChangeKind,
    Kind,
    Objective,
    Option,
    Problem,
    Sync,
    Task,
    draw,
    evaluate,
    fewest_devices,
    kind_of,
    leaves,
    search,
)
from flowrl.plan.search.best import FEW_SIZES
from flowrl.plan.search.explain import thin
from flowrl.plan.search.schedule import signature
from tests.proofs.planner_cases import count_schedules, draw_problem, every_schedule
from tests.proofs.planner_optimality import compare


def shared_out(work_s: float, sizes=(1, 2, 4, 8), *, fixed_s: float = 0.0, **bytes_) -> tuple:
    """Options that share work out evenly, over a part that stays as it is."""
    return tuple(Option(devices=size, seconds=work_s / size + fixed_s, **bytes_) for size in sizes)


def pair(first: tuple, second: tuple, **more) -> Problem:
    """A task that feeds another one."""
    tasks = (
        Task(id="first", options=first),
        Task(id="second", after=("first",), options=second, max_chunks=64),
    )
    given = {"num_devices": 8, "memory_bytes": 100, "chunks": (1, 2, 4, 8)} | more
    return Problem(tasks=tasks, **given)


def test_tasks_that_scale_take_turns_on_everything() -> None:
    found = search(pair(shared_out(80), shared_out(80)))
    assert draw(found.best[0].schedule) == (
        "Temporal\n|-- first on 8 devices, 10 s\n`-- second on 8 devices, 10 s"
    )
    assert found.infeasible is None
    assert found.thinned is None


def test_tasks_that_do_not_scale_are_streamed_on_devices_of_their_own() -> None:
    found = search(pair(shared_out(8, fixed_s=30), shared_out(8, fixed_s=30)))
    # 32 s each on four devices: (32 + 32) / 8 + 32 * 7 / 8.
    assert draw(found.best[0].schedule).startswith("Spatial, 8 chunks")
    assert found.best[0].evaluation.step_s == 36.0


def test_every_chunk_costs_so_their_number_is_chosen() -> None:
    dear = tuple(replace(option, chunk_s=2.0) for option in shared_out(8, fixed_s=30))
    found = search(pair(dear, dear))
    # c chunks: u = 32 + 2 (c - 1), u (1 + 1 / c): 51, 47.5 and 51.75 for 2, 4 and 8.
    assert draw(found.best[0].schedule).startswith("Spatial, 4 chunks")
    assert found.best[0].evaluation.step_s == 47.5


def test_memory_parts_what_would_rather_take_turns() -> None:
    big = {"resident": 60, "peak": 80}
    found = search(pair(shared_out(80, **big), shared_out(80, **big)))
    assert kind_of(found.best[0].schedule) is Kind.SPATIAL
    assert found.best[0].evaluation.peak == 80


def test_weights_that_are_shared_make_turns_fit() -> None:
    problem = pair(
        shared_out(80, resident=60, peak=65, weight_bytes=60, form="x"),
        shared_out(80, resident=60, peak=65, weight_bytes=60, form="x"),
    )
    shared = replace(problem, tasks=tuple(replace(task, weights="w") for task in problem.tasks))
    assert kind_of(search(problem).best[0].schedule) is Kind.SPATIAL
    found = search(shared).best[0]
    assert kind_of(found.schedule) is Kind.TEMPORAL
    assert (found.evaluation.resident, found.evaluation.peak) == (60, 65)


def test_a_sync_that_is_dear_apart_keeps_its_ends_together() -> None:
    problem = pair(shared_out(8, fixed_s=30), shared_out(8, fixed_s=30))
    syncs = (Sync(source="second", destination="first", together_s=0.0, apart_s=40.0),)
    found = search(replace(problem, syncs=syncs)).best[0]
    assert kind_of(found.schedule) is Kind.TEMPORAL
    assert found.evaluation.step_s == 62.0


def test_staleness_hides_the_faster_side() -> None:
    problem = pair(
        shared_out(8, fixed_s=30),
        shared_out(8, fixed_s=30),
        chunks=(1,),
        staleness=1,
        ahead=frozenset({"first"}),
    )
    found = search(problem).best[0]
    assert kind_of(found.schedule) is Kind.ASYNCHRONOUS
    assert found.evaluation.step_s == 32.0
    without = search(replace(problem, kinds=frozenset({Kind.HYBRID}))).best[0]
    assert without.evaluation.step_s == 62.0


def test_batches_that_overlap_are_hidden_as_far_as_ages_let_them() -> None:
    """30 s of drawing, 4 s of which are a batch's own and 6 s all that it takes of full engines."""
    drawn = tuple(
        replace(option, steady_s=6.0, dense_s=4.0) for option in shared_out(8, fixed_s=30)
    )
    problem = pair(drawn, shared_out(8, fixed_s=5), chunks=(1,), ahead=frozenset({"first"}))
    seconds = []
    for staleness in (1, 2, 4, 9):
        found = search(replace(problem, staleness=staleness)).best[0]
        assert kind_of(found.schedule) is Kind.ASYNCHRONOUS
        seconds.append(found.evaluation.step_s)
    # (a + 1) T = (32 - 4) T / (T - 4) + 7 on half of the devices each.
    assert seconds == pytest.approx([20.828, 15.047, 10.465, 7.106], abs=1e-3)


def test_turns_and_a_stream_in_one_chunk_are_told_apart() -> None:
    """Of three best ones, one takes turns where another one differs in nothing but that."""
    tasks = tuple(
        Task(
            id=f"t{at}",
            after=(f"t{at - 1}",) if at else (),
            options=(Option(devices=1, seconds=seconds),),
        )
        for at, seconds in enumerate((14.0, 7.0, 17.0))
    )
    problem = Problem(
        tasks=tasks,
        num_devices=3,
        memory_bytes=0,
        chunks=(1,),
        staleness=1,
        ahead=frozenset({"t0", "t1"}),
        kinds=frozenset({Kind.ASYNCHRONOUS}),
    )
    found = {draw(one.schedule) for one in search(problem, top=9).best}
    assert len(found) == 4  # t0 ahead of two that take turns or not, and both of t0 and t1 ahead


def test_pins_are_kept() -> None:
    problem = pair(shared_out(80), shared_out(80), pinned={"first": 2})
    devices = {leaf.task: leaf.option.devices for leaf in leaves(search(problem).best[0].schedule)}
    assert devices["first"] == 2


def test_device_seconds_prefer_few_devices() -> None:
    problem = pair(shared_out(80, fixed_s=1), shared_out(80, fixed_s=1))
    fast = search(problem).best[0].evaluation
    cheap = search(replace(problem, objective=Objective.DEVICE_SECONDS)).best[0].evaluation
    assert (fast.devices, fast.step_s) == (8, 22.0)
    assert (cheap.devices, cheap.objective) == (1, 162.0)


def test_devices_that_are_taken_besides_make_more_of_the_others_worth_it() -> None:
    problem = pair(shared_out(80, fixed_s=1), shared_out(80, fixed_s=1))
    dear = replace(problem, objective=Objective.DEVICE_SECONDS)
    # 2 (1 + 80 / n) (n + 8) on n devices: 1,458 on one, 352 on all eight.
    beside = search(replace(dear, beside=8)).best[0].evaluation
    best = min((2 * (1 + 80 / n) * (n + 8), n) for n in range(1, 9))
    assert (beside.objective, beside.devices) == pytest.approx(best)
    for number in range(40):
        drawn = draw_problem(random.Random(number))
        if count_schedules(drawn) < 2000:
            costly = replace(drawn, objective=Objective.DEVICE_SECONDS, beside=5)
            assert compare(costly).gap == 0, number


def test_of_equally_fast_schedules_the_one_with_fewest_splits_wins() -> None:
    same = (Option(devices=1, seconds=10.0), Option(devices=2, seconds=5.0))
    tasks = (Task(id="one", options=same), Task(id="two", options=same))
    found = search(Problem(tasks=tasks, num_devices=2, memory_bytes=10), top=3)
    assert [item.evaluation.step_s for item in found.best] == [10.0, 10.0, 15.0]
    assert [item.evaluation.num_splits for item in found.best] == [0, 1, 0]


def test_each_kind_is_found_where_only_it_is_allowed() -> None:
    options = shared_out(20, fixed_s=5)
    tasks = tuple(
        Task(id=f"t{at}", after=(f"t{at - 1}",) if at else (), options=options, max_chunks=8)
        for at in range(3)
    )
    problem = Problem(
        tasks=tasks, num_devices=8, memory_bytes=0, staleness=1, ahead=frozenset({"t0"})
    )
    for kind in (Kind.TEMPORAL, Kind.SPATIAL, Kind.ASYNCHRONOUS):
        found = search(replace(problem, kinds=frozenset({kind}))).best
        assert [kind_of(item.schedule) for item in found] == [kind]
    both = search(replace(problem, kinds=frozenset({Kind.TEMPORAL, Kind.SPATIAL})), top=50).best
    assert {kind_of(item.schedule) for item in both} == {Kind.TEMPORAL, Kind.SPATIAL}


def test_the_best_few_are_the_best_few_of_all_schedules() -> None:
    rng = random.Random("the best few")
    checked = 0
    while checked < 25:
        problem = draw_problem(rng)
        if count_schedules(problem) > 400:
            continue
        every: dict[object, float] = {}
        for schedule in every_schedule(problem):
            found = evaluate(problem, schedule)
            name = signature(schedule)
            if found.fits and found.objective < every.get(name, float("inf")):
                every[name] = found.objective
        ours = search(problem, top=5).best
        assert [item.evaluation.objective for item in ours] == sorted(every.values())[:5]
        assert len({signature(item.schedule) for item in ours}) == len(ours)
        checked += 1


def large(num_devices: int) -> Problem:
    """A chain of three on many node-aligned counts, with memory that keeps them from turns."""
    counts = (1, 2, 4, *range(8, num_devices + 1, 8))
    parts = {"resident": 40, "peak": 60}
    tasks = tuple(
        Task(
            id=f"t{at}",
            after=(f"t{at - 1}",) if at else (),
            options=shared_out(work, counts, fixed_s=at + 1.0, **parts),
            max_chunks=8,
        )
        for at, work in enumerate((900.0, 100.0, 400.0))
    )
    return Problem(tasks=tasks, num_devices=num_devices, counts=counts, memory_bytes=100)


def test_many_counts_are_searched_exactly_and_few_of_them_by_a_rule_that_is_named() -> None:
    problem = large(512)
    exact, thinned = search(problem), search(problem, max_counts=12)
    assert exact.thinned is None
    assert thinned.thinned is not None
    assert "of 67 device counts" in thinned.thinned
    assert exact.best[0].evaluation.step_s <= thinned.best[0].evaluation.step_s
    # Exact: limits that grow from the bound give what one unlimited run gives.
    small = large(64)
    assert search(small).best[0].schedule == search(small, top=3).best[0].schedule


@pytest.mark.parametrize("memory_bytes", [80, 100, 120, 130])
def test_where_turns_are_the_ceiling_the_best_schedule_is_the_same(memory_bytes: int) -> None:
    # The ceiling of two schedules is another one: that of few device counts.
    problem = large(256)
    smaller = {"resident": 20, "peak": 40}
    tasks = tuple(
        replace(
            task,
            options=task.options
            + tuple(
                replace(option, seconds=1.3 * option.seconds, label=1, **smaller)
                for option in task.options
            ),
        )
        for task in problem.tasks
    )
    problem = replace(problem, tasks=tasks, memory_bytes=memory_bytes)
    turns = search(replace(problem, kinds=frozenset({Kind.TEMPORAL})))
    assert len(problem.block_sizes()) > FEW_SIZES
    assert turns.best
    best = search(problem).best[0]
    assert best == search(problem, top=2).best[0]
    assert best.evaluation.objective <= turns.best[0].evaluation.objective


def test_thinning_keeps_halves_their_rest_and_pins() -> None:
    few, rule = thin(replace(large(512), pinned={"t0": 24}), 16)
    sizes = few.block_sizes()
    assert {512, 256, 128, 384, 24} <= set(sizes)
    assert rule is not None
    assert all(option.devices in sizes for task in few.tasks for option in task.options)


def test_a_task_that_fits_nowhere_is_named_with_its_bytes() -> None:
    problem = pair(shared_out(80, peak=130), shared_out(80, peak=10))
    found = search(problem)
    assert found.best == ()
    assert found.infeasible is not None
    (binding,) = found.infeasible.bindings
    assert (binding.tasks, binding.over_bytes) == (("first",), 30)
    assert [(c.kind, c.value) for c in found.infeasible.changes] == [(ChangeKind.MEMORY, 130)]


def test_the_smallest_set_that_does_not_fit_is_named() -> None:
    options = shared_out(80, (2,), resident=60, peak=60)
    tasks = (
        Task(id="small", options=shared_out(8, (2,), peak=5)),
        Task(id="one", options=options),
        Task(id="two", options=options),
    )
    problem = Problem(tasks=tasks, num_devices=2, counts=(2, 4), memory_bytes=100)
    found = search(problem).infeasible
    assert found is not None
    (binding,) = found.bindings
    assert (binding.tasks, binding.over_bytes) == (("one", "two"), 20)
    assert "one and two together need at least" in binding.reason
    assert {(c.kind, c.value) for c in found.changes} == {
        (ChangeKind.MEMORY, 125),  # small works beside both
        (ChangeKind.DEVICES, 4),
    }


def test_a_pin_that_makes_it_impossible_is_named() -> None:
    problem = pair(shared_out(80), shared_out(80), pinned={"second": 3})
    found = search(problem).infeasible
    assert found is not None
    assert found.bindings[0].over_bytes is None
    assert "pinned to 3" in found.bindings[0].reason
    assert [c.kind for c in found.changes] == [ChangeKind.PIN]


def test_a_kind_that_makes_it_impossible_is_named() -> None:
    problem = pair(
        shared_out(80, (1,)), shared_out(80, (1,)), num_devices=1, kinds=frozenset({Kind.SPATIAL})
    )
    found = search(problem).infeasible
    assert found is not None
    assert found.bindings[0].tasks == ("first", "second")
    assert [c.kind for c in found.changes] == [ChangeKind.KINDS]


def test_the_fewest_devices_are_found_by_memory() -> None:
    options = tuple(
        Option(devices=size, seconds=1.0, resident=240 // size, peak=240 // size)
        for size in (1, 2, 4, 8)
    )
    assert fewest_devices(pair(options, options)) == 8  # 30 + 30 on each; on 4 it is 60 + 60
    assert fewest_devices(pair(options, options, memory_bytes=120)) == 4
    assert fewest_devices(pair(options, options, memory_bytes=20)) is None


def test_too_many_tasks_are_refused() -> None:
    tasks = tuple(Task(id=f"t{at}", options=shared_out(1, (1,))) for at in range(15))
    with pytest.raises(PlanError, match="so many tasks"):
        search(Problem(tasks=tasks, num_devices=1, memory_bytes=0))


def test_within_an_objective_only_what_is_below_is_found() -> None:
    problem = pair(shared_out(80), shared_out(80))
    best = search(problem).best[0]
    assert best.evaluation.step_s == 20.0
    assert search(problem, within=20.0).best[0].evaluation == best.evaluation
    below = search(problem, within=19.9)
    assert (below.best, below.infeasible) == ((), None)
    assert search(replace(problem, memory_bytes=0), within=1e9).best[0].evaluation.step_s == 20.0
