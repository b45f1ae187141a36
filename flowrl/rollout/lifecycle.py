"""The lifecycle of samples and groups: attempts that begin, end and fail, and final states.

The scheduler translates events into these; each keeps every record that it touches consistent.
Actions that follow are collected until the scheduler concludes its step.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, SampleId
from flowrl.rollout.actions import Abort, Action, Deliver, DeliveredGroup, Drop, Judge, Score
from flowrl.rollout.events import SampleEnd
from flowrl.rollout.state import SchedulerState
from flowrl.rollout.states import (
    DropReason,
    Engine,
    Group,
    GroupPhase,
    Sample,
    State,
    attempt_spans,
    joined,
)
from flowrl.specs import FinishReason


class Lifecycle:
    """Moves samples and groups of a state, and collects the resulting actions."""

    __slots__ = (
        "_aborts",
        "_drops",
        "_groups",
        "_machine",
        "_placement",
        "_pool",
        "_settings",
        "_state",
        "judges",
        "scores",
    )

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._settings = state.settings
        self._machine = state.machine
        self._placement = state.placement
        self._groups = state.groups
        self._pool = state.pool
        # Of the step being made; all empty between steps.
        self._aborts: dict[EngineId, list[SampleId]] = {}
        self._drops: list[Drop] = []
        self.scores: list[SampleId] = []  # to be scored
        self.judges: list[Group] = []  # to be judged

    def collect(self) -> list[Action]:
        """The step's actions so far, aborts first; the next step begins with none."""
        actions: list[Action] = [
            Abort(engine=engine, samples=tuple(samples)) for engine, samples in self._aborts.items()
        ]
        actions += self._drops
        if self._drops:
            # A group can be dropped by a later part of the event that finished its member.
            self.scores = [name for name in self.scores if name in self._machine.samples]
            self.judges = [group for group in self.judges if group.alive]
        if self.scores:
            actions.append(Score(samples=tuple(self.scores)))
        if self.judges:
            samples = tuple(tuple(m.id for m in group.members) for group in self.judges)
            actions.append(Judge(groups=tuple(g.id for g in self.judges), samples=samples))
        self._aborts.clear()
        self._drops.clear()
        self.scores.clear()
        self.judges.clear()
        return actions

    # Attempts

    def attempt(self, engine: EngineId, sample: SampleId, attempt: int) -> Sample | None:
        """Returns the sample if it runs that attempt there; else counts the report as fenced."""
        record = self._machine.samples.get(sample)
        if (
            record is None
            or record.attempt != attempt
            or record.engine is None
            or record.engine.id != engine
        ):
            self._state.fenced += 1
            return None
        return record

    def start(self, sample: Sample, engine: Engine) -> None:
        """Begins the next attempt of a queued sample."""
        group = sample.group
        sample.engine = group.home = engine
        sample.avoids = None
        sample.attempt += 1
        sample.moved_s = self._state.timers.now_s
        begins = False
        if sample.first_version is None:
            sample.first_version = self._machine.version
            if group.first_version is None:
                group.first_version = sample.first_version
                self._pool.update_version(group)
                begins = True
        self._machine.move(sample, State.RUNNING)
        predictor = self._placement.queues.predictor
        if begins and predictor is not None and predictor.ages:
            self._placement.queues.update_ranks(group.members)

    def finish(self, engine: EngineId, ends: tuple[SampleEnd, ...]) -> tuple[int, list[SampleId]]:
        """Sends samples whose attempts ended to the scorer, back to the queue, or drops them.

        Returns:
            The number of samples that finished, and those that the engine aborted by itself without
            a token.
        """
        move = self._machine.move
        predictor = self._placement.queues.predictor
        oldest = self._state.oldest
        finished = 0
        refused: list[SampleId] = []
        # Dropped after the loop: a drop aborts the group's other attempts, and some of them may
        # have ended too, further on in this event.
        doomed: list[tuple[Sample, DropReason]] = []
        for end in ends:
            sample = self.attempt(engine, end.sample, end.attempt)
            if sample is None:
                continue
            new_tokens = self._take_tokens(sample, end)
            too_old = sample.first_version is not None and sample.first_version < oldest
            if end.reason is not FinishReason.ABORT:
                finished += 1
                move(sample, State.GENERATED)
                if predictor is not None:
                    predictor.observe(sample.group, end.num_tokens)
                    self._placement.queues.update_ranks(sample.group.members)
                if too_old:
                    doomed.append((sample, DropReason.AGED))
                else:
                    move(sample, State.SCORING)
                    self.scores.append(sample.id)
                continue
            if new_tokens == 0 and not sample.aborting:
                # Nobody asked for this abort and it brought nothing: without a bound an engine
                # that refuses a sample could go on doing so for ever.
                sample.failures += 1
                refused.append(sample.id)
            move(sample, State.PARTIAL, sample.aborting or "given back")
            if too_old:
                doomed.append((sample, DropReason.AGED))
            elif sample.failures >= self._settings.retries.attempts:
                doomed.append((sample, DropReason.RETRIES))
            else:
                if not sample.kept_tokens:
                    self.set_first_version(sample, None)
                move(sample, State.QUEUED)
        for sample, reason in doomed:
            if sample.state not in (State.DROPPED, State.FILTERED):
                self.drop(sample, reason)
        return finished, refused

    def _take_tokens(self, sample: Sample, end: SampleEnd) -> int:
        """Joins what the attempt made to what was kept; returns how many tokens it made."""
        spans, new_tokens = attempt_spans(end, sample.kept_tokens)
        if new_tokens:
            # An engine may serve older weights than the one before it: the oldest token counts.
            oldest = min(spans)[0]
            if sample.versions:
                sample.versions = joined(sample.versions, spans)
                if sample.first_version is not None:
                    oldest = min(oldest, sample.first_version)
            else:
                sample.versions = spans
            self.set_first_version(sample, oldest)
            sample.kept_tokens = end.num_tokens
        sample.num_tokens = end.num_tokens
        return new_tokens

    def abort(self, sample: Sample, reason: str) -> None:
        """Asks the engine for the end of the running attempt, once."""
        if not sample.aborting:
            assert sample.engine is not None
            sample.aborting = reason
            sample.moved_s = self._state.timers.now_s  # the answer has as much time as a token
            self._aborts.setdefault(sample.engine.id, []).append(sample.id)

    def fail(self, sample: Sample, error: str) -> None:
        """Queues a sample whose attempt failed again, or gives it up."""
        sample.failures += 1
        sample.avoids = sample.engine
        if sample.failures >= self._settings.retries.attempts:
            self.drop(sample, DropReason.RETRIES)
        else:
            self.requeue(sample, error)

    def requeue(self, sample: Sample, reason: str) -> None:
        """Moves a sample from RUNNING to QUEUED, without the tokens of the attempt."""
        sample.num_tokens = sample.kept_tokens
        if not sample.kept_tokens:
            self.set_first_version(sample, None)
        self._machine.move(sample, State.QUEUED, reason)

    def set_first_version(self, sample: Sample, first_version: int | None) -> None:
        """Sets the version that the sample's age counts from, and its group's."""
        if sample.first_version != first_version:
            sample.first_version = first_version
            self._update_group_version(sample.group)

    def _update_group_version(self, group: Group) -> None:
        group.recompute_first_version()
        self._pool.update_version(group)

    # Scores and verdicts

    def score(self, sample: Sample) -> None:
        """Moves a sample from SCORING to READY; the group may be complete with it."""
        self._machine.move(sample, State.READY)
        group = sample.group
        group.num_ready += 1
        if group.num_ready == self._settings.group_size:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        """Drops spare members of a group with enough ready ones, and has it judged or kept."""
        spare = [member for member in group.members if member.state is not State.READY]
        if spare:
            for member in spare:
                self._end(member, DropReason.REDUNDANT)
            group.members = [m for m in group.members if m.state is State.READY]
            self._update_group_version(group)
        if self._settings.judges_groups:
            group.phase = GroupPhase.JUDGING
            self.judges.append(group)
        else:
            self.keep(group)

    def fail_reward(self, sample: Sample) -> None:
        """Asks again for the score of a sample whose reward failed, or gives it up."""
        sample.reward_failures += 1
        if sample.reward_failures >= self._settings.retries.rewards:
            self.drop(sample, DropReason.REWARD_FAILED)
        else:
            self.scores.append(sample.id)

    def keep(self, group: Group) -> None:
        """Marks the group as one that can be delivered."""
        group.phase = GroupPhase.READY
        self._pool.settle(group)
        self._state.admission.settle(kept=True)

    def filter(self, group: Group, reason: str) -> None:
        """Ends a group whose verdict is against it."""
        for member in group.members:
            self._machine.move(member, State.FILTERED, reason)
        self._end_group(group, GroupPhase.FILTERED)

    # Ends

    def deliver(self, batch: int, taken: list[Group]) -> Deliver:
        """Consumes the members of the groups, and names the dead groups."""
        oldest, version = self._state.oldest, self._state.horizon
        reason = f"batch {batch}, trained on at version {version}"
        kept, filtered = [], []
        for group in taken:
            if not group.alive:
                filtered.append(group.id)
                continue
            if group.first_version is not None and group.first_version < oldest:
                raise SchedulerError(
                    "a group is too old to be delivered",
                    where=f"group {group.id}",
                    found=f"first version {group.first_version}, batch for version {version}",
                    expected=f"first version {oldest} or later",
                )
            kept.append(DeliveredGroup(group=group.id, samples=tuple(m.id for m in group.members)))
            del self._groups[group.id]
            self._state.admission.admitted -= 1
            for member in group.members:
                self._machine.move(member, State.CONSUMED, reason)
        return Deliver(batch=batch, groups=tuple(kept), filtered=tuple(filtered), version=version)

    def drop(self, sample: Sample, reason: DropReason) -> None:
        """Drops the sample, and with it its group if too few members are left."""
        self.drop_members(sample.group, {sample.id: reason})

    def drop_members(self, group: Group, reasons: Mapping[SampleId, DropReason]) -> None:
        """Drops members for their own reasons; the others too, if too few are left without them."""
        members = group.members
        if len(members) - len(reasons) < self._settings.group_size:
            for member in members:
                self._end(member, reasons.get(member.id, DropReason.INCOMPLETE_GROUP))
            self._end_group(group, GroupPhase.DROPPED)
            return
        for member in members:
            if member.id in reasons:
                group.num_ready -= member.state is State.READY
                self._end(member, reasons[member.id])
        group.members = [member for member in members if member.id not in reasons]
        self._update_group_version(group)

    def _end(self, member: Sample, reason: DropReason) -> None:
        engine = member.engine
        # A sample whose retries are used up, or whose engine is lost, runs no more.
        if (
            engine is not None
            and engine.id in self._placement.engines
            and reason is not DropReason.RETRIES
        ):
            self.abort(member, reason)
        self._machine.move(member, State.DROPPED, reason)
        self._drops.append(Drop(sample=member.id, reason=reason))

    def _end_group(self, group: Group, phase: GroupPhase) -> None:
        """Ends a group whose members have all ended as FILTERED or DROPPED."""
        was_ready = group.phase is GroupPhase.READY
        group.phase = phase
        group.members = []
        del self._groups[group.id]
        if not group.admitted:
            return
        admission = self._state.admission
        admission.admitted -= 1
        if was_ready:
            self._pool.lose(group)
        else:
            self._pool.settle(group)
            admission.settle(kept=False)
        if self._settings.refill:
            admission.lost += 1
