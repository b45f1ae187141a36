"""Everything around a scheduler, played: engines, scorer, judge, trainer, clock.

A `World` makes events, carries the scheduler's actions out, and keeps its own books
(`flowrl.testing.scheduler_books`) of what is true. Whatever the scheduler does is checked against
these, never against the scheduler's own state. A difference is a `Violation`.

What happens next is a *move* (`scheduler_moves`, `scheduler_faults`), a function of the world and a
random stream; this module has what moves are made of. All choices come from seeds, so a list of
moves with their seeds is a story that can be told again, or shortened.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowrl.ids import EngineId, GroupId, SampleId, group_id
from flowrl.rollout import (
    Action,
    BatchAsked,
    DeadlineReached,
    EngineContinueAsked,
    EngineJoined,
    EngineUpdated,
    Event,
    GroupsJudged,
    Progressed,
    PromptsOffered,
    RolloutScheduler,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
    SchedulerSettings,
    State,
    StopAsked,
    Submit,
    Transition,
    WeightsPublished,
)
from flowrl.rollout.journal import JournalWriter
from flowrl.specs import FinishReason
from flowrl.testing.scheduler_books import Attempt, Books, EngineTruth, Violation
from flowrl.testing.scheduler_starvation import check_nothing_waits

__all__ = ["World", "WorldRules"]

T = TypeVar("T")

SOURCES = ("", "math", "code")
"""Sources of prompts, where sources matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRules:
    """What a world is like, beside the scheduler's own settings.

    Attributes:
        batch_groups: Groups of a batch, at most; exactly so many with an age budget.
        max_live: Samples that are offered at once, about.
        max_tokens: Tokens of an answer, at most.
        filter_rate: Share of groups that are filtered.
        lag_rate: Share of decode calls that still use the weights before the latest.
        ahead: Whether batches are asked for ahead of their version.
        validate: Whether the scheduler checks itself, too.
        journals: Whether a journal is kept, to be read and replayed.
    """

    batch_groups: int = 2
    max_live: int = 40
    max_tokens: int = 6
    filter_rate: float = 0.3
    lag_rate: float = 0.1
    ahead: bool = False
    validate: bool = True
    journals: bool = False


class SampleQueues:
    """A file in memory: a list of what was written."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> None:
        """Adds a line."""
        self.lines.append(text)


class World:
    """One scheduler and all that surrounds it."""

    def __init__(self, settings: SchedulerSettings, rules: WorldRules) -> None:
        self.settings = settings
        self.rules = rules
        self.books = Books(settings=settings, max_tokens=rules.max_tokens)
        self.scheduler = RolloutScheduler(settings, validate=rules.validate, observer=self.observe)
        self.next_event = 0
        self.num_engines = 0
        self.clock_s = 0.0
        self.journal = SampleQueues()
        self._writer = JournalWriter(self.journal)
        self._writer.begin(settings)
        self.events: list[Event] = []  # that count: those before a crash and after its checkpoint
        self.seen = Counter[str]()  # kinds of events, and restarts
        self.saved: tuple[dict[str, object], Books] | None = None

    # Events

    def tell(self, make: Callable[..., Event], *, at_s: float | None = None) -> None:
        """Steps an event and carries out what follows.

        Args:
            make: Makes it from `id` and `at_s`.
            at_s: When it happens; now by default.
        """
        books = self.books
        event = make(id=self.next_event, at_s=self.clock_s if at_s is None else at_s)
        self.next_event += 1
        self.events.append(event)
        self.seen[type(event).__name__] += 1
        if self.rules.journals:
            self._writer.event(event)
        if event.at_s > books.now_s:
            books.now_s = event.at_s
        if books.wake_s is not None and books.wake_s <= books.now_s:
            books.wake_s = None
        actions = self.scheduler.step(event)
        try:
            books.carry_out(actions, self.scheduler.counts)
            check_nothing_waits(books)
            self._check_spans(actions)
        except Violation as violation:
            raise Violation(violation.invariant, f"{violation} -- after {event}") from None

    def _check_spans(self, actions: Iterable[Action]) -> None:
        """What goes on from tokens has the versions that made them."""
        for action in actions:
            if isinstance(action, Submit):
                for dispatch in action.samples:
                    made = runs_of(self.books.payload.get(dispatch.sample, ()))
                    told = self.scheduler.spans(dispatch.sample)
                    self.books.check(10, made == told, f"{dispatch.sample}: {told} is {made}")

    def observe(self, step: Transition) -> None:
        """An attempt that made no token for long is over, though nobody reported it."""
        if step.before is not State.RUNNING or not step.reason.startswith("no token for"):
            return
        name = EngineId(step.engine or "")
        attempt = self.end_attempt(name, step.sample)
        silence_s = self.books.now_s - attempt.moved_s
        stall_s = self.settings.patience.stall_s
        self.books.check(
            8,
            bool(stall_s) and silence_s >= stall_s - 1e-9,
            f"{step.sample} is given up after {silence_s} s without a token",
        )
        self.books.given_up[name, step.sample] = attempt.abort_asked
        self.books.lose_tokens(step.sample)
        self.seen["stall"] += 1

    def rewind(self, last_event_id: int) -> None:
        """The process goes back to the state after that event."""
        if self.rules.journals:
            self._writer.rewind(last_event_id)
        self.events = [event for event in self.events if event.id <= last_event_id]

    # Prompts and batches

    def offer(self, number: int, *, source: str = "", rng: random.Random | None = None) -> None:
        """Offers the next prompts."""
        books = self.books
        first = len(books.groups)
        # Ten prompts an epoch, so that lengths are learned from one epoch for the next.
        groups = tuple(group_id(n // 10, n % 10) for n in range(first, first + number))
        books.groups += groups
        books.wanted[source] = max(0, books.wanted[source] - number)
        expected: tuple[float, ...] = ()
        if rng is not None and rng.random() < 0.2:
            expected = tuple(float(rng.randint(0, 9)) for _ in groups)
        self.tell(
            lambda **k: PromptsOffered(groups=groups, source=source, expected_tokens=expected, **k)
        )

    def ask(self, groups: int, version: int | None = None) -> None:
        """Asks for one more batch."""
        books = self.books
        batch, books.num_asked = books.num_asked, books.num_asked + 1
        books.asked[batch] = (groups, version)
        self.tell(lambda **k: BatchAsked(batch=batch, groups=groups, version=version, **k))

    def publish(self) -> None:
        """There are new weights; engines that keep their samples have them at once."""
        books = self.books
        books.version += 1
        books.untrained = max(0, books.untrained - 1)
        if not self.settings.publication.empties:
            for engine in books.engines.values():
                if engine.loading is None:
                    engine.version = books.version
        self.tell(lambda **k: WeightsPublished(version=books.version, **k))

    # Engines

    def join(self, engine: EngineId, capacity: int, version: int | None = None) -> None:
        """An engine joins; with older weights where `version` says so."""
        books = self.books
        has = books.version if version is None else version
        books.engines[engine] = EngineTruth(capacity=capacity, version=has)
        self.tell(lambda **k: EngineJoined(engine=engine, capacity=capacity, version=version, **k))

    def update(self, engine: EngineId) -> None:
        """The engine has loaded the weights that it was asked to load."""
        truth = self.books.engines[engine]
        assert truth.loading is not None
        truth.version, truth.loading = truth.loading, None
        self.tell(lambda **k: EngineUpdated(engine=engine, version=truth.version, **k))

    def advance(
        self, engine: EngineId, num_steps: int, rng: random.Random, *, answers: float = 0.7
    ) -> None:
        """Decodes, reports progress of some, and ends those that are done.

        Args:
            answers: Share of the aborts asked for that are answered now.
        """
        truth = self.books.engines[engine]
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
            missing = self.books.length(sample) - attempt.kept - len(attempt.made)
            attempt.made += [version] * min(num_steps, missing)
            if missing <= num_steps:
                done.append((sample, FinishReason.STOP))
            if len(attempt.made) > attempt.reported:
                attempt.reported = len(attempt.made)
                attempt.moved_s = max(self.books.now_s, self.clock_s)
            told.append((sample, attempt.attempt, attempt.kept + len(attempt.made)))
        if told:
            progress = tuple(told)
            self.tell(lambda **k: Progressed(engine=engine, progress=progress, **k))
        rng.shuffle(done)
        # A deadline that came with the report may have ended some of them.
        known = self.books.engines.get(engine)
        done = [end for end in done if known is truth and end[0] in truth.running]
        if done:
            self.report(engine, done)

    def report(self, engine: EngineId, ends: Iterable[tuple[SampleId, FinishReason]]) -> None:
        """Attempts end."""
        books = self.books
        reports = []
        for sample, reason in ends:
            attempt = self.end_attempt(engine, sample)
            if sample not in books.end:
                tokens = books.payload.setdefault(sample, [])
                tokens += attempt.made
                if reason is FinishReason.ABORT and not tokens:
                    books.began.pop(sample, None)
                if reason is not FinishReason.ABORT:
                    books.doubtful.pop(engine, None)
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
        self.tell(lambda **k: SamplesFinished(engine=engine, ends=ended, **k))

    def end_attempt(self, engine: EngineId, sample: SampleId) -> Attempt:
        """The attempt is over."""
        attempt = self.books.engines[engine].running.pop(sample)
        self.books.bury(engine, sample, attempt)
        return attempt

    # Scores and verdicts

    def score(self, samples: Sequence[SampleId]) -> None:
        """Samples are scored."""
        books, settings = self.books, self.settings
        for sample in samples:
            # The score before may have made this one a spare one.
            if sample not in books.scoring:
                continue
            del books.scoring[sample]
            books.scored[sample] = None
            group = GroupId(sample.rpartition("/")[0])
            whole = [s for s in books.live(group) if s in books.scored]
            if len(whole) == settings.group_size:
                for spare in books.live(group):
                    books.scoring.pop(spare, None)
                if not settings.judges_groups:
                    books.ready[group] = None
        scores = tuple((sample, 1.0) for sample in samples)
        self.tell(lambda **k: SamplesScored(scores=scores, **k))

    def judge(self, groups: Sequence[GroupId]) -> None:
        """Groups are judged."""
        books = self.books
        verdicts = tuple((group, self.verdict(group)) for group in groups)
        for group, reason in verdicts:
            del books.judging[group]
            if reason is None:
                books.ready[group] = None
                continue
            books.dead[group] = None
            for sample in books.live(group):
                books.finish(sample, "filtered")
        self.tell(lambda **k: GroupsJudged(verdicts=verdicts, **k))

    def verdict(self, group: GroupId) -> str | None:
        """What the filter says of the group."""
        dull = random.Random(str(group)).random() < self.rules.filter_rate
        return "dull" if dull else None

    # The state

    def write_and_read(self) -> None:
        """The scheduler is written and read back, and nobody notices."""
        written = self.scheduler.to_json()
        again = RolloutScheduler.from_json(
            json.loads(json.dumps(written, allow_nan=False)),
            validate=self.rules.validate,
            observer=self.observe,
        )
        self.books.check(11, again.to_json() == written, "the state is not what was written")
        self.scheduler = again

    def save(self) -> None:
        """A checkpoint: the written state, and the books beside it."""
        self.saved = (self.scheduler.to_json(), self.books.clone())

    # The end

    def stop(self) -> None:
        """The run ends."""
        self.books.asked.clear()
        self.books.stopped = True
        self.tell(lambda **k: StopAsked(reason="asked to", **k))
        self.books.check(8, not self.scheduler.counts.live, "samples live on after the stop")

    def drain(self, rng: random.Random) -> None:
        """No more faults: checks that everything asked is answered and nothing stays behind.

        Time passes only as far as the scheduler asked to be woken.
        """
        books = self.books
        if books.stopped:
            books.check(8, not self.scheduler.counts.live, "samples live on after the stop")
            return
        self._calm_down()
        longest = self.rules.max_tokens + 8
        for _ in range(300 + longest * (self.scheduler.counts.live + 60)):
            before = self.next_event
            self._serve_all(rng)
            if self.next_event != before:
                continue
            if self.books.wake_s is not None and (self._busy() or self.books.asked):
                self.clock_s = self.books.wake_s
                self.tell(DeadlineReached)
            elif books.version < books.horizon() - self.settings.max_staleness and self._busy():
                self.publish()  # what waits may start only with the weights of the next batch
            elif books.asked:
                self._feed_batches()
            else:
                break
        books = self.books
        books.check(
            8,
            not books.asked,
            f"batches {books.asked} are never delivered: {self.scheduler.waits()}",
        )
        busy = self._busy()
        books.check(8, not busy, f"{busy} samples never end: {self.scheduler.waits()}")

    def _busy(self) -> int:
        """Samples that are under way; those that wait for admission are not."""
        counts = self.scheduler.counts
        busy = counts.running + counts.scoring
        return busy if self.settings.budget else busy + counts.queued

    def _calm_down(self) -> None:
        """Ends faults and pauses; what is stuck stays so where the scheduler is to notice."""
        books = self.books
        self.clock_s = max(self.clock_s, books.now_s)
        for name, engine in list(books.engines.items()):
            if engine.held:
                engine.held = False
                self.tell(lambda name=name, **k: EngineContinueAsked(engine=name, **k))
            if not self.settings.patience.stall_s:
                for attempt in engine.running.values():
                    attempt.stuck = False
            if not self.settings.patience.heartbeat_s:
                engine.silent = False
        if not any(e.capacity and not e.silent and not e.leaving for e in books.engines.values()):
            self.join(EngineId("engine[last]"), 3)

    def _serve_all(self, rng: random.Random) -> None:
        books = self.books
        for name in list(books.engines):
            engine = books.engines.get(name)
            if engine is not None and not engine.silent:
                self.advance(name, self.rules.max_tokens, rng, answers=1.0)
        for name in list(books.engines):
            engine = books.engines.get(name)
            if engine is not None and engine.loading is not None and not engine.silent:
                self.update(name)
        if books.scoring:
            self.score(list(books.scoring))
        if books.judging:
            self.judge(list(books.judging))
        for source, number in list(books.wanted.items()):
            if number:
                self.offer(number, source=source)
        if books.asked and books.untrained:
            self.publish()

    def _feed_batches(self) -> None:
        """Batches wait for more groups than were ever offered, or for weights."""
        books = self.books
        if books.version < books.horizon() - self.settings.max_staleness:
            self.publish()
            return
        if self.settings.budget is not None:
            # It asks for prompts by itself, so a batch can wait for nothing but new weights.
            ahead = books.horizon() > books.version
            books.check(8, ahead, f"batches {books.asked} wait: {self.scheduler.waits()}")
            self.publish()
            return
        asked = sum(groups for groups, _ in books.asked.values())
        there = len(books.ready)
        if not self.settings.refill:
            there += len(books.dead)
        books.check(8, there < asked, f"batches {books.asked} wait while {there} are there")
        self.offer(asked - there)


def runs_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Versions of tokens as spans.

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
