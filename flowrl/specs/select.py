"""Selections by name: which samples of each group are kept, and in what order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["SelectSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSpec(Spec):
    """Base of selections.

    Attributes:
        pairs: Whether each group becomes a pair, the preferred sample first.
    """

    family: ClassVar[str] = "select"
    pairs: ClassVar[bool] = False
