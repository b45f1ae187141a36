"""The rollout scheduler: every sample from its admission to the one end it has. No I/O, no clock.

Lifecycle of a synchronous step, with groups of two on one engine:

>>> from flowrl.ids import EngineId, GroupId
>>> from flowrl.rollout.events import BatchAsked, EngineJoined, PromptsOffered
>>> from flowrl.rollout.settings import SchedulerSettings
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
members, so if too few are left the others are dropped with the reason `incomplete_group`. Without
refill the group still counts towards its batch, and is named there.

What happens to late reports: a report names the attempt it is about. If the sample does not run
that attempt on that engine (it was lost, aborted, dropped or already ended), the report is counted
in `fenced` and changes nothing. Slots of dropped samples are free at once: the `Abort` comes
before the `Submit` that uses them.

Everything that can be chosen is a policy of the settings; docs/scheduling.md describes each. Time
comes with events, so a log of events replays to the same state (`flowrl.rollout.journal`).

After an error the scheduler may have handled half an event and is not to be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from flowrl.errors import SchedulerError
from flowrl.ids import GroupId, SampleId, sample_id
from flowrl.rollout import events as ev
from flowrl.rollout.actions import Action, Deliver, NeedPrompts, Wake
from flowrl.rollout.fleet import Fleet
from flowrl.rollout.lifecycle import Lifecycle
from flowrl.rollout.machine import Observer
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.state import SchedulerState, describe_waits, read_state, write_state
from flowrl.rollout.states import (
    BatchRequest,
    Counts,
    DropReason,
    Group,
    GroupPhase,
    Sample,
    Spans,
    State,
)
from flowrl.rollout.validation import check_state


class RolloutScheduler:
    """`step(event) -> actions`; see the module.

    Args:
        validate: Check every invariant of the state after each step, and keep whole
            histories. This is slow; it is for tests.
        observer: Called with each transition, in order; costs nothing when None.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        validate: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self._bind(SchedulerState.new(settings, observer, keep_histories=validate), validate)

    def _bind(self, state: SchedulerState, validate: bool) -> None:
        self.state = state
        self.settings = state.settings
        self._machine = state.machine
        self._placement = state.placement
        self._groups = state.groups
        self._pool = state.pool
        self._admission = state.admission
        self._waiting = state.waiting
        self._timers = state.timers
        self._lifecycle = Lifecycle(state)
        self._fleet = Fleet(state, self._lifecycle)
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

    def spans(self, sample: SampleId) -> Spans:
        """Returns the version spans of the tokens that ended attempts of a live sample left."""
        return self._machine.samples[sample].versions

    def reward_attempts_left(self, sample: SampleId) -> int:
        """Returns how often the reward of a live sample may still fail, the last time included."""
        return self.settings.retries.rewards - self._machine.samples[sample].reward_failures

    def history(self, sample: SampleId) -> str:
        """Returns the transitions of a sample; of ended samples only the validator keeps them."""
        record = self._machine.samples.get(sample)
        if record is not None:
            return self._machine.history(record)
        histories = self._machine.histories or {}
        return "; ".join(str(step) for step in histories.get(sample, [])) or "not a live sample"

    def waits(self) -> list[str]:
        """Returns one line for each party that waits, to print when nothing moves any more."""
        return describe_waits(self.state)

    # The machine

    def step(self, event: ev.Event) -> list[Action]:
        """Handles the event and returns the resulting actions. A repeated event changes nothing.

        Raises:
            SchedulerError: the event contradicts what was agreed (a group offered twice, spans
                that do not add up, a version that falls), or an impossible transition.
        """
        machine = self._machine
        if event.id <= machine.event_id:
            return []
        machine.event_id = event.id
        if type(event) is not ev.Resumed:  # whose clock is another one
            self._timers.advance(event.at_s)
        self._HANDLERS[type(event)](self, event)
        actions = self._conclude()
        if self._validate:
            check_state(self.state)
        return actions

    def _conclude(self) -> list[Action]:
        """Everything that has become possible: deadlines, batches, requests for prompts, starts."""
        if self._timers.pending:
            for timer in self._timers.pop_due():
                self._fleet.due(timer)
        delivers = self._deliver_all()
        self._fleet.serve_empty()
        actions = self._lifecycle.collect()
        actions += self._fleet.actions
        self._fleet.actions.clear()
        actions += delivers
        self._admit()
        actions += self._needs()
        if self.state.can_start:
            self._start(actions)
        self._fleet.watch_stalls()
        wake = self._timers.wake()
        if wake is not None:
            actions.append(Wake(at_s=wake))
        return actions

    def _deliver_all(self) -> list[Deliver]:
        """Answers batches as long as they need not wait."""
        delivers: list[Deliver] = []
        self._drop_stale(DropReason.AGED)
        while self._waiting:
            taken = self._pool.take(self._waiting[0])
            if taken is None:
                break
            state, asked = self.state, self._waiting.popleft()
            delivers.append(self._lifecycle.deliver(asked.batch, taken))
            version, batches = state.served
            state.served = (state.horizon, batches + 1 if version == state.horizon else 1)
            # Spare groups that no later batch can take were not lost, but never needed.
            spare = self.settings.over_sampling.prompts > 0
            self._drop_stale(DropReason.REDUNDANT if spare else DropReason.AGED)
        return delivers

    def _drop_stale(self, reason: DropReason) -> None:
        """Drops samples that are too stale for the next batch, if its version has risen."""
        state = self.state
        horizon = state.next_horizon()
        rises = horizon > state.horizon
        state.horizon = horizon
        state.expect_next()
        if not rises:
            return
        oldest = state.oldest
        for group in list(self._groups.values()):
            if group.first_version is not None and group.first_version < oldest:
                self._lifecycle.drop_members(
                    group,
                    {
                        member.id: reason
                        for member in group.members
                        if member.first_version is not None and member.first_version < oldest
                    },
                )

    def _admit(self) -> None:
        """Lets waiting groups in, as far as the age budget goes."""
        if not len(self._admission):
            return
        num_admissible = self.state.num_admissible()
        while num_admissible > 0 and len(self._admission):
            self._admit_group(self._admission.pop())
            num_admissible -= 1

    def _admit_group(self, group: Group) -> None:
        self._admission.admit(group)
        self._pool.add(group)
        for sample in group.members:
            self._placement.queues.add_fresh(sample)

    def _needs(self) -> list[Action]:
        """Requests for prompts."""
        if self.settings.budget is not None:
            if self.state.stopped is not None:
                return []
            wanted = self._admission.wanted_by_budget(self.state.num_admissible())
        elif self.settings.refill and self._waiting:
            asked = sum(asked.groups for asked in self._waiting)
            number = self._admission.wanted_by_batches(asked, len(self._groups))
            wanted = {"": number} if number else {}
        else:
            return []
        for source, number in wanted.items():
            self._admission.request(source, number)
        return [NeedPrompts(groups=number, source=source) for source, number in wanted.items()]

    def _start(self, actions: list[Action]) -> None:
        """Starts what can start, and gathers what runs if nothing more can come."""
        placement, fleet = self._placement, self._fleet
        if placement.queues.first() is not None:
            fleet.unpack(self.state.num_startable)
            actions += fleet.actions
            fleet.actions.clear()
        submits = placement.place(self._lifecycle.start)
        actions += submits
        # While work still comes in it is not the tail.
        comes = submits or placement.queues.first() is not None or self._admission.requested
        if not comes and fleet.repack():
            actions += self._lifecycle.collect()
            actions += fleet.actions
            fleet.actions.clear()

    # Events: prompts and attempts

    def _on_prompts(self, event: ev.PromptsOffered) -> None:
        if self.state.stopped is not None:
            return
        expected = event.expected_tokens
        if expected and not (
            len(expected) == len(event.groups) and all(0 <= tokens < 1e8 for tokens in expected)
        ):
            raise SchedulerError(
                "the expected lengths are wrong",
                where=f"event {event.id}",
                found=f"{expected} for {len(event.groups)} groups",
                expected="a number of tokens for each group, or none at all",
            )
        waits = self.settings.budget is not None
        for number, name in enumerate(event.groups):
            group = self._new_group(event, name)
            if expected:
                group.expected_tokens = expected[number]
            if waits:
                self._admission.add(group)
            else:
                self._admit_group(group)
        self._admission.offered(event.source, len(event.groups))

    def _new_group(self, event: ev.PromptsOffered, name: GroupId) -> Group:
        if not self.state.offered.add(name):
            raise SchedulerError(
                "a group is offered a second time",
                where=f"event {event.id}",
                found=f"group {name}",
                expected="each prompt once an epoch",
                hint="resume the data cursor together with the scheduler's state",
            )
        group = Group(id=name, members=[], source=event.source)
        self.state.num_offered += 1
        self._groups[name] = group
        for member in range(self.settings.num_members):
            group.members.append(self._machine.admit(sample_id(name, member), group, member))
        return group

    def _on_progress(self, event: ev.Progressed) -> None:
        self._fleet.seen(event.engine)
        for name, attempt, num_tokens in event.progress:
            sample = self._lifecycle.attempt(event.engine, name, attempt)
            if sample is not None and num_tokens > sample.num_tokens:
                sample.num_tokens = num_tokens
                sample.moved_s = self._timers.now_s

    def _on_finished(self, event: ev.SamplesFinished) -> None:
        self._fleet.seen(event.engine)
        finished, refused = self._lifecycle.finish(event.engine, event.ends)
        if finished:
            self._fleet.record_success(event.engine)
        for sample in refused:
            self._fleet.record_failure(event.engine, sample)

    def _on_failed(self, event: ev.SampleFailed) -> None:
        self._fleet.seen(event.engine)
        sample = self._lifecycle.attempt(event.engine, event.sample, event.attempt)
        if sample is not None:
            self._lifecycle.fail(sample, event.error)
            self._fleet.record_failure(event.engine, event.sample)

    def _on_abort_asked(self, event: ev.AbortAsked) -> None:
        for name in event.samples:
            sample = self._machine.samples.get(name)
            if sample is not None and sample.state is State.RUNNING:
                self._lifecycle.abort(sample, "aborted")

    # Events: scores and verdicts

    def _on_scored(self, event: ev.SamplesScored) -> None:
        for name, _ in event.scores:
            sample = self._scoring(name)
            if sample is not None:
                self._lifecycle.score(sample)

    def _on_reward_failed(self, event: ev.RewardFailed) -> None:
        sample = self._scoring(event.sample)
        if sample is not None:
            self._lifecycle.fail_reward(sample)

    def _scoring(self, name: SampleId) -> Sample | None:
        """The sample, if a score of it is waited for; else the answer is fenced."""
        sample = self._machine.samples.get(name)
        if sample is None or sample.state is not State.SCORING:
            self.state.fenced += 1
            return None
        return sample

    def _on_judged(self, event: ev.GroupsJudged) -> None:
        for name, reason in event.verdicts:
            group = self._groups.get(name)
            if group is None or group.phase is not GroupPhase.JUDGING:
                self.state.fenced += 1
            elif reason is None:
                self._lifecycle.keep(group)
            else:
                self._lifecycle.filter(group, reason)

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
        if event.version > version:
            self._machine.version = event.version
            self._fleet.publish()

    def _on_batch_asked(self, event: ev.BatchAsked) -> None:
        if self.state.stopped is not None or event.groups < 1:
            raise SchedulerError(
                "this batch cannot be answered",
                where=f"batch {event.batch}",
                found=f"{event.groups} groups, stopped: {self.state.stopped}",
                expected="at least one group, and a scheduler that was not stopped",
            )
        if self.settings.named and len(event.names) != event.groups:
            raise SchedulerError(
                "the groups of a batch are not named",
                where=f"batch {event.batch}",
                found=f"{event.groups} groups, {len(event.names)} names",
                expected="a name for each group",
            )
        if all(asked.batch != event.batch for asked in self._waiting):
            self._waiting.append(
                BatchRequest(
                    batch=event.batch,
                    groups=event.groups,
                    version=event.version,
                    names=event.names,
                )
            )

    def _on_parents_dropped(self, event: ev.ParentsDropped) -> None:
        for name in event.groups:
            group = self._groups.get(name)
            if group is not None:
                names = _names(group.members)
                self._lifecycle.drop_members(group, dict.fromkeys(names, DropReason.NO_PARENT))

    def _on_stop(self, event: ev.StopAsked) -> None:
        if self.state.stopped is not None:
            return
        self.state.stopped = event.reason
        self._waiting.clear()
        self._admission.clear()
        for group in list(self._groups.values()):
            names = _names(group.members)
            self._lifecycle.drop_members(group, dict.fromkeys(names, DropReason.STOPPED))
        self._admission.clear()

    def _on_resumed(self, event: ev.Resumed) -> None:
        # What was asked of the process before is asked again; a second answer is fenced.
        self._fleet.forget_all(event.at_s)
        for group in self._groups.values():
            if group.phase is GroupPhase.JUDGING:
                self._lifecycle.judges.append(group)
            elif group.phase is GroupPhase.OPEN:
                self._lifecycle.scores += _names(
                    m for m in group.members if m.state is State.SCORING
                )
        self._admission.forget_requests()

    _HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        ev.PromptsOffered: _on_prompts,
        ev.EngineJoined: lambda self, event: self._fleet.join(event),
        ev.EngineCapacityChanged: lambda self, event: self._fleet.resize(event),
        ev.EngineLost: lambda self, event: self._fleet.lost(event.engine, event.reason),
        ev.EngineLeaving: lambda self, event: self._fleet.leave(event),
        ev.HeartbeatLost: lambda self, event: self._fleet.suspect(event.engine),
        ev.HeartbeatSeen: lambda self, event: self._fleet.seen(event.engine),
        ev.EnginePauseAsked: lambda self, event: self._fleet.pause(event),
        ev.EngineContinueAsked: lambda self, event: self._fleet.continue_engine(event.engine),
        ev.EngineUpdated: lambda self, event: self._fleet.updated(event),
        ev.Progressed: _on_progress,
        ev.SamplesFinished: _on_finished,
        ev.SampleFailed: _on_failed,
        ev.SamplesScored: _on_scored,
        ev.RewardFailed: _on_reward_failed,
        ev.GroupsJudged: _on_judged,
        ev.WeightsPublished: _on_published,
        ev.BatchAsked: _on_batch_asked,
        ev.ParentsDropped: _on_parents_dropped,
        ev.AbortAsked: _on_abort_asked,
        ev.DeadlineReached: lambda self, event: None,
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
        state = read_state(obj, observer, keep_histories=validate)
        if validate:
            check_state(state)
        scheduler = cls.__new__(cls)
        scheduler._bind(state, validate)
        return scheduler


def _names(samples: Iterable[Sample]) -> list[SampleId]:
    return [sample.id for sample in samples]
