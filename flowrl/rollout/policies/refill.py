"""How many prompts to ask for when filtered groups leave a batch short (dynamic sampling)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["AskByKeepRate", "AskMissing", "RefillPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillPolicy(Spec):
    """Base of refill policies; they matter only where `refill` is on."""

    family: ClassVar[str] = "refill"

    @property
    def fading(self) -> float:
        """What the count of groups before is multiplied by when another one is counted."""
        return 0.0

    def ask(self, missing: int, kept: float, settled: float) -> int:
        """Groups to ask for.

        Args:
            missing: Groups that a waiting batch lacks; positive.
            kept: Groups that got READY so far, recent ones counted most.
            settled: The same of all groups that got READY or were filtered or dropped.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AskMissing(RefillPolicy):
    """As many as are missing; if they are filtered too, as many again."""

    kind: ClassVar[str] = "ask_missing"

    def ask(self, missing: int, kept: float, settled: float) -> int:
        return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class AskByKeepRate(RefillPolicy):
    """So many that, at the share kept so far, enough will be left: ceil(missing / share).

    The share is `(prior weight + kept) / (weight + settled)`, where kept and settled count recent
    groups: each is multiplied by `1 - 1/memory` before the next group is counted. Saves rounds of
    asking, each as long as the longest of its samples; what is too many stays for the next batch,
    or ages.

    Attributes:
        prior: Share to begin with.
        weight: Groups that the prior counts for.
        memory: Groups after which what was seen counts 1/e.
        most: Never ask for more than so many times what is missing.
    """

    kind: ClassVar[str] = "ask_by_keep_rate"

    prior: float = 0.5
    weight: float = 8.0
    memory: float = 256.0
    most: float = 4.0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "memory", "most")
        require_at_least(self, 1e-3, "prior", "weight")
        if self.prior > 1:
            raise SchedulerError(
                "prior is out of range",
                where=f"{self.family} policy {self.kind}",
                found=repr(self.prior),
                expected="a share between 0.001 and 1",
            )

    @property
    def fading(self) -> float:
        return 1 - 1 / self.memory

    def ask(self, missing: int, kept: float, settled: float) -> int:
        share = (self.prior * self.weight + kept) / (self.weight + settled)
        return math.ceil(missing * min(self.most, 1 / share))
