"""What happens to the scheduler. The caller numbers events; ids strictly increase.

An event whose id is not above the last one is ignored, so a caller that is not sure whether an
event went through may send it again. Everything in an event is a fact about the outside; nothing
in it depends on the clock. Events of many samples are batched, in one event an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.specs import FinishReason

__all__ = [
    "AbortAsked",
    "BatchAsked",
    "EngineCapacityChanged",
    "EngineJoined",
    "EngineLost",
    "Event",
    "GroupsJudged",
    "Progressed",
    "PromptsOffered",
    "Resumed",
    "RewardFailed",
    "SampleEnd",
    "SampleFailed",
    "SamplesFinished",
    "SamplesScored",
    "StopAsked",
    "WeightsPublished",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEnd:
    """The end of one attempt.

    Attributes:
        attempt: As in the `Dispatch` that began it; another one's is fenced.
        num_tokens: Response tokens so far, those of earlier attempts included.
        versions: `((version, count), ...)`, the weights that produced *this attempt's* tokens, in
            order; the counts sum to `num_tokens` minus the dispatch's `kept_tokens`.
    """

    sample: SampleId
    attempt: int
    reason: FinishReason
    num_tokens: int
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsOffered:
    """New groups, each of `group_size` samples; their order is the order of delivery.

    Samples start as soon as an engine has room, and their age counts from then on. A synchronous
    caller therefore offers a step's prompts after the publication before it.
    """

    id: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJoined:
    """An engine takes up to `capacity` samples at once from now on.

    An engine that joins under a name that is still in use has died unnoticed: its samples go back
    to the queue first.
    """

    id: int
    engine: EngineId
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacityChanged:
    """The engine takes another number of samples; those above it stay until they end.

    A capacity of 0 pauses an engine.
    """

    id: int
    engine: EngineId
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost:
    """The engine is gone, with all tokens of its running attempts."""

    id: int
    engine: EngineId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Running attempts advanced: `(sample, attempt, response tokens so far)`."""

    id: int
    engine: EngineId
    progress: tuple[tuple[SampleId, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesFinished:
    """Attempts ended: finished, or aborted with their tokens kept."""

    id: int
    engine: EngineId
    ends: tuple[SampleEnd, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """An attempt broke; its tokens are lost, those of earlier aborted attempts are not."""

    id: int
    engine: EngineId
    sample: SampleId
    attempt: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesScored:
    """Scores of samples that a `Score` action named."""

    id: int
    scores: tuple[tuple[SampleId, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed:
    """The sample has no score and will get none."""

    id: int
    sample: SampleId
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsJudged:
    """Verdicts on groups that a `Judge` action named: None keeps, a reason filters the group."""

    id: int
    verdicts: tuple[tuple[GroupId, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished:
    """The engines serve weights `version` from now on; versions only rise."""

    id: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAsked:
    """The trainer can take a batch of `groups` groups now.

    A sample's age is measured when its batch is delivered, so a trainer asks when it is free to
    train, not ahead. Asking again for a batch that still waits changes nothing.
    """

    id: int
    batch: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAsked:
    """Running ones of `samples` are to be aborted with their tokens kept; others are left."""

    id: int
    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """The run ends: every live sample is dropped, and waiting batches are forgotten."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The process began anew from a written state: no engine of before exists any more."""

    id: int


Event: TypeAlias = (
    PromptsOffered
    | EngineJoined
    | EngineCapacityChanged
    | EngineLost
    | Progressed
    | SamplesFinished
    | SampleFailed
    | SamplesScored
    | RewardFailed
    | GroupsJudged
    | WeightsPublished
    | BatchAsked
    | AbortAsked
    | StopAsked
    | Resumed
)
