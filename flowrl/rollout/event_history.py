"""The history of one sample from the journal: its admission, its attempts and its end.

>>> from flowrl.rollout.events import EngineJoined, PromptsOffered
>>> from flowrl.rollout.settings import SchedulerSettings
>>> from flowrl.rollout.journal import Journal
>>> journal = Journal(
...     head={"settings": SchedulerSettings(group_size=1).to_json()},
...     events=(
...         EngineJoined(id=0, engine="e", capacity=8, at_s=1.0),
...         PromptsOffered(id=1, groups=("0/0",), at_s=1.5),
...     ),
...     rewinds=0,
...     torn=False,
... )
>>> print(sample_history(journal, "0/0/0"))
sample 0/0/0: still running (in a journal of 2 events)
     1.500 s  event 1: offered
     1.500 s  event 1: attempt 0 starts on e, weights 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.ids import GroupId, SampleId
from flowrl.rollout import events as ev
from flowrl.rollout.actions import Deliver
from flowrl.rollout.journal import Journal
from flowrl.rollout.machine import Transition
from flowrl.rollout.states import TERMINAL, Spans, State, joined
from flowrl.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event in the history of the sample."""

    event_id: int
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:10.3f} s  event {self.event_id}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleHistory:
    """The history of a sample.

    Attributes:
        state: Its last one; None where no such sample was offered, or it had ended before.
        spans: Which weights made its tokens, of attempts whose tokens were kept.
        age: The version of the batch that consumed it minus the oldest version that sampled one of
            its tokens; None for samples that were not consumed, or have no token.
        moments: In order.
        num_events: Of the journal.
        earlier: Whether it was offered before the journal begins.
    """

    sample: SampleId
    state: State | None
    spans: Spans
    age: int | None
    moments: tuple[Moment, ...]
    num_events: int
    earlier: bool = False

    def __str__(self) -> str:
        num_read = counted(self.num_events, "event")
        if self.state is None:
            what = "ended before this journal begins" if self.earlier else "never offered"
            return f"sample {self.sample}: {what} (in a journal of {num_read})"
        still = "" if self.state in TERMINAL else "still "
        head = f"sample {self.sample}: {still}{self.state} (in a journal of {num_read})"
        if self.spans:
            parts = ", ".join(f"{count} by version {version}" for version, count in self.spans)
            head += f"; tokens: {parts}"
        if self.age is not None:
            head += f"; {self.age} versions old when consumed"
        return "\n".join([head, *map(str, self.moments)])


def sample_history(journal: Journal, sample: SampleId) -> SampleHistory:
    """Replays the journal and notes what concerns the sample."""
    steps: list[Transition] = []

    def observe(step: Transition) -> None:
        if step.sample == sample:
            steps.append(step)

    scheduler = journal.open(observer=observe)
    moments: list[Moment] = []
    spans: Spans = ()
    state: State | None = None
    age: int | None = None
    record = scheduler.state.machine.samples.get(sample)
    if record is not None:
        spans, state = record.versions, record.state
        moments.append(
            Moment(
                event_id=scheduler.last_event_id,
                at_s=scheduler.state.timers.now_s,
                text=f"the journal begins: {scheduler.history(sample)}",
            )
        )
    group = GroupId(sample.rpartition("/")[0])
    earlier = group.count("/") == 1 and group in scheduler.state.offered
    for event in journal.events:
        fenced = scheduler.fenced
        actions = scheduler.step(event)
        texts: list[str] = []
        if isinstance(event, ev.WeightsPublished) and state is State.RUNNING:
            texts.append(f"weights {event.version} are published while it runs")
        if isinstance(event, ev.Resumed) and state is not None and state not in TERMINAL:
            texts.append("the run goes on from its checkpoint")
        texts += _reports(event, sample, ignored=scheduler.fenced > fenced)
        for step in steps:
            if step.before is State.RUNNING:
                spans = _spans_after(event, step, spans)
            texts.append(_describe_transition(step))
            state = step.after
            if step.after is State.CONSUMED and spans:
                batches = (action for action in actions if isinstance(action, Deliver))
                batch = next(b for b in batches if any(sample in g.samples for g in b.groups))
                age = batch.version - min(spans)[0]
        moments += [Moment(event_id=event.id, at_s=event.at_s, text=text) for text in texts]
        steps.clear()
    return SampleHistory(
        sample=sample,
        state=state,
        spans=spans,
        age=age,
        moments=tuple(moments),
        num_events=len(journal.events),
        earlier=earlier,
    )


def _spans_after(event: ev.Event, step: Transition, spans: Spans) -> Spans:
    """The sample's spans after its attempt ended with the event."""
    if not isinstance(event, ev.SamplesFinished) or step.after not in (
        State.PARTIAL,
        State.GENERATED,
    ):
        return spans
    for end in event.ends:
        if end.sample == step.sample and end.attempt == step.attempt and end.versions:
            return joined(spans, end.versions) if spans else end.versions
    return spans


def _reports(event: ev.Event, sample: SampleId, *, ignored: bool) -> Iterator[str]:
    """Yields the reports on the sample that change no state."""
    match event:
        case ev.RewardFailed(sample=name, error=error) if name == sample and not ignored:
            yield f"its reward failed: {error}"
        case ev.SamplesScored(scores=scores) if not ignored:
            yield from (f"its score is {score:g}" for name, score in scores if name == sample)
        case ev.SampleFailed(sample=name, attempt=attempt) if name == sample and ignored:
            yield f"a late report of attempt {attempt} is ignored"
        case _:
            return


def _describe_transition(step: Transition) -> str:
    because = f": {step.reason}" if step.reason else ""
    match step.before, step.after:
        case None, _:
            return "offered"
        case _, State.RUNNING:
            return f"attempt {step.attempt} starts on {step.engine}, weights {step.version}"
        case _, State.GENERATED:
            return f"attempt {step.attempt} finished on {step.engine}"
        case _, State.PARTIAL:
            return f"attempt {step.attempt} on {step.engine} was aborted{because}"
        case State.RUNNING, State.QUEUED:
            return f"attempt {step.attempt} on {step.engine} failed{because}"
        case State.PARTIAL, State.QUEUED:
            return "waits to go on from its tokens"
        case _, State.SCORING:
            return "waits for its score"
        case _, State.READY:
            return "is ready"
        case _:
            return f"{step.after}{because}"
