"""What the scheduler asks its caller to do, in the order of the list it returns.

Aborts stand before submissions, so that an engine that obeys in order never holds more samples
than its capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flowrl.ids import EngineId, GroupId, SampleId

__all__ = [
    "Abort",
    "Action",
    "Deliver",
    "DeliveredGroup",
    "Dispatch",
    "Drop",
    "Judge",
    "NeedPrompts",
    "Score",
    "Submit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One attempt to start.

    Attributes:
        attempt: Counted from 0 for each sample; names the attempt in every report on it.
        kept_tokens: Response tokens of aborted attempts to go on from.
    """

    sample: SampleId
    attempt: int
    kept_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Start these attempts on the engine."""

    engine: EngineId
    samples: tuple[Dispatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End these samples' running attempts on the engine, tokens kept."""

    engine: EngineId
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score these finished samples."""

    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Keep or filter these groups; every member is scored."""

    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredGroup:
    """A whole group, its members in member order."""

    group: GroupId
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """The answer to `BatchAsked`; the samples are consumed.

    Attributes:
        groups: In offer order.
        filtered: Groups that were filtered or dropped, in offer order. Without refill they count
            towards the asked number; with refill they are those passed over since the batch before.
    """

    batch: int
    groups: tuple[DeliveredGroup, ...]
    filtered: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The sample has ended unused; what is stored of it can be freed."""

    sample: SampleId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPrompts:
    """With refill: offer so many further groups, or the waiting batch cannot be filled."""

    groups: int


Action: TypeAlias = Submit | Abort | Score | Judge | Deliver | Drop | NeedPrompts
