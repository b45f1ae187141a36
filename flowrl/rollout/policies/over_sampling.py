"""Spare samples: more members than a group needs, more prompts than a batch needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["OverSampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSampling(Spec):
    """Redundant members and prompts, which cut the tail of a step at the cost of some tokens.

    A group then begins with `group_size + members` members and is complete as soon as
    `group_size` of them are scored; the others are aborted and end as DROPPED(redundant). A member
    that fails for good costs nothing as long as enough others are left.

    With `prompts`, so many groups more than a batch needs are in flight, and a batch takes the
    groups that are ready first, whatever the order of offers. Those left over stay for the next
    batch where the bound on age lets them; otherwise they end as redundant, too.

    Both make what is trained on depend on who finishes first, which favours short answers; without
    them a synchronous run does not depend on it.

    Attributes:
        members: Redundant members of each group.
        prompts: Redundant groups in flight; needs admission by age budget, and refill.
    """

    family: ClassVar[str] = "over_sampling"
    kind: ClassVar[str] = "over_sampling"

    members: int = 0
    prompts: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "members", "prompts")
