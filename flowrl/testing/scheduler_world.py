"""Everything around a scheduler, played: engines, scorer, judge, trainer, and the faults of each.

A `World` makes events at random, carries the scheduler's actions out, and keeps its own books in
its own way (which token was made by which weights, who holds what, what ended how). Whatever the
scheduler does is checked against these books, never against the scheduler's own state. A
difference is a `Violation`.

All choices come from one `random.Random`, so a seed names an episode, and Hypothesis can steer and
shrink one.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from flowrl.ids import EngineId, GroupId, SampleId, group_id
from flowrl.rollout import (
    AbortAsked,
    BatchAsked,
    EngineCapacityChanged,
    EngineJoined,
    EngineLost,
    Event,
    GroupsJudged,
    Progressed,
    PromptsOffered,
    Resumed,
    RewardFailed,
    RolloutScheduler,
    SampleEnd,
    SampleFailed,
    SamplesFinished,
    SamplesScored,
    SchedulerSettings,
    StopAsked,
    WeightsPublished,
)
from flowrl.specs import FinishReason
from flowrl.testing.scheduler_books import Attempt, Books, Violation

__all__ = ["CALM", "STORMY", "Violation", "Weights", "World"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How often each kind of event is tried, relative to the others."""

    offer: float = 4
    ask: float = 4
    publish: float = 3
    progress: float = 20
    score: float = 12
    judge: float = 8
    join: float = 2
    resize: float = 1
    lose: float = 0
    fail: float = 0
    refuse: float = 0
    late: float = 0
    repeat: float = 0
    reward_fail: float = 0
    abort: float = 0
    early_publish: float = 0
    rewrite: float = 0
    crash: float = 0
    stop: float = 0


CALM = Weights()
"""No faults."""

STORMY = Weights(
    lose=1,
    fail=2,
    refuse=1,
    late=3,
    repeat=2,
    reward_fail=0.5,
    abort=3,
    early_publish=0.5,
    rewrite=1,
    crash=0.7,
    stop=0.02,
)
"""Every fault, often."""


class World:
    """One scheduler and all that surrounds it.

    Args:
        rng: Where every choice comes from.
        max_live: Samples that are offered at once, about.
        lag_rate: Share of decode calls that still use the weights before the latest.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        rng: random.Random,
        *,
        weights: Weights = STORMY,
        batch_groups: int = 2,
        max_live: int = 40,
        max_tokens: int = 6,
        filter_rate: float = 0.3,
        lag_rate: float = 0.1,
        validate: bool = True,
    ) -> None:
        self.settings = settings
        self.rng = rng
        self.batch_groups = batch_groups
        self.max_live = max_live
        self.max_tokens = max_tokens
        self.filter_rate = filter_rate
        self.lag_rate = lag_rate
        self.validate = validate
        self.scheduler = RolloutScheduler(settings, validate=validate)
        self.books = Books(settings=settings, max_tokens=max_tokens)
        self.next_event = 0
        self.num_engines = 0
        self.events: list[Event] = []  # since the last restart from an older state
        self.seen = Counter[str]()  # kinds of events, and restarts
        self._saved: tuple[dict[str, object], Books] | None = None
        self._past: list[tuple[EngineId, SampleId, int, int]] = []  # attempts that are over
        moves = {kind.name: getattr(self, f"do_{kind.name}") for kind in fields(Weights)}
        self._moves: list[Callable[[], None]] = list(moves.values())
        self._rates = [float(getattr(weights, name)) for name in moves]

    # Running

    def run(self, num_events: int) -> None:
        """Lets so many things happen, fewer after a stop."""
        for _ in range(num_events):
            if self.books.stopped:
                return
            self.rng.choices(self._moves, self._rates)[0]()

    def drain(self) -> None:
        """No more faults: checks that everything asked is answered and nothing stays behind."""
        books = self.books
        if books.stopped:
            self.books.check(not self.scheduler.counts.live, "samples live on after the stop")
            return
        if not any(books.capacity.values()):
            self._join(EngineId("engine[last]"), 3)
        longest = self.max_tokens + 8
        for _ in range(200 + longest * (self.scheduler.counts.live + 50)):
            before = self.next_event
            if books.asked and books.untrained:
                self.do_publish()
            for engine in list(books.running):
                self._advance(engine, self.max_tokens)
            self._score(list(books.scoring))
            self._judge(list(books.judging))
            if books.wanted:
                self.offer(books.wanted)
            if self.next_event == before:
                if not books.asked:
                    break
                # Batches may ask for more groups than were ever offered.
                asked, there = sum(books.asked.values()), self.books.num_available()
                self.books.check(
                    there < asked, f"batches {books.asked} wait while {there} are there"
                )
                self.offer(asked - there)
        self.books.check(not books.asked, f"batches {books.asked} are never delivered")
        counts = self.scheduler.counts
        busy = counts.live - counts.ready
        self.books.check(not busy, f"{busy} samples never end: {self.scheduler.waits()}")

    def tell(self, make: Callable[[int], Event]) -> None:
        """Steps an event and carries out what follows."""
        event = make(self.next_event)
        self.next_event += 1
        self.events.append(event)
        self.seen[type(event).__name__] += 1
        actions = self.scheduler.step(event)
        try:
            self.books.carry_out(actions, self.scheduler.counts)
        except Violation as violation:
            raise Violation(f"after {event}: {violation}") from None

    # Moves

    def do_offer(self) -> None:
        """A few prompts, unless many are live."""
        if self.scheduler.counts.live < self.max_live:
            self.offer(self.rng.randint(1, 3))

    def do_ask(self) -> None:
        """Asks for a batch; sometimes several wait, or one is asked for twice."""
        books = self.books
        if len(books.asked) < 1 or self.rng.random() < 0.1:
            self.ask(self.rng.randint(1, self.batch_groups))
        else:
            batch, groups = self.rng.choice(list(books.asked.items()))
            self.tell(lambda i: BatchAsked(id=i, batch=batch, groups=groups))

    def do_publish(self) -> None:
        """New weights for the batches that were delivered."""
        if self.books.untrained:
            self.books.untrained = 0
            self.do_early_publish()

    def do_early_publish(self) -> None:
        """New weights that no batch called for."""
        self.books.version += 1
        self.tell(lambda i: WeightsPublished(id=i, version=self.books.version))

    def do_progress(self) -> None:
        """An engine decodes; some samples end."""
        engine = self._pick([e for e, running in self.books.running.items() if running])
        if engine is not None:
            self._advance(engine, self.rng.randint(1, 4))

    def do_score(self) -> None:
        """Some samples are scored, in any order."""
        names = list(self.books.scoring)
        if names:
            self._score(self.rng.sample(names, self.rng.randint(1, len(names))))

    def do_judge(self) -> None:
        """Some groups are judged, in any order."""
        names = list(self.books.judging)
        if names:
            chosen = self.rng.sample(names, self.rng.randint(1, len(names)))
            self._judge(chosen)

    def do_join(self) -> None:
        """An engine joins; seldom under a name that is in use."""
        books = self.books
        engine = self._pick(list(books.capacity)) if self.rng.random() < 0.1 else None
        if engine is None:
            if len(books.capacity) >= 4:
                return
            engine = EngineId(f"engine[{self.num_engines}]")
            self.num_engines += 1
        else:
            self._forget_engine(engine)
        self._join(engine, self.rng.randint(1, 7))

    def do_resize(self) -> None:
        """An engine takes more or fewer samples, or none for a while."""
        engine = self._pick(list(self.books.capacity))
        if engine is not None:
            self.books.capacity[engine] = capacity = self.rng.choice([0, 1, 2, 3, 5, 8])
            self.tell(lambda i: EngineCapacityChanged(id=i, engine=engine, capacity=capacity))

    def do_lose(self) -> None:
        """An engine dies, sometimes one that is dead already."""
        engine = self._pick([*self.books.capacity, EngineId("engine[none]")])
        if engine is not None:
            self._forget_engine(engine)
            self.tell(lambda i: EngineLost(id=i, engine=engine, reason="killed"))

    def do_fail(self) -> None:
        """An attempt breaks."""
        found = self._pick_attempt()
        if found:
            engine, sample, attempt = found
            self._end_attempt(engine, sample)
            self.tell(
                lambda i: SampleFailed(
                    id=i, engine=engine, sample=sample, attempt=attempt.attempt, error="broken"
                )
            )

    def do_refuse(self) -> None:
        """An engine gives a sample back of its own accord, perhaps without any token."""
        found = self._pick_attempt()
        if found:
            self._report(found[0], [(found[1], FinishReason.ABORT)])

    def do_late(self) -> None:
        """A report arrives on an attempt that is over, or on a sample that never was."""
        known = self._past[-50:]
        past = self._pick([*known, (EngineId("x"), SampleId("9/9/9"), 0, 1)])
        assert past is not None
        engine, sample, attempt, tokens = past
        end = SampleEnd(
            sample=sample,
            attempt=attempt,
            reason=self.rng.choice(list(FinishReason)),
            num_tokens=tokens,
            versions=((0, tokens),) if tokens else (),
        )
        late: list[Callable[[int], Event]] = [
            lambda i: SamplesFinished(id=i, engine=engine, ends=(end, end)),
            lambda i: SampleFailed(
                id=i, engine=engine, sample=sample, attempt=attempt, error="late"
            ),
            lambda i: Progressed(id=i, engine=engine, progress=((sample, attempt, 99),)),
        ]
        if sample not in self.books.scoring:
            late.append(lambda i: SamplesScored(id=i, scores=((sample, 1.0),)))
            late.append(lambda i: RewardFailed(id=i, sample=sample, error="late"))
        if GroupId(sample.rpartition("/")[0]) not in self.books.judging:
            group = GroupId(sample.rpartition("/")[0])
            late.append(lambda i: GroupsJudged(id=i, verdicts=((group, "late"),)))
        before, fenced = self._facts(), self.scheduler.fenced
        self.tell(self.rng.choice(late))
        self.books.check(self._facts() == before, f"a late report on {sample} changed something")
        self.books.check(
            self.scheduler.fenced > fenced, f"a late report on {sample} was not counted"
        )

    def do_repeat(self) -> None:
        """An event is sent a second time."""
        event = self._pick(self.events[-20:])
        if event is not None:
            self.books.check(
                not self.scheduler.step(event), f"{event} had an effect when sent again"
            )

    def do_reward_fail(self) -> None:
        """A reward raises."""
        sample = self._pick(list(self.books.scoring))
        if sample is not None:
            del self.books.scoring[sample]
            self.tell(lambda i: RewardFailed(id=i, sample=sample, error="raised"))

    def do_abort(self) -> None:
        """Some samples are to be aborted, running or not, known or not."""
        names = [*self.books.attempts, SampleId("9/9/9")]
        chosen = tuple(self.rng.sample(names[-30:], min(len(names), self.rng.randint(1, 4), 30)))
        self.tell(lambda i: AbortAsked(id=i, samples=chosen))

    def do_rewrite(self) -> None:
        """The scheduler is written and read back, and nobody notices."""
        written = self.scheduler.to_json()
        again = RolloutScheduler.from_json(json.loads(json.dumps(written)), validate=self.validate)
        self.books.check(again.to_json() == written, "the state is not what was written")
        self.scheduler = again
        self.seen["rewrite"] += 1
        if self.rng.random() < 0.5:
            self._saved = (written, self.books.clone())

    def do_crash(self) -> None:
        """The process dies and begins anew from what was last written."""
        if self._saved is None:
            self._saved = (
                self.scheduler.to_json(),
                self.books.clone(),
            )
            return
        written, books = self._saved
        for engine in list(self.books.running):
            self._forget_engine(engine)
        self.scheduler = RolloutScheduler.from_json(
            json.loads(json.dumps(written)), validate=self.validate
        )
        self.books = books.clone()
        for engine in list(self.books.running):
            self._forget_engine(engine)
        waiting = set(self.books.scoring), set(self.books.judging)
        self.books.scoring.clear()
        self.books.judging.clear()
        self.books.wanted = 0
        self.events.clear()
        self._past.clear()
        self.seen["crash"] += 1
        self.tell(lambda i: Resumed(id=i))
        self.books.check(
            (set(self.books.scoring), set(self.books.judging)) == waiting,
            "what waited for a score or a verdict is not asked for again after a crash",
        )

    def do_stop(self) -> None:
        """The run ends."""
        self.books.asked.clear()
        self.books.stopped = True
        self.tell(lambda i: StopAsked(id=i, reason="asked to"))
        self.books.check(not self.scheduler.counts.live, "samples live on after the stop")

    # How moves are made

    def _pick(self, items: Sequence[T]) -> T | None:
        return self.rng.choice(items) if items else None

    def _pick_attempt(self) -> tuple[EngineId, SampleId, Attempt] | None:
        return self._pick(
            [(e, s, a) for e, running in self.books.running.items() for s, a in running.items()]
        )

    def _join(self, engine: EngineId, capacity: int) -> None:
        self.books.capacity[engine] = capacity
        self.books.running[engine] = {}
        self.tell(lambda i: EngineJoined(id=i, engine=engine, capacity=capacity))

    def ask(self, groups: int) -> None:
        """Asks for one more batch."""
        batch, self.books.num_asked = self.books.num_asked, self.books.num_asked + 1
        self.books.asked[batch] = groups
        self.tell(lambda i: BatchAsked(id=i, batch=batch, groups=groups))

    def offer(self, num_groups: int) -> None:
        """Offers the next prompts."""
        first = self.books.num_offered
        groups = tuple(group_id(n // 10, n % 10) for n in range(first, first + num_groups))
        self.books.num_offered += num_groups
        self.books.wanted = max(0, self.books.wanted - num_groups)
        self.tell(lambda i: PromptsOffered(id=i, groups=groups))

    def _advance(self, engine: EngineId, num_steps: int) -> None:
        """Decodes, reports progress of some, and ends those that are done."""
        version = max(0, self.books.version - (self.rng.random() < self.lag_rate))
        running = self.books.running[engine]
        if not running:
            return
        done: list[tuple[SampleId, FinishReason]] = []
        for sample, attempt in running.items():
            missing = self.books.length(sample) - attempt.kept - len(attempt.made)
            if attempt.abort_asked and self.rng.random() < 0.7:
                done.append((sample, FinishReason.ABORT))
                continue
            attempt.made += [version] * min(num_steps, missing)
            if missing <= num_steps:
                done.append((sample, FinishReason.STOP))
        progress = tuple((s, a.attempt, a.kept + len(a.made)) for s, a in running.items())
        self.tell(lambda i: Progressed(id=i, engine=engine, progress=progress))
        self.rng.shuffle(done)
        if done:
            self._report(engine, done)

    def _report(self, engine: EngineId, ends: Iterable[tuple[SampleId, FinishReason]]) -> None:
        reports = []
        for sample, reason in ends:
            attempt = self._end_attempt(engine, sample)
            spans: list[tuple[int, int]] = []
            for version in attempt.made:
                if spans and spans[-1][0] == version:
                    spans[-1] = (version, spans[-1][1] + 1)
                else:
                    spans.append((version, 1))
            if sample not in self.books.end:
                self.books.payload.setdefault(sample, []).extend(attempt.made)
            reports.append(
                SampleEnd(
                    sample=sample,
                    attempt=attempt.attempt,
                    reason=reason,
                    num_tokens=attempt.kept + len(attempt.made),
                    versions=tuple(spans),
                )
            )
        self.tell(lambda i: SamplesFinished(id=i, engine=engine, ends=tuple(reports)))

    def _end_attempt(self, engine: EngineId, sample: SampleId) -> Attempt:
        attempt = self.books.running[engine].pop(sample)
        self._past.append((engine, sample, attempt.attempt, attempt.kept + len(attempt.made)))
        return attempt

    def _forget_engine(self, engine: EngineId) -> None:
        for sample in list(self.books.running.get(engine, ())):
            self._end_attempt(engine, sample)
        self.books.running.pop(engine, None)
        self.books.capacity.pop(engine, None)

    def _score(self, samples: Sequence[SampleId]) -> None:
        if samples:
            for sample in samples:
                del self.books.scoring[sample]
                self.books.scored.add(sample)
            scores = tuple((sample, 1.0) for sample in samples)
            self.tell(lambda i: SamplesScored(id=i, scores=scores))

    def _judge(self, groups: Sequence[GroupId]) -> None:
        if groups:
            verdicts = tuple((group, self._verdict(group)) for group in groups)
            for group, reason in verdicts:
                del self.books.judging[group]
                if reason is not None:
                    for sample in self.books.members(group):
                        self.books.finish(sample, "filtered")
            self.tell(lambda i: GroupsJudged(id=i, verdicts=verdicts))

    def _verdict(self, group: GroupId) -> str | None:
        return "boring" if random.Random(str(group)).random() < self.filter_rate else None

    def _facts(self) -> object:
        counts = self.scheduler.counts
        return (counts, len(self.books.delivered), self.scheduler.version)
