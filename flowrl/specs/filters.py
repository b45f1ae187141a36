"""Filters and selections by name: which groups and samples reach the update.

The functions of `fl.filter` and `fl.select` document the fields that are their arguments too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.specs.base import Count, CountFromZero, Finite, FromZero, Spec, Wrong, option


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSpec(Spec):
    """The base of filters.

    Attributes:
        reason: The reason of a removal in the sample log.
    """

    family: ClassVar[str] = "filter"
    reason: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroVariance(FilterSpec):
    """Removes groups whose scores differ by at most `tolerance`: they carry no gradient.

    Attributes:
        measure: `spread` compares max - min; `std` the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        singleton: The treatment of a group of one.
    """

    kind: ClassVar[str] = "zero_variance"
    reason: ClassVar[str] = "zero_variance"

    tolerance: FromZero = 1e-8
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

    low: Finite = 0.0
    high: Finite = 1.0

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a lower bound that is not below the upper one."""
        if not self.low < self.high:
            yield "low", self.low, f"a number below high={self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSpec(Spec):
    """The base of selections.

    Attributes:
        pairs: True if each group becomes a pair, the preferred sample first.
    """

    family: ClassVar[str] = "select"
    pairs: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Top(SelectSpec):
    """Keeps the `k` best samples of each group by score, the first ones among equal scores."""

    kind: ClassVar[str] = "top"

    k: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(SelectSpec):
    """Keeps the samples that score at least `at_least`: all, some or none of a group."""

    kind: ClassVar[str] = "threshold"

    at_least: Finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(SelectSpec):
    """Keeps the samples in whose response the map `parse` found a number."""

    kind: ClassVar[str] = "parsed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAndWorst(SelectSpec):
    """Keeps a pair of each group, its best sample and then its worst, for preference losses.

    Groups whose scores differ by at most `tolerance` are removed, because neither sample of such a
    pair would be better.
    """

    kind: ClassVar[str] = "best_and_worst"
    pairs: ClassVar[bool] = True

    tolerance: FromZero = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(SelectSpec):
    """Keeps `k` samples of each group, chosen by hashes of their ids: always the same ones."""

    kind: ClassVar[str] = "random"

    k: Count
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(SelectSpec):
    """Keeps of each episode the turns of one of its policies, in the response mask.

    The score of an episode is the sum of the rewards of these turns. Episodes in which that policy
    took no turn are left out.

    Attributes:
        policy: Place of the policy among those that take turns, from 0.
        of: Policies that take turns, in order.
    """

    kind: ClassVar[str] = "turns"

    policy: CountFromZero
    of: Count

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a place that is none of theirs."""
        if self.policy >= self.of:
            yield "policy", self.policy, f"a number below of={self.of}"
