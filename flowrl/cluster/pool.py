"""The machines that a job may use: nodes, their devices, and the links between them.

Pure data. A pool describes what is there; it reserves nothing. Sizes are in bytes.

Addresses: a device's `id` (`cpu:0`, `cuda:3`, `npu:0`) is the name that the process on its node
uses for it, so after `CUDA_VISIBLE_DEVICES=2,3` the first visible card is `cuda:0`. In a pool of
one node the address of a device is its id; in a larger pool it is `node/id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl.cluster.hardware import DeviceSpec, Machine, find_spec
from flowrl.errors import PlanError
from flowrl.wording import counted

CPU = "CPU"
"""The catalogue's name of a core, whatever the product is called."""


MEMORY_SHARE = 0.9
"""Of an accelerator's memory, unless `plan.memory_share` says another: what vLLM and SGLang take by
themselves. The rest is for what no formula knows: memory of communication and graphs outside of the
framework's allocator, and what this cannot give out because it is in pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Something that computes and has memory.

    Attributes:
        id: `type:index`, as the process on its node names it.
        type: `cpu`, `cuda` or `npu`.
        name: Of the product, as its driver reports it.
        memory_bytes: Memory that this process could ever use: the card's, or the machine's within
            the limit of its control group.
        available_bytes: What was free of it when the pool was made; None where nobody measured.
        num_cores: CPU cores that this process may use; 0 for accelerators.
        bfloat16: It computes in bfloat16 at full speed.
        reserved: Kept for others: the planner never places a role on it.
        share: Of an accelerator's memory, what plans may fill.
        spec: Its figures where the cluster file gives some; else the catalogue's of that name are
            taken.
    """

    id: str
    type: str
    name: str
    memory_bytes: int
    available_bytes: int | None = None
    num_cores: int = 0
    bfloat16: bool = False
    reserved: bool = False
    share: float = MEMORY_SHARE
    spec: DeviceSpec | None = None

    @property
    def free_bytes(self) -> int:
        """The free memory where it is known, else all of it."""
        if self.available_bytes is None:
            return self.memory_bytes
        return min(self.memory_bytes, self.available_bytes)

    @property
    def budget_bytes(self) -> int:
        """What a plan may use: of a CPU what is free, of an accelerator the `share` of it."""
        return self.free_bytes if self.type == "cpu" else int(self.share * self.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection.

    Attributes:
        ends: Ids of two devices of the node; `*` stands for every one, `network` for other nodes.
        kind: `nvlink`, `hccs`, `pcie` (to the host too) or `network`.
        bytes_per_s: Of one device, in one direction.
    """

    ends: tuple[str, str]
    kind: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine."""

    name: str
    devices: tuple[Device, ...]
    memory_bytes: int
    num_cores: int
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Equal devices in nodes that hold equally many of them.

    Attributes:
        device: What each of them is; its id is that of the first.
        spec: Its figures, with the links of its node; None for a device that is in no catalogue.
        node_size: Devices of a node.
        addresses: Node by node.
        budget_bytes: What a plan may use of each: of the one with least.
        in_part: Its nodes have more of these devices, which idle.
        host_cores: CPU cores of each node's host.
        host_bytes: Memory of each node's host, of the one that has least.
        spare_cores: CPU cores of the pool's nodes without accelerators; 0 of a group of CPUs.
        spare: The CPUs that these are.
        spare_bytes: Memory of the one of these nodes that has least.
    """

    device: Device
    spec: DeviceSpec | None
    node_size: int
    addresses: tuple[str, ...]
    budget_bytes: int
    in_part: bool = False
    host_cores: int = 0
    host_bytes: int = 0
    spare_cores: int = 0
    spare: tuple[str, ...] = ()
    spare_bytes: int = 0

    @property
    def kind(self) -> str:
        """The catalogue's name of its devices, where it has them, whatever their driver says."""
        return self.device.name if self.spec is None else self.spec.name

    @property
    def num_nodes(self) -> int:
        """Nodes that the group is in."""
        return len(self.addresses) // self.node_size

    @property
    def machine(self) -> Machine:
        """What times follow from.

        Raises:
            PlanError: nothing is known of the device but its name and memory.
        """
        if self.spec is None:
            raise PlanError(
                f"no figures are known of {self.device.name}, so no time can be predicted",
                where=f"cluster: {self.addresses[0]}",
                hint="name a device of configs/hardware, or give tflops, memory_tb_per_s and links "
                "in the cluster file",
            )
        return Machine(spec=self.spec, node_size=self.node_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePool:
    """All machines of a job.

    Attributes:
        nodes: At least one.
        warnings: What discovery could not find out, one sentence each; for people.
    """

    nodes: tuple[ClusterNode, ...]
    warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, ClusterNode, Device]]:
        """`(address, node, device)` of every device, in order."""
        for node in self.nodes:
            for device in node.devices:
                yield self.address(node, device), node, device

    def address(self, node: ClusterNode, device: Device) -> str:
        """The name of a device, unique in the pool."""
        return device.id if len(self.nodes) == 1 else f"{node.name}/{device.id}"

    def device(self, address: str) -> Device:
        """The device at `address`.

        Raises:
            KeyError: there is none.
        """
        for node in self.nodes:
            if len(self.nodes) == 1 or address.startswith(f"{node.name}/"):
                for device in node.devices:
                    if self.address(node, device) == address:
                        return device
        raise KeyError(address)

    def filled_to(self, share: float) -> ResourcePool:
        """The same, in which plans may fill this share of each accelerator's memory."""
        if all(device.share == share for node in self.nodes for device in node.devices):
            return self
        done: dict[int, tuple[Device, ...]] = {}  # large clusters have one tuple for many nodes
        nodes = []
        for node in self.nodes:
            if id(node.devices) not in done:
                done[id(node.devices)] = tuple(replace(one, share=share) for one in node.devices)
            nodes.append(replace(node, devices=done[id(node.devices)]))
        return replace(self, nodes=tuple(nodes))

    def groups(self, device_type: str | None = None) -> tuple[DeviceGroup, ...]:
        """The unreserved devices, in sets that are as large as possible and equal inside.

        Equal are devices of the same kind and memory, in nodes with the same links that hold
        equally many of them. How much of their memory is free may differ.

        Args:
            device_type: None takes all accelerators, or the CPUs where there is none.
        """
        accelerated = any(kind != "cpu" for kind in self.types)
        members: dict[object, list[tuple[ClusterNode, list[Device]]]] = {}
        # Nodes that were expanded from one entry share their devices; each such tuple is sorted
        # into kinds once.
        sorted_once: dict[int, list[tuple[object, list[Device]]]] = {}
        spare: list[ClusterNode] = []
        for node in self.nodes:
            kinds = sorted_once.get(id(node.devices))
            if kinds is None:
                kinds = sorted_once[id(node.devices)] = _kinds(node, device_type, accelerated)
            for kind, devices in kinds:
                members.setdefault((kind, node.links), []).append((node, devices))
            if all(device.type == "cpu" for device in node.devices) and not kinds:
                spare.append(node)
        return tuple(self._group(nodes, spare) for nodes in members.values())

    def _group(
        self, nodes: list[tuple[ClusterNode, list[Device]]], spare: list[ClusterNode]
    ) -> DeviceGroup:
        first_node, first = nodes[0]
        beside = [(node, device) for node in spare for device in node.devices]
        free = [(node, device) for node, device in beside if not device.reserved]
        return DeviceGroup(
            device=first[0],
            spec=_spec(first_node, first[0]),
            node_size=len(first),
            addresses=tuple(
                self.address(node, device) for node, devices in nodes for device in devices
            ),
            budget_bytes=min(device.budget_bytes for _, devices in nodes for device in devices),
            host_cores=min(node.num_cores for node, _ in nodes),
            host_bytes=min(node.memory_bytes for node, _ in nodes),
            spare_cores=sum(device.num_cores for _, device in free),
            spare=tuple(self.address(node, device) for node, device in free),
            spare_bytes=min((node.memory_bytes for node, _ in free), default=0),
        )

    @property
    def types(self) -> frozenset[str]:
        """Device types that are there and not reserved."""
        return frozenset(device.type for _, _, device in self if not device.reserved)


def split_cpus(pool: ResourcePool, count: int) -> ResourcePool:
    """The pool with each CPU as `count` devices `cpu:0`, `cpu:1`, ... that share cores and memory.

    So several workers of one machine are placed apart. Links and accelerators stay.

    Raises:
        PlanError: a CPU has fewer cores.
    """
    return replace(pool, nodes=tuple(_split_node(node, count) for node in pool.nodes))


def _split_node(node: ClusterNode, count: int) -> ClusterNode:
    devices: list[Device] = []
    for device in node.devices:
        if device.type != "cpu":
            devices.append(device)
            continue
        if not 1 <= count <= device.num_cores:
            raise PlanError(
                f"a CPU of {counted(device.num_cores, 'core')} cannot be {count} devices",
                where=f"node {node.name}",
                expected="at least one core each",
                hint=f"ask for 1 to {device.num_cores}",
            )
        free = device.available_bytes
        part = replace(
            device,
            memory_bytes=device.memory_bytes // count,
            available_bytes=None if free is None else free // count,
        )
        cores, more = divmod(device.num_cores, count)
        first = sum(other.type == "cpu" for other in devices)
        for index in range(count):
            own = cores + (index < more)
            devices.append(replace(part, id=f"cpu:{first + index}", num_cores=own))
    return replace(node, devices=tuple(devices))


def _kinds(
    node: ClusterNode,
    device_type: str | None,
    accelerated: bool,
) -> list[tuple[object, list[Device]]]:
    """The unreserved devices of a node by what they are, with a key that equals for equal ones."""
    kinds: dict[object, list[Device]] = {}
    for device in node.devices:
        wanted = (
            device.type == device_type if device_type else (device.type != "cpu") == accelerated
        )
        if wanted and not device.reserved:
            key = replace(device, id="", available_bytes=None)
            kinds.setdefault(key, []).append(device)
    return [((key, len(devices)), devices) for key, devices in kinds.items()]


def _spec(node: ClusterNode, device: Device) -> DeviceSpec | None:
    """The figures of a device with the links of its node in the place of the catalogue's."""
    spec = device.spec or find_spec(device.name)
    if spec is None and device.type == "cpu":
        spec = find_spec(CPU)
    if spec is None:
        return None
    rates = {link.kind: link.bytes_per_s for link in node.links}
    if device.type == "cpu":
        # The figures of a core; what memory gives is taken to grow with the cores that ask.
        spec = replace(
            spec,
            flops=spec.flops * device.num_cores,
            memory_bytes_per_s=spec.memory_bytes_per_s * device.num_cores,
        )
    else:
        joined = [rates[kind] for kind in ("nvlink", "hccs") if kind in rates]
        if joined:
            spec = replace(spec, intra_bytes_per_s=max(joined))
        elif "pcie" in rates:
            # Cards that nothing else joins talk over PCIe.
            spec = replace(spec, intra_bytes_per_s=rates["pcie"])
        if "pcie" in rates:
            spec = replace(spec, host_bytes_per_s=rates["pcie"])
    if "network" in rates:
        spec = replace(spec, inter_bytes_per_s=rates["network"])
    return replace(spec, memory_bytes=device.memory_bytes)
