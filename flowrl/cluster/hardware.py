"""Figures of devices: the catalogue in `configs/hardware`, and machines made of its devices.

The catalogue holds what a data sheet says and, where somebody measured it, what a device reaches.
Every entry names its source; figures that no source gives are estimates, and say so. A wheel
carries the files of `configs/hardware`; from a checkout they are read where they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import yaml
from pydantic import Field

from flowrl.cluster.efficiencies import Efficiencies, efficiencies_of
from flowrl.cluster.fields import Gib, HostRate, LinkRate, MemoryRate, Tflops
from flowrl.config.problems import validated
from flowrl.config.section import Section
from flowrl.config.tree import Places
from flowrl.errors import ConfigError
from flowrl.wording import listing

GIB = 1 << 30

OWN_FIGURES = "name, type, memory_gib, tflops, memory_tb_per_s, host_gb_per_s and links"
"""What a cluster file says of a device that the catalogue has not."""

_FOLDERS = (
    Path(__file__).parent / "catalogue",
    Path(__file__).parents[2] / "configs" / "hardware",
)
"""Where a wheel and where a checkout has the catalogue."""


_VENDORS = ("nvidia", "tesla", "geforce", "huawei")
"""Words before the name of a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What a device can do. Rates are peaks; `measured_*` is what a program reached.

    Attributes:
        name: In the catalogue.
        type: `cuda`, `npu` or `cpu`.
        flops: Dense bfloat16 operations a second; of a CPU, those of one core in float32.
        memory_bytes: That software finds on the device, which is less than it is sold with; of a
            CPU nominal, for the machine's own is known better.
        memory_bytes_per_s: Read or written.
        intra_bytes_per_s: From one device to the others of its node, in one direction.
        inter_bytes_per_s: From one device to other nodes.
        host_bytes_per_s: Between the device and the memory of its host, in one direction.
        measured_flops: Of large matrix products.
        measured_memory_bytes_per_s: Of copies, bytes read and written.
        measured_attention_flops: Of a trainer's attention forward (FlashAttention 2).
        sibling_bytes_per_s: To the other die of the same card, where a card has two.
        efficiencies: Of which generation its kernels' efficiencies are, where somebody says it.
        source: Of the figures.
        aliases: Other names, as drivers and schedulers report them.
    """

    name: str
    type: Literal["cuda", "npu", "cpu"]
    flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    host_bytes_per_s: float
    measured_flops: float | None = None
    measured_memory_bytes_per_s: float | None = None
    measured_attention_flops: float | None = None
    sibling_bytes_per_s: float | None = None
    efficiencies: Efficiencies | None = None
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def generation(self) -> Efficiencies | None:
        """Whose calibrated efficiencies hold: what was said, else by the name; None of neither."""
        return self.efficiencies or efficiencies_of(self.type, self.name)

    def __hash__(self) -> int:
        # Equal figures have equal names; a hash of all of them costs more than what it looks up.
        return hash(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices in equal nodes, as far as times follow from them.

    Attributes:
        node_size: Devices of a node.
    """

    spec: DeviceSpec
    node_size: int

    def __hash__(self) -> int:
        return hash((self.spec.name, self.node_size))


def catalogue() -> Mapping[str, DeviceSpec]:
    """Every device that is known, by name.

    Raises:
        ConfigError: a file of the catalogue is broken or absent.
    """
    return _read()[0]


def device_spec(name: str, *, where: str | None = None) -> DeviceSpec:
    """The figures of a device by its name, by one that drivers give it, or by some words of either.

    `A100` and `a100-80gb` are A100-SXM-80GB, as long as no other device has these words.

    Args:
        where: The file and key that name it, for messages.

    Raises:
        ConfigError: the catalogue has no such device, or several.
    """
    spec = find_spec(name)
    if spec is not None:
        return spec
    meant = abbreviated(name)
    if len(meant) == 1:
        return meant[0]
    if meant:
        names = [one.name for one in meant]
        raise ConfigError(
            f"{name} may be any of {len(meant)} devices in the hardware catalogue",
            where=where,
            found=repr(name),
            expected=f"one of {listing(names)}",
            hint=f"write {' or '.join(names)}",
        )
    raise ConfigError(
        "no such device in the hardware catalogue",
        where=where,
        found=repr(name),
        expected=f"one of {listing(_nearest_first(name))}",
        hint="take the one that is meant; or add one of your own to the files of configs/hardware, "
        f"or describe it in a cluster file: {OWN_FIGURES}",
    )


def _nearest_first(name: str) -> list[str]:
    """All devices; the first have names most like this one: in their first words, then in all."""

    def likeness(one: DeviceSpec) -> tuple[float, float]:
        known = [one.name, *one.aliases]
        firsts = (_alike(_words(name)[:1], _words(other)[:1]) for other in known)
        return max(firsts), max(_alike(_words(name), _words(other)) for other in known)

    return [one.name for one in sorted(catalogue().values(), key=likeness, reverse=True)]


def _alike(one: Sequence[str], other: Sequence[str]) -> float:
    return SequenceMatcher(None, " ".join(one), " ".join(other)).ratio()


def find_spec(name: str) -> DeviceSpec | None:
    """The figures of a device, or None where the catalogue has none.

    Case makes no difference, nor does what stands between words, nor the vendor before them:
    drivers and schedulers write `NVIDIA A100-SXM4-40GB`, `A100-SXM4-40GB` and
    `nvidia-a100-sxm4-40gb` for one device.
    """
    by_name, by_alias = _read()
    return by_name.get(name) or by_alias.get(_spelling(name))


def abbreviated(name: str) -> list[DeviceSpec]:
    """The devices with a name that has all words of this one, in their order."""
    wanted = _words(name)
    found: dict[str, DeviceSpec] = {}
    by_name, by_alias = _read()
    for known, spec in (*by_name.items(), *by_alias.items()):
        words = iter(_words(known))
        if wanted and all(word in words for word in wanted):
            found.setdefault(spec.name, spec)
    return list(found.values())


def _spelling(name: str) -> str:
    words = _words(name)
    while len(words) > 1 and words[0] in _VENDORS:
        del words[0]
    return " ".join(words)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.casefold()) if word]


class _Measured(Section):
    bf16_tflops: Tflops | None = None
    memory_tb_per_s: MemoryRate | None = None
    attention_tflops: Tflops | None = None


class _Entry(Section):
    """One device as a file has it, in the units that data sheets use (GB are 1e9 bytes)."""

    type: Literal["cuda", "npu", "cpu"]
    bf16_tflops: Tflops
    memory_gib: Gib
    reported_gib: Gib | None = None
    memory_tb_per_s: MemoryRate
    intra_node_gb_per_s: LinkRate
    inter_node_gb_per_s: LinkRate
    host_gb_per_s: HostRate
    sibling_gb_per_s: LinkRate | None = None
    efficiencies: Efficiencies | None = None
    measured: _Measured = _Measured()
    source: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()


class _File(Section):
    devices: dict[str, _Entry] = Field(min_length=1)


@cache
def _read() -> tuple[Mapping[str, DeviceSpec], Mapping[str, DeviceSpec]]:
    """Devices by name, and by every name as `_spelling` has it."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    if folder is None:
        raise ConfigError(
            "the hardware catalogue is missing from this installation",
            where=str(_FOLDERS[0]),
            hint="install flowrl again, from a wheel or a checkout with configs/hardware",
        )
    by_name: dict[str, DeviceSpec] = {}
    by_alias: dict[str, DeviceSpec] = {}
    for path in sorted(folder.glob("*.yaml")):
        for name, entry in _read_file(path).devices.items():
            spec = _spec(name, entry)
            by_name[name] = spec
            for alias in (name, *entry.aliases):
                if by_alias.setdefault(_spelling(alias), spec) is not spec:
                    raise ConfigError(
                        f"two devices are named {alias!r}",
                        where=str(path),
                        hint="take the name or the alias away from one of them",
                    )
    return MappingProxyType(by_name), MappingProxyType(by_alias)


def _read_file(path: Path) -> _File:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"a file of the hardware catalogue cannot be read: {error}",
            where=str(path),
            hint="correct it, or remove it from the folder",
        ) from error
    return validated(_File, raw, Places(path))


def _spec(name: str, entry: _Entry) -> DeviceSpec:
    measured = entry.measured
    flops, attention = measured.bf16_tflops, measured.attention_tflops
    memory = measured.memory_tb_per_s
    sibling = entry.sibling_gb_per_s
    return DeviceSpec(
        name=name,
        type=entry.type,
        flops=entry.bf16_tflops * 1e12,
        memory_bytes=int((entry.reported_gib or entry.memory_gib) * GIB),
        memory_bytes_per_s=entry.memory_tb_per_s * 1e12,
        intra_bytes_per_s=entry.intra_node_gb_per_s * 1e9,
        inter_bytes_per_s=entry.inter_node_gb_per_s * 1e9,
        host_bytes_per_s=entry.host_gb_per_s * 1e9,
        measured_flops=None if flops is None else flops * 1e12,
        measured_memory_bytes_per_s=None if memory is None else memory * 1e12,
        measured_attention_flops=None if attention is None else attention * 1e12,
        sibling_bytes_per_s=None if sibling is None else sibling * 1e9,
        efficiencies=entry.efficiencies,
        source=entry.source,
        aliases=entry.aliases,
    )
