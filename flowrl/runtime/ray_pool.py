"""The machines of a running Ray cluster as a pool.

`cluster: ray` and `cluster: ray:ADDRESS` have all of it, for plans over many devices. With
`executor: ray` and `cluster: auto` it is the devices of this node, where models are trained, and
the CPUs of all nodes, because engines may be on any.

Ray's own listing has the nodes that are alive, the CPUs, GPUs and NPUs of each, and the type of its
accelerators. Names and memory of accelerators come from their node's own report, and where it has
none, from the hardware catalogue. All this is asked in a process of its own: joining a cluster
starts threads, reads tokens and can wait for minutes on an address where nothing answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec as find_module
from typing import Any, cast

from flowrl.cluster.discover import discover
from flowrl.cluster.hardware import DeviceSpec, abbreviated, catalogue, find_spec
from flowrl.cluster.load import SAME_MEMORY
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.errors import ConfigError
from flowrl.runtime.ray_access import ADDRESS, use_token
from flowrl.wording import listing

_log = logging.getLogger(__name__)

_KINDS = {"GPU": "cuda", "NPU": "npu"}
"""Ray's resources that are devices."""

_RAY_NAMES = {device_type: kind for kind, device_type in _KINDS.items()}

_TYPE = "accelerator_type:"

_HERE, _REPORT = "Here", "Report"
"""What is added to Ray's listing: this node, and the accelerators that a node itself finds."""

_REPORT_S = 20.0

_MARK = "flowrl-ray-nodes "
"""Before the one line that is read; Ray and its libraries print others."""


def ray_pool(cluster: str = "ray", *, timeout_s: float = 30.0) -> ResourcePool:
    """Returns the pool of a running Ray cluster.

    Args:
        cluster: `ray`, the cluster that Ray finds from here, or `ray:ADDRESS` (`host:port`, or
            `ray://host:port` of a Ray client server).
        timeout_s: Seconds within which it must answer.

    Raises:
        ConfigError: Ray is not installed, no cluster answers in time, none of its nodes can be
            used, or one has accelerators of a type that the hardware catalogue does not have.
    """
    named = cluster if cluster.startswith("ray://") else cluster.partition(":")[2]
    return pool_of_nodes(ask_ray(named or "auto", timeout_s=timeout_s))


def joined_pool() -> ResourcePool | None:
    """Returns what a run has that joins the cluster at `RAY_ADDRESS`; None without such a cluster.

    It is this node with the devices that it offers, and with the CPUs of all nodes.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers in time.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return None
    alive = [node for node in ask_ray(address) if node.get("Alive")]
    own = _resources([node for node in alive if node.get(_HERE)])
    total = _resources(alive)
    machine = discover()
    devices: list[Device] = []
    for device in machine.nodes[0].devices:
        if device.type == "cpu":
            devices.append(replace(device, num_cores=max(1, total["CPU"])))
        elif sum(each.type == device.type for each in devices) < own[_RAY_NAMES[device.type]]:
            devices.append(device)
    accelerators = [f"{total[kind]} {kind}" for kind in _KINDS if total[kind]]
    if accelerators and len(devices) == 1:
        _log.warning(
            "%s=%s: models are trained on the CPU of this node, which offers no accelerator; start "
            "the run on a node that does (the cluster has %s) to train there",
            ADDRESS,
            address,
            listing(accelerators),
        )
    node = replace(machine.nodes[0], devices=tuple(devices), num_cores=max(1, total["CPU"]))
    return replace(machine, nodes=(node,))


def _resources(nodes: Sequence[Mapping[str, object]]) -> Counter[str]:
    """Returns whole numbers of what nodes offer together, by Ray's names."""
    found = Counter[str]()
    for node in nodes:
        listed = cast("Mapping[str, float]", node.get("Resources", {}))
        found.update({kind: int(number) for kind, number in listed.items()})
    return found


def _named(address: str) -> str:
    """Returns the configuration's text for an address."""
    if address == "auto":
        return "ray"
    return address if address.startswith("ray://") else f"ray:{address}"


def ask_ray(address: str = "auto", *, timeout_s: float = 30.0) -> list[Mapping[str, object]]:
    """Returns the answer of `ray.nodes()`, called in a process that ends with the answer.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers in time.
    """
    if find_module("ray") is None:
        raise ConfigError(
            "Ray is not installed, so its cluster cannot be listed",
            where="cluster",
            found=f"cluster={_named(address)}",
            hint="pip install 'flowrl[ray]', or describe the machines in a YAML (cluster=PATH)",
        )
    where = "found from here" if address == "auto" else f"at {address}"
    hint = "start one with `ray start --head`, or give its address: cluster=ray:HOST:PORT"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, address],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"no Ray cluster {where} answered within {timeout_s:g} s", where="cluster", hint=hint
        ) from None
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            nodes: list[Mapping[str, object]] = json.loads(line.removeprefix(_MARK))
            return nodes
    said = [line for line in done.stderr.splitlines() if line.strip()]
    raise ConfigError(
        f"no Ray cluster {where} could be listed",
        where="cluster",
        found=said[-1].strip()[:300] if said else f"exit code {done.returncode}",
        hint=hint,
    )


def pool_of_nodes(nodes: Sequence[Mapping[str, object]]) -> ResourcePool:
    """Returns the pool of a listing in the form of `ray.nodes()`.

    Nodes that are dead, or that offer neither CPUs nor devices, are left out. A fraction of a
    device that Ray offers is none for a plan.

    Raises:
        ConfigError: as `ray_pool` does.
    """
    alive = sorted((node for node in nodes if node.get("Alive")), key=_order)
    taken: dict[str, int] = {}
    found: list[ClusterNode] = []
    for node in alive:
        made = _node(node, taken)
        if made is not None:
            found.append(made)
    if not found:
        raise ConfigError(
            "the Ray cluster has no node that can be used",
            where="cluster",
            found=f"{len(nodes)} nodes, {len(alive)} alive",
            expected="an alive node with CPUs or accelerators",
        )
    return ResourcePool(nodes=tuple(found))


def _order(node: Mapping[str, object]) -> tuple[str, str]:
    return _name(node), str(node.get("NodeID", ""))


def _name(node: Mapping[str, object]) -> str:
    for key in ("NodeManagerHostname", "NodeName", "NodeManagerAddress", "NodeID"):
        if node.get(key):
            return str(node[key])
    return "node"


def _node(node: Mapping[str, object], taken: dict[str, int]) -> ClusterNode | None:
    listed = node.get("Resources")
    resources = (
        {str(key): float(value) for key, value in listed.items()}
        if isinstance(listed, Mapping)
        else {}
    )
    name = _name(node)
    cores = int(resources.get("CPU", 0))
    devices = [
        device
        for kind, device_type in _KINDS.items()
        if int(resources.get(kind, 0)) > 0
        for device in _devices(name, kind, device_type, resources, node.get(_REPORT, ()))
    ]
    if cores < 1 and not devices:
        return None
    count = taken[name] = taken.get(name, 0) + 1
    # Ray's heap and its object store share what it takes of the machine's memory.
    memory = int(resources.get("memory", 0) + resources.get("object_store_memory", 0))
    cpu = Device(
        id="cpu:0",
        type="cpu",
        name="CPU",
        memory_bytes=memory,
        num_cores=max(1, cores),
        # A head that offers no CPU is kept free on purpose.
        reserved=cores < 1,
    )
    return ClusterNode(
        name=name if count == 1 else f"{name}#{count}",
        devices=(cpu, *devices),
        memory_bytes=memory,
        num_cores=cores,
    )


def _devices(
    node: str, kind: str, device_type: str, resources: Mapping[str, float], report: object
) -> list[Device]:
    number = int(resources[kind])
    listed = [Device(**each) for each in cast("Sequence[dict[str, Any]]", report)]
    if len(own := [each for each in listed if each.type == device_type]) >= number:
        return own[:number]
    types = [key.removeprefix(_TYPE) for key in resources if key.startswith(_TYPE)]
    known_types = (spec for spec in map(_spec_of_type, types) if spec and spec.type == device_type)
    specs = list({spec.name: spec for spec in known_types}.values())
    if len(specs) != 1:
        known = [name for name, spec in catalogue().items() if spec.type == device_type]
        raise ConfigError(
            f"Ray lists {number} {kind} on node {node}, and nothing says how much memory they have",
            where="cluster",
            found=f"accelerator types {listing(types)}, and {len(own)} found by the node itself",
            expected=f"one that the hardware catalogue knows, such as {listing(known)}",
            hint="start the node's Ray with --resources='{\"accelerator_type:NAME\": 1}', or "
            "describe the machines in a YAML (cluster=PATH)",
        )
    return [
        Device(
            id=f"{device_type}:{index}",
            type=device_type,
            name=specs[0].name,
            memory_bytes=specs[0].memory_bytes,
            bfloat16=True,
        )
        for index in range(number)
    ]


def _spec_of_type(name: str) -> DeviceSpec | None:
    """Returns the device with Ray's type name; None if unknown or ambiguous.

    It is ambiguous if another device with that name has less memory: `A100` has 40 or 80 GB.
    """
    spec = find_spec(name)
    others = () if spec is None or name == spec.name else abbreviated(name)
    if spec is None or any(
        other.memory_bytes < (1 - SAME_MEMORY) * spec.memory_bytes for other in others
    ):
        return None
    return spec


def _answer(address: str) -> None:
    """Prints the listing; what the child process does."""
    use_token()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    here, ask = ray.get_runtime_context().get_node_id(), ray.remote(_report)
    nodes = ray.nodes()
    reports = {}
    for node in nodes:
        node[_HERE] = node["NodeID"] == here
        if node["Alive"] and any(node["Resources"].get(kind) for kind in _KINDS):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            reports[node["NodeID"]] = ask.options(num_cpus=0, scheduling_strategy=there).remote()
    end = time.monotonic() + _REPORT_S
    for node in nodes:
        if node["NodeID"] in reports:
            # The hardware catalogue serves for a node that does not report.
            with contextlib.suppress(ray.exceptions.RayError):
                left = max(0.0, end - time.monotonic())
                node[_REPORT] = ray.get(reports[node["NodeID"]], timeout=left)
    print(_MARK + json.dumps(nodes, default=str), flush=True)
    ray.shutdown()


def _report() -> list[dict[str, object]]:
    """Returns the accelerators of the node on which it runs, from which Ray hides them."""
    (node,) = discover(environ={}).nodes
    return [asdict(device) for device in node.devices if device.type != "cpu"]


if __name__ == "__main__":
    _answer(sys.argv[1])
