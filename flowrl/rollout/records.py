"""The mutable records of the scheduler's state. Every field says what holds of it.

Samples are compared by identity. A record lives as long as its sample; the end is only counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.states import GroupPhase, State

__all__ = ["TRAIL_STATES", "Engine", "Group", "Sample", "read_trail", "trail_code"]

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


@dataclass(slots=True, eq=False)
class Engine:
    """A place that holds samples while they run."""

    id: EngineId
    capacity: int  # samples to hold at once; 0 when paused or lost; held may exceed it for a while
    order: int  # number of the join; unique; breaks ties of equal load
    held: dict[SampleId, Sample] = field(default_factory=dict)  # exactly those RUNNING here
    stamp: int = 0  # only the heap entry with this stamp is current

    @property
    def free(self) -> int:
        """Samples it can still take; negative after a cut of capacity."""
        return self.capacity - len(self.held)


@dataclass(slots=True, eq=False)
class Group:
    """All samples of one prompt in one epoch."""

    id: GroupId
    seq: int  # number of the offer; unique, rising
    members: list[Sample]  # group_size live samples in member order; empty once the group is dead
    phase: GroupPhase = GroupPhase.OPEN  # OPEN iff num_ready < group_size and no member was dropped
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
    member: int  # its place in group.members
    state: State = State.QUEUED
    attempt: int = -1  # number of the latest dispatch; -1 before the first; never falls
    failures: int = 0  # failed attempts; < max_attempts while live
    engine: Engine | None = None  # set iff RUNNING, and then engine.held has it
    aborting: bool = False  # an abort was asked of the engine; only while RUNNING
    kept_tokens: int = 0  # tokens of ended attempts, in the payload store; never falls
    num_tokens: int = 0  # the same plus the reported progress; >= kept_tokens
    versions: tuple[tuple[int, int], ...] = ()  # (version, count) of kept_tokens; counts sum to it
    first_version: int | None = None  # least of versions; without tokens, of the dispatch
    trail: int = trail_code(State.QUEUED)  # last TRAIL_STATES states, 4 bits each
