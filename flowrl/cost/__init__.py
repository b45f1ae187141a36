"""What a job costs: the sizes of a model, its operations, and the memory of a role.

Times have modules of their own, which are asked through `flowrl.cost.source.Cost`.
"""

from __future__ import annotations

from flowrl.cost.flops import (
    FlopsConvention,
    FlopsParts,
    Work,
    flops_per_token,
    forward_flops,
    model_flops,
)
from flowrl.cost.memory import MemoryPart, Phase, PhaseMemory, Workload, format_bytes
from flowrl.cost.models import Experts, LatentAttention, ModelShape, ParameterCounts

__all__ = [
    "Experts",
    "FlopsConvention",
    "FlopsParts",
    "LatentAttention",
    "MemoryPart",
    "ModelShape",
    "ParameterCounts",
    "Phase",
    "PhaseMemory",
    "Work",
    "Workload",
    "flops_per_token",
    "format_bytes",
    "forward_flops",
    "model_flops",
]
