"""Filters by name: which groups or samples reach the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["FilterSpec", "ZeroVariance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSpec(Spec):
    """Base of filters.

    Attributes:
        reason: The reason that a filtered sample carries in the sample log.
    """

    family: ClassVar[str] = "filter"
    reason: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroVariance(FilterSpec):
    """Removes groups whose scores differ by at most `tolerance`: they carry no gradient.

    The comparison is max - min, not a standard deviation, which round-off can make positive for a
    group of equal scores.
    """

    kind: ClassVar[str] = "zero_variance"
    reason: ClassVar[str] = "zero_variance"

    tolerance: float = 1e-8
