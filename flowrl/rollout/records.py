"""The mutable records of the scheduler's state. Every field says what holds of it.

Samples are compared by identity. A record exists as long as its sample; the end is only counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.events import SampleEnd
from flowrl.rollout.states import ClosedReason, GroupPhase, State

__all__ = [
    "TRAIL_STATES",
    "BatchRequest",
    "Engine",
    "Group",
    "Health",
    "Sample",
    "Spans",
    "attempt_spans",
    "joined",
    "read_trail",
    "trail_code",
]


_STATES = tuple(State)
_CODES = {state: number + 1 for number, state in enumerate(_STATES)}

TRAIL_STATES = 15
"""States that a trail remembers: 4 bits each, within a two-digit Python integer."""


def trail_code(state: State) -> int:
    """The state's number in a trail, from 1; 0 is the end of the trail."""
    return _CODES[state]


def read_trail(trail: int) -> list[State]:
    """The last states of a sample, oldest first."""
    states = []
    while trail:
        states.append(_STATES[(trail & 15) - 1])
        trail >>= 4
    return states[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch that was asked for and is not delivered."""

    batch: int
    groups: int
    version: int | None = None  # that it will be trained on, where the caller said so


@dataclass(slots=True, eq=False)
class Engine:
    """A place that holds samples while they run."""

    id: EngineId
    capacity: int  # samples to hold at once while open; held may exceed it for a while
    order: int  # number of the join; unique; breaks ties of equal load
    version: int = 0  # of the weights that it last said, or was taken, to serve
    limit: int = 0  # samples it may hold now: capacity, 1 on trial, 0 when closed or lost
    held: dict[SampleId, Sample] = field(default_factory=dict)  # exactly those RUNNING here
    stamp: int = 0  # only the heap entry with this stamp is current
    closed: set[ClosedReason] = field(
        default_factory=set
    )  # why it gets no samples; empty when open
    asked_version: int | None = None  # of an `UpdateEngine` that is not answered; then UPDATING
    paused: bool = False  # must make no tokens until it is continued

    @property
    def free(self) -> int:
        """Samples it can still take; negative after a cut of capacity."""
        return self.limit - len(self.held)

    def limit_now(self, health: Health | None) -> int:
        """Returns the value that `limit` must have."""
        if self.closed:
            return 0
        return min(self.capacity, 1) if health is not None and health.on_trial else self.capacity


@dataclass(slots=True, eq=False)
class Health:
    """The failures of an engine, remembered by its name even after it is lost."""

    failed: dict[str, None] = field(default_factory=dict)  # samples since the last success, losses
    quarantines: int = 0  # since the last success
    on_trial: bool = False  # it was released and has finished no sample since
    until_s: float | None = None  # of the quarantine that it is in


@dataclass(slots=True, eq=False)
class Group:
    """All samples of one prompt in one epoch."""

    id: GroupId
    members: list[Sample]  # live samples in member order; empty once the group is dead
    source: str = ""
    expected_tokens: float | None = None  # as the caller thinks of an answer's length
    seq: int = -1  # number of the admission; unique, rising; -1 before it
    phase: GroupPhase = GroupPhase.OPEN  # OPEN iff num_ready < group_size and it is not dead
    num_ready: int = 0  # members in READY
    first_version: int | None = None  # least of the members', None while none has begun
    pooled_version: int | None = None  # the first_version that the pool knows of
    home: Engine | None = None  # where its latest member was sent; may be lost or full

    @property
    def alive(self) -> bool:
        """True while its members are live and it can still be delivered."""
        return self.phase not in (GroupPhase.FILTERED, GroupPhase.DROPPED)

    @property
    def settled(self) -> bool:
        """True once no batch needs to wait for it."""
        return self.phase not in (GroupPhase.OPEN, GroupPhase.JUDGING)

    @property
    def admitted(self) -> bool:
        """True once its samples may start."""
        return self.seq >= 0

    def recompute_first_version(self) -> None:
        """Takes the least first version of the members that have begun."""
        self.first_version = min(
            (m.first_version for m in self.members if m.first_version is not None), default=None
        )


@dataclass(slots=True, eq=False)
class Sample:
    """One answer to one prompt, from admission to its end."""

    id: SampleId
    group: Group
    member: int  # its number in the group; group.members is in this order
    state: State = State.QUEUED
    attempt: int = -1  # number of the latest dispatch; -1 before the first; never falls
    failures: int = 0  # failed attempts; < retries.attempts while live
    reward_failures: int = 0  # failed rewards; < retries.rewards while live
    engine: Engine | None = None  # set iff RUNNING, and then engine.held has it
    avoids: Engine | None = None  # where its last attempt failed; only while QUEUED
    aborting: str = ""  # why an abort was asked of the engine; only while RUNNING
    kept_tokens: int = 0  # tokens of ended attempts, in the payload store; never falls
    num_tokens: int = 0  # the same plus the reported progress; >= kept_tokens
    versions: tuple[tuple[int, int], ...] = ()  # (version, count) of kept_tokens; counts sum to it
    first_version: int | None = None  # least of versions; without tokens, of the dispatch
    moved_s: float = 0.0  # when it last made a token, began, or was to be aborted; for stalls
    rank: float = 0.0  # queue rank when queued: minus the tokens predicted to remain
    trail: int = trail_code(State.QUEUED)  # last TRAIL_STATES states, 4 bits each


# Version spans: which weights made which tokens of a sample.

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""`(version, tokens)` in the order of tokens; neighbours have different versions."""


def attempt_spans(end: SampleEnd, kept_tokens: int) -> tuple[Spans, int]:
    """The spans of an attempt that began after `kept_tokens`, and how many tokens they are.

    Raises:
        SchedulerError: they do not add up.
    """
    spans, new_tokens = end.versions, end.num_tokens - kept_tokens
    if (
        new_tokens < 0
        or sum(count for _, count in spans) != new_tokens
        or (len(spans) > 1 and min(count for _, count in spans) < 1)
    ):
        raise SchedulerError(
            "an attempt's version spans do not add up to its tokens",
            where=f"sample {end.sample}, attempt {end.attempt}",
            found=f"{end.num_tokens} tokens in all, spans {spans}",
            expected=f"spans of {new_tokens} tokens after the {kept_tokens} kept ones",
            hint="the engine reports the versions of this attempt's own tokens",
        )
    return spans, new_tokens


def joined(first: Spans, second: Spans) -> Spans:
    """Spans one after the other; neighbours of one version become one.

    >>> joined(((0, 5), (1, 2)), ((1, 3), (2, 1)))
    ((0, 5), (1, 5), (2, 1))
    """
    if first[-1][0] != second[0][0]:
        return first + second
    version, count = first[-1]
    return (*first[:-1], (version, count + second[0][1]), *second[1:])
