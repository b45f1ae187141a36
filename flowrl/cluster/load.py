"""Reads a description of machines (`cluster: PATH`), which need not be the ones at hand.

    nodes:
      - name: trainer
        count: 8                # trainer-0 ... trainer-7
        memory_gib: 1024
        cores: 96
        devices:
          - {type: cuda, count: 8, name: H100-SXM-80GB, memory_gib: 80}
        links:
          - {kind: nvlink, gb_per_s: 450}

Every node gets a CPU device with the node's memory and cores, whether or not it is listed.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowrl.cluster.pool import ClusterNode, Device, Link, ResourcePool
from flowrl.errors import ConfigError

__all__ = ["load_cluster"]

GIB = 1 << 30


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _DeviceEntry(_Section):
    type: Literal["cuda", "npu"]
    count: int = Field(default=1, ge=1)
    name: str = Field(min_length=1)
    memory_gib: float = Field(gt=0)
    bfloat16: bool = True
    reserved: bool = False


class _LinkEntry(_Section):
    kind: Literal["nvlink", "hccs", "pcie", "network"]
    gb_per_s: float = Field(gt=0)


class _NodeEntry(_Section):
    name: str = Field(min_length=1)
    count: int = Field(default=1, ge=1)
    memory_gib: float = Field(gt=0)
    cores: int = Field(ge=1)
    cpu: str = "CPU"
    devices: tuple[_DeviceEntry, ...] = ()
    links: tuple[_LinkEntry, ...] = ()


class _ClusterFile(_Section):
    nodes: tuple[_NodeEntry, ...] = Field(min_length=1)


def load_cluster(path: Path) -> ResourcePool:
    """The pool that the YAML file at `path` describes.

    Raises:
        ConfigError: no such file, no YAML, or a key or value that is not understood.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the cluster file cannot be read: {error.strerror}",
            where=str(path),
            hint="give an existing file, or cluster=auto to use this machine",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not a YAML file: {error}", where=str(path)) from error
    try:
        file = _ClusterFile.model_validate(raw)
    except ValidationError as error:
        raise _as_config_error(path, error) from error
    nodes = [node for entry in file.nodes for node in _expand(entry)]
    names = [node.name for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two nodes are named {name!r}",
                where=str(path),
                hint="give each entry its own name; entries with count add -0, -1, ... to theirs",
            )
    return ResourcePool(nodes=tuple(nodes))


def _expand(entry: _NodeEntry) -> list[ClusterNode]:
    memory = int(entry.memory_gib * GIB)
    devices = [
        Device(id="cpu:0", type="cpu", name=entry.cpu, memory_bytes=memory, num_cores=entry.cores)
    ]
    counts = {"cuda": 0, "npu": 0}
    for group in entry.devices:
        for _ in range(group.count):
            devices.append(
                Device(
                    id=f"{group.type}:{counts[group.type]}",
                    type=group.type,
                    name=group.name,
                    memory_bytes=int(group.memory_gib * GIB),
                    bfloat16=group.bfloat16,
                    reserved=group.reserved,
                )
            )
            counts[group.type] += 1
    links = []
    for link in entry.links:
        end = "network" if link.kind == "network" else "*"
        links.append(Link(ends=("*", end), kind=link.kind, bytes_per_s=link.gb_per_s * 1e9))
    names = [entry.name] if entry.count == 1 else [f"{entry.name}-{i}" for i in range(entry.count)]
    return [
        ClusterNode(
            name=name,
            devices=tuple(devices),
            memory_bytes=memory,
            num_cores=entry.cores,
            links=tuple(links),
        )
        for name in names
    ]


_KEYS = sorted(
    {
        key
        for section in (_ClusterFile, _NodeEntry, _DeviceEntry, _LinkEntry)
        for key in section.model_fields
    }
)


def _as_config_error(path: Path, error: ValidationError) -> ConfigError:
    # A misspelt key is also a missing one; the key that is there says more.
    first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    where = f"{path}: {key}" if key else str(path)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][-1]), _KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(_KEYS)}"
        return ConfigError("unknown key", where=where, hint=hint)
    return ConfigError(
        str(first["msg"]),
        where=where,
        found=None if first["type"] == "missing" else repr(first["input"])[:80],
    )
