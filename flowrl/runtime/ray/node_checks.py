"""What `flowrl doctor --cluster` finds on each node of a Ray cluster.

A probe runs on every node: it names the versions there, answers with its clock, writes into the
shared folder, and exchanges an object with this process.
"""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowrl.errors import BackendError
from flowrl.runtime.ray.cluster import RayCluster
from flowrl.runtime.ray_access import ADDRESS

_PROBE_S = 60.0
_CLOCK_S = 1.0
_PAYLOAD = 16 << 20
_DISTRIBUTIONS = ("flowrl", "torch", "transformers", "ray", "vllm", "sglang")
_DRIVERS = {
    "NVIDIA driver": ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "Ascend driver": ("npu-smi", "info", "-t", "board", "-i", "0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """A line about a node; `problem` if something is to be done about it."""

    name: str
    found: str
    problem: bool = False
    hint: str = ""


class _Probe:
    """Runs on a node."""

    def versions(self) -> dict[str, str]:
        found = {"python": platform.python_version()}
        for name in _DISTRIBUTIONS:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        for name, command in _DRIVERS.items():
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=10, check=True
                )
            except (OSError, subprocess.SubprocessError):
                continue
            found[name] = next(iter(done.stdout.strip().splitlines()), "")
        return found

    def clock(self) -> float:
        return time.time()

    def write(self, folder: str, name: str, text: str) -> str:
        try:
            with (Path(folder) / name).open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as reason:
            return str(reason)
        return ""

    def received(self, shared: list[ray.ObjectRef[np.ndarray]]) -> float:
        began = time.perf_counter()
        ray.get(shared[0])
        return time.perf_counter() - began

    def sent(self) -> np.ndarray:
        return np.zeros(_PAYLOAD, np.uint8)


def check_nodes(folder: Path) -> list[NodeFinding]:
    """Returns what there is to say of each node of the cluster at `RAY_ADDRESS`.

    Args:
        folder: The folder of runs, which all nodes must see as this process does.

    Raises:
        BackendError: no cluster is named, or it cannot be joined.
    """
    if not os.environ.get(ADDRESS) and not ray.is_initialized():
        raise BackendError(
            "no cluster is named",
            where=f"flowrl doctor --cluster ({ADDRESS})",
            hint=f"{ADDRESS}=HOST:PORT flowrl doctor --cluster",
        )
    cluster = RayCluster()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        payload = ray.put(np.zeros(_PAYLOAD, np.uint8))
        here = ray.get_runtime_context().get_node_id()
        nodes = sorted(ray.nodes(), key=lambda node: (node["NodeID"] != here, node["NodeID"]))
        mine = _Probe().versions()
        return [
            finding
            for node in nodes
            if node["Alive"]
            for finding in _findings(node, folder.resolve(), payload, mine)
        ]
    finally:
        cluster.close()


def _findings(
    node: Mapping[str, Any], folder: Path, payload: Any, mine: Mapping[str, str]
) -> Iterator[NodeFinding]:
    name = f"node {node['NodeManagerHostname']} {node['NodeID'][:8]}"
    probe: Any = ray.remote(_Probe).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    )
    try:
        probe = probe.remote()
        yield _versions(name, _answer(probe.versions.remote()), mine)
        yield _clock(name, probe)
        yield _shared(name, probe, folder)
        yield _link(name, probe, payload)
    except ray.exceptions.RayError as reason:
        yield NodeFinding(
            name=name,
            found=f"no probe runs there: {' '.join(str(reason).split())[:200]}",
            problem=True,
            hint="install flowrl there, in the environment in which `ray start` runs",
        )


def _answer(call: Any) -> Any:
    return ray.get(call, timeout=_PROBE_S)


def _versions(name: str, found: Mapping[str, str], mine: Mapping[str, str]) -> NodeFinding:
    # Drivers may differ: a node has the devices that it has.
    differing = [name for name in mine if name not in _DRIVERS and found.get(name) != mine[name]]
    return NodeFinding(
        name=f"{name} versions",
        found=", ".join(f"{key} {value}" for key, value in found.items()),
        problem=bool(differing),
        hint="; ".join(f"install {name} {mine[name]} there, as here" for name in differing),
    )


def _clock(name: str, probe: Any) -> NodeFinding:
    began = time.time()
    there = _answer(probe.clock.remote())
    ended = time.time()
    offset, error = there - (began + ended) / 2, (ended - began) / 2
    return NodeFinding(
        name=f"{name} clock",
        found=f"{1000 * offset:+.1f} ms from this one, within {1000 * error:.1f} ms",
        problem=abs(offset) > _CLOCK_S + error,
        hint="set the clock there (NTP)" if abs(offset) > _CLOCK_S + error else "",
    )


def _shared(name: str, probe: Any, folder: Path) -> NodeFinding:
    file = folder / f".flowrl-doctor-{secrets.token_hex(8)}"
    text = secrets.token_hex(16)
    try:
        said = _answer(probe.write.remote(str(folder), file.name, text))
        seen = file.is_file() and file.read_text(encoding="utf-8") == text
    finally:
        file.unlink(missing_ok=True)
    problem = said or ("" if seen else "what it wrote is not there for this process")
    return NodeFinding(
        name=f"{name} folder",
        found=f"{folder}: {problem or 'written there, read here'}",
        problem=bool(problem),
        hint="mount one folder at that path on all nodes, and name it as runtime.runs"
        if problem
        else "",
    )


def _link(name: str, probe: Any, payload: Any) -> NodeFinding:
    there_s = _answer(probe.received.remote([payload]))
    made = probe.sent.remote()
    ray.wait([made], timeout=_PROBE_S, fetch_local=False)
    began = time.perf_counter()
    _answer(made)
    here_s = time.perf_counter() - began
    rates = [f"{_PAYLOAD / 1e6 / seconds:,.0f} MB/s" for seconds in (there_s, here_s)]
    return NodeFinding(name=f"{name} link", found=f"{rates[0]} to it, {rates[1]} from it")
