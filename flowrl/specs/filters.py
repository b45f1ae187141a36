"""Filters by name: which groups or samples reach the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.specs.base import Spec, option

__all__ = ["Difficulty", "FilterSpec", "ZeroVariance"]


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

    Attributes:
        tolerance: The most that counts as equal.
        measure: `spread` compares max - min; `std` a standard deviation, which round-off can make
            positive for a group of equal scores.
        ddof: Of the standard deviation.
        singleton: Whether a group of one stays.
    """

    kind: ClassVar[str] = "zero_variance"
    reason: ClassVar[str] = "zero_variance"

    tolerance: float = 1e-8
    measure: Literal["spread", "std"] = option("spread")
    ddof: int = option(1)
    singleton: Literal["remove", "keep"] = option("remove")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty(FilterSpec):
    """Keeps groups whose mean score lies strictly between `low` and `high`.

    For scores of 0 and 1 the mean is the solve rate; `low=0, high=1` removes prompts that were
    always or never solved. A mean of exactly `low` or `high` is outside.
    """

    kind: ClassVar[str] = "difficulty"
    reason: ClassVar[str] = "difficulty"

    low: float = 0.0
    high: float = 1.0
