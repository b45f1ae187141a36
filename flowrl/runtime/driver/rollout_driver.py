"""Drives a RolloutScheduler: sends it events and carries out its actions.

The scheduler decides; this module has the engines, the scorers and the clock. One thread runs it:
an in-process engine decodes inside `poll`, scorers work in their own processes meanwhile, so a
finished sample is scored while others still generate and a finished group is judged at once.

    offer -> [Submit] -> engine.poll -> SamplesFinished -> [Score] -> scoring.poll ->
    SamplesScored -> [Judge] -> GroupsJudged -> [Deliver] -> collect returns

Where the scheduler refills batches, prompts are offered in rounds: `flowrl.runtime.driver.rounds`.

An engine that fails is reported to the scheduler, which has its samples generated again, on another
engine where there is one, and it is restarted; `flowrl.runtime.local.engine_restarts` limits the
number of restarts.

Every wait is bounded by the stall timeout, after which `SchedulerError` lists who waits for whom.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import assert_never

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.backend.protocols import Finished, GenerateBackend, Loaded, Progress
from flowrl.data import PromptItem, Tokenizer
from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, RoleName, SampleId, sample_id
from flowrl.observe.run_status import RolloutStatus
from flowrl.rollout import actions as do
from flowrl.rollout import events as ev
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.states import DropReason
from flowrl.runtime.checkpoint.unused_samples import UnusedSamples
from flowrl.runtime.driver.collected_batch import (
    Clock,
    CollectedBatch,
    EventStamp,
    FailureBudget,
    RequestMaker,
    Scorers,
    Seconds,
    decode_responses,
)
from flowrl.runtime.driver.filters import GroupJudge
from flowrl.runtime.driver.payloads import GroupRows, Payload, PayloadStore
from flowrl.runtime.driver.rollout_status import rollout_status
from flowrl.runtime.driver.rounds import POLL_S, one_round, stalled
from flowrl.runtime.driver.sample_outcomes import SampleOutcomes, ScorerResults
from flowrl.runtime.driver.sources import PromptSupply
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.runtime.local.engine_restarts import EngineFailures, error_text
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.runtime.spans import SPANS
from flowrl.runtime.workers import Waitable
from flowrl.specs import Grammar, Sampling

_DECODE_S = 30.0
"""Seconds of a poll of an engine in this process, which stops after a number of steps anyway."""


class RolloutDriver:
    """One scheduler with its engines and scorers.

    Args:
        scheduler: The state machine; only this driver may step it.
        engines: Generating engines by id. One that fails is restarted if it is `Restartable`.
        view: Returns an engine that joins later as this driver sees it.
        scorers: Scorers by role; a sample is scored when all of them have answered. Without any,
            samples have no score.
        reported: The role whose score is that of a sample; None if something later gives it.
        store: The payload store, for an engine that looks prompts up.
        tokenizer: Decodes responses for the scorer.
        sampling: The sampling options of every request.
        grammar: The grammar of every response, or of every turn.
        group_size: Samples for each prompt.
        seed_of: The seed of a sample's random stream.
        judge: Verdicts on groups; None where the scheduler does not ask for any.
        failures: Reward failures allowed.
        beat: Called whenever something moved (the watchdog's).
        stop: Asked between polls; a true value raises KeyboardInterrupt there.
        stall_timeout_s: Seconds without any event after which `collect` gives up.
        supply: Further prompts, for a scheduler that refills batches.
        unused: The value of `unused` when the scheduler was written; None with a new scheduler.
        journal: Receives every event before the scheduler does.

    Attributes:
        engine_failures: Which engines are broken or given up.
    """

    def __init__(
        self,
        *,
        scheduler: RolloutScheduler,
        engines: Mapping[EngineId, GenerateBackend],
        scorers: Mapping[RoleName, Scorers],
        tokenizer: Tokenizer,
        sampling: Sampling,
        group_size: int,
        seed_of: Callable[[SampleId], int],
        judge: GroupJudge | None,
        failures: FailureBudget,
        beat: Callable[[], None],
        stop: Callable[[], bool],
        stall_timeout_s: float,
        reported: RoleName | None,
        store: PayloadStore | None = None,
        grammar: Grammar | None = None,
        supply: PromptSupply | None = None,
        unused: UnusedSamples | None = None,
        journal: Callable[[ev.Event], None] | None = None,
        view: Callable[[EngineId, GenerateBackend], GenerateBackend] = lambda name, engine: engine,
        clock: Clock = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.store = PayloadStore() if store is None else store
        self._view = view
        self._engines = dict(engines)
        self._leaving: set[EngineId] = set()
        self._scorers = dict(scorers)
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._requests = RequestMaker(sampling=sampling, grammar=grammar, seed_of=seed_of)
        self._judge = judge
        self._failures = failures
        self.beat = beat
        self._stop = stop
        self._stall_timeout_s = stall_timeout_s
        self._decode_s = min(_DECODE_S, self._stall_timeout_s / 5)
        self._supply = supply
        self._clock = clock
        # The time of a resumed run goes on from that of the run before.
        self._began = clock() - scheduler.state.timers.now_s
        self._event = scheduler.last_event_id
        self._pending: deque[ev.Event] = deque()
        # What each engine has, by attempt: one that was given up may answer after the next began.
        self._running: dict[EngineId, dict[SampleId, int]] = {engine: {} for engine in engines}
        # Where a score may end other samples, no time is to tell which.
        at_once = bool(scheduler.settings.over_sampling.members)
        at_once &= not any(isinstance(engine, Waitable) for engine in self._engines.values())
        self._results = ScorerResults(self._scorers, reported, self.store, failures.score, at_once)
        self._outcomes = SampleOutcomes(self.store, unused)
        self._wake_s: float | None = None  # when the scheduler next needs the time
        self._short: Counter[str] = Counter()  # groups that the scheduler misses, by source; > 0
        self.engine_failures = EngineFailures(self._engines)
        self._dispatch_s = 0.0  # since the last batch was collected
        self.spent = Seconds()
        # Called with samples whose generation has ended; again where a reward is tried again.
        self.on_generated: Callable[[Sequence[tuple[SampleId, Payload]]], None] | None = None
        self.on_dropped: Callable[[SampleId], None] | None = None
        self._journal = journal
        if unused is not None:
            self._emit(ev.Resumed(**self._stamp()))
        for engine_id in self._engines:
            self._report_join(engine_id)

    def unused(self) -> UnusedSamples:
        """Samples that no batch has used yet, and what no batch has reported."""
        return self._outcomes.unused()

    def join(self, engine_id: EngineId, engine: GenerateBackend) -> None:
        """Gives samples to a further engine, which has the newest weights."""
        self._engines[engine_id] = self._view(engine_id, engine)
        self._running[engine_id] = {}
        self._report_join(engine_id)

    def leave(self, engine_id: EngineId) -> None:
        """Empties an engine: its samples go on with others, and then it is no longer served."""
        self._leaving.add(engine_id)
        self._emit(ev.EngineLeaving(**self._stamp(), engine=engine_id))

    def _forget(self, engine_id: EngineId) -> None:
        engine = self._engines.pop(engine_id)
        if isinstance(engine, EpisodeEngine):  # it may have episodes of dropped samples
            self.engine_failures.call(engine_id, engine.close, None)
        del self._running[engine_id]
        self._leaving.discard(engine_id)
        self.engine_failures.forget(engine_id)

    def _report_join(self, engine_id: EngineId) -> None:
        capacity = self._capacity(engine_id)
        self._emit(ev.EngineJoined(**self._stamp(), engine=engine_id, capacity=capacity))

    def _capacity(self, engine_id: EngineId) -> int:
        """Samples to give to an engine: more than its slots, so that a freed one is filled."""
        return GIVEN_PER_SLOT * self._engines[engine_id].num_slots

    def offer(self, items: Sequence[PromptItem]) -> None:
        """Offers prompts; each becomes a group."""
        started = self._clock()
        num_members = self.scheduler.settings.num_members
        for item in items:
            for member in range(num_members):
                self.store.add(sample_id(item.group, member), item)
        for source, part in groupby(items, key=lambda item: item.source):
            groups = tuple(item.group for item in part)
            self._emit(ev.PromptsOffered(**self._stamp(), groups=groups, source=source))
        self._dispatch_s += self._clock() - started

    def was_offered(self, group: GroupId) -> bool:
        """True if the group was ever offered, in this process or one before."""
        return group in self.scheduler.state.offered

    def lose_parents(self, groups: Sequence[GroupId]) -> None:
        """Drops groups whose prompts were made of samples that were dropped."""
        self._emit(ev.ParentsDropped(**self._stamp(), groups=tuple(groups)))

    def serves(self, engine: EngineId) -> bool:
        """True if this driver's samples come from the engine."""
        return engine in self._engines

    def publish(self, version: int) -> None:
        """Reports to the scheduler that the engines serve weights `version`."""
        self._emit(ev.WeightsPublished(**self._stamp(), version=version))

    def collect(self, batch: int, groups: int) -> CollectedBatch:
        """Asks for a batch and runs engines and scorers until it is delivered.

        They hold no dropped samples then: drivers share engines, scorers and sample ids.

        Raises:
            RewardError: more rewards failed than allowed.
            BatchNotFilled: a batch that is to be refilled costs more prompts than it may.
            WorkerDied: the last engine is given up.
            SchedulerError: nothing progressed for the stall timeout.
            KeyboardInterrupt: `stop` returned true.
        """
        started, dispatched_s, failed = self._clock(), self._dispatch_s, self._failures.failed
        self.begin()
        self.request(batch, groups)
        try:
            self.run(lambda: self.has_settled(batch))
        except BaseException:
            # The rollout is given up. When a resumed run makes it again, its rewards fail again.
            self._failures.failed = failed
            raise
        collected = self.take(batch)
        seconds = collected.seconds
        others_s = seconds.generate + seconds.score_wait + seconds.assemble + seconds.dispatch
        seconds.collect = max(0.0, self._clock() - started - others_s + dispatched_s)
        return collected

    def begin(self) -> None:
        """Begins a collection: counts its time and its prompts."""
        self.spent = Seconds()
        if self._supply is not None:
            self._supply.begin()

    def request(self, batch: int, groups: int) -> None:
        """Asks the scheduler for a batch."""
        if self._supply is not None:
            self._supply.taken = groups
        self._emit(ev.BatchAsked(**self._stamp(), batch=batch, groups=groups))

    def has_settled(self, batch: int) -> bool:
        """True if a batch is delivered, and neither engines nor scorers have dropped samples."""
        return batch in self._outcomes.batches and not self._is_busy_with_dropped()

    def take(self, batch: int) -> CollectedBatch:
        """Takes a delivered batch, with the time that was spent on it."""
        collected = self._outcomes.batches.pop(batch)
        self.spent.dispatch, self._dispatch_s = self._dispatch_s, 0.0
        collected.seconds = self.spent
        return collected

    def run(self, done: Callable[[], bool], look: Callable[[], int] | None = None) -> None:
        """Calls `look` until `done`; by default it looks after this driver's engines and scorers.

        Args:
            look: Returns how much moved.
        """

        def asked() -> int:
            if self._stop():
                raise KeyboardInterrupt
            return one_round((self,)) if look is None else look()

        self.wait_for(done, asked)

    def wait_for(self, done: Callable[[], bool], look: Callable[[], int]) -> None:
        """Calls `look`, which returns how much moved, until `done`."""
        last_move = self._clock()
        while not done():
            if look():
                last_move = self._clock()
                self.beat()
            elif self._clock() - last_move > self._stall_timeout_s:
                raise stalled(self._stall_timeout_s, self.describe())

    def look_after_engines(self, seconds: Seconds) -> int:
        """Wakes the scheduler, restarts engines and takes their outputs; returns what moved."""
        progressed = self._report_time() + self._restart_engines() + self._poll_engines(seconds)
        return progressed + self._report_silence()

    def _report_time(self) -> int:
        """Steps the scheduler at the time that it wants to be woken at."""
        if self._wake_s is None or self.seconds_to_wake() > 0:
            return 0
        self._wake_s = None
        self._emit(ev.DeadlineReached(**self._stamp()))
        return 1

    def _report_silence(self) -> int:
        """Reports silent engines to the scheduler, and returns their number."""
        heartbeat_s = self.scheduler.settings.patience.heartbeat_s
        silent = self.engine_failures.fallen_silent(heartbeat_s) if heartbeat_s else []
        for engine in silent:
            self._emit(ev.HeartbeatLost(**self._stamp(), engine=engine))
        return len(silent)

    def seconds_to_wake(self) -> float:
        """Returns the seconds until the scheduler wants the time; infinity if it does not."""
        wake_s = math.inf if self._wake_s is None else self._wake_s
        return max(0.0, wake_s - (self._clock() - self._began))

    @property
    def is_generating(self) -> bool:
        """True if an engine has a sample of this driver."""
        return any(self._running.values())

    @property
    def free_slots(self) -> dict[EngineId, int]:
        """Free slots of the engines in this process that have samples; none of others."""
        return {
            name: self._engines[name].num_slots - len(running)
            for name, running in self._running.items()
            if running and not isinstance(self._engines[name], Waitable)
        }

    @property
    def is_scoring(self) -> bool:
        """True if a scorer has a sample of this driver."""
        return bool(self._results.due)

    @property
    def awaits_scores(self) -> bool:
        """True if its engines may go on once everything is scored: scores end spare samples."""
        return self._results.at_once and self.is_scoring

    @property
    def is_broken(self) -> bool:
        """True if an engine failed and was not restarted yet."""
        return bool(self.engine_failures.broken)

    def waitable(self) -> list[Waitable]:
        """Returns the engines and scorers in other processes that may send something."""
        # A pool without open requests is not polled; a message from it would end every wait.
        pools = self._scorers.values() if self._results.due else ()
        return [*self.waitable_engines(), *(pool for pool in pools if isinstance(pool, Waitable))]

    def waitable_engines(self) -> list[Waitable]:
        return [
            engine
            for name, engine in self._engines.items()
            if isinstance(engine, Waitable) and self.engine_failures.is_alive(name)
        ]

    def refill(self) -> int:
        """Offers prompts in the place of lost groups, if no scorer owes an answer; how many."""
        if self._results.due or not self._short:
            return 0
        if self._supply is None:
            raise SchedulerError(
                "the scheduler asks for more prompts, but this run offers a fixed batch",
                found=f"{self._short.total()} groups short",
            )
        number = 0
        for source, short in list(self._short.items()):
            items = self._supply.further(short, source)
            self._short -= Counter({source: len(items)})
            self._outcomes.offered(items)
            self.offer(items)
            number += len(items)
        return number

    def describe(self) -> str:
        """Returns who waits for whom, in one line."""
        return "; ".join(self._waits()) or f"nothing waits; samples: {self.scheduler.counts}"

    def _waits(self) -> list[str]:
        episodes = [e.describe() for e in self._engines.values() if isinstance(e, EpisodeEngine)]
        return [*self.scheduler.waits(), *filter(None, episodes)]

    def status(self, name: str) -> RolloutStatus:
        """Returns what goes on, under the rollout's name; may be called in another thread."""
        return rollout_status(name, self.scheduler.state, self._waits(), self.engine_failures)

    def _is_busy_with_dropped(self) -> bool:
        """True if an engine or a scorer still has a sample that was dropped."""
        busy = (*self._running.values(), self._results.due)
        return any(self.store.get(sample) is None for samples in busy for sample in samples)

    # Events in

    def _stamp(self) -> EventStamp:
        """Returns the stamp of an event that happens now."""
        self._event += 1
        return {"id": self._event, "at_s": self._clock() - self._began}

    def _emit(self, *events: ev.Event) -> None:
        """Steps the scheduler with events that wait, with these, and with what they cause."""
        self._pending.extend(events)
        while self._pending:
            event = self._pending.popleft()
            if self._journal is not None:
                self._journal(event)
            for action in self.scheduler.step(event):
                self._perform(action)

    def _poll_engines(self, seconds: Seconds) -> int:
        progressed = 0
        for engine_id, engine in list(self._engines.items()):
            running = self._running.get(engine_id)  # None: it left when others' outputs were taken
            if running is None or not (running or isinstance(engine, Waitable)):
                continue  # an idle one in another process may have died
            started = self._clock()
            # One in another process is waited for together with all others.
            timeout_s = 0.0 if isinstance(engine, Waitable) else self._decode_s
            nothing: Sequence[Progress | Finished | Loaded] = []
            poll = partial(engine.poll, timeout_s)
            # One in another process notes by itself what it does.
            with SPANS.of(engine_id, "generate") if timeout_s else nullcontext():
                outputs = self.engine_failures.call(engine_id, poll, nothing)
            if timeout_s:
                seconds.generate += self._clock() - started
            progressed += len(outputs)
            progress = tuple(
                (o.sample, o.attempt, o.num_tokens) for o in outputs if isinstance(o, Progress)
            )
            if progress:
                self._emit(ev.Progressed(**self._stamp(), engine=engine_id, progress=progress))
            finished = [o for o in outputs if isinstance(o, Finished)]
            if finished:
                self._finish(engine_id, finished)
        return progressed

    def _restart_engines(self) -> int:
        """Requeues the samples of failed engines and restarts these; returns their number."""
        broken = dict(self.engine_failures.broken)
        for engine_id, error in broken.items():
            if engine_id not in self._engines:
                continue  # it was leaving, and had what another one lost
            self._running[engine_id].clear()
            self._emit(ev.EngineLost(**self._stamp(), engine=engine_id, reason=error_text(error)))
            if engine_id in self._leaving:
                self._forget(engine_id)
            elif self.engine_failures.restart(engine_id):
                self._report_join(engine_id)
        return len(broken)

    def _finish(self, engine_id: EngineId, finished: list[Finished]) -> None:
        self.engine_failures.ended_some(engine_id)
        ends = []
        for end in finished:
            if self._running[engine_id].get(end.sample) == end.attempt:
                del self._running[engine_id][end.sample]
            payload = self.store.get(end.sample)
            if payload is None or payload.attempt != end.attempt:
                continue  # dropped meanwhile, or the end of a dead attempt; it is fenced, too
            payload.extend(end, engine_id)
            ends.append(
                ev.SampleEnd(
                    sample=end.sample,
                    attempt=end.attempt,
                    reason=end.reason,
                    num_tokens=len(payload.tokens),
                    versions=end.versions,
                )
            )
        self._emit(ev.SamplesFinished(**self._stamp(), engine=engine_id, ends=tuple(ends)))

    def poll_scoring(self, seconds: Seconds, *, wait: bool) -> int:
        if not self._results.due:
            return 0
        started = self._clock()
        if wait:
            with SPANS.waiting("rollout", "scorers"):
                self._results.wait(POLL_S)
        answered = self._clock()
        seconds.score_wait += answered - started
        answers = self._results.poll()
        for failure in answers.failed:
            payload = self.store.get(failure.sample)
            if payload is not None:  # else it was dropped with a member that failed before
                self._emit(self._failed(failure, payload))
        # A failure above may have dropped its whole group: whether the scores of the others came in
        # the same poll is a matter of time, and must not show in the scheduler's state.
        scores = tuple(score for score in answers.scored if self.store.get(score[0]) is not None)
        if scores:
            self._emit(ev.SamplesScored(**self._stamp(), scores=scores))
        seconds.assemble += self._clock() - answered
        return answers.num

    def _failed(self, failure: ScoreFailure | EpisodeFailure, payload: Payload) -> ev.RewardFailed:
        if self.scheduler.reward_attempts_left(failure.sample) <= 1:  # else it is asked for again
            self._failures.spend(failure, payload)
            payload.failure = failure.message
            if isinstance(failure, ScoreFailure):
                payload.failed_term = failure.term
        return ev.RewardFailed(**self._stamp(), sample=failure.sample, error=failure.message)

    # Actions out

    def _perform(self, action: do.Action) -> None:
        match action:
            case do.Submit():
                self._submit(action)
            case do.Abort():
                engine = self._engines[action.engine]
                self.engine_failures.call(
                    action.engine, partial(engine.abort, action.samples), None
                )
            case do.Score():
                self._score(action)
            case do.Judge():
                self._judge_groups(action)
            case do.Deliver():
                self._deliver(action)
            case do.Drop():
                ((sample, payload),) = self.store.take((action.sample,))
                self._results.forget(sample)
                reason = f"{action.reason}: {payload.failure}" if payload.failure else action.reason
                if self._supply is not None and reason != DropReason.INCOMPLETE_GROUP:
                    self._supply.note(payload.item.group, str(action.reason))
                self._outcomes.dropped(sample, payload, reason)
                if self.on_dropped is not None:
                    self.on_dropped(sample)
            case do.NeedPrompts():
                self._short[action.source] += action.groups
            case do.Wake():
                self._wake_s = action.at_s
            case do.UpdateEngine():
                self._update_engine(action.engine)
            case do.ReleaseEngine():
                if action.engine in self._leaving:
                    self._forget(action.engine)
                else:
                    self.engine_failures.give_up(action.engine, "its heartbeat was lost")
            case do.PauseEngine() | do.ContinueEngine():
                pass  # an engine makes no token without a request, and gets each request by itself
            case _:
                assert_never(action)

    def _update_engine(self, engine_id: EngineId) -> None:
        """Loads new weights into an empty engine; here it has them already."""
        version = self.scheduler.version
        self._pending.append(ev.EngineUpdated(**self._stamp(), engine=engine_id, version=version))

    def _submit(self, action: do.Submit) -> None:
        requests = [self._requests.request(d, self.store[d.sample]) for d in action.samples]
        self._running[action.engine].update((d.sample, d.attempt) for d in action.samples)
        engine = self._engines[action.engine]
        self.engine_failures.call(action.engine, partial(engine.submit, requests), None)

    def _score(self, action: do.Score) -> None:
        payloads = [(sample, self.store[sample]) for sample in action.samples]
        for _, payload in payloads:
            if payload.broken is not None:
                self._pending.append(self._failed(payload.broken, payload))
        payloads = [row for row in payloads if row[1].broken is None]
        plain = [payload for _, payload in payloads if not payload.is_episode]
        decode_responses(self._tokenizer, plain)
        if self.on_generated is not None:
            self.on_generated(payloads)
        if self._scorers:
            self._results.ask(payloads)
        elif payloads:
            # A sample is scored when the scheduler receives this event; the 0 is never read.
            scores = tuple((sample, payload.score or 0.0) for sample, payload in payloads)
            self._pending.append(ev.SamplesScored(**self._stamp(), scores=scores))

    def _judge_groups(self, action: do.Judge) -> None:
        if self._judge is None:
            raise SchedulerError("a group is to be judged, but the workflow has no filter")
        members = dict(zip(action.groups, action.samples, strict=True))
        groups: list[GroupRows] = [
            (group, [(sample, self.store[sample]) for sample in samples])
            for group, samples in members.items()
        ]
        verdicts = tuple(zip(action.groups, self._judge(groups), strict=True))
        self._outcomes.judged(members, verdicts)
        if self._supply is not None:
            for group, reason in verdicts:
                self._supply.note(group, reason)
        self._pending.append(ev.GroupsJudged(**self._stamp(), verdicts=verdicts))

    def _deliver(self, action: do.Deliver) -> None:
        self._outcomes.deliver(action)
