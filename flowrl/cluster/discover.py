"""Finds the devices of this machine without importing an accelerator framework."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from flowrl.cluster.accelerators import cuda_devices, npu_devices
from flowrl.cluster.command import Runner, run_command
from flowrl.cluster.cpu import cpu_device
from flowrl.cluster.pool import ClusterNode, ResourcePool

logger = logging.getLogger(__name__)


def discover(
    *,
    run: Runner = run_command,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> ResourcePool:
    """This machine as a pool of one node: its CPU, then its GPUs, then its NPUs.

    What could not be found out is logged as a warning and kept in `ResourcePool.warnings`.

    Args:
        run: Runs a vendor's tool; tests give recorded output.
        environ: Environment variables; by default the process's own.
        root: Where `/proc`, `/sys` and `/dev` are looked for.
    """
    environ = os.environ if environ is None else environ
    cpu = cpu_device(root)
    cuda = cuda_devices(run, environ, cpu.memory_bytes)
    npu = npu_devices(run, environ, root)
    warnings = cuda.warnings + npu.warnings
    for warning in warnings:
        logger.warning("%s", warning)
    node = ClusterNode(
        name=platform.node() or "localhost",
        devices=(cpu, *cuda.devices, *npu.devices),
        memory_bytes=cpu.memory_bytes,
        num_cores=cpu.num_cores,
    )
    return ResourcePool(nodes=(node,), warnings=warnings)
