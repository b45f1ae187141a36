"""NVIDIA GPUs and Ascend NPUs of this machine, asked of their vendors' tools.

No framework is imported: `nvidia-smi` and `npu-smi` answer in a second where importing torch takes
several, and an installed torch says nothing about a card that it was not built for. A tool that is
absent means that there are no such devices; a tool that fails is a warning, never silence.

Visibility variables renumber devices, so ids count the visible ones in the variable's order:
- `CUDA_VISIBLE_DEVICES`: indices, or UUIDs or unique beginnings of them; the list ends at the first
  that is invalid (CUDA C++ Programming Guide, "CUDA Environment Variables").
- `ASCEND_RT_VISIBLE_DEVICES`: logical ids; the list ends at the first word that is none (CANN
  environment variable reference).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.cluster.command import Runner, ToolFailed, run_tool
from flowrl.cluster.pool import Device

MIB = 1 << 20

_NVIDIA_FIELDS = "index,uuid,name,memory.total,memory.free"

_FIRST_BFLOAT16 = 8.0
"""Compute capability of the first cards (Ampere) with bfloat16 in hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Devices of one vendor, and what could not be found out, one sentence each."""

    devices: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    index: int
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    bfloat16: bool


def cuda_devices(run: Runner, environ: Mapping[str, str], host_bytes: int) -> Found:
    """GPUs that CUDA would show to this process.

    Args:
        host_bytes: Memory of the machine, for cards that share it and report none of their own.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return Found()
    try:
        text = _query_nvidia(run)
    except ToolFailed as error:
        if "No devices were found" in str(error):
            return Found()
        return Found(warnings=(f"NVIDIA GPUs are not used: {error}",))
    if text is None:
        return Found()
    cards, warnings = _parse_nvidia(text)
    if visible is not None:
        cards, problem = _select_cards(cards, visible)
        warnings += problem
    if len({card.name for card in cards}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        warnings += (
            "the GPUs differ, and CUDA numbers the fastest first where nvidia-smi goes by PCI bus; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both agree",
        )
    devices = []
    for position, card in enumerate(cards):
        if card.total_bytes is None:
            warnings += (f"{card.name} shares the machine's memory; its budget is the host's",)
        devices.append(
            Device(
                id=f"cuda:{position}",
                type="cuda",
                name=card.name,
                memory_bytes=host_bytes if card.total_bytes is None else card.total_bytes,
                available_bytes=card.free_bytes,
                bfloat16=card.bfloat16,
            )
        )
    return Found(devices=tuple(devices), warnings=warnings)


def _query_nvidia(run: Runner) -> str | None:
    """One line a card; drivers before 510 do not know `compute_cap`, so it is left out for them."""

    def query(fields: str) -> str | None:
        argv = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
        return run_tool(run, argv)

    try:
        return query(f"{_NVIDIA_FIELDS},compute_cap")
    except ToolFailed as error:
        if "not a valid field" not in str(error):
            raise
    return query(_NVIDIA_FIELDS)


def _parse_nvidia(text: str) -> tuple[list[_Card], tuple[str, ...]]:
    cards: list[_Card] = []
    warnings: list[str] = []
    for line in text.splitlines():
        if not line.strip() or "No devices were found" in line:
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) not in (5, 6) or not cells[0].isdigit():
            warnings.append(
                f"a line of nvidia-smi is not understood and its GPU not used: {line!r}"
            )
            continue
        index, uuid, name, total, free, *capability = cells
        if not total.isdigit() and "N/A" not in total and "Not Supported" not in total:
            warnings.append(f"GPU {index} ({name}) is not used: its memory reads {total!r}")
            continue
        cards.append(
            _Card(
                index=int(index),
                uuid=uuid,
                name=name,
                total_bytes=_mib(total),
                free_bytes=_mib(free),
                bfloat16=_has_bfloat16(capability),
            )
        )
    return cards, tuple(warnings)


def _has_bfloat16(capability: Sequence[str]) -> bool:
    """From `["8.6"]`; where the driver does not say, the card is taken for a recent one."""
    try:
        return float(capability[0]) >= _FIRST_BFLOAT16
    except (IndexError, ValueError):
        return True


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def _select_cards(cards: Sequence[_Card], visible: str) -> tuple[list[_Card], tuple[str, ...]]:
    chosen: list[_Card] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.startswith("MIG-"):
            return chosen, (
                f"CUDA_VISIBLE_DEVICES names the MIG slice {word}, whose memory nvidia-smi does "
                "not list; it is not used. Describe the machine in a YAML to use it",
            )
        if word.isdigit():
            matches = [card for card in cards if card.index == int(word)]
        elif word.startswith("GPU-"):
            matches = [card for card in cards if card.uuid.startswith(word)]
        else:
            matches = []
        if len(matches) != 1 or matches[0] in chosen:
            known = ", ".join(str(card.index) for card in cards) or "none"
            return chosen, (
                f"CUDA_VISIBLE_DEVICES={visible}: {word!r} is no GPU of this machine "
                f"(there: {known}) or is named twice; like CUDA, the list is read up to there",
            )
        chosen.append(matches[0])
    return chosen, ()


def npu_devices(run: Runner, environ: Mapping[str, str], root: Path = Path("/")) -> Found:
    """Ascend NPUs that CANN would show to this process, one for each chip."""
    visible = environ.get("ASCEND_RT_VISIBLE_DEVICES")
    present = any(
        re.fullmatch(r"davinci\d+", path.name) for path in (root / "dev").glob("davinci*")
    )
    if not present or visible == "":
        return Found()
    try:
        text = run_tool(run, ("npu-smi", "info", "-m"))
    except ToolFailed as error:
        return Found(warnings=(f"Ascend NPUs are not used: {error}",))
    if text is None:
        return Found(
            warnings=(
                "Ascend NPUs are not used: /dev/davinci* are there, but npu-smi is not in PATH",
            )
        )
    chips = _parse_npu_map(text)
    warnings: list[str] = []
    if not chips:
        warnings.append("Ascend NPUs are not used: npu-smi info -m lists no computing chip")
    if visible is not None:
        chips = _select_chips(chips, visible, warnings)
    devices: list[Device] = []
    for position, (logic, npu, chip, name) in enumerate(chips):
        memory = _npu_memory(run, npu, chip)
        if isinstance(memory, str):
            warnings.append(f"NPU {logic} ({name}) is not used: {memory}")
            continue
        total, free = memory
        devices.append(
            Device(
                id=f"npu:{position}",
                type="npu",
                name=name,
                memory_bytes=total,
                available_bytes=free,
                bfloat16="310" not in name,
            )
        )
    return Found(devices=tuple(devices), warnings=tuple(warnings))


def _parse_npu_map(text: str) -> list[tuple[int, int, int, str]]:
    """`(logical id, NPU id, chip id, name)` of each computing chip, by logical id.

    Columns: NPU ID, Chip ID, Chip Logic ID, in newer versions Chip Phy-ID, Chip Name. Controller
    chips (`Mcu`) have `-` for a logical id.
    """
    chips = []
    for line in text.splitlines():
        match = re.fullmatch(r"\s*(\d+)\s+(\d+)\s+(\d+)\s+(?:(?:\d+|-)\s+)?(\S.*?)\s*", line)
        if match:
            npu, chip, logic = (int(match[i]) for i in (1, 2, 3))
            chips.append((logic, npu, chip, match[4]))
    return sorted(chips)


def _select_chips(
    chips: Sequence[tuple[int, int, int, str]], visible: str, warnings: list[str]
) -> list[tuple[int, int, int, str]]:
    by_logic = {chip[0]: chip for chip in chips}
    chosen: list[tuple[int, int, int, str]] = []
    for word in visible.split(","):
        if not word.isdigit() or int(word) not in by_logic:
            known = ", ".join(map(str, by_logic)) or "none"
            warnings.append(
                f"ASCEND_RT_VISIBLE_DEVICES={visible}: {word!r} is no NPU of this machine "
                f"(there: {known}); like CANN, the list is read up to there"
            )
            break
        chosen.append(by_logic[int(word)])
    return chosen


def _npu_memory(run: Runner, npu: int, chip: int) -> tuple[int, int | None] | str:
    """`(total, free)` bytes, or why they are not known."""
    argv = ("npu-smi", "info", "-t", "usages", "-i", str(npu), "-c", str(chip))
    try:
        text = run_tool(run, argv) or ""
    except ToolFailed as error:
        return str(error)
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in text.splitlines())
    }
    for kind in ("HBM", "DDR", "Memory"):
        capacity = fields.get(f"{kind} Capacity(MB)", "")
        if capacity.isdigit() and int(capacity) > 0:
            rate = fields.get(f"{kind} Usage Rate(%)", "")
            total = int(capacity) * MIB
            return total, total * (100 - int(rate)) // 100 if rate.isdigit() else None
    return f"{' '.join(argv)} names no memory capacity"
