"""The mutable records of the scheduler's state. Every field says what holds of it.

Samples are compared by identity. A record lives as long as its sample; the end is only counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.states import Closed, GroupPhase, State

__all__ = [
    "TRAIL_STATES",
    "Asked",
    "Engine",
    "Group",
    "Health",
    "Sample",
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
class Asked:
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
    closed: set[Closed] = field(default_factory=set)  # why it gets no samples; empty when open
    asked_version: int | None = None  # of an `UpdateEngine` that is not answered; then UPDATING
    paused: bool = False  # was told to make no tokens

    @property
    def free(self) -> int:
        """Samples it can still take; negative after a cut of capacity."""
        return self.limit - len(self.held)

    def limit_now(self, health: Health | None) -> int:
        """What `limit` is to be."""
        if self.closed:
            return 0
        return min(self.capacity, 1) if health is not None and health.on_trial else self.capacity


@dataclass(slots=True, eq=False)
class Health:
    """What is remembered of an engine's failures under its name, also when it is lost."""

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
    dated: int | None = None  # the first_version that the pool knows of
    home: Engine | None = None  # where its latest member was sent; may be lost or full

    @property
    def alive(self) -> bool:
        """Whether its members are live and it can still be delivered."""
        return self.phase not in (GroupPhase.FILTERED, GroupPhase.DROPPED)

    @property
    def settled(self) -> bool:
        """Whether a batch need not wait for it any more."""
        return self.phase not in (GroupPhase.OPEN, GroupPhase.JUDGING)

    @property
    def admitted(self) -> bool:
        """Whether its samples may start."""
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
    rank: float = 0.0  # place in its line when it was queued: minus the tokens predicted to go
    trail: int = trail_code(State.QUEUED)  # last TRAIL_STATES states, 4 bits each
