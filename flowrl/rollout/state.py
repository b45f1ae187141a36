"""The whole state of a scheduler between two steps, its deadlines, and what it waits for.

Time is what events say it is; it never goes back. A deadline is due when an event's time reaches
it. Whenever the earliest deadline is earlier than the wake-up that was last asked for, another
wake-up is asked for: no deadline is ever without one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from flowrl.ids import EngineId, GroupId
from flowrl.rollout.admission import AdmissionQueue, OfferedGroups
from flowrl.rollout.batches import Pool, open_pool
from flowrl.rollout.machine import Machine, Observer
from flowrl.rollout.placement import Placement
from flowrl.rollout.records import BatchRequest, Engine, Group, Health
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import GroupPhase, State
from flowrl.wording import counted

__all__ = [
    "SchedulerState",
    "Timer",
    "TimerKind",
    "Timers",
    "describe_waits",
]


class TimerKind(StrEnum):
    """The purpose of a deadline."""

    HEARTBEAT = "heartbeat"  # a silent engine is given up
    RELEASE = "release"  # an engine leaves quarantine
    STALL = "stall"  # running attempts are looked at; of no engine


Timer: TypeAlias = tuple[TimerKind, EngineId]


class Timers:
    """Deadlines by what they are for."""

    __slots__ = ("announced", "now_s", "pending")

    def __init__(self) -> None:
        self.now_s = 0.0  # the latest time of any event
        self.pending: dict[Timer, float] = {}  # deadlines that have not come
        self.announced: float | None = None  # the wake-up asked for; None when it has passed

    def set(self, kind: TimerKind, engine: EngineId, at_s: float) -> None:
        """Sets the deadline, whatever it was before."""
        self.pending[kind, engine] = at_s

    def cancel(self, kind: TimerKind, engine: EngineId) -> None:
        """Removes the deadline if there is one."""
        self.pending.pop((kind, engine), None)

    def advance(self, at_s: float) -> None:
        """Moves the clock forward to `at_s`; it never moves back."""
        if at_s > self.now_s:
            self.now_s = at_s
            if self.announced is not None and self.announced <= at_s:
                self.announced = None

    def pop_due(self) -> list[Timer]:
        """Deadlines that have come, the earliest first; they are pending no more."""
        due = sorted((at_s, timer) for timer, at_s in self.pending.items() if at_s <= self.now_s)
        for _, timer in due:
            del self.pending[timer]
        return [timer for _, timer in due]

    def wake(self) -> float | None:
        """The wake-up to ask for now, if another one than before is needed."""
        if not self.pending:
            return None
        earliest = min(self.pending.values())
        if self.announced is not None and self.announced <= earliest:
            return None
        self.announced = earliest
        return earliest

    def restart(self, at_s: float) -> None:
        """A new clock that shows `at_s`: as much is left of each deadline as before."""
        shift = at_s - self.now_s
        self.pending = {timer: at_s + shift for timer, at_s in self.pending.items()}
        self.now_s = at_s
        self.announced = None


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """Everything that a scheduler knows. `flowrl.rollout.validation` checks what is said here."""

    settings: SchedulerSettings
    placement: Placement  # the engines, and every QUEUED sample of an admitted group
    machine: Machine  # every live sample, and how many ever were in each state
    pool: Pool  # admitted groups: alive ones, and dead ones that no batch has named yet
    admission: AdmissionQueue  # groups that are not admitted, and what was asked for
    timers: Timers = field(default_factory=Timers)  # deadlines
    health: dict[EngineId, Health] = field(default_factory=dict)  # engines that failed lately
    groups: dict[GroupId, Group] = field(default_factory=dict)  # alive groups in offer order
    offered: OfferedGroups = field(default_factory=OfferedGroups)  # every group ever offered
    num_offered: int = 0  # their number
    waiting: deque[BatchRequest] = field(
        default_factory=deque
    )  # batches that were asked for, in order
    horizon: int = 0  # version that the next batch is for, as far as it is known; never falls
    served: tuple[int, int] = (0, 0)  # (version, batches) of the latest delivery, that one included
    fenced: int = 0  # reports on dead attempts, and answers to nothing asked; never falls
    stopped: str | None = None  # reason of the stop; then nothing is alive and nothing waits

    @classmethod
    def new(
        cls, settings: SchedulerSettings, observer: Observer | None, *, keep_histories: bool
    ) -> SchedulerState:
        """The state before the first event."""
        placement = Placement(settings)
        return cls(
            settings=settings,
            placement=placement,
            machine=Machine(placement, observer, keep_histories=keep_histories),
            pool=open_pool(settings),
            admission=AdmissionQueue(settings),
        )

    @property
    def oldest(self) -> int:
        """The least first version that the next batch can take."""
        return self.horizon - self.settings.max_staleness

    @property
    def can_start(self) -> bool:
        """True if a sample that starts now is not too old from the beginning."""
        return self.machine.version >= self.oldest

    @property
    def num_startable(self) -> int:
        """Queued samples of admitted groups."""
        held_back = len(self.admission) * self.settings.num_members
        return self.machine.counts[State.QUEUED] - held_back

    def next_horizon(self) -> int:
        """The version that the next batch is for."""
        horizon = max(self.horizon, self.machine.version)
        if self.settings.budget is not None:
            horizon = self.settings.budget.next_version(horizon, self.served)
        if self.waiting and self.waiting[0].version is not None:
            horizon = max(horizon, self.waiting[0].version)
        return horizon

    def expect_next(self) -> None:
        """Informs the pool which batches are still to come for the next batch's version."""
        further = 0
        budget = self.settings.budget
        if budget is not None:
            version, batches = self.served
            left = budget.batches_per_version - (batches if version == self.horizon else 0)
            further = max(0, left - 1)
        self.pool.expect(self.horizon, further)

    def room(self) -> int:
        """Groups that the age budget admits now; negative where more are in flight."""
        return self.admission.room(
            self.machine.version, self.horizon, self.served, self.pool.num_counted_dead
        )


def describe_waits(state: SchedulerState) -> list[str]:
    """Returns one line for each party that waits, and what it waits for."""
    counts = state.machine.total()
    lines = [
        f"batch {asked.batch} waits for {counted(asked.groups, 'group')}" for asked in state.waiting
    ]
    if len(state.admission):
        lines.append(
            f"{counted(len(state.admission), 'group waits', 'groups wait')} for admission, "
            f"first {_first(state).id}"
        )
    queued = state.num_startable
    if queued:
        cause = "no free slot of an engine" if state.placement.engines else "no engine"
        if not state.can_start:
            cause = f"no version {state.oldest} of the weights yet"
        lines.append(f"{counted(queued, 'sample is', 'samples are')} queued: there is {cause}")
    lines += [_describe(engine) for engine in state.placement.engines.values() if _busy(engine)]
    if counts.scoring:
        first = next(s.id for s in state.machine.samples.values() if s.state is State.SCORING)
        lines.append(
            f"{counted(counts.scoring, 'sample waits', 'samples wait')} for a score, first {first}"
        )
    judging = [group.id for group in state.groups.values() if group.phase is GroupPhase.JUDGING]
    if judging:
        lines.append(
            f"{counted(len(judging), 'group waits', 'groups wait')} for a verdict, "
            f"first {judging[0]}"
        )
    for source, number in state.admission.requested.items():
        of = f" of {source}" if source else ""
        lines.append(f"{number} further groups{of} were asked for and not offered")
    return lines


def _first(state: SchedulerState) -> Group:
    return next(state.admission.groups())


def _busy(engine: Engine) -> bool:
    return bool(engine.held or engine.closed)


def _describe(engine: Engine) -> str:
    text = f"engine {engine.id} holds {len(engine.held)} of {engine.capacity} samples"
    if engine.held:
        text += f", first {next(iter(engine.held))}"
    if engine.asked_version is not None:
        text += f"; it was asked to load weights {engine.asked_version}"
    if engine.closed:
        text += f"; closed: {', '.join(sorted(engine.closed))}"
    return text
