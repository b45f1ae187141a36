"""Of which generation the calibrated efficiencies hold for a device: by its type, or by its name.

Two generations were calibrated (`flowrl.cost.efficiency`). Devices of another one take those of the
generation whose kernels they run: Ada those of Ampere, since FlashAttention 3 is for Hopper alone
(its README, "Requirements"); Blackwell's for data centres those of Hopper, which are nearest to
their own, of which there are no rows; Ascend those of Ampere. Which product is of which generation
follows from NVIDIA's list "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus): 8.0 to
8.7 are Ampere, 8.9 is Ada, 9.0 Hopper, 10.0 and 10.3 are Blackwell for data centres.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, TypeAlias

Efficiencies: TypeAlias = Literal["ampere", "hopper"]

_PRODUCTS: tuple[tuple[Efficiencies, tuple[str, ...]], ...] = (
    (
        "ampere",
        (
            # Ampere
            *("A100X?", "A800", "A30X?", "A40", "A16", "A10[GM]?", "A2", "A[2456][05]00"),
            r"RTX[ _-]?30[5-9]0",
            # Ada
            *("L2", "L4", "L20", "L40[SG]?", "Ada", r"RTX[ _-]?40[5-9]0D?"),
            # Ascend
            *(r"Ascend\w*", r"910\w*"),
        ),
    ),
    (
        "hopper",
        (
            # Hopper
            *("H20", "H100", "H200", "H800", "GH200"),
            # Blackwell
            *("B100", "B200", "B300", "GB200", "GB300"),
        ),
    ),
)
"""Products as they stand in names, each a word of its own: the A100 of `NVIDIA A100-SXM4-40GB`."""

_WORDS = tuple(
    (kind, re.compile(rf"(?<![a-z0-9])(?:{'|'.join(products)})(?![a-z0-9])", re.IGNORECASE))
    for kind, products in _PRODUCTS
)


@lru_cache(maxsize=256)
def efficiencies_of(device_type: str, name: str) -> Efficiencies | None:
    """Of a device, wherever in its name the product stands; None where nothing tells.

    An `npu` is an Ascend, whatever it is called.

    >>> efficiencies_of("cuda", "NVIDIA A100-PCIE-40GB"), efficiencies_of("cuda", "my card")
    ('ampere', None)
    """
    if device_type == "npu":
        return "ampere"
    found = [kind for kind, words in _WORDS if words.search(name)]
    return found[0] if len(found) == 1 else None
