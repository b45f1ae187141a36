"""Whether the tail of a step is moved onto fewer engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["NoRepack", "RepackPolicy", "RepackTail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackPolicy(Spec):
    """Base of repacking policies."""

    family: ClassVar[str] = "repack"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRepack(RepackPolicy):
    """Samples stay where they are."""

    kind: ClassVar[str] = "no_repack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackTail(RepackPolicy):
    """When nothing is queued and few samples run, they are gathered on the fewest engines.

    As soon as the running samples fit on at most `share` of the engines that run any, the others'
    samples are aborted with their tokens kept and go on there, and the freed engines are paused:
    the caller may give their devices to the trainer. They continue when samples wait that the
    others have no room for. Each repacking at least divides the number of engines by 1/share, so
    over a tail a sample moves at most log(engines) / log(1/share) times.

    Attributes:
        share: Of the engines in use, at most 0.5 or so: below 1.
    """

    kind: ClassVar[str] = "repack_tail"

    share: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(self, 0, "share")
        if self.share >= 1:
            raise SchedulerError(
                "share is out of range",
                where=f"{self.family} policy {self.kind}",
                found=repr(self.share),
                expected="a share below 1, or samples would be moved for nothing",
            )
