"""The events that the scheduler handles. The caller numbers them; ids strictly increase.

An event whose id is not above the last one is ignored, so a caller that is not sure whether an
event went through may send it again. Everything in an event is a fact about the outside. Events of
many samples are batched, in one event an engine.

Time is such a fact, too: `at_s` is when the event happened, in seconds on a clock of the caller's.
The scheduler has no other clock, so the log of events replays to the same state at any speed. Only
rules that speak of seconds read it; a caller without such rules leaves it 0. A clock that jumps
back is treated as stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.specs import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBase:
    """The fields that all events have.

    Attributes:
        id: Above that of every event before.
        at_s: When it happened, in seconds of the caller's clock.
    """

    id: int
    at_s: float = 0.0


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
class PromptsOffered(EventBase):
    """New groups; their order is the order of admission and of delivery.

    Where everything offered is admitted, samples start as soon as an engine has a free slot, and
    their age counts from then on. A synchronous caller then offers a step's prompts after the
    publication before it; with admission by age budget it may offer them at any time.

    Attributes:
        source: Where they come from; sources can have shares of the engines.
        expected_tokens: How long an answer to each is thought to be, for longest-first order;
            empty, or as many as groups.
    """

    groups: tuple[GroupId, ...]
    source: str = ""
    expected_tokens: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJoined(EventBase):
    """An engine takes up to `capacity` samples at once from now on.

    An engine that joins under a name that is still in use has died unnoticed: its samples go back
    to the queue first.

    Attributes:
        version: Of the weights that it serves; None where they are the latest. With older ones it
            gets no samples before it was updated.
    """

    engine: EngineId
    capacity: int
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacityChanged(EventBase):
    """The engine takes another number of samples.

    A capacity of 0 lets an engine run dry.

    Attributes:
        excess: Whether samples above the capacity stay until they end, or are aborted and continue
            on other engines: those with the fewest tokens, which cost the least to compute again.
    """

    engine: EngineId
    capacity: int
    excess: Literal["stay", "abort"] = "stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost(EventBase):
    """The engine is gone, with all tokens of its running attempts."""

    engine: EngineId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeaving(EventBase):
    """The engine is to go: it gets no more samples, and `ReleaseEngine` follows when it is empty.

    Attributes:
        running: Whether its samples are aborted and continue on other engines, or finish first.
    """

    engine: EngineId
    running: Literal["abort", "finish"] = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatLost(EventBase):
    """The engine is silent: it may be dead or alive."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatSeen(EventBase):
    """The engine is alive. Every report from it says so, too."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePauseAsked(EventBase):
    """The engine is to make no tokens until `EngineContinueAsked`: its devices are needed.

    Attributes:
        running: Whether its samples stay in it, or are aborted and continue on other engines.
    """

    engine: EngineId
    running: Literal["keep", "abort"] = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContinueAsked(EventBase):
    """The pause that was asked for is over."""

    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdated(EventBase):
    """The engine serves weights `version` now, as `UpdateEngine` asked."""

    engine: EngineId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(EventBase):
    """Running attempts advanced: `(sample, attempt, response tokens so far)`."""

    engine: EngineId
    progress: tuple[tuple[SampleId, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesFinished(EventBase):
    """Attempts ended: finished, or aborted with their tokens kept."""

    engine: EngineId
    ends: tuple[SampleEnd, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed(EventBase):
    """An attempt broke; its tokens are lost, those of earlier aborted attempts are not."""

    engine: EngineId
    sample: SampleId
    attempt: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesScored(EventBase):
    """Scores of samples that a `Score` action named."""

    scores: tuple[tuple[SampleId, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed(EventBase):
    """The scorer has no score for the sample; it may be asked again."""

    sample: SampleId
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsJudged(EventBase):
    """Verdicts on groups that a `Judge` action named: None keeps, a reason filters the group."""

    verdicts: tuple[tuple[GroupId, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(EventBase):
    """There are weights `version` now; versions only rise.

    Where engines keep their running samples, they serve these weights already. Where they are
    emptied first, each takes them when `UpdateEngine` says so.
    """

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAsked(EventBase):
    """The trainer wants a batch of `groups` groups.

    Asking again for a batch that still waits changes nothing.

    Attributes:
        version: The publication that it will be trained on. A trainer that asks ahead, while it
            still trains on the batch before, says so here, and the samples' ages are measured
            against it. None is the version when it is delivered or, with admission by age
            budget, the first version that still lacks a batch.
        names: The groups themselves, where batches name them; each was offered, and is named once.
    """

    batch: int
    groups: int
    version: int | None = None
    names: tuple[GroupId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentsDropped(EventBase):
    """The samples that these groups answer were dropped: so are these. Ended ones are left."""

    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAsked(EventBase):
    """Running ones of `samples` are to be aborted with their tokens kept; others are left."""

    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineReached(EventBase):
    """The time `at_s` is reached: the answer to `Wake`. Any event with a time serves as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(EventBase):
    """The run ends: every live sample is dropped, and waiting batches are forgotten."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(EventBase):
    """The process restarted from a saved state: none of its earlier engines exists any more.

    Its clock may be another one; `at_s` is its time, and what was left of deadlines is kept.
    """


Event: TypeAlias = (
    PromptsOffered
    | EngineJoined
    | EngineCapacityChanged
    | EngineLost
    | EngineLeaving
    | HeartbeatLost
    | HeartbeatSeen
    | EnginePauseAsked
    | EngineContinueAsked
    | EngineUpdated
    | Progressed
    | SamplesFinished
    | SampleFailed
    | SamplesScored
    | RewardFailed
    | GroupsJudged
    | WeightsPublished
    | BatchAsked
    | ParentsDropped
    | AbortAsked
    | DeadlineReached
    | StopAsked
    | Resumed
)
