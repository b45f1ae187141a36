"""The whole state of a scheduler between two steps, its JSON form, its deadlines and waits.

Time is what events say it is; it never goes back. A deadline is due when an event's time reaches
it. Whenever the earliest deadline is earlier than the wake-up that was last asked for, another
wake-up is asked for: no deadline is ever without one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, sample_id
from flowrl.rollout.admission import AdmissionQueue, OfferedGroups
from flowrl.rollout.batches import Pool, open_pool
from flowrl.rollout.machine import Machine, Observer
from flowrl.rollout.placement import Placement
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import (
    TERMINAL,
    BatchRequest,
    ClosedReason,
    Engine,
    Group,
    GroupPhase,
    Health,
    Sample,
    State,
)
from flowrl.wording import counted


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

    def num_admissible(self) -> int:
        """Groups that the age budget admits now; negative where more are in flight."""
        return self.admission.num_admissible(
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


# The state as plain JSON values, and back; `read_state(write_state(s))` is `s`. Nothing derived is
# written: loads and limits of engines, counts of live samples and the pool's counts are computed.

FORMAT = 5
"""Version of the layout; another one is refused."""

_HEALTH = ("quarantines", "on_trial", "until_s")
_ENGINE = ("id", "capacity", "order", "version", "asked_version", "paused")
_GROUP = ("id", "source", "expected_tokens", "seq", "first_version")
_SAMPLE = (
    "member",
    "attempt",
    "failures",
    "reward_failures",
    "aborting",
    "kept_tokens",
    "num_tokens",
    "first_version",
    "moved_s",
    "rank",
    "trail",
)
"""Fields of the records that are written as they are."""


def _values(record: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _pick(obj: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: obj[name] for name in names}


def write_state(state: SchedulerState) -> dict[str, Any]:
    """Everything, as dicts, lists, strings, numbers, booleans and None."""
    machine, placement = state.machine, state.placement
    predictor = placement.queues.predictor
    return {
        "format": FORMAT,
        "settings": state.settings.to_json(),
        "last_event_id": machine.event_id,
        "version": machine.version,
        "horizon": state.horizon,
        "served": list(state.served),
        "ended": {end.value: machine.counts[end] for end in TERMINAL},
        "offered": state.offered.to_json(),
        "num_offered": state.num_offered,
        "waiting": [
            [asked.batch, asked.groups, asked.version, list(asked.names)] for asked in state.waiting
        ],
        "fenced": state.fenced,
        "stopped": state.stopped,
        "timers": {
            "now_s": state.timers.now_s,
            "announced": state.timers.announced,
            "pending": [[*timer, at_s] for timer, at_s in state.timers.pending.items()],
        },
        "health": {
            name: {**_values(health, _HEALTH), "failed": list(health.failed)}
            for name, health in state.health.items()
        },
        "num_joins": placement.num_joins,
        "engines": [
            {**_values(engine, _ENGINE), "closed": sorted(engine.closed)}
            for engine in placement.engines.values()
        ],
        "alive": list(state.groups),
        "groups": [
            _write_group(state, group)
            for group in (*state.pool.groups(), *state.admission.groups())
        ],
        "admission": state.admission.to_json(),
        "queues": placement.queues.to_json(),
        "lengths": None if predictor is None else predictor.to_json(),
    }


def _write_group(state: SchedulerState, group: Group) -> dict[str, Any]:
    return {
        **_values(group, _GROUP),
        "phase": group.phase.value,
        "home": _known(state, group.home),
        "members": [_write_sample(state, sample) for sample in group.members],
    }


def _write_sample(state: SchedulerState, sample: Sample) -> dict[str, Any]:
    return {
        **_values(sample, _SAMPLE),
        "state": sample.state.value,
        "engine": sample.engine.id if sample.engine else None,
        "avoids": _known(state, sample.avoids),
        "versions": [list(span) for span in sample.versions],
    }


def _known(state: SchedulerState, engine: Engine | None) -> EngineId | None:
    """The engine's name, or None where it is lost: the name may be in use again by another."""
    known = engine is not None and state.placement.engines.get(engine.id) is engine
    return engine.id if known and engine is not None else None


def read_state(
    obj: dict[str, Any], observer: Observer | None, *, keep_histories: bool
) -> SchedulerState:
    """The state that `write_state` described.

    Raises:
        SchedulerError: the object has another layout, or a part of it is missing or wrong.
    """
    if obj.get("format") != FORMAT:
        raise SchedulerError(
            "this scheduler state has another layout",
            found=f"format {obj.get('format')!r}",
            expected=f"format {FORMAT}",
            hint="resume it with the release that wrote it",
        )
    try:
        return _read(obj, observer, keep_histories)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SchedulerError(
            "this scheduler state cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error


def _read(obj: dict[str, Any], observer: Observer | None, keep_histories: bool) -> SchedulerState:
    settings = SchedulerSettings.from_json(obj["settings"])
    state = SchedulerState.new(settings, observer, keep_histories=keep_histories)
    machine, placement = state.machine, state.placement
    machine.event_id = obj["last_event_id"]
    machine.version, state.horizon = obj["version"], obj["horizon"]
    version, batches = obj["served"]
    state.served = (version, batches)
    for end in TERMINAL:
        machine.counts[end] = obj["ended"][end.value]
    state.offered = OfferedGroups.from_json(obj["offered"])
    state.num_offered = obj["num_offered"]
    for batch, number, of_version, names in obj["waiting"]:
        state.waiting.append(
            BatchRequest(batch=batch, groups=number, version=of_version, names=tuple(names))
        )
    state.fenced, state.stopped = obj["fenced"], obj["stopped"]
    timers, written = state.timers, obj["timers"]
    timers.now_s, timers.announced = written["now_s"], written["announced"]
    for kind, engine, at_s in written["pending"]:
        timers.set(TimerKind(kind), EngineId(engine), at_s)
    for name, fields in obj["health"].items():
        failed = dict.fromkeys(fields["failed"])
        state.health[EngineId(name)] = Health(failed=failed, **_pick(fields, _HEALTH))
    placement.num_joins = obj["num_joins"]
    for fields in obj["engines"]:
        _read_engine(state, fields)
    groups = {fields["id"]: _read_group(state, fields) for fields in obj["groups"]}
    state.groups.update((name, groups[name]) for name in obj["alive"])
    state.admission.read(obj["admission"], groups)
    if placement.queues.predictor is not None:
        placement.queues.predictor.read(obj["lengths"])
    placement.queues.read(obj["queues"], machine.samples)
    state.expect_next()
    return state


def _read_engine(state: SchedulerState, obj: dict[str, Any]) -> None:
    engine = Engine(**_pick(obj, _ENGINE), closed={ClosedReason(why) for why in obj["closed"]})
    engine.limit = engine.limit_now(state.health.get(engine.id))
    state.placement.add(engine)


def _read_group(state: SchedulerState, obj: dict[str, Any]) -> Group:
    engines = state.placement.engines
    group = Group(**_pick(obj, _GROUP), members=[], home=engines.get(obj["home"]))
    for fields in obj["members"]:
        sample = _read_sample(state, group, fields)
        group.members.append(sample)
        group.num_ready += sample.state is State.READY
        state.machine.samples[sample.id] = sample
        state.machine.counts[sample.state] += 1
    if group.admitted:
        # The pool sees what it saw before: an admission, and then perhaps the end of waiting.
        state.pool.add(group)
        group.phase = GroupPhase(obj["phase"])
        state.admission.admitted += group.alive
        state.admission.unsettled += not group.settled
        if group.settled:
            state.pool.settle(group)
    return group


def _read_sample(state: SchedulerState, group: Group, obj: dict[str, Any]) -> Sample:
    engines = state.placement.engines
    sample = Sample(
        **_pick(obj, _SAMPLE),
        id=sample_id(group.id, obj["member"]),
        group=group,
        state=State(obj["state"]),
        avoids=engines.get(obj["avoids"]),
        versions=tuple((version, count) for version, count in obj["versions"]),
    )
    if obj["engine"] is not None:
        sample.engine = engines[obj["engine"]]
        sample.engine.held[sample.id] = sample
    return sample
