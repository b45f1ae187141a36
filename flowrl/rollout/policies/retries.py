"""How often what fails is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["Retries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries(Spec):
    """A sample is dropped when so many of its attempts, or of its rewards, have failed.

    The loss of an engine fails the attempts on it; an abort that was asked for fails none.

    Attributes:
        attempts: Of a sample, that may be made.
        rewards: Of a sample, that may be asked for.
    """

    family: ClassVar[str] = "retries"
    kind: ClassVar[str] = "retries"

    attempts: int = 3
    rewards: int = 1

    def __post_init__(self) -> None:
        require_at_least(self, 1, "attempts", "rewards")
