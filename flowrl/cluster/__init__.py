"""Which machines and devices there are; `flowrl.cluster.discover` looks at this one."""

from __future__ import annotations

from flowrl.cluster.hardware import DeviceSpec, Machine, catalogue, device_spec
from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import (
    ClusterNode,
    Device,
    DeviceGroup,
    Link,
    ResourcePool,
    split_cpus,
)

__all__ = [
    "ClusterNode",
    "Device",
    "DeviceGroup",
    "DeviceSpec",
    "Link",
    "Machine",
    "ResourcePool",
    "catalogue",
    "device_spec",
    "load_cluster",
    "split_cpus",
]
