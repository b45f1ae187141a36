"""How long silence is borne."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec

__all__ = ["Patience"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience(Spec):
    """Deadlines, in seconds of the time that events carry.

    They need a caller that tells the time (`at_s` of its events) and answers `Wake` with
    `DeadlineReached`.

    Attributes:
        heartbeat_s: An engine whose heartbeat was lost gets no samples, and so long after it is
            given up like one that died. Any sign of life from it before then opens it again. 0
            gives it up at once.
        stall_s: An attempt that made no token for so long has failed: it is aborted and begins
            again, elsewhere if there is another engine. An abort that is not answered counts
            alike. 0 waits for ever. An engine may hold samples that it does not decode yet; then
            it must be longer than they wait there. Looked at every `stall_s / 8`, so it takes up
            to an eighth longer.
    """

    family: ClassVar[str] = "patience"
    kind: ClassVar[str] = "patience"

    heartbeat_s: float = 0.0
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "heartbeat_s", "stall_s")
