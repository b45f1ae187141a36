"""Runs on a Ray cluster of three simulated nodes, of which one is removed without warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import BackendError
from flowrl.observe.rows import StepMetrics
from tests.ray.test_ray_runs import learned, run
from tests.runtime.many_programs import games_of
from tests.runtime.tiny_runs import WatchedDisplay, outcome

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="the Ray executor needs Ray: pip install 'flowrl[ray]'"
)

DEADLINE_S = 60.0
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head with one CPU, on which runs are, and two nodes with two CPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, namespace="nodes", logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


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


@pytest.mark.parametrize("lost", ["actor.generate[0]", "verifier.score"])
def test_workers_of_a_node_that_is_removed_go_on_on_another_one(
    lost: str, nodes: Any, tmp_path: Path, expected: tuple[list[str], bytes]
):
    before: dict[str, str] = {}

    def act(placed: dict[str, str]) -> None:
        before.update(placed)
        remove(nodes, placed[lost])

    folder = run(tmp_path, "ray", 2, Nodes(act))
    nodes.add_node(num_cpus=2)
    assert learned(folder) == expected
    assert before["actor.generate[0]"] == before["actor.generate[1]"] != before["verifier.score"]


def test_engines_for_which_no_node_is_left_end_the_run_with_what_is_missing(
    nodes: Any, tmp_path: Path
):
    def act(placed: dict[str, str]) -> None:
        for node in list(nodes.worker_nodes):
            nodes.remove_node(node, allow_graceful=False)

    with pytest.raises(BackendError, match=r"no place for actor\.generate") as caught:
        run(tmp_path, "ray", 2, Nodes(act))
    assert "1 node with 1 CPU, 0 free" in str(caught.value.found)
