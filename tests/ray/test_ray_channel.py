"""What a channel to a Ray actor, and a cluster, do where something goes wrong; none is started."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

if find_spec("ray") is None:
    pytest.skip("channels are those of Ray's actors", allow_module_level=True)

from flowrl.config.schema import RuntimeConfig
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import RoleName
from flowrl.runtime.ray import ENDED
from flowrl.runtime.ray import channel as channels
from flowrl.runtime.ray.channel import ActorChannel
from flowrl.runtime.ray.clients import ActorScorers
from flowrl.runtime.ray.own_node import OwnNode

DEADLINE_S = 60.0
LIMIT_S = 0.001
LATE = r"start_timeout_s=0\.001 seconds"


class SilentChannel:
    """The channel of an actor that never says anything."""

    def send(self, message: object) -> None: ...

    def close(self, grace_s: float) -> None: ...

    def receive(self, timeout_s: float) -> list[Any]:
        return []

    def ended(self) -> None: ...


def test_a_trainer_that_is_not_ready_in_time_is_an_error_of_every_call():
    from flowrl.runtime.ray.policies import ActorGroup

    def opened(deliver: object) -> Any:
        return SilentChannel()

    limits = RuntimeConfig(start_timeout_s=LIMIT_S)
    group = ActorGroup(RoleName("actor"), lambda batch: None, opened, ("open",), limits)
    with contextlib.closing(group), pytest.raises(WorkerDied, match=LATE) as late:
        group.call("offload").result(DEADLINE_S)
    assert late.value.where == "roles.actor"


def test_scorers_that_are_not_ready_in_time_are_an_error_and_replaced_ones_are_replaced_again():
    channels: list[SilentChannel] = []

    def opened() -> Any:
        channels.append(SilentChannel())
        if len(channels) == 2:
            channels[-1].receive = lambda timeout_s: [("ready",)]
        return channels[-1]

    with pytest.raises(WorkerDied, match=LATE):
        ActorScorers(opened, ("open",), LIMIT_S)
    scorers = ActorScorers(opened, ("open",), LIMIT_S)
    channels[-1].ended = lambda: "killed"

    def poll_on() -> None:
        while True:
            scorers.poll()

    with pytest.raises(WorkerDied, match=f"die before .*\n.*3 in a row, the last: .*{LATE}"):
        poll_on()
    assert len(channels) == 4


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


def test_files_that_are_too_large_for_ray_are_not_taken_for_a_wrong_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from flowrl.runtime.ray import cluster

    def refuse(**options: object) -> None:
        what = "Package size (600.00MiB) exceeds the maximum size of 512.00MiB."
        raise cluster.ray.exceptions.RuntimeEnvSetupError(what)

    monkeypatch.setenv(cluster.ADDRESS, "auto")
    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(BackendError, match=r"the files of rewards(.|\n)*600\.00MiB"):
        cluster._join(tmp_path)


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
