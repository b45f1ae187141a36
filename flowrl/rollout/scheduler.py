"""The rollout scheduler: every sample from its admission to the one end it has. No I/O, no clock.

Lifecycle of a synchronous step, with groups of two on one engine:

>>> from flowrl.ids import EngineId, GroupId
>>> from flowrl.rollout import BatchAsked, EngineJoined, PromptsOffered, SchedulerSettings
>>> scheduler = RolloutScheduler(SchedulerSettings(group_size=2))
>>> scheduler.step(EngineJoined(id=0, engine=EngineId("e"), capacity=8))
[]
>>> [submit] = scheduler.step(PromptsOffered(id=1, groups=(GroupId("0/0"),)))
>>> [dispatch.sample for dispatch in submit.samples]
['0/0/0', '0/0/1']
>>> scheduler.step(BatchAsked(id=2, batch=0, groups=1))
[]

`SamplesFinished` is answered by `Score`, `SamplesScored` by `Judge` (where groups are judged), and
the last score or verdict by `Deliver`. Each sample moves on alone; only a group waits for its
members, and only a batch for its groups.

What happens to a group that loses a member: a delivered group has exactly `group_size` valid
members, so the others are dropped with the reason `incomplete_group`. Without refill the group
still counts towards its batch, and is named there.

What happens to late reports: a report names the attempt it is about. If the sample does not run
that attempt on that engine (it was lost, aborted, dropped or already ended), the report is counted
in `fenced` and changes nothing. Slots of dropped samples are free at once: the `Abort` stands
before the `Submit` that uses them.

After an error the scheduler may have handled half an event and is not to be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, SampleId, sample_id
from flowrl.rollout import events as ev
from flowrl.rollout.actions import (
    Action,
    Deliver,
    NeedPrompts,
)
from flowrl.rollout.lives import Lives
from flowrl.rollout.machine import Observer
from flowrl.rollout.records import Group, Sample
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.snapshot import read_state, write_state
from flowrl.rollout.state import SchedulerState, describe_waits
from flowrl.rollout.states import Counts, DropReason, GroupPhase, State
from flowrl.rollout.validation import check_state

__all__ = ["RolloutScheduler"]


class RolloutScheduler:
    """`step(event) -> actions`; see the module.

    Args:
        validate: Check every invariant of the state after each step, and keep whole stories. Slow;
            for tests.
        observer: Called with each transition, in order; costs nothing when None.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        validate: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self._open(SchedulerState.new(settings, observer, keep_stories=validate), validate)

    def _open(self, state: SchedulerState, validate: bool) -> None:
        self.state = state
        self.settings = state.settings
        self._machine = state.machine
        self._placement = state.placement
        self._groups = state.groups
        self._pool = state.pool
        self._waiting = state.waiting
        self._lives = Lives(state)
        self._validate = validate

    # What can be asked

    @property
    def counts(self) -> Counts:
        """Samples by state."""
        return self._machine.total()

    @property
    def version(self) -> int:
        """The latest published weights."""
        return self._machine.version

    @property
    def fenced(self) -> int:
        """Reports on dead attempts, and answers to nothing asked; all without effect."""
        return self.state.fenced

    @property
    def stopped(self) -> str | None:
        """The reason of the stop, if there was one."""
        return self.state.stopped

    @property
    def last_event_id(self) -> int:
        """The next event's id is higher."""
        return self._machine.event_id

    def story(self, sample: SampleId) -> str:
        """What happened to a sample; of ended ones only the validator keeps it."""
        record = self._machine.samples.get(sample)
        if record is not None:
            return self._machine.story(record)
        stories = self._machine.stories or {}
        return "; ".join(str(step) for step in stories.get(sample, [])) or "not a live sample"

    def waits(self) -> list[str]:
        """Who waits for whom, one line each: what to print when nothing moves any more."""
        return describe_waits(self.state)

    # The machine

    def step(self, event: ev.Event) -> list[Action]:
        """What follows from the event. An event that was seen before changes nothing.

        Raises:
            SchedulerError: the event contradicts what was agreed (a group offered twice, spans
                that do not add up, a version that falls), or an impossible transition.
        """
        machine = self._machine
        if event.id <= machine.event_id:
            return []
        machine.event_id = event.id
        self._HANDLERS[type(event)](self, event)
        actions = self._conclude()
        if self._validate:
            check_state(self.state)
        return actions

    def _conclude(self) -> list[Action]:
        """Everything that has become possible: batches, requests for prompts, placements."""
        delivers: list[Deliver] = []
        while self._waiting:
            batch, num_groups = self._waiting[0]
            taken = self._pool.take(num_groups)
            if taken is None:
                break
            self._waiting.popleft()
            delivers.append(self._lives.deliver(batch, taken))
        actions = self._lives.collect()
        actions += delivers
        if self.settings.refill and self._waiting:
            asked = sum(num_groups for _, num_groups in self._waiting)
            need = min(asked - len(self._groups) - self.state.requested, self.state.lost)
            if need > 0:
                self.state.lost -= need
                self.state.requested += need
                actions.append(NeedPrompts(groups=need))
        actions += self._placement.place(self._lives.start)
        return actions

    # Events: prompts and engines

    def _on_prompts(self, event: ev.PromptsOffered) -> None:
        if self.state.stopped is not None:
            return
        for group_id in event.groups:
            if not self.state.offered.add(group_id):
                raise SchedulerError(
                    "a group is offered a second time",
                    where=f"event {event.id}",
                    found=f"group {group_id}",
                    expected="each prompt once an epoch",
                    hint="resume the data cursor together with the scheduler's state",
                )
            group = Group(id=group_id, seq=self.state.num_offered, members=[])
            self.state.num_offered += 1
            self._groups[group_id] = group
            for member in range(self.settings.group_size):
                name = sample_id(group_id, member)
                group.members.append(self._machine.admit(name, group, member))
            self._pool.add(group)
        self.state.requested = max(0, self.state.requested - len(event.groups))

    def _on_engine_joined(self, event: ev.EngineJoined) -> None:
        self._require_capacity(event.engine, event.capacity)
        if event.engine in self._placement.engines:
            self._lose_engine(event.engine, "joined anew")
        self._placement.join(event.engine, event.capacity)

    def _on_capacity(self, event: ev.EngineCapacityChanged) -> None:
        self._require_capacity(event.engine, event.capacity)
        engine = self._placement.engines.get(event.engine)
        if engine is None:
            self.state.fenced += 1
        else:
            self._placement.resize(engine, event.capacity)

    def _on_engine_lost(self, event: ev.EngineLost) -> None:
        if event.engine in self._placement.engines:
            self._lose_engine(event.engine, event.reason)
        else:
            self.state.fenced += 1

    def _lose_engine(self, engine: EngineId, reason: str) -> None:
        for sample in self._placement.lose(self._placement.engines[engine]):
            # A sample can be gone already: with its group, by an earlier one of this loop.
            if sample.state is State.RUNNING:
                self._lives.fail(sample, f"engine lost: {reason}")

    @staticmethod
    def _require_capacity(engine: EngineId, capacity: int) -> None:
        if capacity < 0:
            raise SchedulerError(
                "a capacity is negative", where=f"engine {engine}", found=str(capacity)
            )

    # Events: attempts

    def _on_progress(self, event: ev.Progressed) -> None:
        samples, engine = self._machine.samples, event.engine
        for name, attempt, num_tokens in event.progress:
            sample = samples.get(name)
            if (
                sample is None
                or sample.attempt != attempt
                or sample.engine is None
                or sample.engine.id != engine
            ):
                self.state.fenced += 1
            elif num_tokens > sample.num_tokens:
                sample.num_tokens = num_tokens

    def _on_finished(self, event: ev.SamplesFinished) -> None:
        self._lives.finish(event.engine, event.ends)

    def _on_failed(self, event: ev.SampleFailed) -> None:
        sample = self._lives.attempt(event.engine, event.sample, event.attempt)
        if sample is not None:
            self._lives.fail(sample, event.error)

    def _on_abort_asked(self, event: ev.AbortAsked) -> None:
        for name in event.samples:
            sample = self._machine.samples.get(name)
            if sample is not None and sample.state is State.RUNNING:
                self._lives.abort(sample)

    # Events: scores and verdicts

    def _on_scored(self, event: ev.SamplesScored) -> None:
        for name, _ in event.scores:
            sample = self._machine.samples.get(name)
            if sample is None or sample.state is not State.SCORING:
                self.state.fenced += 1
                continue
            self._machine.move(sample, State.READY)
            group = sample.group
            group.num_ready += 1
            if group.num_ready == self.settings.group_size:
                if self.settings.judges_groups:
                    group.phase = GroupPhase.JUDGING
                    self._lives.judges.append(group.id)
                else:
                    group.phase = GroupPhase.READY
                    self._pool.settle(group)

    def _on_reward_failed(self, event: ev.RewardFailed) -> None:
        sample = self._machine.samples.get(event.sample)
        if sample is None or sample.state is not State.SCORING:
            self.state.fenced += 1
        else:
            self._lives.drop(sample, DropReason.REWARD_FAILED)

    def _on_judged(self, event: ev.GroupsJudged) -> None:
        for name, reason in event.verdicts:
            group = self._groups.get(name)
            if group is None or group.phase is not GroupPhase.JUDGING:
                self.state.fenced += 1
            elif reason is None:
                group.phase = GroupPhase.READY
                self._pool.settle(group)
            else:
                for member in group.members:
                    self._machine.move(member, State.FILTERED, reason)
                self._lives.end_group(group, GroupPhase.FILTERED)

    # Events: versions, batches, the run

    def _on_published(self, event: ev.WeightsPublished) -> None:
        version = self._machine.version
        if event.version < version:
            raise SchedulerError(
                "the version of the weights falls",
                where=f"event {event.id}",
                found=f"version {event.version} after {version}",
                expected="versions that rise",
            )
        self._machine.version = event.version
        oldest = event.version - self.settings.max_staleness
        for group in list(self._groups.values()):
            if group.first_version is not None and group.first_version < oldest:
                self._lives.drop_group(
                    group,
                    {
                        member.id: DropReason.AGED
                        for member in group.members
                        if member.first_version is not None and member.first_version < oldest
                    },
                )
        self._pool.publish(event.version)

    def _on_batch_asked(self, event: ev.BatchAsked) -> None:
        if self.state.stopped is not None or event.groups < 1:
            raise SchedulerError(
                "this batch cannot be answered",
                where=f"batch {event.batch}",
                found=f"{event.groups} groups, stopped: {self.state.stopped}",
                expected="at least one group, and a scheduler that was not stopped",
            )
        if all(batch != event.batch for batch, _ in self._waiting):
            self._waiting.append((event.batch, event.groups))

    def _on_stop(self, event: ev.StopAsked) -> None:
        if self.state.stopped is not None:
            return
        self.state.stopped = event.reason
        self._waiting.clear()
        for group in list(self._groups.values()):
            self._lives.drop_group(group, dict.fromkeys(_names(group.members), DropReason.STOPPED))
        self.state.lost = self.state.requested = 0

    def _on_resumed(self, event: ev.Resumed) -> None:
        for engine in list(self._placement.engines.values()):
            for sample in self._placement.lose(engine):
                # Not the sample's failure: the whole process ended.
                self._lives.requeue(sample, "resumed")
        # What was asked of the process before is asked again; a second answer is fenced.
        for group in self._groups.values():
            if group.phase is GroupPhase.JUDGING:
                self._lives.judges.append(group.id)
            elif group.phase is GroupPhase.OPEN:
                self._lives.scores += _names(m for m in group.members if m.state is State.SCORING)
        self.state.lost += self.state.requested
        self.state.requested = 0

    _HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        ev.PromptsOffered: _on_prompts,
        ev.EngineJoined: _on_engine_joined,
        ev.EngineCapacityChanged: _on_capacity,
        ev.EngineLost: _on_engine_lost,
        ev.Progressed: _on_progress,
        ev.SamplesFinished: _on_finished,
        ev.SampleFailed: _on_failed,
        ev.SamplesScored: _on_scored,
        ev.RewardFailed: _on_reward_failed,
        ev.GroupsJudged: _on_judged,
        ev.WeightsPublished: _on_published,
        ev.BatchAsked: _on_batch_asked,
        ev.AbortAsked: _on_abort_asked,
        ev.StopAsked: _on_stop,
        ev.Resumed: _on_resumed,
    }

    # The state as JSON

    def to_json(self) -> dict[str, Any]:
        """The whole state between two steps, as plain JSON values."""
        return write_state(self.state)

    @classmethod
    def from_json(
        cls,
        obj: dict[str, Any],
        *,
        validate: bool = False,
        observer: Observer | None = None,
    ) -> RolloutScheduler:
        """The scheduler that `to_json` described; step `Resumed` if its engines are gone.

        Raises:
            SchedulerError: the object is not such a description, or breaks an invariant.
        """
        state = read_state(obj, observer, keep_stories=validate)
        if validate:
            check_state(state)
        scheduler = cls.__new__(cls)
        scheduler._open(state, validate)
        return scheduler


def _names(samples: Iterable[Sample]) -> list[SampleId]:
    return [sample.id for sample in samples]
