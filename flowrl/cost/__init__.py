"""What a job costs: the sizes of a model and the memory of a role."""

from __future__ import annotations

from flowrl.cost.memory import MemoryPart, Phase, PhaseMemory, Workload, format_bytes
from flowrl.cost.models import ModelShape, ParameterCounts

__all__ = [
    "MemoryPart",
    "ModelShape",
    "ParameterCounts",
    "Phase",
    "PhaseMemory",
    "Workload",
    "format_bytes",
]
