"""The machines that a job may use: nodes, their devices, and the links between them.

Pure data. A pool describes what is there; it reserves nothing. Sizes are in bytes.

Addresses: a device's `id` (`cpu:0`, `cuda:3`, `npu:0`) is the name that the process on its node
uses for it, so after `CUDA_VISIBLE_DEVICES=2,3` the first visible card is `cuda:0`. In a pool of
one node the address of a device is its id; in a larger pool it is `node/id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ClusterNode", "Device", "Link", "ResourcePool"]


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
    """

    id: str
    type: str
    name: str
    memory_bytes: int
    available_bytes: int | None = None
    num_cores: int = 0
    bfloat16: bool = False
    reserved: bool = False

    @property
    def budget_bytes(self) -> int:
        """What a plan may use: the free memory where it is known, else all of it."""
        if self.available_bytes is None:
            return self.memory_bytes
        return min(self.memory_bytes, self.available_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection.

    Attributes:
        ends: Ids of two devices of the node; `*` stands for every one, `network` for other nodes.
        kind: `nvlink`, `hccs`, `pcie`, `network`, ...
        bytes_per_s: In one direction.
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
        for found, _, device in self:
            if found == address:
                return device
        raise KeyError(address)

    @property
    def types(self) -> frozenset[str]:
        """Device types that are there and not reserved."""
        return frozenset(device.type for _, _, device in self if not device.reserved)
