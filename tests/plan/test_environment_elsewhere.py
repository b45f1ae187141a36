"""Environments on accelerators of another kind than their policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.plan import PlacementPlan
from flowrl.plan.check.whole import check_plan
from flowrl.plan.elsewhere import Part, seatings
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.show.plan import plan_text
from flowrl.plan.sizing import Job, fewest, pool_of_devices
from flowrl.plan.ways.tasks import TaskWork, tasks_of
from tests.sim.cluster_jobs import Planned, simulated
from tests.sizes import every

CONFIG = Path(__file__).parents[2] / "configs" / "agent_qwen25_7b.yaml"
DATA = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
GIB = 1 << 30
WORLD = "plan.environments.world"
ON_A100 = (f"{WORLD}.device=A100-SXM-80GB", f"{WORLD}.concurrency=16", f"{WORLD}.memory_gib=70")
SLOW, FAST = "A100-SXM-80GB", "H100-SXM-80GB"


@cache
def cluster(slow: int, fast: int) -> ResourcePool:
    """Nodes of A100, then nodes of H100."""
    nodes = [
        replace(node, name=f"{name}-{number}")
        for name, kind, count in (("slow", SLOW, slow), ("fast", FAST, fast))
        for number, node in enumerate(pool_of_devices(device_spec(kind), count).nodes)
    ]
    return ResourcePool(nodes=tuple(nodes))


@cache
def compiled(*words: str, slow: int = 8, fast: int = 16) -> api.Compiled:
    overrides = [f"data.train={DATA}", "train.prompts_per_step=32", *words]
    return api.compile(None, CONFIG, overrides=overrides, pool=cluster(slow, fast))


def kinds(plan: PlacementPlan) -> Mapping[str, str]:
    """Where each operation is that has accelerators; all of its devices are of one kind."""
    found = {}
    for operation in plan.operations:
        names = {plan.pool.device(device).name for device in operation.devices}
        if operation.devices:
            (found[str(operation.node)],) = names
    return found


def test_a_simulator_is_on_its_kind_of_devices_and_its_policy_on_another():
    plan = compiled(*ON_A100).plan
    where = kinds(plan)
    assert (where["world.interact"], where["actor.generate"]) == (SLOW, FAST)
    use = plan.operation("world.interact").environment
    assert use is not None
    assert (use.mode, use.at_once) == ("apart", 128.0)
    # 256 episodes of 10 steps of 2 s and a reset of 5 s, of which 128 are served at once.
    assert use.seconds == pytest.approx(256 * 25 / 128)
    (reason,) = (one for one in plan.reasons if one.subject == "world.interact")
    assert reason.choice.startswith("apart: on 8 x A100-SXM-80GB, 128 calls at once, beside")
    assert plan.placement("world").devices == tuple(f"slow-0/cuda:{n}" for n in range(8))
    held = [entry for entry in plan.prediction.memory if entry.active == "world"]
    assert [(entry.device, entry.num_devices) for entry in held] == [("slow-0/cuda:0", 8)]
    assert held[0].memory.total == pytest.approx(70 * GIB, rel=0.02)
    for entry in plan.prediction.memory:
        assert entry.memory.total <= plan.pool.device(entry.device).budget_bytes
    assert PlacementPlan.from_json(plan.to_json()) == plan
    assert PlacementPlan.from_yaml(plan.to_yaml()) == plan
    assert "world.interact on 8 x A100-SXM-80GB" in plan_text(plan)


def test_tasks_have_what_their_environment_leaves_of_its_kind():
    """Fast devices draw, and of sixteen slow ones those train that the simulator has not."""
    words = (*ON_A100, f"{WORLD}.step_s=0.5", "plan.pins.rollout.devices=16-19")
    plan = compiled(*words, slow=16, fast=4).plan
    where = kinds(plan)
    assert where == {
        "world.interact": SLOW,
        "actor.generate": FAST,
        "actor.update": SLOW,
        "actor.sync": FAST,
    }
    plays = set(plan.operation("world.interact").devices)
    trains = set(plan.operation("actor.update").devices)
    assert len(plays) == 8
    assert not plays & trains
    # All on the fast ones would take longer; so would all of the slow ones for the simulator.
    for pins in (("actor.devices=16-19",), ("world.devices=0-15",)):
        other = compiled(*words, *(f"plan.pins.{pin}" for pin in pins), slow=16, fast=4).plan
        assert other.prediction.step_s >= plan.prediction.step_s


def test_an_edited_plan_keeps_a_simulator_from_what_works_at_once():
    words = (*ON_A100, f"{WORLD}.step_s=0.5", "plan.pins.rollout.devices=16-19")
    plan = compiled(*words, slow=16, fast=4).plan
    assert plan.kind == "spatial"
    trains = plan.operation("actor.update").devices[:8]
    moved = replace(
        plan,
        placements=tuple(
            replace(one, devices=trains) if one.role == "world" else one for one in plan.placements
        ),
        operations=tuple(
            replace(one, devices=trains) if one.node == "world.interact" else one
            for one in plan.operations
        ),
    )
    with pytest.raises(PlanError, match="parts of a spatial step share 8 devices"):
        check_plan(moved)


def test_devices_of_the_simulator_are_pinned_on_its_kind():
    plan = compiled(*ON_A100, "plan.pins.world.devices=4-7", "plan.pins.rollout.devices=8-15").plan
    names = [f"slow-0/cuda:{number}" for number in range(4, 8)]
    assert list(plan.operation("world.interact").devices) == names
    assert list(plan.operation("actor.generate").devices) == [f"fast-0/cuda:{n}" for n in range(8)]
    assert [pin.value for pin in plan.pins] == ["4-7", "8-15"]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ((f"{WORLD}.device=L40S",), PlanError, "is to be on L40S-48GB, and the cluster has none"),
        ((f"{WORLD}.device=acelerator",), PlanError, "did you mean 'accelerator'"),
        ((*ON_A100, f"{WORLD}.memory_gib=80"), PlanError, "does not fit on A100-SXM-80GB"),
        ((*ON_A100, "plan.pins.world.devices=8-11"), PlanError, "which its pins do not name"),
        (
            (*ON_A100, "plan.pins.rollout.devices=8-15", "plan.pins.rollout.environment=together"),
            PlanError,
            "is on A100-SXM-80GB, so it is apart from a policy on H100-SXM-80GB",
        ),
    ],
)
def test_a_simulator_that_cannot_be_where_it_is_asked_for_is_told(
    words: tuple[str, ...], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        compiled(*words)


def test_sizes_of_one_kind_of_devices_have_no_place_for_a_simulator_on_another():
    overrides = [f"data.train={DATA}", *ON_A100]
    graph, request, _ = api.ask_for_plan(CONFIG, overrides=overrides)
    job = Job(graph=graph, request=request, spec=device_spec(FAST), cost=AnalyticCost())
    with pytest.raises(PlanError, match="on A100-SXM-80GB, and all devices here are H100") as said:
        fewest(job)
    assert said.value.hint is not None
    assert "--cluster" in said.value.hint


def test_a_kind_has_many_names():
    named = compiled(f"{WORLD}.device=NVIDIA A100-SXM4-80GB", *ON_A100[1:]).plan
    assert kinds(named)["world.interact"] == SLOW


def playing() -> tuple[TaskWork, ...]:
    graph, request, _ = api.ask_for_plan(CONFIG, overrides=[f"data.train={DATA}", *ON_A100])
    return tasks_of(graph, request)


def parts_of(slow: int, fast: int) -> list[Part]:
    start, found = 0, []
    for group in cluster(slow, fast).groups():
        numbering = tuple(range(start, start + len(group.addresses)))
        found.append(Part(group=group, host=1 << 40, numbering=numbering))
        start += len(numbering)
    return found


NO_PINS = PinnedTasks(filters={}, devices={}, environments={}, decisions=(), asked={})


def test_devices_are_set_aside_by_whole_nodes_or_parts_of_the_only_one():
    def ways(slow: int, pins: PinnedTasks = NO_PINS) -> list[tuple[int, list[int]]]:
        slow_part, fast_part = parts_of(slow, 8)
        found = seatings(playing(), fast_part, [slow_part, fast_part], [slow_part], pins)
        return [
            (
                len(one.outside["actor.generate"].addresses),
                [len(part.group.addresses) for part in one.left],
            )
            for one in found
        ]

    assert ways(24) == [(24, []), (8, [16]), (16, [8])]
    assert ways(4) == [(4, []), (1, [3]), (2, [2]), (3, [])]  # a single device is no group
    some = replace(NO_PINS, environments={"actor.generate": (8, 9, 10, 11)})
    assert ways(24, some) == [(4, [])]  # the rest are nodes with unequal numbers of devices
    slow_part, fast_part = parts_of(8, 8)
    (same,) = seatings(playing(), slow_part, [slow_part, fast_part], [slow_part], NO_PINS)
    assert (same.outside, list(same.left)) == ({}, [fast_part])


@pytest.mark.parametrize(
    ("words", "slow", "fast"),
    every(
        3,
        [
            (ON_A100, 8, 16),
            ((*ON_A100, f"{WORLD}.concurrency=4"), 8, 16),
            ((*ON_A100, f"{WORLD}.step_s=0.5", "plan.pins.rollout.devices=16-19"), 16, 4),
        ],
    ),
)
def test_such_plans_are_simulated_near_what_they_predict(
    words: tuple[str, ...], slow: int, fast: int
):
    found = compiled(*words, slow=slow, fast=fast)
    (stage,) = found.stages
    use = stage.plan.operation("world.interact").environment
    assert use is not None
    assert use.mode == "apart"
    planned = Planned(stage=stage, config=found.config.plan)
    assert simulated(planned, steps=2).step_s == pytest.approx(planned.step_s, rel=0.2)
