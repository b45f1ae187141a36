"""Maps by name: functions of a batch's fields that give further fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["MapSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec(Spec):
    """Base of maps.

    Attributes:
        per_sample: Whether what it gives of a sample depends on that sample alone. Such a map may
            stand before a filter that judges each group as soon as it is scored.
    """

    family: ClassVar[str] = "map"
    per_sample: ClassVar[bool] = False

    @property
    def gives(self) -> tuple[tuple[str, str, str], ...]:
        """`(name, dtype, unit)` of each field that it gives; `("score", "float32", "samples")`."""
        return (("score", "float32", "samples"),)
