"""What a node of a graph costs in one step, as an attribute that prints and parses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["NodeCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost(Spec):
    """Upper bounds: every sample is as long as it may be, and no filter drops any.

    Attributes:
        flops: Operations of the model in a step; 0 where no model runs.
        output_bytes: Of all that the node produces in a step.
        activation_bytes: At once, with logits.
        kv_bytes: Of the KV cache.
    """

    family: ClassVar[str] = "cost"
    kind: ClassVar[str] = "upper_bound"

    flops: int
    output_bytes: int
    activation_bytes: int
    kv_bytes: int
