"""Maps by name: functions of a batch's fields that give further fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["MapSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec(Spec):
    """Base of maps."""

    family: ClassVar[str] = "map"

    @property
    def gives(self) -> tuple[tuple[str, str, str], ...]:
        """`(name, dtype, unit)` of each field that it gives; `("score", "float32", "samples")`."""
        return (("score", "float32", "samples"),)
