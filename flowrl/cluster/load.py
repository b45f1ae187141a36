"""Reads a description of machines (`cluster: PATH`), which need not be the ones at hand.

    nodes:
      - name: trainer
        count: 8                # trainer-0 ... trainer-7
        memory_gib: 1024
        cores: 96
        devices:
          - {name: H100-SXM-80GB, count: 8}     # of configs/hardware: all is known by its name
        links:
          - {kind: network, gb_per_s: 25}       # in the place of what the catalogue says

A device of the catalogue may differ in `memory_gib` and in its rates (`tflops`, `memory_tb_per_s`,
`host_gb_per_s`). One that is not in it needs its `type` and `memory_gib`, and for predictions of
time its rates and links, and `efficiencies` where its name does not tell its generation.

`memory_gib` is what software reports, of which plans fill 90 %; `tflops` the peak in dense
bfloat16; all rates of links are of one device, in one direction: eight devices that share a network
card of 200 Gb/s have 25 / 8 GB/s each.

Every node gets a CPU device with the node's memory and cores. An entry `{type: cpu, count: 2}`
makes it two devices that share them, so that two workers can be placed apart; it says no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, StrictBool

from flowrl.cluster.efficiencies import Efficiencies
from flowrl.cluster.fields import Gib, HostRate, LinkRate, MemoryRate, Tflops
from flowrl.cluster.hardware import (
    DeviceSpec,
    abbreviated,
    catalogue,
    device_spec,
    find_spec,
)
from flowrl.cluster.pool import ClusterNode, Device, Link, ResourcePool, split_cpus
from flowrl.config.problems import validated
from flowrl.config.section import Int, Section
from flowrl.config.tree import Places
from flowrl.config.yaml_tree import FileKind, read_yaml_file
from flowrl.errors import ConfigError
from flowrl.wording import counted, listing

GIB = 1 << 30

MOST_CORES = 100_000
"""Of a node; a node of eight H100 has some 200."""

MOST_DEVICES = 1 << 17
"""In one file: more are a slip of the hand, and would take all memory before anything is said."""

SAME_MEMORY = 0.1
"""A device has the memory that a file gives where they differ by at most so much: what it is sold
with and what it reports are nearer than that."""


CLUSTER = FileKind(
    noun="cluster file",
    begins="begin with `nodes:`, as the files in configs/clusters do",
    hint="give a file that describes machines, like those in configs/clusters, "
    "or cluster=auto for this one",
    folders=(Path("configs/clusters"),),
)


class _DeviceEntry(Section):
    name: str | None = Field(default=None, min_length=1)
    type: Literal["cuda", "npu", "cpu"] | None = None
    count: Int = Field(default=1, ge=1)
    memory_gib: Gib | None = None
    bfloat16: StrictBool = True
    reserved: StrictBool = False
    tflops: Tflops | None = None
    memory_tb_per_s: MemoryRate | None = None
    host_gb_per_s: HostRate | None = None
    efficiencies: Efficiencies | None = None


class _LinkEntry(Section):
    kind: Literal["nvlink", "hccs", "pcie", "network"]
    gb_per_s: LinkRate


class _NodeEntry(Section):
    name: str = Field(min_length=1)
    count: Int = Field(default=1, ge=1)
    memory_gib: Gib
    cores: Int = Field(ge=1, le=MOST_CORES)
    cpu: str = "CPU"
    devices: tuple[_DeviceEntry, ...] = ()
    links: tuple[_LinkEntry, ...] = ()


class _ClusterFile(Section):
    nodes: tuple[_NodeEntry, ...] = Field(min_length=1)


def load_cluster(path: Path) -> ResourcePool:
    """The pool that the YAML file at `path` describes.

    Raises:
        ConfigError: no such file, no YAML, or a key or value that is not understood.
    """
    tree = read_yaml_file(path, CLUSTER)
    where = Places.of(tree, path)
    if "nodes" not in tree.entries:
        raise ConfigError(
            "this describes no machines",
            where=str(path),
            found=f"keys {', '.join(tree.entries)}"[:80],
            expected="a mapping with `nodes`",
            hint="name a file like those in configs/clusters; a configuration goes before it",
        )
    file = validated(_ClusterFile, tree.plain, where)
    _check_number(where, file)
    _check_links(where, file)
    nodes = [
        node
        for index, entry in enumerate(file.nodes)
        for node in _expand(entry, where, f"nodes.{index}")
    ]
    for name, times in Counter(node.name for node in nodes).items():
        if times > 1:
            raise ConfigError(
                f"two nodes are named {name!r}",
                where=where(_second(file, name)),
                hint="give each entry its own name; entries with count add -0, -1, ... to theirs",
            )
    return ResourcePool(nodes=tuple(nodes))


def _second(file: _ClusterFile, name: str) -> str:
    """The key of the entry that names a node for the second time."""
    named = [index for index, entry in enumerate(file.nodes) if name in _names(entry)]
    return f"nodes.{named[1]}.name"


def _names(entry: _NodeEntry) -> list[str]:
    """Of the nodes that an entry stands for."""
    if entry.count == 1:
        return [entry.name]
    return [f"{entry.name}-{index}" for index in range(entry.count)]


def _check_number(where: Places, file: _ClusterFile) -> None:
    total = 0
    for index, entry in enumerate(file.nodes):
        counts = [group.count for group in entry.devices]
        devices = entry.count * (1 + sum(counts))  # with the CPU of each node
        total += devices
        if total > MOST_DEVICES:
            raise ConfigError(
                "more devices than a cluster file may have",
                where=where(f"nodes.{index}"),
                found=f"{devices:,} devices (count {entry.count:,} of {1 + sum(counts):,})",
                expected=f"at most {MOST_DEVICES:,} in all, with a CPU of each node",
                hint="take a smaller count, of nodes or of their devices",
            )


def _check_links(where: Places, file: _ClusterFile) -> None:
    """A node has one rate of each kind of link: of two, nobody knows which one is meant."""
    for index, entry in enumerate(file.nodes):
        first: dict[str, int] = {}
        for at, link in enumerate(entry.links):
            before = first.setdefault(link.kind, at)
            if before != at:
                both = (before, at)
                rates = (f"{entry.links[one].gb_per_s:g}" for one in both)
                raise ConfigError(
                    f"two links of {entry.name!r} are of kind {link.kind}",
                    where=" and ".join(where(f"nodes.{index}.links.{one}") for one in both),
                    found=f"gb_per_s {' and '.join(rates)}",
                    expected="one link of each kind: the rate of one device, in one direction",
                    hint="take one of them out",
                )


def _expand(entry: _NodeEntry, where: Places, key: str) -> list[ClusterNode]:
    links = tuple(
        Link(
            ends=("*", "network" if link.kind == "network" else "*"),
            kind=link.kind,
            bytes_per_s=link.gb_per_s * 1e9,
        )
        for link in entry.links
    )
    memory = int(entry.memory_gib * GIB)
    one = Device(id="cpu:0", type="cpu", name=entry.cpu, memory_bytes=memory, num_cores=entry.cores)
    devices, cpus = [], 0
    counts = Counter[str]()
    for index, group in enumerate(entry.devices):
        if _is_cpu(group):
            _check_cpu(group, where, f"{key}.devices.{index}")
            cpus += group.count
            continue
        device = _device(group, links, where, f"{key}.devices.{index}")
        for _ in range(group.count):
            devices.append(replace(device, id=f"{device.type}:{counts[device.type]}"))
            counts[device.type] += 1
    node = ClusterNode(
        name=entry.name,
        devices=(one, *devices),
        memory_bytes=memory,
        num_cores=entry.cores,
        links=links,
    )
    if cpus > 1:
        if cpus > entry.cores:
            raise ConfigError(
                f"a node of {counted(entry.cores, 'core')} cannot have {cpus} CPU devices",
                where=where(f"{key}.devices"),
                expected="at least one core each",
                hint=f"set their count to at most {entry.cores}, or cores to at least {cpus}",
            )
        (node,) = split_cpus(ResourcePool(nodes=(node,)), cpus).nodes
    # The nodes share one tuple of devices, which keeps a pool of thousands small.
    return [replace(node, name=name) for name in _names(entry)]


def _is_cpu(entry: _DeviceEntry) -> bool:
    known = None if entry.name is None or entry.type is not None else find_spec(entry.name)
    return entry.type == "cpu" or (known is not None and known.type == "cpu")


def _check_cpu(entry: _DeviceEntry, where: Places, key: str) -> None:
    """Of the node's own CPU an entry says only how many devices it is.

    Raises:
        ConfigError: it says more, which would be ignored.
    """
    of_node = {"name": "cpu", "memory_gib": "memory_gib", "tflops": "cores"}
    for name in sorted(entry.model_fields_set - {"type", "count"}):
        if name == "name" and find_spec(entry.name or "") is not None:
            continue
        hint = f"take {name} out"
        if name in of_node:
            hint += f", or say `{of_node[name]}` of the node"
        raise ConfigError(
            f"a CPU has no {name} of its own in a node's devices",
            where=where(f"{key}.{name}"),
            found=str(getattr(entry, name)),
            expected="type and count: such devices share the node's cores and memory",
            hint=hint,
        )


def _device(entry: _DeviceEntry, links: tuple[Link, ...], where: Places, key: str) -> Device:
    """A device of an entry; its id is given later."""
    if entry.name is None:
        raise ConfigError(
            "a device needs a name",
            where=where(key),
            expected="one of configs/hardware, or any with type and memory_gib",
            hint=f"add name to it: one of {listing(catalogue())}",
        )
    known = _known(entry, entry.name, where(f"{key}.name"))
    if known is not None and entry.type not in (None, known.type):
        raise ConfigError(
            f"{known.name} is of another type",
            where=where(f"{key}.type"),
            found=entry.type,
            expected=known.type,
            hint="leave type out, for the catalogue knows it; a device of your own needs another "
            "name",
        )
    nominal = 0 if known is None else known.memory_bytes
    return Device(
        id="",
        type=known.type if known is not None else entry.type or "cuda",
        name=known.name if known is not None else entry.name,
        memory_bytes=nominal if entry.memory_gib is None else int(entry.memory_gib * GIB),
        bfloat16=entry.bfloat16,
        reserved=entry.reserved,
        spec=_own_spec(entry, known, links, where(key)),
    )


def _known(entry: _DeviceEntry, name: str, where: str) -> DeviceSpec | None:
    """What the catalogue has of it; None of a device that the entry describes by itself.

    A bare product may be one of several: an `A100` of 40 GiB is none with 80.
    """
    known = find_spec(name)
    if known is None:
        alone = entry.type is not None and entry.memory_gib is not None
        return None if alone else device_spec(name, where=where)
    if entry.memory_gib is None or name == known.name:
        return known
    nbytes = entry.memory_gib * GIB
    if abs(known.memory_bytes / nbytes - 1) <= SAME_MEMORY:
        return known
    meant = [one for one in abbreviated(name) if abs(one.memory_bytes / nbytes - 1) <= SAME_MEMORY]
    if len(meant) > 1:
        if None not in (entry.type, entry.tflops, entry.memory_tb_per_s, entry.host_gb_per_s):
            return None
        raise ConfigError(
            f"{name} with {entry.memory_gib:g} GiB may be any of {len(meant)} devices in the "
            "hardware catalogue",
            where=where,
            found=repr(name),
            expected=f"one of {listing([one.name for one in meant])}",
            hint=f"write {' or '.join(one.name for one in meant)}",
        )
    return meant[0] if meant else known


def _own_spec(
    entry: _DeviceEntry, known: DeviceSpec | None, links: tuple[Link, ...], where: str
) -> DeviceSpec | None:
    """The figures that an entry gives; None where it gives none."""
    flops = _scaled(entry.tflops, 1e12)
    memory = _scaled(entry.memory_tb_per_s, 1e12)
    host = _scaled(entry.host_gb_per_s, 1e9)
    if flops is None and memory is None and host is None and entry.efficiencies is None:
        return None
    if known is not None:
        # What was measured of the device is not that of one with another rate.
        return replace(
            known,
            flops=flops or known.flops,
            memory_bytes_per_s=memory or known.memory_bytes_per_s,
            host_bytes_per_s=host or known.host_bytes_per_s,
            measured_flops=known.measured_flops if flops is None else None,
            measured_memory_bytes_per_s=(
                known.measured_memory_bytes_per_s if memory is None else None
            ),
            measured_attention_flops=known.measured_attention_flops if flops is None else None,
            efficiencies=entry.efficiencies or known.efficiencies,
            source=f"{known.source}; changed by the cluster file",
        )
    rates = {link.kind: link.bytes_per_s for link in links}
    host = host or rates.get("pcie")
    intra = rates.get("nvlink") or rates.get("hccs") or rates.get("pcie")
    inter = rates.get("network")
    if not (flops and memory and host and intra and inter):
        rated = {"tflops": flops, "memory_tb_per_s": memory, "host_gb_per_s": host}
        linked = {"nvlink": intra, "network": inter}
        raise _incomplete(
            entry.name or "",
            rated=[name for name, value in rated.items() if value is None],
            linked=[name for name, value in linked.items() if value is None],
            where=where,
        )
    return DeviceSpec(
        name=entry.name or "",
        type=entry.type or "cuda",
        flops=flops,
        memory_bytes=int((entry.memory_gib or 0) * GIB),
        memory_bytes_per_s=memory,
        intra_bytes_per_s=intra,
        inter_bytes_per_s=inter,
        host_bytes_per_s=host,
        efficiencies=entry.efficiencies,
        source="the cluster file",
    )


def _incomplete(
    name: str, *, rated: Sequence[str], linked: Sequence[str], where: str
) -> ConfigError:
    """Of a device with some figures, which lacks others; the way out is what to add."""
    inside = " (or hccs or pcie)"
    lines = [
        f"- {{kind: {kind}, gb_per_s: ...}}{inside if kind == 'nvlink' else ''}" for kind in linked
    ]
    add = [f"{', '.join(f'{one}: ...' for one in rated)} to the device"] if rated else []
    if lines:
        add.append(
            f"{' and '.join(lines)} to the links of its node: what one device has of it, in one "
            "direction"
        )
    kinds = {"nvlink": "a link nvlink, hccs or pcie", "network": "a link network"}
    return ConfigError(
        f"{name} is in no catalogue, and its figures are not complete",
        where=where,
        expected=", ".join([*rated, *(kinds[kind] for kind in linked)]),
        hint=f"add {', and '.join(add)}",
    )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
