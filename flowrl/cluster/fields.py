"""Fields of files that describe machines, each held to what its figure can be."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from flowrl.cluster.rates import within
from flowrl.config.section import Float

Gib: TypeAlias = Annotated[Float, AfterValidator(within("memory_gib"))]
Tflops: TypeAlias = Annotated[Float, AfterValidator(within("tflops"))]
MemoryRate: TypeAlias = Annotated[Float, AfterValidator(within("memory_tb_per_s"))]
HostRate: TypeAlias = Annotated[Float, AfterValidator(within("host_gb_per_s"))]
LinkRate: TypeAlias = Annotated[Float, AfterValidator(within("link_gb_per_s"))]
