"""A simulated environment of the scheduler: engines, scorer, judge, trainer and clock.

A `World` makes events, carries out the scheduler's actions, and updates a reference model
(`tests.proofs.reference_model`). Everything that the scheduler does is checked against that model,
never against the scheduler's own state. A difference is a `Violation`.

A *move* (`scheduler_moves`, `scheduler_faults`) is a function of the world and a random stream that
decides what happens next; this module has the parts that moves consist of. All choices come from
seeds, so a list of moves with their seeds can be replayed and shortened.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowrl.ids import EngineId, GroupId, SampleId, group_id
from flowrl.rollout.actions import Action, Submit
from flowrl.rollout.events import (
    BatchAsked,
    DeadlineReached,
    EngineContinueAsked,
    EngineJoined,
    EngineUpdated,
    Event,
    GroupsJudged,
    Progressed,
    PromptsOffered,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
    StopAsked,
    WeightsPublished,
)
from flowrl.rollout.journal import JournalWriter
from flowrl.rollout.machine import Transition
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import State
from flowrl.specs import FinishReason
from tests.proofs.reference_model import Attempt, EngineTruth, ReferenceModel, Violation
from tests.proofs.starvation_rules import check_nothing_waits

__all__ = ["World", "WorldRules"]

T = TypeVar("T")

SOURCES = ("", "math", "code")
"""The sources of prompts, for settings that share admission among sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRules:
    """How a world behaves, apart from the scheduler's own settings.

    Attributes:
        batch_groups: Maximum number of groups of a batch; the exact number with an age budget.
        max_live: Approximate maximum number of samples that are offered at once.
        max_tokens: Maximum number of response tokens.
        filter_rate: Share of groups that are filtered.
        lag_rate: Share of decode calls that still use the weights before the latest.
        ahead: Whether batches are asked for ahead of their version.
        validate: Whether the scheduler runs its own validator.
        journals: Whether a journal is written, to be read and replayed.
    """

    batch_groups: int = 2
    max_live: int = 40
    max_tokens: int = 6
    filter_rate: float = 0.3
    lag_rate: float = 0.1
    ahead: bool = False
    validate: bool = True
    journals: bool = False


class Lines:
    """A file in memory, as a list of the lines that were written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        """Appends a line."""
        self.lines.append(text)


class World:
    """One scheduler and its simulated environment."""

    def __init__(self, settings: SchedulerSettings, rules: WorldRules) -> None:
        self.settings = settings
        self.rules = rules
        self.reference = ReferenceModel(settings=settings, max_tokens=rules.max_tokens)
        self.scheduler = RolloutScheduler(settings, validate=rules.validate, observer=self.observe)
        self.next_event = 0
        self.num_engines = 0
        self.clock_s = 0.0
        self.journal = Lines()
        self._writer = JournalWriter(self.journal)
        self._writer.begin(settings)
        self.events: list[Event] = []  # that count: those before a crash and after its checkpoint
        self.seen = Counter[str]()  # kinds of events, and restarts
        self.saved: tuple[dict[str, object], ReferenceModel] | None = None

    # Events

    def send(self, make: Callable[..., Event], *, at_s: float | None = None) -> None:
        """Sends an event to the scheduler and carries out the actions that follow.

        Args:
            make: Makes the event from `id` and `at_s`.
            at_s: Time of the event in seconds; the world's clock by default.
        """
        reference = self.reference
        event = make(id=self.next_event, at_s=self.clock_s if at_s is None else at_s)
        self.next_event += 1
        self.events.append(event)
        self.seen[type(event).__name__] += 1
        if self.rules.journals:
            self._writer.event(event)
        if event.at_s > reference.now_s:
            reference.now_s = event.at_s
        if reference.wake_s is not None and reference.wake_s <= reference.now_s:
            reference.wake_s = None
        actions = self.scheduler.step(event)
        try:
            reference.carry_out(actions, self.scheduler.counts)
            check_nothing_waits(reference)
            self._check_spans(actions)
        except Violation as violation:
            raise Violation(violation.invariant, f"{violation} -- after {event}") from None

    def _check_spans(self, actions: Iterable[Action]) -> None:
        """Checks that resumed samples have the versions of the weights that made their tokens."""
        for action in actions:
            if isinstance(action, Submit):
                for dispatch in action.samples:
                    made = runs_of(self.reference.payload.get(dispatch.sample, ()))
                    told = self.scheduler.spans(dispatch.sample)
                    self.reference.check(10, made == told, f"{dispatch.sample}: {told} is {made}")

    def observe(self, step: Transition) -> None:
        """Ends attempts that the scheduler gave up because they made no token."""
        if step.before is not State.RUNNING or not step.reason.startswith("no token for"):
            return
        name = EngineId(step.engine or "")
        attempt = self.end_attempt(name, step.sample)
        silence_s = self.reference.now_s - attempt.moved_s
        stall_s = self.settings.patience.stall_s
        self.reference.check(
            8,
            bool(stall_s) and silence_s >= stall_s - 1e-9,
            f"{step.sample} is given up after {silence_s} s without a token",
        )
        self.reference.given_up[name, step.sample] = attempt.abort_asked
        self.reference.lose_tokens(step.sample)
        self.seen["stall"] += 1

    def rewind(self, last_event_id: int) -> None:
        """Returns to the state after that event, as a process that resumes does."""
        if self.rules.journals:
            self._writer.rewind(last_event_id)
        self.events = [event for event in self.events if event.id <= last_event_id]

    # Prompts and batches

    def offer(self, number: int, *, source: str = "", rng: random.Random | None = None) -> None:
        """Offers the next prompts."""
        reference = self.reference
        first = len(reference.groups)
        # Ten prompts an epoch, so that lengths are learned from one epoch for the next.
        groups = tuple(group_id(n // 10, n % 10) for n in range(first, first + number))
        reference.groups += groups
        reference.wanted[source] = max(0, reference.wanted[source] - number)
        expected: tuple[float, ...] = ()
        if rng is not None and rng.random() < 0.2:
            expected = tuple(float(rng.randint(0, 9)) for _ in groups)
        self.send(
            lambda **k: PromptsOffered(groups=groups, source=source, expected_tokens=expected, **k)
        )

    def ask(self, groups: int, version: int | None = None) -> None:
        """Asks the scheduler for one more batch."""
        reference = self.reference
        batch, reference.num_asked = reference.num_asked, reference.num_asked + 1
        reference.asked[batch] = (groups, version)
        self.send(lambda **k: BatchAsked(batch=batch, groups=groups, version=version, **k))

    def publish(self) -> None:
        """Publishes new weights; engines that keep their samples have them at once."""
        reference = self.reference
        reference.version += 1
        reference.untrained = max(0, reference.untrained - 1)
        if not self.settings.publication.empties:
            for engine in reference.engines.values():
                if engine.loading is None:
                    engine.version = reference.version
        self.send(lambda **k: WeightsPublished(version=reference.version, **k))

    # Engines

    def join(self, engine: EngineId, capacity: int, version: int | None = None) -> None:
        """Adds an engine, with weights of `version` where it is given."""
        reference = self.reference
        has = reference.version if version is None else version
        reference.engines[engine] = EngineTruth(capacity=capacity, version=has)
        self.send(lambda **k: EngineJoined(engine=engine, capacity=capacity, version=version, **k))

    def update(self, engine: EngineId) -> None:
        """Reports that the engine has loaded the weights that the scheduler asked for."""
        truth = self.reference.engines[engine]
        assert truth.loading is not None
        truth.version, truth.loading = truth.loading, None
        self.send(lambda **k: EngineUpdated(engine=engine, version=truth.version, **k))

    def advance(
        self, engine: EngineId, num_steps: int, rng: random.Random, *, answers: float = 0.7
    ) -> None:
        """Decodes, reports progress, and ends the samples that are complete.

        Args:
            engine: The engine that decodes.
            num_steps: Decode steps, at most one token per sample each.
            rng: Random stream of the choices.
            answers: Share of the requested aborts that are answered now.
        """
        truth = self.reference.engines[engine]
        lags = not self.settings.publication.empties and rng.random() < self.rules.lag_rate
        version = max(0, truth.version - lags)
        done: list[tuple[SampleId, FinishReason]] = []
        told = []
        for sample, attempt in truth.running.items():
            if attempt.stuck:
                continue
            if attempt.abort_asked and rng.random() < answers:
                done.append((sample, FinishReason.ABORT))
                continue
            if truth.paused:
                continue
            missing = self.reference.length(sample) - attempt.kept - len(attempt.made)
            attempt.made += [version] * min(num_steps, missing)
            if missing <= num_steps:
                done.append((sample, FinishReason.STOP))
            if len(attempt.made) > attempt.reported:
                attempt.reported = len(attempt.made)
                attempt.moved_s = max(self.reference.now_s, self.clock_s)
            told.append((sample, attempt.attempt, attempt.kept + len(attempt.made)))
        if told:
            progress = tuple(told)
            self.send(lambda **k: Progressed(engine=engine, progress=progress, **k))
        rng.shuffle(done)
        # A deadline that came with the report may have ended some of them.
        known = self.reference.engines.get(engine)
        done = [end for end in done if known is truth and end[0] in truth.running]
        if done:
            self.report(engine, done)

    def report(self, engine: EngineId, ends: Iterable[tuple[SampleId, FinishReason]]) -> None:
        """Reports the ends of attempts."""
        reference = self.reference
        reports = []
        for sample, reason in ends:
            attempt = self.end_attempt(engine, sample)
            if sample not in reference.end:
                tokens = reference.payload.setdefault(sample, [])
                tokens += attempt.made
                if reason is FinishReason.ABORT and not tokens:
                    reference.began.pop(sample, None)
                if reason is not FinishReason.ABORT:
                    reference.doubtful.pop(engine, None)
            reports.append(
                SampleEnd(
                    sample=sample,
                    attempt=attempt.attempt,
                    reason=reason,
                    num_tokens=attempt.kept + len(attempt.made),
                    versions=runs_of(attempt.made),
                )
            )
        ended = tuple(reports)
        self.send(lambda **k: SamplesFinished(engine=engine, ends=ended, **k))

    def end_attempt(self, engine: EngineId, sample: SampleId) -> Attempt:
        """Removes the attempt from its engine and returns it."""
        attempt = self.reference.engines[engine].running.pop(sample)
        self.reference.bury(engine, sample, attempt)
        return attempt

    # Scores and verdicts

    def score(self, samples: Sequence[SampleId]) -> None:
        """Reports scores of samples."""
        reference, settings = self.reference, self.settings
        for sample in samples:
            # An earlier score may have completed the group, which makes this sample a spare one.
            if sample not in reference.scoring:
                continue
            del reference.scoring[sample]
            reference.scored[sample] = None
            group = GroupId(sample.rpartition("/")[0])
            whole = [s for s in reference.live(group) if s in reference.scored]
            if len(whole) == settings.group_size:
                for spare in reference.live(group):
                    reference.scoring.pop(spare, None)
                if not settings.judges_groups:
                    reference.ready[group] = None
        scores = tuple((sample, 1.0) for sample in samples)
        self.send(lambda **k: SamplesScored(scores=scores, **k))

    def judge(self, groups: Sequence[GroupId]) -> None:
        """Reports the filter's verdicts on groups."""
        reference = self.reference
        verdicts = tuple((group, self.verdict(group)) for group in groups)
        for group, reason in verdicts:
            del reference.judging[group]
            if reason is None:
                reference.ready[group] = None
                continue
            reference.dead[group] = None
            for sample in reference.live(group):
                reference.finish(sample, "filtered")
        self.send(lambda **k: GroupsJudged(verdicts=verdicts, **k))

    def verdict(self, group: GroupId) -> str | None:
        """Returns why the filter refuses the group, or None."""
        dull = random.Random(str(group)).random() < self.rules.filter_rate
        return "dull" if dull else None

    # The state

    def write_and_read(self) -> None:
        """Replaces the scheduler by one that is read back from its written state."""
        written = self.scheduler.to_json()
        again = RolloutScheduler.from_json(
            json.loads(json.dumps(written, allow_nan=False)),
            validate=self.rules.validate,
            observer=self.observe,
        )
        self.reference.check(11, again.to_json() == written, "the state is not what was written")
        self.scheduler = again

    def save(self) -> None:
        """Saves a checkpoint: the written state and a copy of the reference model."""
        self.saved = (self.scheduler.to_json(), self.reference.clone())

    # The end

    def stop(self) -> None:
        """Ends the run."""
        self.reference.asked.clear()
        self.reference.stopped = True
        self.send(lambda **k: StopAsked(reason="asked to", **k))
        self.reference.check(8, not self.scheduler.counts.live, "samples live on after the stop")

    def drain(self, rng: random.Random) -> None:
        """Ends all faults, and checks that every batch is delivered and every sample ends.

        Time passes only to the deadlines that the scheduler asked for.
        """
        reference = self.reference
        if reference.stopped:
            reference.check(8, not self.scheduler.counts.live, "samples live on after the stop")
            return
        self._calm_down()
        longest = self.rules.max_tokens + 8
        for _ in range(300 + longest * (self.scheduler.counts.live + 60)):
            before = self.next_event
            self._serve_all(rng)
            if self.next_event != before:
                continue
            if self.reference.wake_s is not None and (self._busy() or self.reference.asked):
                self.clock_s = self.reference.wake_s
                self.send(DeadlineReached)
            elif (
                reference.version < reference.horizon() - self.settings.max_staleness
                and self._busy()
            ):
                self.publish()  # what waits may start only with the weights of the next batch
            elif reference.asked:
                self._feed_batches()
            else:
                break
        reference = self.reference
        reference.check(
            8,
            not reference.asked,
            f"batches {reference.asked} are never delivered: {self.scheduler.waits()}",
        )
        busy = self._busy()
        reference.check(8, not busy, f"{busy} samples never end: {self.scheduler.waits()}")

    def _busy(self) -> int:
        """Returns the number of samples in flight; samples that wait for admission do not count."""
        counts = self.scheduler.counts
        busy = counts.running + counts.scoring
        return busy if self.settings.budget else busy + counts.queued

    def _calm_down(self) -> None:
        """Ends faults and pauses, but for stuck attempts that the scheduler must notice."""
        reference = self.reference
        self.clock_s = max(self.clock_s, reference.now_s)
        for name, engine in list(reference.engines.items()):
            if engine.held:
                engine.held = False
                self.send(lambda name=name, **k: EngineContinueAsked(engine=name, **k))
            if not self.settings.patience.stall_s:
                for attempt in engine.running.values():
                    attempt.stuck = False
            if not self.settings.patience.heartbeat_s:
                engine.silent = False
        if not any(
            e.capacity and not e.silent and not e.leaving for e in reference.engines.values()
        ):
            self.join(EngineId("engine[last]"), 3)

    def _serve_all(self, rng: random.Random) -> None:
        reference = self.reference
        for name in list(reference.engines):
            engine = reference.engines.get(name)
            if engine is not None and not engine.silent:
                self.advance(name, self.rules.max_tokens, rng, answers=1.0)
        for name in list(reference.engines):
            engine = reference.engines.get(name)
            if engine is not None and engine.loading is not None and not engine.silent:
                self.update(name)
        if reference.scoring:
            self.score(list(reference.scoring))
        if reference.judging:
            self.judge(list(reference.judging))
        for source, number in list(reference.wanted.items()):
            if number:
                self.offer(number, source=source)
        if reference.asked and reference.untrained:
            self.publish()

    def _feed_batches(self) -> None:
        """Offers prompts or publishes weights for batches that wait for them."""
        reference = self.reference
        if reference.version < reference.horizon() - self.settings.max_staleness:
            self.publish()
            return
        if self.settings.budget is not None:
            # It asks for prompts by itself, so a batch can wait for nothing but new weights.
            ahead = reference.horizon() > reference.version
            reference.check(8, ahead, f"batches {reference.asked} wait: {self.scheduler.waits()}")
            self.publish()
            return
        asked = sum(groups for groups, _ in reference.asked.values())
        there = len(reference.ready)
        if not self.settings.refill:
            there += len(reference.dead)
        reference.check(8, there < asked, f"batches {reference.asked} wait while {there} are there")
        self.offer(asked - there)


def runs_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the versions of tokens as (version, count) spans.

    >>> runs_of([0, 0, 1])
    ((0, 2), (1, 1))
    """
    spans: list[tuple[int, int]] = []
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
    return tuple(spans)
