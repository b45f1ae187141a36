"""Selections by name: which samples of each group are kept, and in what order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["BestAndWorst", "RandomK", "SelectSpec", "Threshold", "Top"]


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
