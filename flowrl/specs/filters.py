"""Filters and selections by name: which groups and samples reach the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.specs.base import Spec, option

__all__ = [
    "BestAndWorst",
    "Difficulty",
    "FilterSpec",
    "RandomK",
    "SelectSpec",
    "Threshold",
    "Top",
    "ZeroVariance",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSpec(Spec):
    """Base of selections.

    Attributes:
        pairs: Whether each group becomes a pair, the preferred sample first.
    """

    family: ClassVar[str] = "select"
    pairs: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Top(SelectSpec):
    """The `k` best samples of each group by score; of equal ones those that stand first."""

    kind: ClassVar[str] = "top"

    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(SelectSpec):
    """The samples that score at least `at_least`; of a group all, some or none."""

    kind: ClassVar[str] = "threshold"

    at_least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAndWorst(SelectSpec):
    """A pair of each group, its best sample and then its worst: what DPO learns from.

    Attributes:
        tolerance: Groups whose scores differ by at most this are left out: neither sample of such a
            pair would be better.
    """

    kind: ClassVar[str] = "best_and_worst"
    pairs: ClassVar[bool] = True

    tolerance: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(SelectSpec):
    """`k` samples of each group, drawn by their ids: the same ones whenever they are asked for.

    Attributes:
        k: Of each group; all of a smaller one.
        seed: Another one draws others.
    """

    kind: ClassVar[str] = "random"

    k: int
    seed: int = 0
