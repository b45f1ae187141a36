"""The scheduler's state as plain JSON values, and back; `read_state(write_state(s))` is `s`.

Nothing derived is written: engines' loads and limits, counts of live samples and the pool's
counts are computed from samples and groups. Whole histories (of the validator) are not kept.
"""

from __future__ import annotations

from typing import Any

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, sample_id
from flowrl.rollout.admission import OfferedGroups
from flowrl.rollout.machine import Observer
from flowrl.rollout.records import BatchRequest, Engine, Group, Health, Sample
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.state import SchedulerState, TimerKind, Timers
from flowrl.rollout.states import TERMINAL, ClosedReason, GroupPhase, State

__all__ = ["FORMAT", "read_state", "write_state"]

FORMAT = 3
"""Version of the layout; another one is refused."""


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
        "waiting": [[asked.batch, asked.groups, asked.version] for asked in state.waiting],
        "fenced": state.fenced,
        "stopped": state.stopped,
        "timers": _write_timers(state.timers),
        "health": {name: _write_health(health) for name, health in state.health.items()},
        "num_joins": placement.num_joins,
        "engines": [_write_engine(engine) for engine in placement.engines.values()],
        "alive": list(state.groups),
        "groups": [
            _write_group(state, group)
            for group in (*state.pool.groups(), *state.admission.groups())
        ],
        "admission": state.admission.to_json(),
        "queues": placement.queues.to_json(),
        "lengths": None if predictor is None else predictor.to_json(),
    }


def _write_timers(timers: Timers) -> dict[str, Any]:
    return {
        "now_s": timers.now_s,
        "announced": timers.announced,
        "pending": [[kind.value, engine, at_s] for (kind, engine), at_s in timers.pending.items()],
    }


def _write_health(health: Health) -> dict[str, Any]:
    return {
        "failed": list(health.failed),
        "quarantines": health.quarantines,
        "on_trial": health.on_trial,
        "until_s": health.until_s,
    }


def _write_engine(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.id,
        "capacity": engine.capacity,
        "order": engine.order,
        "version": engine.version,
        "closed": sorted(engine.closed),
        "asked_version": engine.asked_version,
        "paused": engine.paused,
    }


def _write_group(state: SchedulerState, group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "source": group.source,
        "expected_tokens": group.expected_tokens,
        "seq": group.seq,
        "phase": group.phase.value,
        "first_version": group.first_version,
        "home": _known(state, group.home),
        "members": [_write_sample(state, sample) for sample in group.members],
    }


def _write_sample(state: SchedulerState, sample: Sample) -> dict[str, Any]:
    return {
        "member": sample.member,
        "state": sample.state.value,
        "attempt": sample.attempt,
        "failures": sample.failures,
        "reward_failures": sample.reward_failures,
        "engine": sample.engine.id if sample.engine else None,
        "avoids": _known(state, sample.avoids),
        "aborting": sample.aborting,
        "kept_tokens": sample.kept_tokens,
        "num_tokens": sample.num_tokens,
        "versions": [list(span) for span in sample.versions],
        "first_version": sample.first_version,
        "moved_s": sample.moved_s,
        "rank": sample.rank,
        "trail": sample.trail,
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
    state.waiting.extend(BatchRequest(batch=b, groups=g, version=v) for b, g, v in obj["waiting"])
    state.fenced, state.stopped = obj["fenced"], obj["stopped"]
    _read_timers(state.timers, obj["timers"])
    for name, fields in obj["health"].items():
        state.health[EngineId(name)] = _read_health(fields)
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


def _read_timers(timers: Timers, obj: dict[str, Any]) -> None:
    timers.now_s, timers.announced = obj["now_s"], obj["announced"]
    for kind, engine, at_s in obj["pending"]:
        timers.set(TimerKind(kind), EngineId(engine), at_s)


def _read_health(obj: dict[str, Any]) -> Health:
    return Health(
        failed=dict.fromkeys(obj["failed"]),
        quarantines=obj["quarantines"],
        on_trial=obj["on_trial"],
        until_s=obj["until_s"],
    )


def _read_engine(state: SchedulerState, obj: dict[str, Any]) -> None:
    engine = Engine(
        id=EngineId(obj["id"]),
        capacity=obj["capacity"],
        order=obj["order"],
        version=obj["version"],
        closed={ClosedReason(reason) for reason in obj["closed"]},
        asked_version=obj["asked_version"],
        paused=obj["paused"],
    )
    engine.limit = engine.limit_now(state.health.get(engine.id))
    state.placement.add(engine)


def _read_group(state: SchedulerState, obj: dict[str, Any]) -> Group:
    engines = state.placement.engines
    group = Group(
        id=GroupId(obj["id"]),
        members=[],
        source=obj["source"],
        expected_tokens=obj["expected_tokens"],
        seq=obj["seq"],
    )
    group.home = engines.get(obj["home"])
    group.first_version = obj["first_version"]
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
        if group.settled:
            state.pool.settle(group)
    return group


def _read_sample(state: SchedulerState, group: Group, obj: dict[str, Any]) -> Sample:
    engines = state.placement.engines
    sample = Sample(
        id=sample_id(group.id, obj["member"]),
        group=group,
        member=obj["member"],
        state=State(obj["state"]),
        attempt=obj["attempt"],
        failures=obj["failures"],
        reward_failures=obj["reward_failures"],
        avoids=engines.get(obj["avoids"]),
        aborting=obj["aborting"],
        kept_tokens=obj["kept_tokens"],
        num_tokens=obj["num_tokens"],
        versions=tuple((version, count) for version, count in obj["versions"]),
        first_version=obj["first_version"],
        moved_s=obj["moved_s"],
        rank=obj["rank"],
        trail=obj["trail"],
    )
    if obj["engine"] is not None:
        sample.engine = engines[obj["engine"]]
        sample.engine.held[sample.id] = sample
    return sample
