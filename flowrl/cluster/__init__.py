"""Which machines and devices there are."""

from __future__ import annotations

from flowrl.cluster.discover import discover
from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ClusterNode, Device, Link, ResourcePool

__all__ = ["ClusterNode", "Device", "Link", "ResourcePool", "discover", "load_cluster"]
