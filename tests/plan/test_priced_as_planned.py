"""A plan that was just made is priced by its file as it was made: nothing in it is told anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan
from flowrl.plan.priced.anew import priced
from flowrl.plan.sizing import pool_of_devices
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.within_hosts import overfull_host
from tests.plan.many_cases import pinned, request

ROOT = Path(__file__).parents[2]
GRPO = ROOT / "configs" / "grpo_qwen25_7b.yaml"
AGENT = ROOT / "configs" / "agent_qwen25_7b.yaml"
DATA = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
GIB = 1 << 30


def nodes_of(name: str, kind: str, devices: int, gib: int) -> ResourcePool:
    """One node whose host has so much memory."""
    pool = pool_of_devices(device_spec(kind), devices)
    return ResourcePool(
        nodes=tuple(replace(one, name=name, memory_bytes=gib * GIB) for one in pool.nodes)
    )


def both(*pools: ResourcePool) -> ResourcePool:
    return ResourcePool(nodes=tuple(node for pool in pools for node in pool.nodes))


def anew(graph: Graph, asked: PlanRequest, plan: PlacementPlan) -> PlacementPlan:
    """The plan of its file, priced."""
    return priced(graph, asked, PlacementPlan.from_json(plan.to_json()), AnalyticCost())


def test_what_one_kind_puts_on_its_hosts_is_not_asked_of_the_hosts_of_another(grpo: Graph):
    # The trainer's optimizer, 12 bytes of each of 7.6e9 parameters over 8 devices, is on hosts with
    # 2 TiB; those of the engines, with 64 GiB, would not hold it.
    pool = both(
        nodes_of("fast", "H100-SXM-80GB", 8, 2048), nodes_of("slow", "A100-SXM-80GB", 8, 64)
    )
    pins = ("actor.devices=0-7", "reference.devices=0-7", "rollout.devices=8-15")
    asked = pinned(request(), *pins, "update.offload=optimizer", "update.tp=1", "update.pp=1")
    plan = make_plan(grpo, asked, pool)
    (note,) = (one for one in plan.notes if "of its host's memory" in one)
    assert note.startswith("each H100-SXM-80GB of fast/cuda:[0-7] fills up to 10.6 GiB")
    told = [one.constraint for why in plan.reasons for one in why.rejected]
    assert not any("the hosts would hold" in one for one in told)
    assert anew(grpo, asked, plan) == plan
    full = nodes_of("fast", "H100-SXM-80GB", 8, 64)
    poor = replace(
        plan,
        pool=replace(
            plan.pool,
            devices=tuple(
                replace(one, memory_bytes=node.memory_bytes, budget_bytes=node.memory_bytes)
                if one.address == "fast/cpu:0"
                else one
                for one in plan.pool.devices
                for node in full.nodes
            ),
        ),
    )
    with pytest.raises(PlanError, match="more than they hold") as caught:
        anew(grpo, asked, poor)
    assert caught.value.found == "10.6 GiB for a device: actor.update 10.6 GiB"
    assert caught.value.hint == "take `offload` off actor.update"


def test_of_devices_that_are_too_much_for_their_hosts_the_one_that_lacks_most_is_told():
    def way(host: int) -> Candidate:
        return Candidate(layout=Layout(), estimate=None, resident=0, peak=0, host=host)  # type: ignore[arg-type]

    ways = {"draw": way(5), "score": way(7), "train": way(20), "idle": way(0)}
    numbers = {"draw": (0, 1), "score": (1,), "train": (2, 3), "idle": (0, 1, 2)}
    holds = {"draw": 10, "score": 10, "train": 30}
    assert overfull_host(numbers, ways, holds.get) == ({"draw": 5, "score": 7}, 10)
    assert overfull_host(numbers, ways, (holds | {"train": 17}).get) == ({"train": 20}, 17)
    assert overfull_host(numbers, ways, {"train": 20}.get) is None


@pytest.mark.parametrize("beside", ["one device", "a CPU"])
def test_what_idles_on_the_only_node_leaves_its_cores_whatever_else_there_is(beside: str):
    # Nothing is divided over one device alone; and a node without any has only cores.
    pool = nodes_of("node", "H100-SXM-80GB", 5, 2048)
    if beside == "one device":
        pool = both(pool, nodes_of("other", "H200-SXM-141GB", 1, 2048))
    else:
        bare = pool_of_devices(device_spec("H100-SXM-80GB"), 1).nodes[0]
        cpus = tuple(replace(one, num_cores=1) for one in bare.devices if one.type == "cpu")
        pool = both(
            pool, ResourcePool(nodes=(replace(bare, name="other", devices=cpus, num_cores=1),))
        )
    words = [f"data.train={DATA}", "plan.memory_share=0.95"]
    plan = api.compile(None, AGENT, overrides=words, pool=pool).plan
    assert len(plan.operation("actor.generate").devices) == 4
    graph, asked, _ = api.ask_for_plan(AGENT, overrides=words)
    assert anew(graph, asked, plan) == plan


def of_nodes(tmp_path: Path, device: str, count: int) -> ResourcePool:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"nodes: [{{name: n, count: {count}, memory_gib: 2048, cores: 192, devices: [{device}]}}]"
    )
    return load_cluster(file)


def test_of_nodes_that_are_used_in_part_the_part_has_the_cores(tmp_path: Path):
    pool = of_nodes(tmp_path, "{name: B200-SXM-180GB, count: 7}", 2)
    words = [f"data.train={DATA}", "plan.objective=device_time"]
    words += ["roles.actor.model=configs/models/qwen2.5-0.5b.json"]
    words += ["plan.environments.world.step_s=5.0"]
    plan = api.compile(None, AGENT, overrides=words, pool=pool).plan
    graph, asked, _ = api.ask_for_plan(AGENT, overrides=words)
    assert {one.node_size for one in plan.pool.machines} == {4}
    assert len(plan.operation("actor.generate").devices) < 4
    assert anew(graph, asked, plan) == plan


def test_a_plan_without_weights_on_their_way_is_the_same_text_when_read():
    pool = nodes_of("node", "H100-SXM-80GB", 8, 2048)
    words = ["stages=[sft]", "train.group_size=1", f"data.train={DATA}", "plan.kind=temporal"]
    words += ["args=null", "roles.reference=null"]
    plan = api.compile(None, GRPO, overrides=words, pool=pool).plan
    assert not plan.weight_routes
    assert PlacementPlan.from_json(plan.to_json()).to_json() == plan.to_json()
