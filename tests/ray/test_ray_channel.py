"""What a channel to a Ray actor, and a cluster, do where something goes wrong; none is started."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

if find_spec("ray") is None:
    pytest.skip("channels are those of Ray's actors", allow_module_level=True)

from flowrl.errors import BackendError, WorkerDied
from flowrl.runtime.ray import ENDED
from flowrl.runtime.ray import channel as channels
from flowrl.runtime.ray.channel import ActorChannel
from flowrl.runtime.ray.own_node import OwnNode

DEADLINE_S = 60.0


class Method:
    """Stands for every method of an actor."""

    def options(self, **options: object) -> Method:
        return self

    def remote(self, *arguments: object) -> tuple[str, str]:
        return "messages", "bulk"


class Actor:
    send = close = take = assemble = Method()


def test_a_message_that_cannot_be_taken_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def deliver(messages: list[Any]) -> None:
        if messages == [("odd",)]:
            raise ValueError("nobody expects this")
        delivered.extend(messages)

    delivered: list[Any] = []
    monkeypatch.setattr(channels.ray, "get", lambda asked, timeout: [("odd",)])
    node = cast(OwnNode, None)
    channel = ActorChannel(Actor(), node, lambda folder: None, lambda output: None, deliver)
    channel._thread.join(DEADLINE_S)
    assert delivered == [(ENDED, "ValueError: nobody expects this")]
    assert channel._over.is_set()
    assert "cannot be taken" in caplog.text


def test_a_cluster_that_is_refused_is_left(monkeypatch: pytest.MonkeyPatch):
    from flowrl.runtime.ray import cluster

    def refuse() -> None:
        raise BackendError("everyone may come in")

    left: list[str] = []
    monkeypatch.delenv(cluster.AUTH_MODE, raising=False)
    monkeypatch.setattr(cluster, "_join", lambda folder: None)
    monkeypatch.setattr(cluster, "_refuse_open_cluster", refuse)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: left.append("left"))
    with pytest.raises(BackendError, match="everyone may come in"):
        cluster.RayCluster()
    assert left == ["left"]


def test_a_node_that_died_is_an_error_before_its_store_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from flowrl.runtime.ray import own_node

    path = tmp_path / "raylet"
    context = SimpleNamespace(get_node_id=lambda: "raylet")
    nodes = [{"NodeID": name, "RayletSocketName": str(tmp_path / name)} for name in ("raylet", "b")]
    monkeypatch.setattr(own_node.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(own_node.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(own_node.ray, "put", lambda value: ("put", value))
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(path))
        raylet.listen()
        node = OwnNode()
        accepted, _ = raylet.accept()
        with accepted:
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(node.put, range(3000)))
            assert found == [("put", number) for number in range(3000)]
    with pytest.raises(WorkerDied, match="the Ray node of this process died"):
        node.put(1)
    node.close()
