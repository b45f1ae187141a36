"""The scheduler's state as plain JSON values, and back; `read_state(write_state(s))` is `s`.

Nothing derived is written: engines' loads, counts of live samples and the pool's books are made
anew from samples and groups. Whole stories (of the validator) are not kept.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId, sample_id
from flowrl.rollout.machine import Observer
from flowrl.rollout.offered import OfferedGroups
from flowrl.rollout.records import Engine, Group, Sample
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.state import SchedulerState
from flowrl.rollout.states import TERMINAL, GroupPhase, State

__all__ = ["FORMAT", "read_state", "write_state"]

FORMAT = 1
"""Version of the layout; another one is refused."""


def write_state(state: SchedulerState) -> dict[str, Any]:
    """Everything, as dicts, lists, strings, integers, booleans and None."""
    machine, placement = state.machine, state.placement
    return {
        "format": FORMAT,
        "settings": asdict(state.settings),
        "last_event_id": machine.event_id,
        "version": machine.version,
        "ended": {end.value: machine.counts[end] for end in TERMINAL},
        "offered": state.offered.to_json(),
        "num_offered": state.num_offered,
        "waiting": [list(item) for item in state.waiting],
        "lost": state.lost,
        "requested": state.requested,
        "fenced": state.fenced,
        "stopped": state.stopped,
        "num_joins": placement.num_joins,
        "engines": [[e.id, e.capacity, e.order] for e in placement.engines.values()],
        "groups": [_write_group(state, group) for group in state.pool.groups()],
        "returned": [s.id for s in placement.returned if s.state is State.QUEUED],
        "fresh": [s.id for s in placement.fresh if s.state is State.QUEUED],
    }


def _write_group(state: SchedulerState, group: Group) -> dict[str, Any]:
    # A lost engine's name may be in use again by another; as a home it means nothing any more.
    home = group.home
    known = home is not None and state.placement.engines.get(home.id) is home
    return {
        "id": group.id,
        "seq": group.seq,
        "phase": group.phase.value,
        "first_version": group.first_version,
        "home": home.id if known and home is not None else None,
        "members": [_write_sample(sample) for sample in group.members],
    }


def _write_sample(sample: Sample) -> dict[str, Any]:
    return {
        "state": sample.state.value,
        "attempt": sample.attempt,
        "failures": sample.failures,
        "engine": sample.engine.id if sample.engine else None,
        "aborting": sample.aborting,
        "kept_tokens": sample.kept_tokens,
        "num_tokens": sample.num_tokens,
        "versions": [list(span) for span in sample.versions],
        "first_version": sample.first_version,
        "trail": sample.trail,
    }


def read_state(
    obj: dict[str, Any], observer: Observer | None, *, keep_stories: bool
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
        return _read(obj, observer, keep_stories)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SchedulerError(
            "this scheduler state cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error


def _read(obj: dict[str, Any], observer: Observer | None, keep_stories: bool) -> SchedulerState:
    settings = SchedulerSettings(**obj["settings"])
    state = SchedulerState.new(settings, observer, keep_stories=keep_stories)
    state.machine.event_id = obj["last_event_id"]
    state.machine.version = obj["version"]
    for end in TERMINAL:
        state.machine.counts[end] = obj["ended"][end.value]
    state.offered = OfferedGroups.from_json(obj["offered"])
    state.num_offered = obj["num_offered"]
    state.waiting.extend((batch, groups) for batch, groups in obj["waiting"])
    state.lost, state.requested = obj["lost"], obj["requested"]
    state.fenced, state.stopped = obj["fenced"], obj["stopped"]
    for engine_id, capacity, order in obj["engines"]:
        state.placement.add(Engine(id=EngineId(engine_id), capacity=capacity, order=order))
    state.placement.num_joins = obj["num_joins"]
    # The pool's dates depend on the version, so it learns that first.
    state.pool.publish(state.machine.version)
    for item in obj["groups"]:
        _read_group(state, item)
    for name in obj["returned"]:
        state.placement.returned.append(state.machine.samples[SampleId(name)])
    for name in obj["fresh"]:
        state.placement.fresh.append(state.machine.samples[SampleId(name)])
    return state


def _read_group(state: SchedulerState, item: dict[str, Any]) -> None:
    engines = state.placement.engines
    group = Group(id=GroupId(item["id"]), seq=item["seq"], members=[])
    group.home = engines.get(item["home"])
    group.first_version = item["first_version"]
    for member, fields in enumerate(item["members"]):
        sample = _read_sample(group, member, fields)
        if fields["engine"] is not None:
            sample.engine = engines[fields["engine"]]
            sample.engine.held[sample.id] = sample
        group.members.append(sample)
        group.num_ready += sample.state is State.READY
        state.machine.samples[sample.id] = sample
        state.machine.counts[sample.state] += 1
    # The pool sees what it saw before: an offer, and then perhaps the end of waiting.
    state.pool.add(group)
    group.phase = GroupPhase(item["phase"])
    if group.alive:
        state.groups[group.id] = group
    if group.settled:
        state.pool.settle(group)


def _read_sample(group: Group, member: int, fields: dict[str, Any]) -> Sample:
    return Sample(
        id=sample_id(group.id, member),
        group=group,
        member=member,
        state=State(fields["state"]),
        attempt=fields["attempt"],
        failures=fields["failures"],
        aborting=fields["aborting"],
        kept_tokens=fields["kept_tokens"],
        num_tokens=fields["num_tokens"],
        versions=tuple((version, count) for version, count in fields["versions"]),
        first_version=fields["first_version"],
        trail=fields["trail"],
    )
