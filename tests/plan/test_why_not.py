"""Why an alternative is not the plan: its seconds, the kind that was asked for, the objective."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.memory import format_bytes
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.plan.explain.beside import Cause, faster_ones, lost
from flowrl.plan.explain.reasons import reasons_of
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.many import Chosen, Searched
from flowrl.plan.problem_of import sync_seconds
from flowrl.plan.search import Evaluator, Leaf, evaluate, leaves
from flowrl.plan.search_options import option_of
from flowrl.plan.show.many import device_seconds_apart, seconds_text
from flowrl.plan.sizing import pool_of_devices
from flowrl.plan.ways.candidate import RECOMPUTE, Candidate
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.plain_ways import with_option
from flowrl.plan.write.held import held_memory
from tests.plan.many_cases import h100, pinned, request, searched
from tests.plan.test_trainers import lowered, two_policies, with_second_policy
from tests.plan.test_ways_out import of_gib, with_hosts


def test_a_shorter_plan_of_another_kind_names_the_kind_that_was_asked_for(grpo: Graph):
    asked = request(kind="spatial", kind_where="--set plan.kind=spatial")
    plan = make_plan(grpo, asked, h100(16))
    (turns,) = (one for one in plan.alternatives if one.kind == "temporal")
    assert plan.prediction.step_s is not None
    assert turns.step_s is not None
    assert turns.step_s < plan.prediction.step_s
    assert turns.why_not.endswith("shorter, but --set plan.kind=spatial asks for spatial")
    (told,) = (one for one in plan.reasons if one.subject == "schedule")
    (reason,) = (one for one in told.rejected if one.choice.startswith("temporal"))
    took = [seconds_text(one) for one in (turns.step_s, plan.prediction.step_s)]
    says = "--set plan.kind=spatial asks for spatial"
    assert reason.constraint == f"{says}: {took[0]}, the plan's {took[1]}"


def test_a_shorter_plan_that_takes_more_device_time_says_so(grpo: Graph):
    plan = make_plan(grpo, request(objective="device_time", alternatives=3), h100(16))
    step_s, device_s = plan.prediction.step_s, plan.prediction.device_s
    assert step_s is not None
    assert device_s is not None
    shorter = [one for one in plan.alternatives if one.step_s and one.step_s < 0.99 * step_s]
    assert shorter
    for one in shorter:
        assert one.device_s is not None
        more = 100 * (one.device_s / device_s - 1)
        assert f"and {more:.1f} % more device time" in one.why_not
        assert "more complex" not in one.why_not
    (told,) = (one for one in plan.reasons if one.subject == "schedule")
    assert not any("not worth" in one.constraint for one in told.rejected)
    rejected = [one for one in told.rejected if "more device time" in one.constraint]
    assert rejected
    for one in rejected:
        its = next(other for other in plan.alternatives if one.choice.endswith(other.summary))
        assert its.device_s is not None
        assert its.device_s > device_s
        theirs, mine = device_seconds_apart(its.device_s, device_s)
        took = f"{theirs} device-seconds per sample, the plan's {mine}"
        assert one.constraint.endswith(f": {took}")


@pytest.mark.parametrize(("gib", "host_gib"), [(18, 2048), (20, 2048), (24, 400)])
def test_a_layout_that_is_said_to_need_too_much_needs_more_than_there_is(
    grpo: Graph, gib: int, host_gib: int
):
    plan = make_plan(grpo, request(), with_hosts(of_gib(gib), host_gib))
    needs = r"needs ([\d.]+) (MiB|GiB|TiB) of ([\d.]+) GiB even"
    of = {"MiB": 1 / 1024, "GiB": 1.0, "TiB": 1024.0}
    told = 0
    for reason in plan.reasons:
        for other in reason.rejected:
            if found := re.search(needs, other.constraint):
                told += 1
                assert float(found[1]) * of[found[2]] >= float(found[3]), other
    assert told


GIB = 1 << 30


def faster_ways(found: Searched) -> list[tuple[Leaf, Candidate]]:
    """The search's ways that are faster alone than the plan's, on as many devices."""
    best = found.best
    return [
        (leaf, way)
        for leaf in leaves(best.schedule)
        for way in best.posed.ways[leaf.task]
        if way.devices == leaf.option.devices and way.seconds < best.ways[leaf.task].seconds
    ]


def longer_sync_s(best: Chosen, task: str, way: Candidate) -> float:
    """What new weights of the actor, all on the same devices, take longer with another way."""
    taken = [
        sync_seconds(
            best.posed.task("actor.generate"),
            ways["actor.update"].layout,
            ways["actor.generate"].layout,
            best.posed.candidates,
            apart=False,
            shard="optimizer",
        )
        for ways in (best.ways, {**best.ways, task: way})
    ]
    return taken[1] - taken[0]


@pytest.mark.parametrize(
    ("pool", "causes"),
    [
        (h100(8), {Cause.ROOM}),
        (h100(32), {Cause.SYNC}),
        (with_hosts(of_gib(24), 400), {Cause.ROOM, Cause.PLAIN}),
    ],
)
def test_what_keeps_a_faster_way_out_is_what_the_search_says_of_it(
    grpo: Graph, pool: ResourcePool, causes: set[Cause]
):
    found = searched(grpo, request(), pool)
    best, problem = found.best, found.best.posed.problem
    now = evaluate(problem, best.schedule)
    seen = set()
    for leaf, way in faster_ways(found):
        task = best.posed.task(leaf.task)
        why = lost(task, way, best)
        seen.add(why.cause)
        label = best.posed.ways[leaf.task].index(way)
        option = problem.task(leaf.task).options[label]
        then = evaluate(problem, with_option(best.schedule, leaf.task, option))
        if not then.fits:
            assert why.cause is Cause.ROOM
            total, *parts = told_gib(why.words.partition("; also")[0])
            assert total == pytest.approx((then.peak + RUNTIME_BYTES["cuda"]) / GIB, abs=0.06)
            limit, *parts = parts
            assert limit == pytest.approx(best.posed.group.budget_bytes / GIB, abs=0.06)
            assert sum(parts) == pytest.approx(total, abs=0.06 * len(parts))
        elif then.objective >= now.objective:
            assert why.cause is Cause.STEP
        elif then.objective + longer_sync_s(best, leaf.task, way) >= now.objective:
            assert why.cause is Cause.SYNC
            assert "weight sync takes " in why.words
        else:
            assert why.cause is Cause.PLAIN
            assert way.plainness > best.ways[leaf.task].plainness
            gained = seconds_text(now.step_s - then.step_s)
            if gained == seconds_text(0.0):
                assert why.words == "more complex"
            else:
                assert gained in why.words
    assert seen == causes


@pytest.mark.parametrize("devices", [8, 16])
def test_all_phases_in_which_a_faster_way_does_not_fit_are_told_the_fullest_first(
    grpo: Graph, devices: int
):
    found = searched(grpo, request(), with_hosts(of_gib(24, devices), 400))
    best = found.best
    budget, counts = best.posed.group.budget_bytes, set()
    for leaf, way in faster_ways(found):
        why = lost(best.posed.task(leaf.task), way, best)
        if why.cause is not Cause.ROOM:
            continue
        most: dict[str, int] = {}
        for one in held_memory(replace(best, ways={**best.ways, leaf.task: way})):
            phase = f"{one.active} {one.memory.phase}"
            most[phase] = max(one.memory.total, most.get(phase, 0))
        over = sorted((one for one in most.values() if one > budget), reverse=True)
        first, _, others = why.words.partition("; also ")
        told = [first.split(": ", 1)[1].split(" of ")[0]]
        told += [one.split(" while ")[0] for one in others.split(" and ") if one]
        assert told == [format_bytes(one) for one in over]
        counts.add(len(told))
    assert max(counts) > 1


def told_gib(words: str) -> list[float]:
    of = {"MiB": 1 / 1024, "GiB": 1.0}
    return [float(one) * of[unit] for one, unit in re.findall(r"([\d.]+) (MiB|GiB)", words)]


def test_a_faster_layout_is_taken_however_large_its_replicas_are(grpo: Graph):
    """Of eight devices, of a model that one device holds."""
    plan = make_plan(grpo, request(), h100(16)).operation("actor.update")
    assert plan.layout.describe() == "tp 4, pp 2, dp 2"
    asked = pinned(request(), "actor.update.pp=1", "actor.update.cp=1", "actor.update.tp=1")
    small = make_plan(grpo, asked, h100(16)).operation("actor.update")
    assert plan.seconds is not None
    assert small.seconds is not None
    assert plan.seconds < small.seconds


def test_a_way_that_loses_to_a_third_one_names_it(grpo: Graph):
    best = searched(grpo, request(), with_hosts(of_gib(24), 400)).best
    task = best.posed.task("reference.logprobs")
    made, way = best.posed.made(task.id), best.ways[task.id]
    found = [
        lost(task, one, best)
        for layout in made.layouts(task, way.layout.num_devices).possible
        for one in made.of_layout(task, layout, Filter())
        if one.seconds < way.seconds
    ]
    (rival,) = {one.words for one in found if one.cause is Cause.RIVAL}
    assert rival == (
        "pp 2, cp 4, all on the host between turns is as fast in about as much memory or less"
    )


def test_what_is_said_of_all_faster_ways_is_true_of_each():
    assert (
        faster_ones([Cause.ROOM, Cause.ROOM]) == "faster ones do not fit with the other operations"
    )
    both = faster_ones([Cause.PLAIN, Cause.HOST, Cause.ROOM])
    assert both == (
        "faster ones do not fit with the other operations, put more on their hosts than these can "
        "hold or are more complex"
    )
    unknown = faster_ones([Cause.ROOM, Cause.UNKNOWN])
    assert unknown == "faster ones are more complex or take more memory"


def test_more_devices_for_a_task_that_cost_device_time_say_so(grpo: Graph):
    plan = make_plan(grpo, request(objective="device_time"), h100(16))
    told = {
        reason.subject: one.constraint
        for reason in plan.reasons
        for one in reason.rejected
        if one.choice == "16 devices"
    }
    assert re.search(
        r", but it costs [\d.]+ device-seconds per sample more$", told["actor.generate"]
    )
    assert ", but it does not fit with the other operations: up to " in told["reference.logprobs"]


def test_a_refusal_names_the_parts_of_memory_as_tables_do(grpo: Graph):
    with pytest.raises(PlanError, match=r", runtime 768 MiB") as told:
        make_plan(grpo, request(), of_gib(4))
    assert "captured graphs " in told.value.what


SMALL = [
    pool_of_devices(replace(device_spec(name), memory_bytes=gib * GIB), devices)
    for name, devices, gib in (
        ("A100-SXM-80GB", 16, 24),
        ("A100-SXM-80GB", 24, 33),
        ("H100-SXM-80GB", 8, 45),
        ("H100-SXM-80GB", 16, 30),
    )
]


@pytest.mark.parametrize("pool", SMALL)
def test_an_update_recomputes_and_offloads_no_more_than_it_has_to(pool: ResourcePool):
    graph, asked = lowered(two_policies, mini_batches=4), with_second_policy(request())
    found = searched(graph, asked, pool)
    best = found.best
    now = evaluate(best.posed.problem, best.schedule)
    why = {one.subject: one.why for one in reasons_of(found)}
    for leaf in leaves(best.schedule):
        task, way = best.posed.task(leaf.task), best.ways[leaf.task]
        if not task.updates:
            continue
        fitting = [
            one
            for one in best.posed.made(task.id).of_layout(task, way.layout, Filter())
            if lost(task, one, best).cause not in (Cause.ROOM, Cause.HOST)
        ]
        # Those that compute less again, or have something on the device that is on the host.
        without = [
            one
            for one in fitting
            if RECOMPUTE.index(one.recompute) < RECOMPUTE.index(way.recompute)
            or set(way.offload) - set(one.offload)
        ]
        if way.recompute == "none" and not way.offload:
            assert f"{task.id} memory" not in why
        else:
            needed = why[f"{task.id} memory"].startswith(("only this", "it does not fit"))
            assert needed == (not without)
        for one in (one for one in fitting if one.plainness < way.plainness):
            option = option_of(task, one, asked, shared=False, label=leaf.option.label)
            changed = with_option(best.schedule, leaf.task, option)
            then = Evaluator(best.posed.problem).measure(changed)
            assert one.seconds > way.seconds
            assert then.objective > now.objective
