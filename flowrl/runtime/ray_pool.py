"""The machines of a running Ray cluster as a pool (`cluster: ray`, or `cluster: ray:ADDRESS`).

Ray's own listing has the nodes that are alive, the CPUs, GPUs and NPUs of each, and the type of its
accelerators; their memory and rates come from the hardware catalogue, for Ray knows neither. The
listing is made in a process of its own: joining a cluster starts threads, reads tokens and can wait
for minutes on an address where nothing answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec as find_module

from flowrl.cluster.hardware import DeviceSpec, abbreviated, catalogue, find_spec
from flowrl.cluster.load import SAME_MEMORY
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.errors import ConfigError
from flowrl.runtime.ray_access import use_token
from flowrl.wording import listing

__all__ = ["ask_ray", "pool_of_nodes", "ray_pool"]

_KINDS = {"GPU": "cuda", "NPU": "npu"}
"""Ray's resources that are devices."""

_TYPE = "accelerator_type:"

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
        for device in _devices(name, kind, device_type, resources)
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
    node: str, kind: str, device_type: str, resources: Mapping[str, float]
) -> list[Device]:
    types = [key.removeprefix(_TYPE) for key in resources if key.startswith(_TYPE)]
    known_types = (spec for spec in map(_spec_of_type, types) if spec and spec.type == device_type)
    specs = list({spec.name: spec for spec in known_types}.values())
    if len(specs) != 1:
        known = [name for name, spec in catalogue().items() if spec.type == device_type]
        raise ConfigError(
            f"Ray lists {int(resources[kind])} {kind} on node {node}, and nothing says how much "
            "memory they have",
            where="cluster",
            found=f"accelerator types {listing(types)}",
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
        for index in range(int(resources[kind]))
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

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    print(_MARK + json.dumps(ray.nodes(), default=str), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    _answer(sys.argv[1])
