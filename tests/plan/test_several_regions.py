"""Several policies that play in one step: a region each, with environments of their own or one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.plan import PlacementPlan
from flowrl.plan.check.schedule import region_devices
from flowrl.plan.priced.anew import priced
from flowrl.plan.sizing import pool_of_devices
from tests.sim.cluster_jobs import Planned, model_of, simulated

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("players.py")
WORLD = "plan.environments.world"
SIMULATOR = (f"{WORLD}.device=accelerator", f"{WORLD}.concurrency=16", f"{WORLD}.memory_gib=20")
WORDS = "device=accelerator", "concurrency=16", "memory_gib=10"
TWO_SIMULATORS = tuple(f"plan.environments.{n}.{w}" for n in ("world", "other") for w in WORDS)


def config(workflow: str, policies: tuple[str, ...], worlds: tuple[str, ...]) -> dict[str, Any]:
    """The agent of configs/agent_qwen25_7b.yaml, once for each policy."""
    raw: dict[str, Any] = yaml.safe_load((ROOT / "configs/agent_qwen25_7b.yaml").read_text())
    actor, world = raw["roles"]["actor"], raw["roles"]["world"]
    times = raw["plan"]["environments"]["world"]
    raw["workflow"] = f"{PROGRAMS}:{workflow}"
    raw["data"]["train"] = str(ROOT / "tests/data/gsm8k_test.jsonl")
    raw["train"]["prompts_per_step"] = 32
    raw["roles"] = {**dict.fromkeys(policies, actor), **dict.fromkeys(worlds, world)}
    raw["plan"]["environments"] = dict.fromkeys(worlds, times)
    return raw


PLAYERS = {
    "both_play": (("red", "blue"), ("world",)),
    "two_worlds": (("red",), ("world", "other")),
    "twice": (("red",), ("world",)),
    "debate": (("red", "blue"), ("world",)),
}


@cache
def compiled(workflow: str, *words: str, devices: int = 16) -> api.Compiled:
    pool = pool_of_devices(device_spec("H100-SXM-80GB"), devices)
    return api.compile(None, config(workflow, *PLAYERS[workflow]), overrides=words, pool=pool)


def regions(plan: PlacementPlan) -> dict[str, tuple[str, ...]]:
    return {one.node: one.devices for one in plan.operations if one.environment is not None}


@pytest.mark.parametrize("words", [(), SIMULATOR])
@pytest.mark.parametrize("workflow", ["both_play", "twice"])
def test_an_environment_of_two_regions_is_where_each_of_them_has_it(
    workflow: str, words: tuple[str, ...]
):
    apart = ("plan.kind=spatial",) if workflow == "both_play" else ()
    plan = compiled(workflow, *words, *apart).plan
    where = regions(plan)
    assert list(where) == ["world.interact", "world.interact.2"]
    draws = [one for one in plan.operations if one.op == "generate"]
    for operation, devices in zip(draws, where.values(), strict=True):
        hosts = {address.partition("/")[0] for address in operation.devices}
        assert {address.partition("/")[0] for address in devices} == hosts
        if words:
            assert set(region_devices(plan, operation)) == {*operation.devices, *devices}
    assert set(plan.placement("world").devices) == {d for some in where.values() for d in some}
    assert PlacementPlan.from_json(plan.to_json()) == plan
    for entry in plan.prediction.memory:
        assert entry.memory.total <= plan.pool.device(entry.device).budget_bytes


def test_each_policy_that_learns_gets_its_weights():
    plan = compiled("both_play", *SIMULATOR).plan
    ways = {(one.source, one.destination, one.node) for one in plan.weight_routes}
    assert ways == {("red", "red", "red.generate"), ("blue", "blue", "blue.generate")}


def test_policies_of_two_regions_have_pins_of_their_own():
    pins = {"red.generate.tp": "2", "blue.generate.tp": "4", "red.generate.devices": "0-7"}
    words = [f"plan.pins.{name}={value}" for name, value in pins.items()]
    plan = compiled("both_play", *words).plan
    red, blue = plan.operation("red.generate"), plan.operation("blue.generate")
    assert (red.layout.tp, blue.layout.tp) == (2, 4)
    assert list(red.devices) == [f"node-0/cuda:{number}" for number in range(8)]
    assert {str(reason.subject) for reason in plan.reasons} >= {
        "world.interact",
        "world.interact.2",
    }


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        (
            "both_play",
            ("plan.pins.red.generate.devices=0-7", "plan.pins.blue.generate.devices=8-15"),
        ),
        ("both_play", SIMULATOR),
        ("twice", ("plan.pins.rollout.devices=0-15",)),
        ("two_worlds", TWO_SIMULATORS),
    ],
)
def test_plans_of_two_regions_are_simulated_near_what_they_predict(
    workflow: str, words: tuple[str, ...]
):
    found = compiled(workflow, *words)
    (stage,) = found.stages
    planned = Planned(stage=stage, config=found.config.plan)
    assert len(model_of(planned).rollouts) == 2
    assert simulated(planned, steps=1).step_s == pytest.approx(planned.step_s, rel=0.2)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (8, ()),
        (32, ()),
        (16, ("plan.pins.red.generate.dp=2", "plan.pins.blue.generate.dp=4")),
    ],
)
def test_policies_that_take_turns_in_an_episode_have_devices_of_their_own(
    devices: int, words: tuple[str, ...]
):
    found = compiled("debate", *words, devices=devices)
    (stage,) = found.stages
    plan = stage.plan
    draws = [one for one in plan.operations if one.op == "generate"]
    assert [one.node for one in draws] == ["red.generate", "blue.generate"]
    assert set(draws[0].devices).isdisjoint(draws[1].devices)
    assert [one.layout.dp for one in draws] == ([2, 4] if words else [draws[0].layout.dp] * 2)
    spans = {span.node: span for span in plan.prediction.timeline or ()}
    assert spans["red.generate"].begin_s == spans["blue.generate"].begin_s
    assert len([one for one in plan.operations if one.environment is not None]) == 1
    assert PlacementPlan.from_json(plan.to_json()) == plan
    if not words:
        graph, request, _ = api.ask_for_plan(config("debate", *PLAYERS["debate"]))
        assert priced(graph, request, plan, AnalyticCost()) == plan
    planned = Planned(stage=stage, config=found.config.plan)
    assert model_of(planned).rollouts[0].turns == ("red", "blue")
    assert simulated(planned, steps=1).step_s == pytest.approx(planned.step_s, rel=0.2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan.kind=temporal",), "several policies that take turns, each on devices of its own"),
        (SIMULATOR, "several policies that take turns, and plans have their environment on hosts"),
    ],
)
def test_what_policies_that_take_turns_cannot_have_is_refused(words: tuple[str, ...], says: str):
    with pytest.raises(PlanError, match=says):
        compiled("debate", *words)
