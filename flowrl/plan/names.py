"""Short names for many devices and for ways to run something, and what has to be known of devices
that no catalogue has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from flowrl.cost.layout import Layout
from flowrl.plan.check.whole import number_ranges
from flowrl.wording import counted

RATES = (
    "tflops, memory_tb_per_s, host_gb_per_s and links (nvlink, hccs or pcie, and network) "
    "in the cluster file"
)
"""Of a device, without which no time is known of it."""

_NUMBERED = re.compile(r"^(.*?)(\d+)$")


def device_names(addresses: Sequence[str]) -> str:
    """`trainer-[0-3]/cuda:[0-7]` for 32 addresses; several such, joined by commas, where need be.

    >>> device_names(["a-0/cuda:0", "a-0/cuda:1", "a-1/cuda:0", "a-1/cuda:1"])
    'a-[0-1]/cuda:[0-1]'
    """
    return _names(tuple(addresses))


@lru_cache(maxsize=64)
def _names(addresses: tuple[str, ...]) -> str:
    """Tasks of a plan are often on the same thousands of devices."""
    nodes: dict[str, list[str]] = {}
    for address in addresses:
        node, slash, device = address.rpartition("/")
        nodes.setdefault(node + slash, []).append(device)
    same: dict[str, list[str]] = {}
    for node, devices in nodes.items():
        same.setdefault(_inside(tuple(devices)), []).append(node)
    shown = []
    for inside, on in same.items():
        for node in _folded(one.rstrip("/") for one in on):
            shown.append(f"{node}/{inside}" if node else inside)
    return ", ".join(shown)


@lru_cache(maxsize=256)
def _inside(devices: tuple[str, ...]) -> str:
    """The devices of a node: most nodes of a plan have the same ones."""
    return ", ".join(_folded(devices))


def _folded(names: Iterable[str]) -> list[str]:
    """Names that differ in their last number only, as one."""
    stems: dict[str, list[int]] = {}
    plain: list[str] = []
    for name in names:
        found = _NUMBERED.match(name)
        if found is None:
            plain.append(name)
        else:
            stems.setdefault(found[1], []).append(int(found[2]))
    return plain + [
        f"{stem}{numbers[0]}" if len(numbers) == 1 else f"{stem}[{number_ranges(numbers)}]"
        for stem, numbers in stems.items()
    ]


def way_words(layout: Layout, recompute: str, offload: Sequence[str]) -> str:
    """`tp 2, dp 4, full recompute`: how something is run, in few words."""
    return ", ".join((layout.describe(), *memory_words(recompute, offload)))


def memory_words(recompute: str, offload: Sequence[str]) -> list[str]:
    """What is computed again, and what is on the host."""
    again = [f"{recompute} recompute"] if recompute != "none" else []
    return [*again, *offload_words(offload)]


def offload_words(offload: Sequence[str]) -> list[str]:
    """What is on the host while a task works, and what goes there between its turns.

    >>> offload_words(("all",)), offload_words(("optimizer", "all"))
    (['all on the host between turns'], ['optimizer always on the host', 'weights between turns'])
    """
    found = ["optimizer always on the host"] if "optimizer" in offload else []
    if "all" in offload:
        found.append("weights between turns" if found else "all on the host between turns")
    return found


def cache_words(kv_tokens: int, slots: int) -> str:
    """Likewise of what an engine holds."""
    return f"{kv_tokens:,} tokens a replica, {counted(slots, 'sample')} at once"
