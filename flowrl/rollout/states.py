"""The states of a sample, why one ends, and the mutable records of samples, groups and engines.

    QUEUED -> RUNNING -> GENERATED -> SCORING -> READY -> CONSUMED
                 |                                 \\----> FILTERED(reason)
                 +-> PARTIAL (aborted, tokens kept) -> QUEUED
                 +-> QUEUED (attempt failed, or its engine was lost)

Every live state may also end in DROPPED(reason). PARTIAL and GENERATED are passed through within
one event; they are states of their own so that the journal distinguishes an abort from a failure
and an answer from its score, and so that policies can hold samples there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TypeAlias

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.events import SampleEnd


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
    - `no_parent`: the sample whose prompt it answers was dropped.
    - `stopped`: the run was stopped.
    """

    AGED = "aged"
    RETRIES = "retries"
    REWARD_FAILED = "reward_failed"
    INCOMPLETE_GROUP = "incomplete_group"
    REDUNDANT = "redundant"
    NO_PARENT = "no_parent"
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


# The mutable records. Samples are compared by identity; a record exists as long as its sample.

TRAIL_CODES = {state: number for number, state in enumerate(State, 1)}
"""The number of each state in a trail; 0 is the end of the trail."""

TRAIL_MASK = (1 << 4 * 15) - 1
"""A trail holds 15 states of 4 bits, within a two-digit Python integer."""


def read_trail(trail: int) -> list[State]:
    """Returns the last states of a sample, oldest first."""
    states = []
    while trail:
        states.append(tuple(State)[(trail & 15) - 1])
        trail >>= 4
    return states[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch that was asked for and is not delivered."""

    batch: int
    groups: int
    version: int | None = None  # that it will be trained on, where the caller said so
    names: tuple[GroupId, ...] = ()  # its groups, where batches name them


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
    closed: set[ClosedReason] = field(default_factory=set)  # why it gets no samples, if any
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
    trail: int = TRAIL_CODES[State.QUEUED]  # the last states; `read_trail` reads it


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
