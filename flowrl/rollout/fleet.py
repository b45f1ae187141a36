"""The engines: which are open, why others are closed, and the actions sent to them.

An engine is open, or closed for one or more reasons (`ClosedReason`); it gets samples only while it
is open. The effect of each reason on the samples that run there, and its end:

| reason      | running samples          | ends with                                    | paused |
|-------------|--------------------------|----------------------------------------------|--------|
| leaving     | aborted, or finish       | `ReleaseEngine` once nothing runs            | no     |
| suspected   | stay                     | a sign of life, or the engine is given up    | no     |
| quarantined | aborted                  | the release at its deadline, on trial        | yes    |
| updating    | aborted, or finish       | `EngineUpdated` with the latest weights      | no     |
| asked       | stay, or aborted         | `EngineContinueAsked`                        | yes    |
| repacked    | aborted                  | samples are queued that others cannot take   | yes    |

Aborted samples keep their tokens and continue on other engines.
"""

from __future__ import annotations

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId
from flowrl.rollout import events as ev
from flowrl.rollout.actions import (
    Action,
    ContinueEngine,
    PauseEngine,
    ReleaseEngine,
    UpdateEngine,
)
from flowrl.rollout.lifecycle import Lifecycle
from flowrl.rollout.placement import in_order
from flowrl.rollout.policies.engines import Quarantine, RepackTail
from flowrl.rollout.state import SchedulerState, Timer, TimerKind
from flowrl.rollout.states import ClosedReason, Engine, Health, Sample, State

_PAUSING = frozenset({ClosedReason.QUARANTINED, ClosedReason.ASKED, ClosedReason.REPACKED})
"""Reasons for which an engine makes no tokens."""

_EMPTYING = frozenset({ClosedReason.LEAVING, ClosedReason.UPDATING})
"""Reasons that wait until nothing runs there."""

_NO_ENGINE = EngineId("")


class Fleet:
    """Opens and closes the engines of a state, and collects the actions for them."""

    __slots__ = (
        "_emptying",
        "_lifecycle",
        "_machine",
        "_placement",
        "_repacked",
        "_settings",
        "_state",
        "actions",
    )

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._settings = state.settings
        self._machine = state.machine
        self._placement = state.placement
        self._lifecycle = lifecycle
        self.actions: list[Action] = []  # of the step being made, to engines; empty between steps
        # Engines that something is waited for with: those with a reason of _EMPTYING.
        engines = state.placement.engines.values()
        self._emptying = {engine.id: engine for engine in engines if engine.closed & _EMPTYING}
        # Engines that were freed: those that are closed as repacked.
        self._repacked = {e.id: e for e in engines if ClosedReason.REPACKED in e.closed}

    # Coming and going

    def join(self, event: ev.EngineJoined) -> None:
        """Adds an engine that joined."""
        _require_capacity(event.engine, event.capacity)
        if event.engine in self._placement.engines:
            self.lose(event.engine, "joined again")
        version = self._machine.version if event.version is None else event.version
        engine = Engine(
            id=event.engine,
            capacity=event.capacity,
            order=self._placement.num_joins,
            version=version,
        )
        self._placement.num_joins += 1
        self._placement.add(engine)
        health = self._state.health.get(engine.id)
        if health is not None and health.until_s is not None:
            engine.closed.add(ClosedReason.QUARANTINED)
        if version < self._machine.version:
            engine.closed.add(ClosedReason.UPDATING)
        self._refresh(engine)

    def resize(self, event: ev.EngineCapacityChanged) -> None:
        """Changes the number of samples that the engine takes."""
        _require_capacity(event.engine, event.capacity)
        engine = self._known(event.engine)
        if engine is None:
            return
        engine.capacity = event.capacity
        self._refresh(engine)
        if event.excess == "abort":
            running = [sample for sample in in_order(engine) if not sample.aborting]
            running.sort(key=lambda sample: sample.num_tokens)
            for sample in running[: max(0, len(running) - event.capacity)]:
                self._lifecycle.abort(sample, "engine over-full")

    def leave(self, event: ev.EngineLeaving) -> None:
        """Closes an engine that is to leave as soon as it is empty."""
        engine = self._known(event.engine)
        if engine is not None:
            self._close(engine, ClosedReason.LEAVING, aborts=event.running == "abort")

    def lost(self, engine: EngineId, reason: str) -> None:
        """Removes an engine that is reported as gone."""
        if self._known(engine) is not None:
            self.lose(engine, reason)

    def lose(self, name: EngineId, reason: str) -> None:
        """Removes a dead engine, with the tokens of its running attempts."""
        for sample in self._remove(self._placement.engines[name]):
            # A sample can be gone already: with its group, by an earlier one of this loop.
            if sample.state is State.RUNNING:
                self._lifecycle.fail(sample, f"engine lost: {reason}")
        self.record_failure(name, f"loss at event {self._machine.event_id}")

    def forget_all(self, at_s: float) -> None:
        """Removes all engines after the process restarted, without recording failures."""
        for engine in list(self._placement.engines.values()):
            for sample in self._remove(engine):
                self._lifecycle.requeue(sample, "resumed")
        timers = self._state.timers
        timers.cancel(TimerKind.STALL, _NO_ENGINE)
        shift = at_s - timers.now_s
        timers.restart(at_s)
        for health in self._state.health.values():
            if health.until_s is not None:
                health.until_s += shift

    def _remove(self, engine: Engine) -> list[Sample]:
        self._state.timers.cancel(TimerKind.HEARTBEAT, engine.id)
        self._emptying.pop(engine.id, None)
        self._repacked.pop(engine.id, None)
        return self._placement.lose(engine)

    # Silence

    def suspect(self, name: EngineId) -> None:
        """Closes an engine whose heartbeat was lost, or gives it up."""
        engine = self._known(name)
        if engine is None:
            return
        patience_s = self._settings.patience.heartbeat_s
        if not patience_s:
            self._give_up(name)
        elif ClosedReason.SUSPECTED not in engine.closed:
            self._state.timers.set(TimerKind.HEARTBEAT, name, self._state.timers.now_s + patience_s)
            self._close(engine, ClosedReason.SUSPECTED, aborts=False)

    def _give_up(self, name: EngineId) -> None:
        self.lose(name, "heartbeat lost")
        self.actions.append(ReleaseEngine(engine=name))

    def seen(self, name: EngineId) -> None:
        """Opens an engine again that has sent a sign of life."""
        engine = self._placement.engines.get(name)
        if engine is not None and ClosedReason.SUSPECTED in engine.closed:
            self._state.timers.cancel(TimerKind.HEARTBEAT, name)
            self._open(engine, ClosedReason.SUSPECTED)

    def watch_stalls(self) -> None:
        """Sets the deadline at which running attempts are checked for stalls."""
        stall_s, timers = self._settings.patience.stall_s, self._state.timers
        if (
            stall_s
            and self._machine.counts[State.RUNNING]
            and (TimerKind.STALL, _NO_ENGINE) not in timers.pending
        ):
            timers.set(TimerKind.STALL, _NO_ENGINE, timers.now_s + stall_s)

    def _end_stalls(self) -> None:
        stall_s, timers = self._settings.patience.stall_s, self._state.timers
        oldest_s = None
        for engine in list(self._placement.engines.values()):
            for sample in in_order(engine):
                if sample.state is not State.RUNNING:
                    continue  # gone with its group, by an earlier one of this loop
                if engine.paused and not sample.aborting:
                    continue  # it is not to make tokens
                if timers.now_s - sample.moved_s >= stall_s:
                    # The engine may be at it still; its report will be of a dead attempt.
                    self._lifecycle.abort(sample, "stalled")
                    self._lifecycle.fail(sample, f"no token for {stall_s:g} s")
                    self.record_failure(engine.id, sample.id)
                elif oldest_s is None or sample.moved_s < oldest_s:
                    oldest_s = sample.moved_s
        if oldest_s is not None:
            at_s = max(oldest_s + stall_s, timers.now_s + stall_s / 8)
            timers.set(TimerKind.STALL, _NO_ENGINE, at_s)

    def due(self, timer: Timer) -> None:
        """Acts on a deadline that has come."""
        kind, name = timer
        match kind:
            case TimerKind.HEARTBEAT:
                self._give_up(name)
            case TimerKind.RELEASE:
                self._release(name)
            case TimerKind.STALL:
                self._end_stalls()

    # Failures

    def record_failure(self, name: EngineId, failure: str) -> None:
        """Counts a failed attempt, or the loss of the engine."""
        policy = self._settings.quarantine
        if not isinstance(policy, Quarantine):
            return
        health = self._state.health.setdefault(name, Health())
        if health.until_s is not None:
            return
        health.failed[failure] = None
        if not health.on_trial and len(health.failed) < policy.failures:
            return
        timers = self._state.timers
        health.until_s = timers.now_s + policy.duration_s(health.quarantines)
        health.quarantines += 1
        health.on_trial = False
        health.failed.clear()
        timers.set(TimerKind.RELEASE, name, health.until_s)
        engine = self._placement.engines.get(name)
        if engine is not None:
            self._close(engine, ClosedReason.QUARANTINED, aborts=True)

    def record_success(self, name: EngineId) -> None:
        """Clears the failures of an engine that finished a sample."""
        health = self._state.health.get(name)
        if health is not None and health.until_s is None:
            del self._state.health[name]
            engine = self._placement.engines.get(name)
            if engine is not None:
                self._refresh(engine)

    def _release(self, name: EngineId) -> None:
        engine = self._placement.engines.get(name)
        if engine is None:
            del self._state.health[name]  # gone in the meantime, and forgiven
            return
        health = self._state.health[name]
        health.until_s = None
        health.on_trial = True
        self._open(engine, ClosedReason.QUARANTINED)

    # Pauses and weights

    def pause(self, event: ev.EnginePauseAsked) -> None:
        """Pauses an engine whose devices the caller needs."""
        engine = self._known(event.engine)
        if engine is not None:
            self._close(engine, ClosedReason.ASKED, aborts=event.running == "abort")

    def continue_engine(self, name: EngineId) -> None:
        """Continues an engine whose devices the caller no longer needs."""
        engine = self._known(name)
        if engine is not None:
            self._open(engine, ClosedReason.ASKED)

    def publish(self) -> None:
        """Updates engines, or has them updated, after the version has risen."""
        policy = self._settings.publication
        for engine in self._placement.engines.values():
            if policy.empties:
                self._close(engine, ClosedReason.UPDATING, aborts=policy.aborts)
            elif ClosedReason.UPDATING not in engine.closed:
                engine.version = self._machine.version

    def updated(self, event: ev.EngineUpdated) -> None:
        """Notes the weights that an engine has loaded, which may no longer be the latest."""
        engine = self._placement.engines.get(event.engine)
        if engine is None or engine.asked_version is None:
            self._state.fenced += 1
            return
        engine.asked_version = None
        engine.version = event.version
        if event.version >= self._machine.version:
            self._open(engine, ClosedReason.UPDATING)

    def serve_empty(self) -> None:
        """Releases or updates the engines that have become empty."""
        for engine in list(self._emptying.values()):
            if engine.held:
                continue
            if ClosedReason.LEAVING in engine.closed:
                self._remove(engine)
                self.actions.append(ReleaseEngine(engine=engine.id))
            elif engine.asked_version is None:
                engine.asked_version = self._machine.version
                self.actions.append(UpdateEngine(engine=engine.id, version=self._machine.version))

    # The tail of a step

    def repack(self) -> bool:
        """Moves the tail onto fewer engines, if it is time; returns whether it did.

        Nothing is queued when it is called.
        """
        policy = self._settings.repack
        running = self._machine.counts[State.RUNNING]
        if not isinstance(policy, RepackTail) or not running:
            return False
        opened = [engine for engine in self._placement.engines.values() if engine.limit]
        opened.sort(key=lambda engine: (-len(engine.held), engine.order))
        in_use = sum(bool(engine.held) for engine in opened)
        kept, slots = 0, 0
        for engine in opened:
            if slots >= running or not engine.held:
                break
            kept += 1
            slots += engine.limit
        if slots < running or kept > policy.share * in_use:
            return False
        for engine in opened[kept:]:
            self._close(engine, ClosedReason.REPACKED, aborts=True)
        return True

    def unpack(self, waiting: int) -> None:
        """Opens engines that were freed by repacking, if samples wait that others cannot take.

        As many as there are samples, so that new work is spread over the engines again.
        """
        if not self._repacked:
            return
        free_slots = sum(max(0, engine.free) for engine in self._placement.engines.values())
        if waiting <= free_slots:
            return
        opened = 0
        for engine in sorted(self._repacked.values(), key=lambda engine: engine.order):
            if opened >= waiting and free_slots >= waiting:
                return
            if engine.closed == {ClosedReason.REPACKED} and engine.capacity:
                self._open(engine, ClosedReason.REPACKED)
                opened += 1
                free_slots += max(0, engine.free)

    # How engines are opened and closed

    def _known(self, name: EngineId) -> Engine | None:
        engine = self._placement.engines.get(name)
        if engine is None:
            self._state.fenced += 1
        return engine

    def _close(self, engine: Engine, reason: ClosedReason, *, aborts: bool) -> None:
        engine.closed.add(reason)
        if aborts:
            for sample in in_order(engine):
                self._lifecycle.abort(sample, reason)
        self._refresh(engine)

    def _open(self, engine: Engine, reason: ClosedReason) -> None:
        engine.closed.discard(reason)
        self._refresh(engine)

    def _refresh(self, engine: Engine) -> None:
        """Brings everything up to date that depends on why the engine is closed."""
        limit = engine.limit_now(self._state.health.get(engine.id))
        self._placement.limit(engine, limit)
        if engine.closed & _EMPTYING:
            self._emptying[engine.id] = engine
        else:
            self._emptying.pop(engine.id, None)
        if ClosedReason.REPACKED in engine.closed:
            self._repacked[engine.id] = engine
        else:
            self._repacked.pop(engine.id, None)
        reasons = sorted(engine.closed & _PAUSING)
        if bool(reasons) is engine.paused:
            return
        engine.paused = bool(reasons)
        if reasons:
            self.actions.append(PauseEngine(engine=engine.id, reason=", ".join(reasons)))
        else:
            for sample in engine.held.values():
                sample.moved_s = self._state.timers.now_s  # it could not make tokens until now
            self.actions.append(ContinueEngine(engine=engine.id))


def _require_capacity(engine: EngineId, capacity: int) -> None:
    if capacity < 0:
        raise SchedulerError(
            "a capacity is negative", where=f"engine {engine}", found=str(capacity)
        )
