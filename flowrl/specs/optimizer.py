"""The optimizer of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.specs.base import Spec

__all__ = ["AdamW"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Spec):
    """AdamW (Loshchilov & Hutter, 2019) with warm-up, a schedule and gradient clipping.

    The learning rate counts optimizer updates (one a mini-batch), not steps. It rises linearly
    over `warmup_updates`, then stays, or falls to `final_fraction` of itself at the last update.

    Attributes:
        max_grad_norm: Global L2 norm that gradients are clipped to; 0 does not clip.
    """

    family: ClassVar[str] = "optimizer"
    kind: ClassVar[str] = "adamw"

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_updates: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.1
    max_grad_norm: float = 1.0
