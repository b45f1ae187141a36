"""Pools from a Ray cluster's listing: recorded ones, and a real cluster where Ray is installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.errors import ConfigError
from flowrl.runtime import ray_pool as module
from flowrl.runtime.ray_pool import ask_ray, joined_pool, pool_of_nodes, ray_pool

GIB = 1 << 30


def listed(host: str, *, alive: bool = True, node_id: str = "", **resources: float) -> Any:
    """A node in the form in which Ray 2.60 lists it."""
    named = {key.replace("__", ":", 1): value for key, value in resources.items()}
    return {
        "NodeID": node_id or f"{host}-id",
        "Alive": alive,
        "alive": alive,
        "NodeManagerAddress": "192.0.2.2",
        "NodeManagerHostname": host,
        "NodeManagerPort": 46609,
        "NodeName": "192.0.2.2",
        "DeathReason": 0,
        "Resources": {"node:192.0.2.2": 1.0, **named},
        "Labels": {"ray.io/node-id": f"{host}-id"},
    }


GPU_NODE = {
    "CPU": 96.0,
    "GPU": 8.0,
    "accelerator_type__H100": 1.0,
    "memory": 700.0 * GIB,
    "object_store_memory": 200.0 * GIB,
}


def test_nodes_and_their_devices_are_those_that_ray_lists() -> None:
    pool = pool_of_nodes([listed("b", **GPU_NODE), listed("a", **GPU_NODE)])
    assert [node.name for node in pool.nodes] == ["a", "b"]
    (group,) = pool.groups()
    assert (group.machine.spec.name, group.machine.node_size) == ("H100-SXM-80GB", 8)
    assert group.addresses[:2] == ("a/cuda:0", "a/cuda:1")
    assert len(group.addresses) == 16
    # Nine tenths of what software finds of 80 GB.
    assert group.budget_bytes == pytest.approx(0.9 * 79.11 * GIB)
    cpu = pool.device("a/cpu:0")
    assert (cpu.num_cores, cpu.memory_bytes) == (96, 900 * GIB)


def test_npus_are_devices_of_their_own_type() -> None:
    (node,) = pool_of_nodes(
        [listed("a", CPU=192.0, NPU=8.0, accelerator_type__Ascend910B3=1.0)]
    ).nodes
    assert [device.id for device in node.devices] == ["cpu:0", *(f"npu:{i}" for i in range(8))]
    assert node.devices[1].name == "Ascend-A2-910B-313T"


def test_dead_and_empty_nodes_are_left_out_and_a_head_without_cpus_is_reserved() -> None:
    pool = pool_of_nodes(
        [
            listed("dead", alive=False, **GPU_NODE),
            listed("empty", memory=GIB),
            listed("head", GPU=1.0, accelerator_type__H20=1.0),
            listed("work", CPU=4.0),
        ]
    )
    assert [node.name for node in pool.nodes] == ["head", "work"]
    assert pool.device("head/cpu:0").reserved
    assert not pool.device("work/cpu:0").reserved


@pytest.mark.parametrize(
    ("types", "found"),
    [
        (("A100", "A100-80G"), "A100-SXM-80GB"),
        (("A100", "A100-40G"), "A100-SXM-40GB"),
        (("L40S",), "L40S-48GB"),
        (("L20",), "L20-48GB"),
        (("H100", "H100-SXM-80GB"), "H100-SXM-80GB"),
    ],
)
def test_types_that_ray_knows_are_devices_of_the_catalogue(
    types: tuple[str, ...], found: str
) -> None:
    resources = {f"accelerator_type__{one}": 1.0 for one in types}
    (group,) = pool_of_nodes([listed("a", CPU=96.0, GPU=8.0, **resources)]).groups()
    assert group.machine.spec.name == found


def test_two_nodes_of_one_host_have_names_of_their_own() -> None:
    pool = pool_of_nodes([listed("a", node_id="2", CPU=1.0), listed("a", node_id="1", CPU=2.0)])
    assert [(node.name, node.num_cores) for node in pool.nodes] == [("a", 2), ("a#2", 1)]


def test_a_fraction_of_a_device_is_none() -> None:
    (node,) = pool_of_nodes([listed("a", CPU=1.5, GPU=0.5)]).nodes
    assert [device.id for device in node.devices] == ["cpu:0"]
    assert node.num_cores == 1


@pytest.mark.parametrize(
    ("resources", "found"),
    [
        ({"GPU": 8.0}, "accelerator types nothing, and 0 found by the node itself"),
        (
            {"GPU": 8.0, "accelerator_type__T4": 1.0},
            "accelerator types T4, and 0 found by the node itself",
        ),
        (
            {"NPU": 8.0, "accelerator_type__H100": 1.0},
            "accelerator types H100, and 0 found by the node itself",
        ),
        # Ray calls those of 40 and of 80 GB so.
        (
            {"GPU": 8.0, "accelerator_type__A100": 1.0},
            "accelerator types A100, and 0 found by the node itself",
        ),
    ],
)
def test_devices_of_a_type_that_nobody_knows_are_refused(
    resources: dict[str, float], found: str
) -> None:
    with pytest.raises(ConfigError, match="nothing says how much memory") as caught:
        pool_of_nodes([listed("a", CPU=1.0, **resources)])
    assert caught.value.found == found


def test_accelerators_are_those_that_their_node_reports() -> None:
    card = {"type": "cuda", "name": "NVIDIA T4", "memory_bytes": 15 * GIB, "bfloat16": False}
    report = [{"id": f"cuda:{index}", **card} for index in range(4)]
    (node,) = pool_of_nodes([listed("a", CPU=4.0, GPU=3.0) | {"Report": report}]).nodes
    # Of four cards, Ray was given three.
    assert [(d.id, d.name, d.memory_bytes) for d in node.devices[1:]] == [
        (f"cuda:{index}", "NVIDIA T4", 15 * GIB) for index in range(3)
    ]


def test_a_cluster_without_a_usable_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="no node that can be used") as caught:
        pool_of_nodes([listed("a", alive=False, CPU=1.0)])
    assert caught.value.found == "1 nodes, 0 alive"


def test_without_ray_the_way_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_module", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed") as caught:
        ask_ray()
    assert "flowrl[ray]" in str(caught.value.hint)


def pretend(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `ray` that the asking process imports."""
    package = folder / "ray"
    package.mkdir()
    (package / "__init__.py").write_text(body)
    (package / "util").mkdir()
    (package / "util" / "scheduling_strategies.py").write_text("NodeAffinitySchedulingStrategy = 0")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(module, "find_module", lambda name: True)


def test_what_ray_answers_is_read_between_what_it_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
from types import SimpleNamespace as Some
def init(address, **options): print("Connecting to", address)
def nodes(): return [{"Alive": True, "NodeID": "1", "NodeName": "a", "Resources": {"CPU": 2.0}}]
def remote(function): return function
def get_runtime_context(): return Some(get_node_id=lambda: "1")
def shutdown(): print("bye")
"""
    pretend(tmp_path, body, monkeypatch)
    (node,) = ray_pool("ray:192.0.2.2:6379").nodes
    assert (node.name, node.num_cores) == ("a", 2)


def test_a_cluster_that_cannot_be_listed_says_what_ray_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def init(address, **options): raise ConnectionError(f'nobody at {address}')"
    pretend(tmp_path, body, monkeypatch)
    with pytest.raises(ConfigError, match="no Ray cluster at h:1 could be listed") as caught:
        ray_pool("ray:h:1")
    assert caught.value.found == "ConnectionError: nobody at h:1"


def test_a_cluster_that_does_not_answer_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, "import threading\nthreading.Event().wait()", monkeypatch)
    with pytest.raises(ConfigError, match=r"found from here answered within 0\.2 s"):
        ray_pool(timeout_s=0.2)


def test_a_config_that_names_ray_is_planned_for_its_cluster(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of_nodes([listed("a", CPU=4.0, memory=64.0 * GIB)])
    asked: list[str] = []

    def answer(cluster: str) -> Any:
        asked.append(cluster)
        return pool

    monkeypatch.setattr(module, "ray_pool", answer)
    monkeypatch.chdir(repository)
    compiled = fl.compile(None, "configs/quickstart.yaml", overrides=["cluster=ray:h:1"])
    assert asked == ["ray:h:1"]
    (device,) = compiled.stages[-1].plan.pool.devices
    assert (device.node, device.num_cores) == ("a", 4)


def machine(*accelerators: str) -> ResourcePool:
    """What this machine is taken for: a CPU, and cards."""
    cpu = Device(id="cpu:0", type="cpu", name="EPYC", memory_bytes=64 * GIB, num_cores=2)
    cards = [
        Device(id=id_, type=id_.partition(":")[0], name="card", memory_bytes=GIB)
        for id_ in accelerators
    ]
    node = ClusterNode(name="x", devices=(cpu, *cards), memory_bytes=64 * GIB, num_cores=2)
    return ResourcePool(nodes=(node,))


def joined(
    monkeypatch: pytest.MonkeyPatch, here: ResourcePool, *nodes: Mapping[str, object]
) -> ResourcePool:
    monkeypatch.setenv("RAY_ADDRESS", "h:1")
    monkeypatch.setattr(module, "ask_ray", lambda address: list(nodes))
    monkeypatch.setattr(module, "discover", lambda: here)
    pool = joined_pool()
    assert pool is not None
    return pool


def test_a_run_that_joins_a_cluster_has_this_node_and_the_cpus_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (node,) = joined(
        monkeypatch,
        machine("cuda:0", "cuda:1", "npu:0"),
        listed("x", CPU=2.0, GPU=1.0) | {"Here": True},
        listed("y", CPU=6.0, GPU=8.0),
        listed("dead", alive=False, CPU=64.0),
    ).nodes
    # Ray was given one of the two GPUs, and not the NPU.
    assert [device.id for device in node.devices] == ["cpu:0", "cuda:0"]
    assert (node.devices[0].name, node.devices[0].num_cores) == ("EPYC", 8)


def test_training_on_a_cpu_of_a_cluster_with_accelerators_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joined(
        monkeypatch,
        machine(),
        listed("x", CPU=2.0) | {"Here": True},
        listed("y", GPU=4.0),
    )
    (said,) = caplog.messages
    assert said.startswith("RAY_ADDRESS=h:1: models are trained on the CPU of this node")
    assert "the cluster has 4 GPU" in said


def test_without_an_address_a_run_has_the_devices_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert joined_pool() is None


@pytest.mark.parametrize(("executor", "cores"), [("ray", 8), ("local", 2)])
def test_only_a_run_with_ray_is_planned_for_the_cluster_that_it_joins(
    repository: Path, monkeypatch: pytest.MonkeyPatch, executor: str, cores: int
) -> None:
    nodes = [listed("x", CPU=2.0) | {"Here": True}, listed("y", CPU=6.0)]
    joined(monkeypatch, machine(), *nodes)
    monkeypatch.setattr("flowrl.cluster.discover.discover", machine)
    monkeypatch.chdir(repository)
    compiled = fl.compile(None, "configs/quickstart.yaml", overrides=[f"executor={executor}"])
    stage = compiled.stages[-1]
    assert stage.local is not None
    assert stage.local.request.num_cores == cores
    # Of the device, which a resumed run finds on any machine.
    assert [p.devices for p in stage.plan.placements if p.role == "actor"] == [("cpu:0",)]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_a_real_cluster_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # Ray sets its own: what is set here is taken back.
    monkeypatch.setenv("PYTHONBREAKPOINT", "pdb.set_trace")
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=8,
        resources={"accelerator_type:H100": 1},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    try:
        address = ray.get_runtime_context().gcs_address
        pool = ray_pool(f"ray:{address}", timeout_s=60)
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(module, "discover", machine)
        run_pool = joined_pool()
    finally:
        ray.shutdown()
    (group,) = pool.groups()
    assert (group.machine.spec.name, group.node_size) == ("H100-SXM-80GB", 8)
    assert run_pool is not None
    assert run_pool.nodes[0].num_cores == 2
    assert sys.modules.get("ray") is ray
