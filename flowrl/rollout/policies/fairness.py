"""How several sources of prompts share the engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import USER_OPTIONS, Spec

__all__ = ["FairnessPolicy", "FirstCome", "WeightedShares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessPolicy(Spec):
    """Base of fairness policies."""

    family: ClassVar[str] = "fairness"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCome(FairnessPolicy):
    """Sources are not told apart: one line, in the order of offers."""

    kind: ClassVar[str] = "first_come"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedShares(FairnessPolicy):
    """While several sources have samples waiting, starts are shared out by weight.

    Stride scheduling (Waldspurger and Weihl, 1995): each source has a pass, the source with the
    least one is next, and its pass rises by 1/weight for each sample started. After m starts a
    source with share w has had m w of them, within one group. A source that comes back from having
    nothing to start has no claim on what it missed. Whole groups are started one after the other,
    so that members still share their prompt's cache.

    With admission by age budget it is admissions that are shared out, and `NeedPrompts` names the
    source to offer from.

    Attributes:
        shares: Pairs of source and weight; written as if each were an option of its own.
        other: Weight of a source that is not named.
    """

    kind: ClassVar[str] = "weighted_shares"

    shares: tuple[tuple[str, float], ...] = field(default=(), metadata=USER_OPTIONS)
    other: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(self, 1e-6, "other")
        names = [name for name, _ in self.shares]
        taken = sorted({name for name in names if names.count(name) > 1 or name in _RESERVED})
        wrong = [f"{name}={weight!r}" for name, weight in self.shares if not weight >= 1e-6]
        if taken or wrong:
            raise SchedulerError(
                "the shares of sources are wrong",
                where=f"{self.family} policy {self.kind}",
                found=", ".join([*taken, *wrong]),
                expected="each source once with a positive weight, none called "
                + " or ".join(_RESERVED),
            )

    def weight(self, source: str) -> float:
        """The share of a source, relative to others."""
        return next((weight for name, weight in self.shares if name == source), self.other)


_RESERVED = ("kind", "other", "shares")
