"""What a model's `config.json` says of its sizes: shapes and numbers of parameters."""

from __future__ import annotations

from flowrl.cost.models.counts import ParameterCounts, count_parameters
from flowrl.cost.models.shape import FAMILIES, Experts, LatentAttention, ModelShape

__all__ = [
    "FAMILIES",
    "Experts",
    "LatentAttention",
    "ModelShape",
    "ParameterCounts",
    "count_parameters",
]
