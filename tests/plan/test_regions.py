"""Environments of episodes in plans over many devices: together with their policy, or apart."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.episode_time import CallSeconds
from flowrl.cost.measured import MeasuredCost
from flowrl.errors import ConfigError, PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, load_plan, make_plan
from flowrl.plan.check.schedule import region_devices
from flowrl.plan.check.whole import check_plan
from flowrl.plan.options import EnvironmentRequest
from flowrl.plan.plan_file import save_plan
from flowrl.plan.show.diff import diff_plans
from flowrl.plan.show.plan import plan_text
from flowrl.plan.sizing import Job, pool_of_devices
from flowrl.plan.ways.regions import Split, split_numbers, splits
from tests.plan.many_cases import posed_alone

CONFIG = Path(__file__).parents[2] / "configs" / "agent_qwen25_7b.yaml"
DATA = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
GIB = 1 << 30
WORLD = "plan.environments.world"
SIMULATOR = (f"{WORLD}.device=accelerator", f"{WORLD}.concurrency=16", f"{WORLD}.memory_gib=20")


def h100(num_devices: int) -> ResourcePool:
    return pool_of_devices(device_spec("H100-SXM-80GB"), num_devices)


@cache
def planned(*words: str, devices: int = 16) -> PlacementPlan:
    overrides = [f"data.train={DATA}", *words]
    return api.compile(None, CONFIG, overrides=overrides, pool=h100(devices)).plan


def where(plan: PlacementPlan) -> str:
    (reason,) = [one for one in plan.reasons if one.subject == "world.interact"]
    return f"{reason.choice}; {reason.why}; not {reason.rejected[0].choice}"


def test_devices_are_shared_out_in_blocks_and_what_they_leave():
    (group,) = h100(16).groups()
    counts = (1, 2, 4, 8, 16)
    shared = EnvironmentRequest(accelerated=True, concurrency=4, nbytes=GIB)
    together, *apart = splits(group, 8, counts, shared)
    assert together == Split(mode="together", policy=8, at_once=32.0, takes_turns=True, nbytes=GIB)
    assert [(one.policy, one.own, one.at_once) for one in apart] == [
        (1, 7, 28.0),
        (2, 6, 24.0),
        (4, 4, 16.0),
        (6, 2, 8.0),
        (7, 1, 4.0),
    ]
    assert split_numbers(apart[0], range(8)) == ((7,), tuple(range(7)))
    assert split_numbers(apart[-1], range(8)) == (tuple(range(7)), (7,))
    assert split_numbers(together, range(8)) == (tuple(range(8)), ())


def test_an_environment_of_cpus_is_on_its_part_of_the_hosts_or_on_nodes_of_their_own():
    pool = h100(16)
    (group,) = pool.groups()
    (half,) = splits(group, 4, (4, 8, 16), EnvironmentRequest(nbytes=16 * GIB))
    # 192 cores for 8 devices, and so for the memory of a node.
    assert (half.at_once, half.host, half.takes_turns) == (96.0, 2 * GIB, False)
    (few,) = splits(group, 16, (4, 8, 16), EnvironmentRequest(concurrency=10))
    assert few.at_once == 20.0
    cpu = Device(id="cpu:0", type="cpu", name="CPU", memory_bytes=GIB, num_cores=64)
    beside = ClusterNode(name="cpus", devices=(cpu,), memory_bytes=GIB, num_cores=64)
    (wider,) = replace(pool, nodes=(*pool.nodes, beside)).groups()
    assert (wider.spare_cores, wider.spare) == (64, ("cpus/cpu:0",))
    assert wider.spare_bytes == GIB
    needs = EnvironmentRequest(nbytes=GIB // 4)
    _, apart = splits(wider, 16, (8, 16), needs)
    assert (apart.mode, apart.own, apart.at_once) == ("apart", 0, 64.0)
    # Of two regions each has half of the cores, and both must fit; four would not.
    _, half = splits(wider, 16, (8, 16), needs, sharers=2)
    assert half.at_once == 32.0
    assert [one.mode for one in splits(wider, 16, (8, 16), needs, sharers=4)] == ["together"]


def test_a_plan_has_its_environment_on_the_hosts_where_it_needs_no_accelerator():
    plan = planned()
    interact, generate = plan.operation("world.interact"), plan.operation("actor.generate")
    assert interact.environment is not None
    assert interact.environment.mode == "together"
    nodes = {address.partition("/")[0] for address in generate.devices}
    assert set(interact.devices) == {f"{node}/cpu:0" for node in nodes}
    # 1,024 episodes of 10 steps of 2 s and a reset of 5 s, on 192 cores a node.
    work = 1024 * (10 * 2.0 + 5.0) / (192 * len(generate.devices) / 8)
    assert interact.environment.seconds == pytest.approx(work)
    assert "on the cores of the hosts" in where(plan)
    assert "not apart" in where(plan)
    bars = {bar.node: bar for bar in plan.prediction.timeline or ()}
    assert bars["world.interact"].end_s == bars["actor.generate"].end_s
    sources = {one.node: one.source for one in plan.prediction.confidence}
    assert sources["world.interact"] == "given"
    assert "576 calls" not in plan_text(plan)
    assert any("in the executor's own process" in note for note in plan.notes)


def test_a_simulator_on_accelerators_has_devices_of_its_own_or_takes_turns():
    """What is cheaper to do at once is apart; what is short, or needs all devices, together."""
    plan = planned(*SIMULATOR)
    interact = plan.operation("world.interact")
    assert interact.environment is not None
    turns = planned(*SIMULATOR, "plan.pins.rollout.environment=together")
    assert turns.operation("world.interact").environment.mode == "together"
    other = planned(*SIMULATOR, "plan.pins.rollout.environment=apart")
    mine, beside = other.operation("actor.generate"), other.operation("world.interact")
    assert beside.environment.mode == "apart"
    assert not set(mine.devices) & set(beside.devices)
    assert len(mine.devices) == mine.layout.num_devices
    steps = {
        one.operation("world.interact").environment.mode: one.prediction.step_s
        for one in (turns, other)
    }
    best = interact.environment.mode
    assert plan.prediction.step_s == pytest.approx(steps[best], rel=0.01)
    assert steps[best] <= min(steps.values()) * 1.01
    held = {entry.active: entry for entry in other.prediction.memory}
    assert held["world"].memory.total >= 20 * GIB
    assert held["world"].num_devices <= len(beside.devices)
    for one in (plan, turns, other):
        for entry in one.prediction.memory:
            assert entry.memory.total <= one.pool.device(entry.device).budget_bytes
        assert PlacementPlan.from_json(one.to_json()) == one
        assert PlacementPlan.from_yaml(one.to_yaml()) == one
    shared = [e for e in turns.prediction.memory if e.active == "actor"]
    names = {(part.role, part.name) for part in shared[0].memory.parts}
    assert ("world", "environment") in names


def test_more_devices_for_the_environment_where_it_is_slow():
    own = []
    for step_s in (0.5, 8.0):
        pin = "plan.pins.rollout.environment=apart"
        plan = planned(*SIMULATOR, pin, f"{WORLD}.step_s={step_s}", f"{WORLD}.reset_s=0")
        share = len(plan.operation("world.interact").devices)
        own.append(share / len(region_devices(plan, plan.operation("actor.generate"))))
    assert own[0] < own[1]


@pytest.mark.parametrize("pinned", ["12-13", "14-15"])
def test_devices_that_an_environment_is_pinned_to_are_looked_for_among_many_schedules(pinned):
    plan = planned(*SIMULATOR, f"{WORLD}.step_s=2", f"plan.pins.world.devices={pinned}")
    first, last = (int(number) - 8 for number in pinned.split("-"))
    assert list(plan.operation("world.interact").devices) == [
        f"node-1/cuda:{number}" for number in range(first, last + 1)
    ]


def test_devices_of_an_environment_are_pinned_inside_those_of_its_rollout():
    pins = ("plan.pins.rollout.devices=0-15", "plan.pins.world.devices=8-11")
    plan = planned(*SIMULATOR, *pins)
    names = [f"node-1/cuda:{number}" for number in range(4)]
    assert list(plan.operation("world.interact").devices) == names
    generate = plan.operation("actor.generate")
    assert len(generate.devices) == 12
    assert {(pin.field, pin.nodes) for pin in plan.pins} == {
        ("devices", ("actor.generate",)),
        ("devices", ("world.interact",)),
    }
    route = next(one for one in plan.weight_routes if one.node == "actor.generate")
    assert route.destination_layout.num_devices == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan.pins.actor.update.environment=apart",), "has no environment"),
        (("plan.pins.world.tp=2",), "an environment with devices and a place"),
        (("plan.pins.rollout.environment=beside",), "no such way of environment"),
        (("plan.mean_observation_tokens=700",), "above the most"),
        (("plan.mean_turns=17",), "above the most"),
        (("plan.mean_response_tokens=1900",), "longer than the episodes"),
    ],
)
def test_what_cannot_be_asked_of_an_environment_is_told(words: tuple[str, ...], message: str):
    with pytest.raises(PlanError, match=message):
        planned(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan.environments.world.memory_gib=4000",), "the hosts cannot hold environment world"),
        ((*SIMULATOR, f"{WORLD}.memory_gib=100"), "environment world does not fit on H100"),
        (("plan.pins.rollout.environment=apart",), "apart only on nodes without"),
        (("plan.pins.world.devices=8-15",), "has no accelerators to pin"),
        (
            (*SIMULATOR, f"{WORLD}.memory_gib=69", "plan.pins.rollout.environment=together"),
            "does not fit on the devices of actor.generate",
        ),
        (
            (*SIMULATOR, "plan.pins.rollout.devices=0-7", "plan.pins.world.devices=8-11"),
            "rollout.devices=0-7 and world.devices=8-11 contradict each other: devices of "
            "environment world are among those of its rollout, which 8-11 are not",
        ),
        (
            (*SIMULATOR, "plan.pins.world.devices=0-15", "plan.pins.rollout.environment=apart"),
            "world.devices=0-15 and rollout.environment=apart contradict each other",
        ),
        (
            (
                *SIMULATOR,
                "plan.pins.rollout.devices=0-7",
                "plan.pins.world.devices=0-7",
                "plan.pins.rollout.environment=apart",
            ),
            "contradict each other",
        ),
    ],
)
def test_an_environment_without_a_place_says_why(words: tuple[str, ...], message: str):
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        planned(*words)
    assert caught.value.hint
    said = re.search(r"^leave (.+?) out", caught.value.hint)
    for pin in said[1].split(" or ") if said else ():
        rest = [word for word in words if word != f"plan.pins.{pin}"]
        assert len(rest) == len(words) - 1
        assert planned(*rest).prediction.step_s  # what is offered works


def test_pins_of_an_environment_are_not_to_be_left_out_where_more_is_in_the_way():
    words = (*SIMULATOR, f"{WORLD}.memory_gib=69", "plan.pins.rollout.environment=together")
    too_large = ("plan.pins.actor.update.tp=1", "plan.pins.actor.update.micro_tokens=4000000")
    with pytest.raises(PlanError, match="does not fit on the devices of actor") as caught:
        planned(*words, *too_large)
    hint = caught.value.hint or ""
    assert hint.startswith("without rollout.environment=together something else does not fit; ")
    with pytest.raises(PlanError):
        planned(*words[:-1], *too_large)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ((f"{WORLD}.memory_gib=4000",), r"take hosts with (\d+) GiB"),
        ((*SIMULATOR, f"{WORLD}.memory_gib=100"), r"take devices of (\d+) GiB"),
        ((f"{WORLD}.device=L40S",), r"(one of these), or plan for a cluster that has L40S"),
    ],
)
def test_what_would_hold_an_environment_is_told(words: tuple[str, ...], pattern: str):
    with pytest.raises(PlanError) as caught:
        planned(*words)
    assert re.search(pattern, caught.value.hint or ""), caught.value.hint


def test_times_of_an_environment_that_there_is_not_are_told():
    with pytest.raises(ConfigError, match="no role 'wordl'"):
        planned("plan.environments.wordl.step_s=1")


def raw_config() -> dict[str, Any]:
    raw = yaml.safe_load(CONFIG.read_text())
    raw["data"]["train"] = str(DATA)
    return raw


def test_an_environment_of_which_nothing_is_known_answers_at_once_and_the_plan_says_so():
    raw = raw_config()
    del raw["plan"]["environments"]
    plan = api.compile(None, raw, pool=h100(16)).plan
    use = plan.operation("world.interact").environment
    assert use is not None
    assert (use.seconds, use.source) == (0.0, "unknown")
    assert any("plan.environments.world.step_s says better" in note for note in plan.notes)


def test_what_was_measured_of_an_environment_is_taken():
    raw = raw_config()
    del raw["plan"]["environments"]
    graph, request, _ = api.ask_for_plan(raw)
    calls = CallSeconds(reset_s=0.5, step_s=0.5, wait_s=1.0, source="measured")
    cost = MeasuredCost((), AnalyticCost(), environments={"world": calls})
    plan = make_plan(graph, request, h100(16), cost)
    use = plan.operation("world.interact").environment
    assert use is not None
    assert (use.step_s, use.wait_s, use.source) == (0.5, 1.0, "measured")
    given = make_plan(*ask_again(), h100(16), cost).operation("world.interact").environment
    assert given is not None
    assert (given.step_s, given.source) == (2.0, "given")


def ask_again() -> tuple[Graph, PlanRequest]:
    graph, request, _ = api.ask_for_plan(raw_config())
    return graph, request


def test_sizes_take_the_cores_of_the_file_and_a_part_of_a_node_has_its_part():
    graph, request = ask_again()
    spec = device_spec("H100-SXM-80GB")
    seconds = {}
    for cores in (192, 48):
        job = Job(graph=graph, request=request, spec=spec, cost=AnalyticCost(), cores=cores)
        posed = posed_alone(job, 4)
        played = posed.ways["actor.generate"][0].played
        assert played is not None
        assert played.split.at_once == cores * played.split.policy / 8
        seconds[cores] = played.environment_s
    assert seconds[48] == pytest.approx(4 * seconds[192])


def test_sizes_keep_the_devices_of_an_environment_that_pins_name():
    pins = ("plan.pins.rollout.devices=0-15", "plan.pins.world.devices=8-11")
    overrides = [f"data.train={DATA}", *SIMULATOR, *pins]
    graph, request, _ = api.ask_for_plan(CONFIG, overrides=overrides)
    spec = device_spec("H100-SXM-80GB")
    posed = posed_alone(Job(graph=graph, request=request, spec=spec, cost=AnalyticCost()), 16)
    assert posed.environments == {"actor.generate": (8, 9, 10, 11)}


def test_the_difference_of_plans_tells_where_the_environment_went():
    plans = [
        planned(*SIMULATOR, f"plan.pins.rollout.environment={mode}")
        for mode in ("together", "apart")
    ]
    lines = diff_plans(*plans)
    assert any(line.startswith("world.interact environment: together") for line in lines)


def test_an_edited_split_must_fit_the_schedule():
    plan = planned(*SIMULATOR, "plan.pins.rollout.environment=apart")
    interact = plan.operation("world.interact")
    fewer = tuple(
        replace(one, devices=one.devices[:-1]) if one.node == interact.node else one
        for one in plan.operations
    )
    with pytest.raises(PlanError, match=r"the schedule runs actor\.generate on"):
        check_plan(replace(plan, operations=fewer))


def test_a_written_plan_shows_its_environment(tmp_path: Path):
    plan = planned(*SIMULATOR, "plan.pins.rollout.environment=apart")
    save_plan(plan, tmp_path / "one.plan.yaml")
    text = plan_text(load_plan(tmp_path / "one.plan.yaml"), explain=True)
    assert "rules score" not in text  # the program has none
    assert "world.interact: apart: on" in text
    assert "world environment" in text
    raw = plan.to_json().replace('"mode": "apart"', '"mode": "beside"')
    with pytest.raises(ConfigError, match="mode"):
        PlacementPlan.from_json(raw)
