"""The actions that the scheduler asks its caller to carry out, in the order of the returned list.

Aborts come before submissions, so that an engine that obeys in order never holds more samples
than its capacity. A paused engine still answers aborts and takes weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flowrl.ids import EngineId, GroupId, SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """An attempt that an engine is to start.

    Attributes:
        attempt: Counted from 0 for each sample; names the attempt in every report on it.
        kept_tokens: Response tokens of aborted attempts to go on from.
    """

    sample: SampleId
    attempt: int
    kept_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Asks an engine to start these attempts."""

    engine: EngineId
    samples: tuple[Dispatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Asks an engine to end the running attempts of these samples, with their tokens kept."""

    engine: EngineId
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Asks for the scores of these finished samples."""

    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Asks for a verdict on these groups, all of whose members are scored.

    Attributes:
        samples: For each group its members in member order, spare ones left out.
    """

    groups: tuple[GroupId, ...]
    samples: tuple[tuple[SampleId, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredGroup:
    """A whole group, its members in member order."""

    group: GroupId
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """The answer to `BatchAsked`; the samples are consumed.

    Attributes:
        groups: In the order of admission, which is that of offers unless sources have shares.
        filtered: Groups that were filtered or dropped, in the same order. Without refill they
            count towards the asked number; with refill they are those passed over since the batch
            before.
        version: The publication that it is to be trained on; ages are measured against it.
    """

    batch: int
    groups: tuple[DeliveredGroup, ...]
    filtered: tuple[GroupId, ...]
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The sample has ended unused; what is stored of it can be freed."""

    sample: SampleId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPrompts:
    """Asks for further groups: the waiting batch cannot be filled, or engines have free slots.

    Attributes:
        source: The source of the prompts; empty where sources have no shares. Another source may
            replace one that has none left.
    """

    groups: int
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseEngine:
    """Asks an engine to generate no tokens until `ContinueEngine`."""

    engine: EngineId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueEngine:
    """Asks a paused engine to generate tokens again."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEngine:
    """Asks an empty engine to load weights `version`; `EngineUpdated` reports that it has."""

    engine: EngineId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEngine:
    """The scheduler has forgotten the engine: it was leaving and is empty, or was given up.

    One that was given up for its silence may still live; it must join again before it is used.
    """

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Asks for `DeadlineReached` at `at_s`, unless another event at or after that time comes first.

    It replaces an earlier request for a later time.
    """

    at_s: float


Action: TypeAlias = (
    Submit
    | Abort
    | Score
    | Judge
    | Deliver
    | Drop
    | NeedPrompts
    | PauseEngine
    | ContinueEngine
    | UpdateEngine
    | ReleaseEngine
    | Wake
)
