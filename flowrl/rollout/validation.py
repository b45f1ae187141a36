"""Checks the whole state against what its fields say, after a step. Linear in the live samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flowrl.errors import SchedulerError
from flowrl.rollout.batches import ByDeadline
from flowrl.rollout.records import Group, Sample
from flowrl.rollout.state import SchedulerState
from flowrl.rollout.states import LIVE, GroupPhase, State

__all__ = ["check_state"]


def check_state(state: SchedulerState) -> None:
    """Checks every invariant that can be seen between two steps.

    Raises:
        SchedulerError: with every broken one, and the story of a sample concerned.
    """
    problems = [
        *_counts(state),
        *_engines(state),
        *_queue(state),
        *_groups(state),
        *_batches(state),
    ]
    if problems:
        raise SchedulerError(
            f"{len(problems)} invariants are broken after event {state.machine.event_id}",
            where="rollout scheduler",
            found="; ".join(problems[:8]),
        )


def _counts(state: SchedulerState) -> Iterator[str]:
    machine = state.machine
    actual = Counter(sample.state for sample in machine.samples.values())
    for live in State:
        if live in LIVE and actual[live] != machine.counts[live]:
            yield f"{machine.counts[live]} samples counted as {live}, but {actual[live]} are"
    for held in (State.PARTIAL, State.GENERATED):
        if actual[held]:
            yield f"{actual[held]} samples stay {held} after a step"
    total = machine.total()
    if not total.conserved or total.admitted != state.num_offered * state.settings.group_size:
        yield f"{state.num_offered} groups were offered, but samples are {total.to_json()}"
    members = sum(len(group.members) for group in state.groups.values())
    if members != len(machine.samples):
        yield f"{len(machine.samples)} live samples, but groups have {members} members"


def _engines(state: SchedulerState) -> Iterator[str]:
    held = 0
    for engine in state.placement.engines.values():
        held += len(engine.held)
        for name, sample in engine.held.items():
            if sample.engine is not engine or state.machine.samples.get(name) is not sample:
                yield f"engine {engine.id} holds {name}, which is not its own"
    if held != state.machine.counts[State.RUNNING]:
        yield f"engines hold {held} samples, {state.machine.counts[State.RUNNING]} are running"
    for sample in state.machine.samples.values():
        yield from _sample(state, sample)


def _sample(state: SchedulerState, sample: Sample) -> Iterator[str]:
    where = f"{sample.id} ({state.machine.story(sample)})"
    running = sample.state is State.RUNNING
    if running != (sample.engine is not None) or (sample.aborting and not running):
        yield f"{where} is {sample.state}, its engine {sample.engine and sample.engine.id}"
    if sample.engine and state.placement.engines.get(sample.engine.id) is not sample.engine:
        yield f"{where} runs on a lost engine"
    if not 0 <= sample.failures < state.settings.max_attempts:
        yield f"{where} is live after {sample.failures} failures"
    if sum(count for _, count in sample.versions) != sample.kept_tokens:
        yield f"{where} has {sample.kept_tokens} kept tokens, spans {sample.versions}"
    if sample.num_tokens < sample.kept_tokens:
        yield f"{where} has fewer tokens than it keeps"
    if sample.versions and sample.first_version != min(sample.versions)[0]:
        yield f"{where} has first version {sample.first_version}, spans {sample.versions}"
    begun = bool(sample.versions) or sample.state is not State.QUEUED
    if begun != (sample.first_version is not None):
        yield f"{where} has first version {sample.first_version}"
    oldest = state.machine.version - state.settings.max_staleness
    if sample.first_version is not None and sample.first_version < oldest:
        yield f"{where} is live and older than version {oldest}"


def _queue(state: SchedulerState) -> Iterator[str]:
    queued = list(state.placement.queued())
    if len(queued) != state.machine.counts[State.QUEUED] or len(set(queued)) != len(queued):
        yield f"the queue holds {len(queued)} of {state.machine.counts[State.QUEUED]} samples"
    if any(sample.attempt >= 0 for sample in state.placement.fresh if sample.state is State.QUEUED):
        yield "a sample that was dispatched before waits among the fresh ones"
    room = [engine.id for engine in state.placement.engines.values() if engine.free > 0]
    if queued and room:
        yield f"{len(queued)} samples are queued while {room[0]} has room"


def _groups(state: SchedulerState) -> Iterator[str]:
    pooled = list(state.pool.groups())
    if [g.seq for g in pooled] != sorted({g.seq for g in pooled}):
        yield "the pool is not in offer order, or holds a group twice"
    if {g.id for g in pooled if g.alive} != set(state.groups):
        yield "the pool's alive groups are not the scheduler's"
    for group in pooled:
        yield from _group(state, group)


def _group(state: SchedulerState, group: Group) -> Iterator[str]:
    size = state.settings.group_size
    where = f"group {group.id} ({group.phase})"
    if len(group.members) != (size if group.alive else 0):
        yield f"{where} has {len(group.members)} members"
    if group.id not in state.offered:
        yield f"{where} was never offered"
    if not group.alive:
        return
    ready = sum(member.state is State.READY for member in group.members)
    if ready != group.num_ready or (ready < size) != (group.phase is GroupPhase.OPEN):
        yield f"{where} has {ready} ready members, {group.num_ready} counted"
    if group.phase is GroupPhase.JUDGING and not state.settings.judges_groups:
        yield f"{where} waits for a verdict that nobody gives"
    firsts = [m.first_version for m in group.members if m.first_version is not None]
    if group.first_version != min(firsts, default=None):
        yield f"{where} has first version {group.first_version}, its members {firsts}"
    if [m.member for m in group.members] != list(range(size)):
        yield f"{where} has its members out of order"


def _batches(state: SchedulerState) -> Iterator[str]:
    if state.stopped is not None and (state.machine.samples or state.waiting or state.groups):
        yield "something is alive after the stop"
    if isinstance(state.pool, ByDeadline):
        yield from state.pool.problems()
    if min(state.lost, state.requested, state.fenced) < 0:
        yield "a counter is negative"
    if state.waiting and state.stopped is None:
        num_groups = state.waiting[0][1]
        if state.pool.complete(num_groups):
            yield f"batch {state.waiting[0][0]} waits, but {num_groups} groups are there"
        if state.settings.refill:
            asked = sum(groups for _, groups in state.waiting)
            if min(asked - len(state.groups) - state.requested, state.lost) > 0:
                yield "a batch can never be filled, and nobody was asked for prompts"
