"""The transitions of a sample: a table, and the one function that makes them.

`Machine.move` is the only place where a sample's state changes. It looks the pair up, applies what
the transition does to queue and engines, keeps the counts and notifies the observer; a pair that
the table does not hold is a fault of ours and reports the sample's history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from flowrl.errors import SchedulerError
from flowrl.ids import SampleId
from flowrl.rollout.placement import Placement
from flowrl.rollout.states import (
    TERMINAL,
    TRAIL_CODES,
    TRAIL_MASK,
    Counts,
    Group,
    Sample,
    State,
    read_trail,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One step in a sample's life, for the run's journal.

    Attributes:
        event_id: Of the event that caused it.
        before: None for the admission.
        reason: Why, where the states alone do not say; else empty.
        attempt: Number of the sample's latest dispatch; -1 before the first.
        engine: Where it runs, or ran until this transition; else None.
        version: Of the weights as the scheduler knew it.
    """

    event_id: int
    sample: SampleId
    before: State | None
    after: State
    reason: str
    attempt: int
    engine: str | None
    version: int

    def __str__(self) -> str:
        parts = [f"event {self.event_id}: {self.before or 'new'} -> {self.after}"]
        if self.reason:
            parts.append(f"({self.reason})")
        if self.engine:
            parts.append(f"on {self.engine}")
        return " ".join([*parts, f"attempt {self.attempt}, version {self.version}"])


Observer: TypeAlias = Callable[[Transition], None]

Effect: TypeAlias = Callable[[Placement, Sample], None]

TRANSITIONS: dict[tuple[State, State], Effect | None] = {
    (State.QUEUED, State.RUNNING): Placement.occupy,
    (State.RUNNING, State.GENERATED): Placement.release,
    (State.RUNNING, State.PARTIAL): Placement.release,
    (State.RUNNING, State.QUEUED): Placement.release_and_requeue,
    (State.PARTIAL, State.QUEUED): Placement.requeue,
    (State.GENERATED, State.SCORING): None,
    (State.SCORING, State.READY): None,
    (State.READY, State.CONSUMED): None,
    (State.READY, State.FILTERED): None,
    (State.QUEUED, State.DROPPED): None,
    (State.RUNNING, State.DROPPED): Placement.release,
    (State.PARTIAL, State.DROPPED): None,
    (State.GENERATED, State.DROPPED): None,
    (State.SCORING, State.DROPPED): None,
    (State.READY, State.DROPPED): None,
}
"""Every legal transition, and what it does to queue and engines."""


class Machine:
    """The live samples, how many are in each state, and how each got there."""

    __slots__ = ("counts", "event_id", "histories", "observer", "placement", "samples", "version")

    def __init__(
        self, placement: Placement, observer: Observer | None, keep_histories: bool
    ) -> None:
        self.placement = placement
        self.observer = observer
        self.samples: dict[SampleId, Sample] = {}  # every live sample, and no other
        self.counts: dict[State, int] = dict.fromkeys(State, 0)  # samples ever admitted, by state
        self.event_id = -1  # of the event being handled; later events have higher ones
        self.version = 0  # latest publication; never falls
        # Whole lifecycle, ended samples too; only with the validator, for they are never forgotten.
        self.histories: dict[SampleId, list[Transition]] | None = {} if keep_histories else None

    def admit(self, sample: SampleId, group: Group, member: int) -> Sample:
        """Creates a QUEUED sample; it enters a queue when its group is admitted."""
        record = Sample(id=sample, group=group, member=member)
        self.samples[sample] = record
        self.counts[State.QUEUED] += 1
        if self.observer is not None or self.histories is not None:
            self._describe_transition(record, None, State.QUEUED, "", None)
        return record

    def move(self, sample: Sample, after: State, reason: str = "") -> None:
        """Takes the sample to state `after`; an ended one is forgotten.

        Raises:
            SchedulerError: the table has no such transition.
        """
        before = sample.state
        try:
            effect = TRANSITIONS[before, after]
        except KeyError:
            raise self.impossible(sample, after) from None
        observed = self.observer is not None or self.histories is not None
        engine = sample.engine if observed else None
        if effect is not None:
            effect(self.placement, sample)
        sample.state = after
        counts = self.counts
        counts[before] -= 1
        counts[after] += 1
        sample.trail = (sample.trail << 4 | TRAIL_CODES[after]) & TRAIL_MASK
        if after in TERMINAL:
            del self.samples[sample.id]
        if observed:
            self._describe_transition(sample, before, after, reason, engine.id if engine else None)

    def _describe_transition(
        self,
        sample: Sample,
        before: State | None,
        after: State,
        reason: str,
        engine: str | None,
    ) -> None:
        transition = Transition(
            event_id=self.event_id,
            sample=sample.id,
            before=before,
            after=after,
            reason=reason,
            attempt=sample.attempt,
            engine=engine,
            version=self.version,
        )
        if self.histories is not None:
            self.histories.setdefault(sample.id, []).append(transition)
        if self.observer is not None:
            self.observer(transition)

    def impossible(self, sample: Sample, after: State) -> SchedulerError:
        """The error for a transition that the table does not hold."""
        return SchedulerError(
            f"impossible transition {sample.state} -> {after} at event {self.event_id}",
            where=f"sample {sample.id}",
            found=self.history(sample),
            expected=", ".join(b for a, b in TRANSITIONS if a is sample.state) or "no transition",
            hint="this is a fault of the scheduler; please report it with the queues above",
        )

    def history(self, sample: Sample) -> str:
        """The sample's life: in full with the validator, else its last states."""
        if self.histories is not None:
            return "; ".join(str(step) for step in self.histories.get(sample.id, []))
        states = " -> ".join(read_trail(sample.trail))
        engine = f" on {sample.engine.id}" if sample.engine else ""
        return (
            f"{states}{engine}, attempt {sample.attempt}, {sample.failures} failures, "
            f"{sample.num_tokens} tokens, first version {sample.first_version}"
        )

    def total(self) -> Counts:
        """Samples by state."""
        by_state = {state.value: number for state, number in self.counts.items()}
        return Counts(admitted=sum(by_state.values()), **by_state)
