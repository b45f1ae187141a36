"""Cores and memory of a process, from files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowrl.cluster.cpu import cpu_device, read_cores, read_memory

GIB = 1 << 30

MEMINFO = """\
MemTotal:       67108864 kB
MemFree:         1048576 kB
MemAvailable:   33554432 kB
Buffers:           35968 kB
HugePages_Total:       0
"""


def machine(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


def test_without_control_groups_the_machine_s_own_numbers_count(tmp_path: Path) -> None:
    memory = read_memory(machine(tmp_path, {}))
    assert (memory.total, memory.available) == (64 * GIB, 32 * GIB)


def test_a_cgroup_v2_limit_cuts_memory_and_inactive_cache_is_available(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/job/memory.current": 5 * GIB,
            "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {2 * GIB}\nactive_file 9",
        },
    )
    memory = read_memory(root)
    assert (memory.total, memory.available) == (8 * GIB, 5 * GIB)


def test_a_limit_of_an_ancestor_counts_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job",
            "sys/fs/cgroup/user/memory.max": 4 * GIB,
            "sys/fs/cgroup/user/memory.current": GIB,
            "sys/fs/cgroup/user/job/memory.max": "max",
        },
    )
    memory = read_memory(root)
    assert (memory.total, memory.available) == (4 * GIB, 3 * GIB)


def test_cgroup_v1_limits_are_read_where_the_path_is_the_host_s(tmp_path: Path) -> None:
    # In a container the path names a folder that only the host sees; the mount's root binds.
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/x",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
        },
    )
    memory = read_memory(root)
    assert (memory.total, memory.available) == (2 * GIB, 3 * GIB // 2)


def test_the_v1_number_for_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 50 * GIB,
        },
    )
    assert read_memory(root).total == 64 * GIB


def test_a_group_over_its_limit_has_nothing_available(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
        },
    )
    assert read_memory(root).available == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/j", "sys/fs/cgroup/j/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/j", "sys/fs/cgroup/j/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/j", "sys/fs/cgroup/j/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 300000,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            },
            8,
        ),
    ],
)
def test_cores_are_the_affinity_cut_to_the_quota(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str | int],
    expected: int,
) -> None:
    cores(monkeypatch, 8)
    assert read_cores(machine(tmp_path, files)) == expected


def test_the_cpu_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor"
    device = cpu_device(machine(tmp_path, {"proc/cpuinfo": cpuinfo}))
    assert (device.id, device.type, device.name) == (
        "cpu:0",
        "cpu",
        "AMD EPYC 9654 96-Core Processor",
    )


def test_a_machine_without_proc_still_has_memory(tmp_path: Path) -> None:
    assert read_memory(tmp_path).total > 0
