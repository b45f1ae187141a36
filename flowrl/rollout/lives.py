"""What becomes of samples and groups: attempts that begin, end and fail, and the ends of all.

The scheduler translates events into these; each keeps every record that it touches consistent.
Actions that follow are collected until the scheduler concludes its step.
"""

from __future__ import annotations

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.actions import Abort, Action, Deliver, DeliveredGroup, Drop, Judge, Score
from flowrl.rollout.events import SampleEnd
from flowrl.rollout.records import Engine, Group, Sample
from flowrl.rollout.state import SchedulerState
from flowrl.rollout.states import DropReason, GroupPhase, State
from flowrl.specs import FinishReason

__all__ = ["Lives"]


class Lives:
    """Moves samples and groups of a state, and collects what must be done about it."""

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
        self.judges: list[GroupId] = []  # to be judged

    def collect(self) -> list[Action]:
        """The step's actions so far, aborts first; the next step begins with none."""
        actions: list[Action] = [
            Abort(engine=engine, samples=tuple(samples)) for engine, samples in self._aborts.items()
        ]
        actions += self._drops
        if self._drops:
            # A group can be dropped by a later part of the event that finished its member.
            self.scores = [name for name in self.scores if name in self._machine.samples]
        if self.scores:
            actions.append(Score(samples=tuple(self.scores)))
        if self.judges:
            actions.append(Judge(groups=tuple(self.judges)))
        self._aborts.clear()
        self._drops.clear()
        self.scores.clear()
        self.judges.clear()
        return actions

    def attempt(self, engine: EngineId, sample: SampleId, attempt: int) -> Sample | None:
        """The sample, if it runs that very attempt there; else the report is fenced."""
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

    def finish(self, engine: EngineId, ends: tuple[SampleEnd, ...]) -> None:
        """Attempts ended: on to the scorer, back to the queue, or dropped."""
        move = self._machine.move
        oldest = self._machine.version - self._settings.max_staleness
        # Dropped after the loop: a drop aborts the group's other attempts, and some of them may
        # have ended too, further on in this event.
        doomed: list[tuple[Sample, DropReason]] = []
        for end in ends:
            sample = self.attempt(engine, end.sample, end.attempt)
            if sample is None:
                continue
            new_tokens = end.num_tokens - sample.kept_tokens
            self._join_spans(sample, end, new_tokens)
            too_old = sample.first_version is not None and sample.first_version < oldest
            if end.reason is not FinishReason.ABORT:
                move(sample, State.GENERATED)
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
            move(sample, State.PARTIAL, "aborted")
            if too_old:
                doomed.append((sample, DropReason.AGED))
            elif sample.failures >= self._settings.max_attempts:
                doomed.append((sample, DropReason.RETRIES))
            else:
                if not sample.kept_tokens:
                    self.date(sample, None)
                move(sample, State.QUEUED)
        for sample, reason in doomed:
            if sample.group.alive:
                self.drop(sample, reason)

    def _join_spans(self, sample: Sample, end: SampleEnd, new_tokens: int) -> None:
        spans = end.versions
        if (
            new_tokens < 0
            or sum(count for _, count in spans) != new_tokens
            or (len(spans) > 1 and min(count for _, count in spans) < 1)
        ):
            raise SchedulerError(
                "an attempt's version spans do not add up to its tokens",
                where=f"sample {sample.id}, attempt {end.attempt}",
                found=f"{end.num_tokens} tokens in all, spans {spans}",
                expected=f"spans of {new_tokens} tokens beside the {sample.kept_tokens} kept ones",
                hint="the engine reports the versions of this attempt's own tokens",
            )
        if new_tokens:
            # An engine may serve older weights than the one before it: the oldest token counts.
            oldest = min(spans)[0]
            if sample.versions:
                sample.versions = _joined(sample.versions, spans)
                if sample.first_version is not None:
                    oldest = min(oldest, sample.first_version)
            else:
                sample.versions = spans
            self.date(sample, oldest)
            sample.kept_tokens = end.num_tokens
        sample.num_tokens = end.num_tokens

    def start(self, sample: Sample, engine: Engine) -> None:
        """A queued sample begins its next attempt."""
        group = sample.group
        sample.engine = group.home = engine
        sample.attempt += 1
        if sample.first_version is None:
            sample.first_version = self._machine.version
            if group.first_version is None:
                group.first_version = sample.first_version
                self._pool.date(group)
        self._machine.move(sample, State.RUNNING)

    def deliver(self, batch: int, taken: list[Group]) -> Deliver:
        """The groups' members are consumed; dead groups are named."""
        oldest = self._machine.version - self._settings.max_staleness
        kept, filtered = [], []
        for group in taken:
            if not group.alive:
                filtered.append(group.id)
                continue
            if group.first_version is not None and group.first_version < oldest:
                raise SchedulerError(
                    "a group is too old to be delivered",
                    where=f"group {group.id}",
                    found=f"first version {group.first_version} at version {self._machine.version}",
                    expected=f"first version {oldest} or later",
                )
            kept.append(DeliveredGroup(group=group.id, samples=tuple(m.id for m in group.members)))
            del self._groups[group.id]
            for member in group.members:
                self._machine.move(member, State.CONSUMED)
        return Deliver(batch=batch, groups=tuple(kept), filtered=tuple(filtered))

    def drop(self, sample: Sample, reason: DropReason) -> None:
        """Drops the sample, and with it its group."""
        self.drop_group(sample.group, {sample.id: reason})

    def drop_group(self, group: Group, reasons: dict[SampleId, DropReason]) -> None:
        """Drops every member: for its own reason, or because the group is incomplete."""
        for member in group.members:
            reason = reasons.get(member.id, DropReason.INCOMPLETE_GROUP)
            # A sample whose retries are used up, or whose engine is lost, runs no more.
            if (
                member.engine is not None
                and member.engine.id in self._placement.engines
                and reason is not DropReason.RETRIES
            ):
                self.abort(member)
            self._machine.move(member, State.DROPPED, reason)
            self._drops.append(Drop(sample=member.id, reason=reason))
        self.end_group(group, GroupPhase.DROPPED)

    def abort(self, sample: Sample) -> None:
        """Asks the engine for the end of the running attempt, once."""
        if not sample.aborting:
            assert sample.engine is not None
            sample.aborting = True
            self._aborts.setdefault(sample.engine.id, []).append(sample.id)

    def end_group(self, group: Group, phase: GroupPhase) -> None:
        """Every member has ended as FILTERED or DROPPED."""
        was_ready = group.phase is GroupPhase.READY
        group.phase = phase
        group.members = []
        del self._groups[group.id]
        if was_ready:
            self._pool.lose(group)
        else:
            self._pool.settle(group)
        if self._settings.refill:
            self._state.lost += 1

    def fail(self, sample: Sample, error: str) -> None:
        """A running attempt came to nothing: try again, or give up."""
        sample.failures += 1
        sample.num_tokens = sample.kept_tokens
        if sample.failures >= self._settings.max_attempts:
            self.drop(sample, DropReason.RETRIES)
        else:
            self.requeue(sample, error)

    def requeue(self, sample: Sample, reason: str) -> None:
        """RUNNING -> QUEUED, without the tokens of the attempt."""
        sample.num_tokens = sample.kept_tokens
        if not sample.kept_tokens:
            self.date(sample, None)
        self._machine.move(sample, State.QUEUED, reason)

    def date(self, sample: Sample, first_version: int | None) -> None:
        """Sets the version that the sample's age counts from, and its group's."""
        if sample.first_version != first_version:
            sample.first_version = first_version
            sample.group.recompute_first_version()
            self._pool.date(sample.group)


def _joined(
    first: tuple[tuple[int, int], ...], second: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Spans one after the other; neighbours of one version become one."""
    if first[-1][0] != second[0][0]:
        return first + second
    version, count = first[-1]
    return (*first[:-1], (version, count + second[0][1]), *second[1:])
