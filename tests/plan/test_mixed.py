"""Plans over two kinds of devices: any part of a step that reads nothing from the rest on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan
from flowrl.plan.mixed import PairJob, PairSearch, pair_searches
from flowrl.plan.pins import read_pins
from flowrl.plan.sizing import pool_of_devices
from flowrl.plan.ways.plain_ways import PLAIN
from flowrl.plan.ways.tasks import tasks_of
from tests.plan.many_cases import parts_of, pinned, request
from tests.plan.test_several_regions import config
from tests.sizes import every

ROOT = Path(__file__).parents[2]
SLOW, FAST = "A100-SXM-80GB", "H100-SXM-80GB"


def cluster(slow: int, fast: int) -> ResourcePool:
    """Nodes of A100, then nodes of H100."""
    return ResourcePool(
        nodes=tuple(
            replace(node, name=f"{name}-{number}")
            for name, kind, count in (("slow", SLOW, slow), ("fast", FAST, fast))
            for number, node in enumerate(pool_of_devices(device_spec(kind), count).nodes)
        )
    )


def asked(**changes: Any) -> PlanRequest:
    return request(alternatives=0, **changes)


def over_two(graph: Graph, wanted: PlanRequest, pool: ResourcePool) -> list[PairSearch]:
    """A search for each ordered pair of groups."""
    parts = parts_of(pool)
    numbers = [number for part in parts for number in part.numbering]
    pins = read_pins(wanted.options, tasks_of(graph, wanted), numbers)
    job = PairJob(graph=graph, request=wanted, cost=AnalyticCost(), pins=pins, parts=parts)
    return list(pair_searches(job))


@pytest.mark.parametrize(
    "changes",
    every(
        3,
        [
            {},
            {"max_staleness": 1},
            {"objective": "device_time"},
            {"max_staleness": 1, "kind": "asynchronous"},
            {"kind": "spatial"},
        ],
    ),
)
def test_limits_lose_no_step_over_two_kinds(grpo: Graph, changes: dict[str, Any]):
    """Each pair is searched within what a good step of it takes; nothing better is outside."""
    for search in over_two(grpo, asked(**changes), cluster(8, 4)):
        assert search.likely is not None
        everything = search.best(float("inf"))[0]
        within = search.best(search.limit)[0]
        assert within.objective == pytest.approx(everything.objective, rel=1e-9)
        assert everything.objective <= search.chosen(search.likely).objective * (1 + PLAIN)


def test_each_side_at_its_best_alone_is_not_always_the_best_of_both(grpo: Graph):
    """Where both pass chunks or run ahead, what is best for one side is not best for the step."""
    gains = [
        search.limit / search.best(search.limit)[0].objective
        for wanted in (asked(), asked(max_staleness=1), asked(objective="device_time"))
        for search in over_two(grpo, wanted, cluster(8, 8))
    ]
    assert max(gains) > 1.02


@pytest.mark.parametrize("job", ["grpo_qwen25_7b", "grpo_qwen25_32b"])
def test_what_reads_memory_is_on_one_kind_and_what_computes_on_the_other(job: str):
    """H20 read as fast as H100 and compute a seventh as fast."""
    pool = load_cluster(ROOT / "configs/clusters/h100_2x8_h20_4x8.yaml")
    data = ROOT / "tests/data/gsm8k_test.jsonl"
    compiled = api.compile(
        None, ROOT / f"configs/{job}.yaml", overrides=[f"data.train={data}"], pool=pool
    )
    where = {
        node: {address.partition("-")[0] for address in compiled.plan.operation(node).devices}
        for node in ("actor.generate", "reference.logprobs", "actor.update")
    }
    assert where == {
        "actor.generate": {"h20"},
        "reference.logprobs": {"h100"},
        "actor.update": {"h100"},
    }


def test_policies_may_have_a_kind_of_devices_each():
    """What one policy draws and learns reads nothing from the other's."""
    raw = config("both_play", ("red", "blue"), ("world",))
    numbers = {"blue": "0-15", "red": "16-31"}
    words = [
        f"plan.pins.{policy}.{work}.devices={where}"
        for policy, where in numbers.items()
        for work in ("generate", "update")
    ]
    plan = api.compile(None, raw, overrides=words, pool=cluster(16, 16)).plan
    for policy, kind in (("blue", SLOW), ("red", FAST)):
        for work in ("generate", "update"):
            devices = plan.operation(f"{policy}.{work}").devices
            assert {plan.pool.device(device).name for device in devices} == {kind}
            assert len(devices) == 16
    assert PlacementPlan.from_json(plan.to_json()) == plan
    # Neither waits for the other.
    spans = {bar.node: bar for bar in plan.prediction.timeline or ()}
    assert spans["red.generate"].begin_s == spans["blue.generate"].begin_s == 0.0


def test_device_time_counts_the_devices_of_both_kinds(grpo: Graph):
    wanted = asked(objective="device_time")
    pins = ("rollout.devices=0-3", "actor.devices=8-11")
    plan = make_plan(grpo, pinned(wanted, *pins), cluster(8, 8))
    where = {
        node: {plan.pool.device(device).name for device in plan.operation(node).devices}
        for node in ("actor.generate", "actor.update")
    }
    assert where == {"actor.generate": {SLOW}, "actor.update": {FAST}}
    used = {device for one in plan.operations if one.seconds for device in one.devices}
    step_s, device_s = plan.prediction.step_s, plan.prediction.device_s
    assert step_s is not None
    assert device_s == pytest.approx(step_s * len(used) / 512)
    reason = next(one for one in plan.reasons if one.subject == "devices")
    assert "actor.generate" in reason.choice
    free = make_plan(grpo, wanted, cluster(8, 8))
    told = next(one for one in free.reasons if one.subject == "devices").rejected
    assert free.prediction.device_s is not None
    mine = f" device-seconds per sample, the plan's {free.prediction.device_s:.1f}"
    assert all(one.constraint.endswith(mine) for one in told)
    assert free.prediction.device_s <= device_s
