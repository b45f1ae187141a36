"""Checks the whole state against what its fields say, after a step. Linear in the live samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flowrl.errors import SchedulerError
from flowrl.rollout.batches import ByDeadline
from flowrl.rollout.policies.engines import AbortRunning
from flowrl.rollout.state import SchedulerState, TimerKind
from flowrl.rollout.states import LIVE, ClosedReason, Engine, Group, GroupPhase, Sample, State


def check_state(state: SchedulerState) -> None:
    """Checks every invariant that can be seen between two steps.

    Raises:
        SchedulerError: with every broken one, and the history of a sample concerned.
    """
    problems = [
        *_counts(state),
        *_engines(state),
        *_queues(state),
        *_groups(state),
        *_batches(state),
        *_demand(state),
        *_timers(state),
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
    if not total.conserved or total.admitted != state.num_offered * state.settings.num_members:
        yield f"{state.num_offered} groups were offered, but samples are {total.to_json()}"
    members = sum(len(group.members) for group in state.groups.values())
    if members != len(machine.samples):
        yield f"{len(machine.samples)} live samples, but groups have {members} members"


def _engines(state: SchedulerState) -> Iterator[str]:
    held = 0
    for engine in state.placement.engines.values():
        held += len(engine.held)
        yield from _engine(state, engine)
        for name, sample in engine.held.items():
            if sample.engine is not engine or state.machine.samples.get(name) is not sample:
                yield f"engine {engine.id} holds {name}, which is not its own"
    if held != state.machine.counts[State.RUNNING]:
        yield f"engines hold {held} samples, {state.machine.counts[State.RUNNING]} are running"
    for sample in state.machine.samples.values():
        for problem in _sample(state, sample):
            yield f"{sample.id} ({state.machine.history(sample)}) {problem}"


def _engine(state: SchedulerState, engine: Engine) -> Iterator[str]:
    where = f"engine {engine.id} (closed: {sorted(engine.closed)})"
    health = state.health.get(engine.id)
    if engine.limit != engine.limit_now(health):
        yield f"{where} has limit {engine.limit}"
    quarantined = health is not None and health.until_s is not None
    if quarantined != (ClosedReason.QUARANTINED in engine.closed):
        yield f"{where} is in quarantine: {quarantined}"
    suspected = (TimerKind.HEARTBEAT, engine.id) in state.timers.pending
    if suspected != (ClosedReason.SUSPECTED in engine.closed):
        yield f"{where} has a heartbeat deadline: {suspected}"
    pausing = {ClosedReason.QUARANTINED, ClosedReason.ASKED, ClosedReason.REPACKED} & engine.closed
    if engine.paused != bool(pausing):
        yield f"{where} is paused: {engine.paused}"
    updating = ClosedReason.UPDATING in engine.closed
    if engine.asked_version is not None and (engine.held or not updating):
        yield f"{where} was asked to load weights while {len(engine.held)} samples run"
    if not engine.held and ClosedReason.LEAVING in engine.closed:
        yield f"{where} is empty and is not let go"
    if updating and not engine.held and engine.asked_version is None:
        yield f"{where} is empty and is not given its weights"
    if not updating and engine.version < state.machine.version:
        yield f"{where} serves version {engine.version} and is not updated"
    aborts = isinstance(state.settings.publication, AbortRunning)
    if (ClosedReason.REPACKED in engine.closed or quarantined or (updating and aborts)) and not all(
        sample.aborting for sample in engine.held.values()
    ):
        yield f"{where} holds samples that are not aborted"


def _sample(state: SchedulerState, sample: Sample) -> Iterator[str]:
    settings = state.settings
    running = sample.state is State.RUNNING
    if running != (sample.engine is not None) or (sample.aborting and not running):
        yield f"is {sample.state}, its engine {sample.engine and sample.engine.id}"
    if sample.engine and state.placement.engines.get(sample.engine.id) is not sample.engine:
        yield "runs on a lost engine"
    if not 0 <= sample.failures < settings.retries.attempts:
        yield f"is live after {sample.failures} failures"
    if not 0 <= sample.reward_failures < settings.retries.rewards:
        yield f"is live after {sample.reward_failures} failed rewards"
    if sum(count for _, count in sample.versions) != sample.kept_tokens:
        yield f"has {sample.kept_tokens} kept tokens, spans {sample.versions}"
    if sample.num_tokens < sample.kept_tokens:
        yield "has fewer tokens than it keeps"
    if sample.versions and sample.first_version != min(sample.versions)[0]:
        yield f"has first version {sample.first_version}, spans {sample.versions}"
    begun = bool(sample.versions) or sample.state is not State.QUEUED
    if begun != (sample.first_version is not None):
        yield f"has first version {sample.first_version}"
    if sample.first_version is not None and sample.first_version < state.oldest:
        yield f"is live and older than version {state.oldest}"
    if sample.avoids is not None and sample.state is not State.QUEUED:
        yield "avoids an engine and is not queued"


def _queues(state: SchedulerState) -> Iterator[str]:
    lined = list(state.placement.queues.samples())
    held_back = [sample for group in state.admission.groups() for sample in group.members]
    queued = state.machine.counts[State.QUEUED]
    if len(set(lined)) != len(lined) or len(lined) + len(held_back) != queued:
        yield f"{len(lined)} + {len(held_back)} samples wait in queue, {queued} are queued"
    if any(sample.group.admitted or sample.attempt >= 0 for sample in held_back):
        yield "a sample that may start waits for admission"
    first = state.placement.queues.first()
    if first is not (lined[0] if lined else None) and first not in lined:
        yield "the first sample of the queues is not in them"
    with_slots = [engine.id for engine in state.placement.engines.values() if engine.free > 0]
    if lined and with_slots and state.can_start:
        yield f"{len(lined)} samples are queued while {with_slots[0]} has free slots"
    freed = [
        engine.id
        for engine in state.placement.engines.values()
        if engine.closed == {ClosedReason.REPACKED} and engine.capacity
    ]
    if lined and freed and state.can_start:
        yield f"{len(lined)} samples are queued while {freed[0]} is free after repacking"


def _groups(state: SchedulerState) -> Iterator[str]:
    pooled = list(state.pool.groups())
    waiting = list(state.admission.groups())
    if [g.seq for g in pooled] != sorted({g.seq for g in pooled}):
        yield "the pool is not in order, or holds a group twice"
    alive = {g.id for g in pooled if g.alive}
    if alive | {g.id for g in waiting} != set(state.groups):
        yield "the groups of pool and admission are not the scheduler's"
    if sum(not group.settled for group in pooled) != state.admission.unsettled:
        yield f"{state.admission.unsettled} groups that are not settled are counted"
    if len(alive) != state.admission.admitted:
        yield f"{len(alive)} admitted groups are alive, {state.admission.admitted} counted"
    dead = 0 if state.settings.refill else len(pooled) - len(alive)
    if dead != state.pool.num_counted_dead:
        yield f"{dead} dead groups count, {state.pool.num_counted_dead} are counted"
    for group in pooled:
        yield from _group(state, group)
    for group in waiting:
        if group.admitted or group.first_version is not None or not group.members:
            yield f"group {group.id} waits for admission and is under way"


def _group(state: SchedulerState, group: Group) -> Iterator[str]:
    size, most = state.settings.group_size, state.settings.num_members
    where = f"group {group.id} ({group.phase})"
    if group.id not in state.offered:
        yield f"{where} was never offered"
    if not group.alive:
        if group.members:
            yield f"{where} has {len(group.members)} members"
        return
    members = [member.member for member in group.members]
    most = most if group.phase is GroupPhase.OPEN else size
    if not size <= len(members) <= most or members != sorted(set(members)):
        yield f"{where} has members {members}"
    ready = sum(member.state is State.READY for member in group.members)
    if ready != group.num_ready or (ready < size) != (group.phase is GroupPhase.OPEN):
        yield f"{where} has {ready} ready members, {group.num_ready} counted"
    if group.phase is GroupPhase.JUDGING and not state.settings.judges_groups:
        yield f"{where} waits for a verdict that nobody gives"
    firsts = [m.first_version for m in group.members if m.first_version is not None]
    if group.first_version != min(firsts, default=None):
        yield f"{where} has first version {group.first_version}, its members {firsts}"


def _batches(state: SchedulerState) -> Iterator[str]:
    if state.stopped is not None and (state.machine.samples or state.waiting or state.groups):
        yield "something is alive after the stop"
    if isinstance(state.pool, ByDeadline):
        yield from state.pool.problems()
    if state.horizon != state.next_horizon() or state.horizon < state.machine.version:
        yield f"the next batch is for version {state.horizon}, expected {state.next_horizon()}"
    if state.waiting and state.stopped is None:
        asked = state.waiting[0]
        if state.pool.complete(asked):
            yield f"batch {asked.batch} waits, but {asked.groups} groups are there"


def _demand(state: SchedulerState) -> Iterator[str]:
    admission = state.admission
    if (
        min(admission.lost, admission.asked_for_lost, state.fenced, *admission.requested.values())
        < 0
    ):
        yield "a counter is negative"
    if state.stopped is not None or state.machine.event_id < 0:
        return
    if state.settings.budget is not None:
        num_admissible = state.num_admissible()
        if num_admissible > 0 and len(admission):
            yield f"{len(admission)} groups wait while {num_admissible} can be admitted"
        if sum(admission.wanted_by_budget(num_admissible).values()):
            yield "groups can be admitted, and nobody was asked for prompts"
    elif state.settings.refill and state.waiting:
        asked = sum(asked.groups for asked in state.waiting)
        missing = min(asked - len(state.groups) - admission.requested.total(), admission.lost)
        if missing > 0 and not admission.unsettled:
            yield "a batch can never be filled, and nobody was asked for prompts"


def _timers(state: SchedulerState) -> Iterator[str]:
    timers = state.timers
    if not timers.pending:
        return
    earliest = min(timers.pending.values())
    if earliest <= timers.now_s:
        yield f"a deadline of {earliest} s has passed at {timers.now_s} s"
    if timers.announced is None or timers.announced > earliest:
        yield f"nobody is to be woken for the deadline at {earliest} s"
    for name, health in state.health.items():
        pending = timers.pending.get((TimerKind.RELEASE, name))
        if pending != health.until_s:
            yield f"engine {name} is released at {pending} s, not {health.until_s} s"
