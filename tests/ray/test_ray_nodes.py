"""Runs on a Ray cluster of three simulated nodes, of which one is removed without warning."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.cli import doctor
from flowrl.config.roles import FreshModel, fresh_config_json
from flowrl.config.schema import RuntimeConfig
from flowrl.errors import BackendError
from flowrl.ids import engine_id
from flowrl.observe.rows import StepMetrics
from flowrl.runtime.channels import Bulk, Mailbox
from flowrl.runtime.ray.executor import RayExecutor
from tests.policy_contexts import policy_context
from tests.ray.test_ray_runs import learned, run
from tests.runtime.many_programs import games_of
from tests.runtime.tiny_runs import WatchedDisplay, outcome
from tests.sizes import every

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="the Ray executor needs Ray: pip install 'flowrl[ray]'"
)

DEADLINE_S = 60.0
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}
NODE: dict[str, Any] = {"num_cpus": 2, "num_gpus": 2, "resources": {"NPU": 2}}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head with one CPU, on which runs are, and two nodes; accelerators are numbers only."""
    import ray
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONBREAKPOINT", "pdb.set_trace")  # Ray sets its own: undo takes it back

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "num_gpus": 2,
            "include_dashboard": False,
            "_system_config": QUICK,
        },
    )
    for _ in range(2):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, namespace="nodes", logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


class Nodes(WatchedDisplay):
    """Notes after the second step on which node each worker is, and then acts."""

    def __init__(self, act: Callable[[dict[str, str]], None] = lambda nodes: None) -> None:
        super().__init__()
        self._act = act
        self.nodes: dict[str, str] = {}

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        if metrics.step == 2:
            self.nodes = nodes_of_actors()
            self._act(self.nodes)


def nodes_of_actors() -> dict[str, str]:
    """Returns the node of each actor that is alive, by its name."""
    import ray

    def node_of(name: str) -> str:
        call = ray.get_actor(name).__ray_call__.remote(
            lambda actor: ray.get_runtime_context().get_node_id()
        )
        return str(ray.get(call, timeout=DEADLINE_S))

    # The second actor of a name is NAME#2.
    return {name.partition("#")[0]: node_of(name) for name in ray.util.list_named_actors()}


def remove(nodes: Any, node_id: str) -> None:
    """Kills all processes of a node."""
    node = next(node for node in nodes.worker_nodes if node.node_id == node_id)
    nodes.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    """What a local run learns."""
    return learned(run(tmp_path_factory.mktemp("local"), "local"))


def test_an_environment_is_on_another_node_than_the_engine(nodes: Any, tmp_path: Path):
    display = Nodes()
    local = fl.run(None, games_of(tmp_path / "local"), display=WatchedDisplay()).folder
    games = games_of(tmp_path / "ray")
    assert outcome(fl.run(None, games, executor="ray", display=display).folder) == outcome(local)
    assert display.nodes["actor.generate[0]"] != display.nodes["game"]


def report(mailbox: Mailbox) -> None:
    """A worker that sends its environment."""
    mailbox.send(("environment", dict(os.environ)))


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("kind", "variable"), [("GPU", "CUDA_VISIBLE_DEVICES"), ("NPU", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_each_worker_sees_the_accelerator_that_it_was_given_and_no_other(kind: str, variable: str):
    from flowrl.runtime.ray.cluster import RayCluster

    cluster = RayCluster()
    names = [f"{kind}[0]", f"{kind}[1]"]
    cluster.places.reserve(names, {"CPU": 1, kind: 1})
    assert cluster.places.place(names[0]).node == cluster.places.place(names[1]).node
    seen = []
    for name in names:
        channel = cluster.start(name, f"{__name__}:report", placed=True)
        ((_, environment),) = channel.receive(DEADLINE_S)
        seen.append(environment[variable])  # type: ignore[index]
        channel.close(0.0)
    with pytest.raises(BackendError, match="no place for more") as caught:
        cluster.places.reserve(["more"], {"CPU": 1, kind: 3})
    cluster.close()
    assert sorted(seen) == ["0", "1"]
    assert caught.value.expected == f"1 worker with 1 CPU and 3 {kind}s each, on one node"


@pytest.mark.usefixtures("nodes")
def test_an_engine_on_an_accelerator_comes_as_far_as_the_device_that_is_not_here(tmp_path: Path):
    config = fresh_config_json(FreshModel(), vocab_size=8, eos_id=0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    executor = RayExecutor(RuntimeConfig())
    fleet = executor.open_fleet(
        [engine_id("actor", 0)],
        "torch",
        policy_context(tmp_path, device="cuda:5"),
        export=lambda folder: None,
        fallback=tmp_path,
        cores=(),
        most=1,
    )
    with contextlib.closing(executor), contextlib.closing(fleet), pytest.raises(BackendError) as e:
        fleet.wait_ready()
    assert "CUDA" in str(e.value)


@pytest.mark.usefixtures("nodes")
def test_the_accelerator_of_the_trainers_is_given_to_no_worker():
    from flowrl.runtime.ray.cluster import RayCluster

    cluster = RayCluster()
    own = cluster.own_device("GPU", "cuda:1")
    assert own in ("cuda:0", "cuda:1")
    assert cluster.own_device("NPU", "npu:0") == "npu:0"  # of which this node has none
    cluster.places.reserve(["worker"], {"GPU": 1, "node:__internal_head__": 0.001})
    channel = cluster.start("worker", f"{__name__}:report", placed=True)
    ((_, environment),) = channel.receive(DEADLINE_S)
    channel.close(0.0)
    cluster.close()
    assert {own, f"cuda:{environment['CUDA_VISIBLE_DEVICES']}"} == {"cuda:0", "cuda:1"}  # type: ignore[index]


def test_the_doctor_reports_each_node(
    nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert doctor.run(True, cluster=True, runs=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    found = {check["name"]: check["found"] for check in report["checks"]}
    for kind, told in (
        ("versions", "flowrl "),
        ("clock", "ms from this one"),
        ("folder", f"{tmp_path}: written there, read here"),
        ("link", "MB/s from it"),
    ):
        of_kind = [text for name, text in found.items() if name.endswith(f" {kind}")]
        assert len(of_kind) == len(nodes.list_all_nodes())
        assert all(told in text for text in of_kind)
    assert list(tmp_path.iterdir()) == []


def test_what_differs_between_a_node_and_this_process_is_a_problem(tmp_path: Path):
    from flowrl.runtime.ray import node_checks

    versions = node_checks._versions("n", {"torch": "2.9"}, {"torch": "2.10", "flowrl": "1"})
    assert versions.problem
    assert versions.hint == "install torch 2.10 there, as here; install flowrl 1 there, as here"


def joined(**environment: str) -> str:
    """Joins a cluster in a process of its own, and returns what that process says."""
    code = "from flowrl.runtime.ray.cluster import RayCluster\nRayCluster().close()"
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stderr


def test_a_cluster_lets_no_run_in_that_has_another_token(nodes: Any):
    said = joined(RAY_ADDRESS=nodes.address, RAY_AUTH_TOKEN="f" * 64)
    assert "the Ray cluster does not let this run in" in said
    assert "RAY_AUTH_MODE=token, the token of RAY_AUTH_TOKEN" in said
    assert "f" * 64 not in said


def test_an_address_at_which_nothing_listens_is_refused_without_waiting():
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        said = joined(RAY_ADDRESS=f"127.0.0.1:{taken.getsockname()[1]}")
    assert "nothing listens at its address" in said


def test_a_cluster_of_several_machines_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch):
    import ray

    from flowrl.runtime.ray.cluster import _refuse_open_cluster

    def nodes(*addresses: str) -> None:
        listed = [{"Alive": True, "NodeManagerAddress": address} for address in addresses]
        monkeypatch.setattr(ray, "nodes", lambda: listed)

    nodes("10.0.0.1", "10.0.0.1")
    _refuse_open_cluster()
    nodes("10.0.0.1", "10.0.0.2")
    with pytest.raises(BackendError, match=r"spans machines and asks for no token"):
        _refuse_open_cluster()


@pytest.mark.parametrize("lost", every(2, ["actor.generate[0]", "verifier.score"]))
def test_workers_of_a_node_that_is_removed_go_on_on_another_one(
    lost: str, nodes: Any, tmp_path: Path, expected: tuple[list[str], bytes]
):
    before: dict[str, str] = {}

    def act(placed: dict[str, str]) -> None:
        before.update(placed)
        remove(nodes, placed[lost])

    folder = run(tmp_path, "ray", 2, Nodes(act))
    nodes.add_node(**NODE)
    assert learned(folder) == expected
    assert before["actor.generate[0]"] == before["actor.generate[1]"] != before["verifier.score"]


def send_much(mailbox: Mailbox) -> None:
    """A worker that sends more than Ray puts into a message, and goes on."""
    mailbox.send(("much", Bulk(np.arange(1 << 18))))
    mailbox.receive()


def test_what_a_worker_has_sent_is_found_when_its_node_is_gone(nodes: Any):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from flowrl.runtime.ray.actor import from_store
    from flowrl.runtime.ray.cluster import RayCluster

    cluster = RayCluster()
    channel = cluster.start("sender", f"{__name__}:send_much")
    node = nodes_of_actors()["sender"]
    assert node != ray.get_runtime_context().get_node_id()
    ((_, sent),) = channel.receive(DEADLINE_S)
    assert isinstance(sent, Bulk)
    remove(nodes, node)
    assert channel._over.wait(DEADLINE_S)
    nodes.add_node(**NODE)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    read = ray.remote(from_store).options(num_cpus=0, scheduling_strategy=here)
    np.testing.assert_array_equal(
        ray.get(read.remote(sent.handle), timeout=DEADLINE_S), np.arange(1 << 18)
    )
    channel.close(0.0)
    cluster.close()


def test_engines_for_which_no_node_is_left_end_the_run_with_what_is_missing(
    nodes: Any, tmp_path: Path
):
    def act(placed: dict[str, str]) -> None:
        for node in list(nodes.worker_nodes):
            nodes.remove_node(node, allow_graceful=False)

    with pytest.raises(BackendError, match=r"no place for actor\.generate") as caught:
        # More steps than can be done before the actors of the lost nodes have died.
        run(tmp_path, "ray", 2, Nodes(act), steps=1000)
    assert "1 node with 1 CPU, 0 free" in str(caught.value.found)
