"""What becomes of an engine that fails again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["NoQuarantine", "Quarantine", "QuarantinePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePolicy(Spec):
    """Base of quarantine policies."""

    family: ClassVar[str] = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoQuarantine(QuarantinePolicy):
    """It gets samples as long as it is there; the retries of each sample bound the harm."""

    kind: ClassVar[str] = "no_quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine(QuarantinePolicy):
    """After `failures` in a row it is closed for a while, then tried with one sample at a time.

    An engine that fails at once is always the least loaded one, and would otherwise swallow the
    whole queue. In a row means: without a finished sample in between. Failures of one sample count
    once, so that a sample which breaks every engine closes none of them; the loss of the engine
    counts as one, also when it joins again under its name.

    Its running samples are aborted with their tokens kept. After the first quarantine the engine is
    on trial: one finished sample opens it fully, one failure closes it again, for `growth` times as
    long.

    Attributes:
        failures: Different samples failed in a row.
        seconds: Of the first quarantine.
        growth: Factor from one quarantine to the next.
        most_seconds: The longest one.
    """

    kind: ClassVar[str] = "quarantine"

    failures: int = 3
    seconds: float = 30.0
    growth: float = 2.0
    most_seconds: float = 600.0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "failures", "growth")
        require_at_least(self, 1e-3, "seconds")
        require_at_least(self, self.seconds, "most_seconds")

    def duration_s(self, before: int) -> float:
        """Seconds of a quarantine that follows `before` others without a success in between."""
        return min(self.most_seconds, self.seconds * self.growth ** min(before, 64))
