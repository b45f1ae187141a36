"""The CPU of this machine, as far as this process may use it.

A container's limits are lower than the machine's: cores come from the scheduling affinity and the
CPU quota of the control groups, memory from their memory limit. Control groups nest, and every
ancestor's limit holds, so the smallest counts. Formats: Linux kernel documentation,
`admin-guide/cgroup-v2.rst` (`memory.max`, `cpu.max`) and `admin-guide/cgroup-v1/`
(`memory.limit_in_bytes`, `cpu.cfs_quota_us`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrl.cluster.pool import Device

# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Host memory in bytes: `total` within all limits, `available` right now."""

    total: int
    available: int


def cpu_device(root: Path = Path("/")) -> Device:
    """The CPU as one device. `root` is where `/proc` and `/sys` are looked for."""
    memory = read_memory(root)
    return Device(
        id="cpu:0",
        type="cpu",
        name=_cpu_name(root),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        num_cores=read_cores(root),
    )


def read_memory(root: Path = Path("/")) -> MemoryReading:
    """Memory of the machine, cut to the control groups' limits.

    A group's page cache that is inactive counts as available, because the kernel gives it back
    before it refuses an allocation.
    """
    total, available = _machine_memory(root)
    for group in _groups(root, "memory"):
        limit = _first_number(group / "memory.max", group / "memory.limit_in_bytes")
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _first_number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        cache = _stat(group / "memory.stat", "total_inactive_file", "inactive_file")
        total = min(total, limit)
        available = min(available, limit - max(used - cache, 0))
    return MemoryReading(total=total, available=max(available, 0))


def read_cores(root: Path = Path("/")) -> int:
    """Cores that this process can keep busy: affinity, cut to the CPU quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        quota, period = _cpu_quota(group)
        if quota is not None and period:
            # A quota of 1.5 cores keeps one thread fully busy, not two.
            cores = min(cores, int(quota / period))
    return max(cores, 1)


def _machine_memory(root: Path) -> tuple[int, int]:
    fields: dict[str, int] = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            fields[name] = int(parts[0]) * 1024
    if "MemTotal" in fields:
        total = fields["MemTotal"]
        return total, fields.get("MemAvailable", fields.get("MemFree", total))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group for `controller` and of all its ancestors."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controllers, mount / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            # Inside a container the path may be the host's and absent; its root still binds us.
            for depth in range(len(parts) + 1):
                folder = base.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


def _cpu_quota(group: Path) -> tuple[int | None, int]:
    words = _text(group / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]), int(words[1])
    quota = _first_number(group / "cpu.cfs_quota_us")
    return quota, _first_number(group / "cpu.cfs_period_us") or 0


def _first_number(*paths: Path) -> int | None:
    """The number in the first file that holds one; `max` and `-1` mean no limit."""
    for path in paths:
        word = _text(path).strip()
        if word.isdigit():
            return int(word)
    return None


def _stat(path: Path, *names: str) -> int:
    found = dict(line.split(None, 1) for line in _text(path).splitlines() if " " in line)
    for name in names:
        if name in found and found[name].strip().isdigit():
            return int(found[name])
    return 0


def _cpu_name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _text(path: Path) -> str:
    """A small system file; empty where it is absent or closed to us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
