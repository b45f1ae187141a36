"""The states of a sample, why one ends, and how many are in each.

    QUEUED -> RUNNING -> GENERATED -> SCORING -> READY -> CONSUMED
                 |                                 \\----> FILTERED(reason)
                 +-> PARTIAL (aborted, tokens kept) -> QUEUED
                 +-> QUEUED (attempt failed, or its engine was lost)

Every live state may also end in DROPPED(reason). PARTIAL and GENERATED are passed through within
one event; they are states of their own so that the journal distinguishes an abort from a failure
and an answer from its score, and so that policies can hold samples there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

__all__ = [
    "LIVE",
    "TERMINAL",
    "ClosedReason",
    "Counts",
    "DropReason",
    "GroupPhase",
    "State",
]


class State(StrEnum):
    """The state of a sample; it has exactly one at any time."""

    QUEUED = "queued"
    RUNNING = "running"
    PARTIAL = "partial"
    GENERATED = "generated"
    SCORING = "scoring"
    READY = "ready"
    CONSUMED = "consumed"
    FILTERED = "filtered"
    DROPPED = "dropped"


LIVE = (
    State.QUEUED,
    State.RUNNING,
    State.PARTIAL,
    State.GENERATED,
    State.SCORING,
    State.READY,
)
"""States from which a sample still goes on."""

TERMINAL = (State.CONSUMED, State.FILTERED, State.DROPPED)
"""The three ends; a sample has exactly one of them."""


class DropReason(StrEnum):
    """The reasons for which a sample ends in DROPPED.

    - `aged`: at consumption it would have been more than `max_staleness` versions old.
    - `retries`: `retries.attempts` attempts failed, counting those lost with their engine.
    - `reward_failed`: `retries.rewards` times its reward raised, hung or returned no number.
    - `incomplete_group`: another member of its group was dropped, too few are left, and a
      delivered group has exactly `group_size` valid members.
    - `redundant`: it was sampled as a spare one, and others were ready first.
    - `stopped`: the run was stopped.
    """

    AGED = "aged"
    RETRIES = "retries"
    REWARD_FAILED = "reward_failed"
    INCOMPLETE_GROUP = "incomplete_group"
    REDUNDANT = "redundant"
    STOPPED = "stopped"


class GroupPhase(StrEnum):
    """The progress of a group as a whole.

    `open` groups wait for members, `judging` ones for a verdict; `ready` ones can be delivered.
    `filtered` and `dropped` groups wait only to be named in a batch.
    """

    OPEN = "open"
    JUDGING = "judging"
    READY = "ready"
    FILTERED = "filtered"
    DROPPED = "dropped"


class ClosedReason(StrEnum):
    """The reasons for which an engine gets no samples; several can hold at once.

    - `leaving`: it is about to go, and is let go as soon as nothing runs there.
    - `suspected`: its heartbeat was lost a short while ago.
    - `quarantined`: it failed again and again.
    - `updating`: it has not got the latest weights yet.
    - `asked`: the caller paused it.
    - `repacked`: the tail of a step was moved off it.
    """

    LEAVING = "leaving"
    SUSPECTED = "suspected"
    QUARANTINED = "quarantined"
    UPDATING = "updating"
    ASKED = "asked"
    REPACKED = "repacked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Samples by state. `admitted` is the sum of all others, always."""

    admitted: int = 0
    queued: int = 0
    running: int = 0
    partial: int = 0
    generated: int = 0
    scoring: int = 0
    ready: int = 0
    consumed: int = 0
    filtered: int = 0
    dropped: int = 0

    @property
    def live(self) -> int:
        """Samples that have no end yet."""
        return self.admitted - self.consumed - self.filtered - self.dropped

    @property
    def conserved(self) -> bool:
        """True if every admitted sample is in exactly one state."""
        by_state: list[int] = [getattr(self, state.value) for state in State]
        return self.admitted == sum(by_state)

    def to_json(self) -> dict[str, int]:
        """Plain numbers by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
