"""Drives a RolloutScheduler: tells it what happened, does what it asks.

The scheduler decides; this module has the engines, the scorers and the clock. One thread runs it:
an in-process engine decodes inside `poll`, scorers work in their own processes meanwhile, so a
finished sample is scored while others still generate and a finished group is judged at once.

    offer -> [Submit] -> engine.poll -> SamplesFinished -> [Score] -> scoring.poll ->
    SamplesScored -> [Judge] -> GroupsJudged -> [Deliver] -> collect returns

Every wait is bounded by the stall timeout, after which `SchedulerError` says who waits for whom.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flowrl.backend.protocols import (
    Finished,
    GenerateBackend,
    GenerateRequest,
    Progress,
    ScoreRequest,
    ScoreResult,
)
from flowrl.data import PromptItem, Tokenizer
from flowrl.errors import RewardError, SchedulerError
from flowrl.ids import EngineId, GroupId, RoleName, SampleId, sample_id
from flowrl.rollout import (
    Abort,
    Action,
    BatchAsked,
    Deliver,
    Drop,
    EngineJoined,
    Event,
    GroupsJudged,
    Judge,
    NeedPrompts,
    Progressed,
    PromptsOffered,
    RewardFailed,
    RolloutScheduler,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
    Score,
    Submit,
    WeightsPublished,
)
from flowrl.runtime.episodes import EpisodeEngine
from flowrl.runtime.judge import GroupJudge
from flowrl.runtime.payloads import Payload, PayloadStore
from flowrl.runtime.sample_set import GroupRows
from flowrl.runtime.scoring import ScoreFailure
from flowrl.runtime.transcript import EpisodeFailure
from flowrl.specs import FinishReason, Grammar, Sampling

__all__ = [
    "Collected",
    "FailureBudget",
    "RolloutDriver",
    "Scorers",
    "Seconds",
    "merged_terms",
    "score_request",
]

_POLL_S = 0.25
"""How long one poll of an engine may decode before scorers and Ctrl-C are looked at again."""


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def __call__(self) -> float: ...


class Scorers(Protocol):
    """What scores samples for a role: processes (`ScoringPool`), or this one (`InlineScorer`)."""

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Takes samples to score."""
        ...

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        """Answers since the last call; returns at once."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Waits until `poll` has something to give; false after `timeout_s` seconds without."""
        ...

    def close(self) -> None:
        """Frees what it holds; idempotent."""
        ...


@dataclass(slots=True)
class FailureBudget:
    """Rewards that may fail before the run stops; shared by all rollouts of a run."""

    allowed: int
    failed: int = 0

    def spend(self, failure: ScoreFailure | EpisodeFailure, payload: Payload) -> None:
        """Counts a failed reward, or an episode that its environment broke off.

        Raises:
            RewardError: it is one more than allowed; names the sample and what it said.
        """
        self.failed += 1
        if self.failed > self.allowed:
            raise RewardError(
                f"the {_whose(failure)} of this sample {failure.message}",
                where=f"sample {failure.sample}",
                found=f"prompt {_excerpt(payload.item.prompt)}, response {_excerpt(payload.text)}",
                expected=f"at most {self.allowed} failed rewards (rewards.max_failures)",
                hint=f"mend the {_whose(failure)}, or raise rewards.max_failures to drop such "
                "samples",
            )


def _whose(failure: ScoreFailure | EpisodeFailure) -> str:
    return "environment" if isinstance(failure, EpisodeFailure) else "reward"


@dataclass(slots=True)
class Seconds:
    """Where the driver's time went."""

    generate: float = 0.0
    score_wait: float = 0.0


@dataclass(slots=True, kw_only=True)
class Collected:
    """A delivered batch.

    Attributes:
        groups: Delivered groups in offer order, each with its members' payloads in member order.
        filtered: Samples of groups that the filter took out, with its reason.
        num_filtered_groups: How many groups those were.
        dropped: Samples that ended unused, with the reason.
        seconds: Time of this collection.
    """

    groups: list[GroupRows] = field(default_factory=list)
    filtered: list[tuple[SampleId, Payload, str]] = field(default_factory=list)
    num_filtered_groups: int = 0
    dropped: list[tuple[SampleId, Payload, str]] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)


class RolloutDriver:
    """One scheduler with its engines and scorers.

    Args:
        scheduler: The state machine; nobody else may step it.
        engines: Generating engines by id.
        scorers: What scores, by role; a sample is scored when all of them answered. Without
            any, samples have no score.
        reported: The role whose score is told of a sample; by default the first of `scorers`.
        store: Where payloads are kept, for an engine that looks prompts up.
        tokenizer: Decodes responses for the scorer.
        sampling: Of every request.
        grammar: What every response, or every turn, is held to.
        group_size: Samples for each prompt.
        seed_of: The seed of a sample's random stream.
        judge: Verdicts on groups; None where the scheduler does not ask for any.
        failures: Reward failures allowed.
        beat: Called whenever something moved (the watchdog's).
        stop: Asked between polls; a true value raises KeyboardInterrupt there.
        stall_timeout_s: Seconds without any event after which `collect` gives up.
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
        reported: RoleName | None = None,
        store: PayloadStore | None = None,
        grammar: Grammar | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.store = PayloadStore() if store is None else store
        self._engines = dict(engines)
        self._scorers = dict(scorers)
        self._reported = next(iter(scorers), None) if reported is None else reported
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._grammar = grammar
        self._group_size = group_size
        self._seed_of = seed_of
        self._judge = judge
        self._failures = failures
        self._beat = beat
        self._stop = stop
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._event = scheduler.last_event_id
        self._pending: deque[Event] = deque()
        self._running: dict[EngineId, set[SampleId]] = {engine: set() for engine in engines}
        self._answers_due: dict[SampleId, int] = {}  # of scorers, for samples that are with them
        self._terms: dict[SampleId, dict[RoleName, Mapping[str, float]]] = {}
        self._batches: dict[int, Collected] = {}
        self._dropped: list[tuple[SampleId, Payload, str]] = []
        self._verdicts: dict[GroupId, str] = {}
        for engine_id, engine in self._engines.items():
            # Twice the slots, so that a freed slot is refilled inside the engine at once.
            self._emit(
                EngineJoined(id=self._next(), engine=engine_id, capacity=2 * engine.num_slots)
            )

    def offer(self, items: Sequence[PromptItem]) -> None:
        """Offers prompts; each becomes a group."""
        for item in items:
            for member in range(self._group_size):
                self.store.add(sample_id(item.group, member), item)
        self._emit(PromptsOffered(id=self._next(), groups=tuple(item.group for item in items)))

    def serves(self, engine: EngineId) -> bool:
        """Whether it is the engine that this driver's samples come from."""
        return engine in self._engines

    def publish(self, version: int) -> None:
        """Tells the scheduler that the engines serve weights `version`."""
        self._emit(WeightsPublished(id=self._next(), version=version))

    def collect(self, batch: int, groups: int) -> Collected:
        """Asks for a batch and runs engines and scorers until it is delivered.

        They are empty of dropped samples when it returns: engines and scorers are shared with other
        drivers (evaluations, later stages), whose samples may have the same ids.

        Raises:
            RewardError: more rewards failed than allowed.
            SchedulerError: nothing moved for the stall timeout.
            KeyboardInterrupt: `stop` said so.
        """
        seconds = Seconds()
        failed = self._failures.failed
        self._emit(BatchAsked(id=self._next(), batch=batch, groups=groups))
        try:
            self._run(lambda: self._is_delivered(batch), seconds)
        except BaseException:
            # The rollout is given up. Made anew by a resumed run, its rewards fail anew.
            self._failures.failed = failed
            raise
        collected = self._batches.pop(batch)
        collected.seconds = seconds
        return collected

    def _is_delivered(self, batch: int) -> bool:
        return batch in self._batches and not self._is_busy_with_dropped()

    def _run(self, done: Callable[[], bool], seconds: Seconds) -> None:
        """Polls engines and scorers until `done`."""
        last_move = self._clock()
        while not done():
            if self._stop():
                raise KeyboardInterrupt
            moved = self._poll_engines(seconds)
            moved += self._poll_scoring(seconds, wait=not any(self._running.values()))
            now = self._clock()
            if moved:
                last_move = now
                self._beat()
            elif now - last_move > self._stall_timeout_s:
                raise SchedulerError(
                    f"nothing moved for {self._stall_timeout_s:g} s",
                    found=self.describe(),
                    hint="raise runtime.stall_timeout_s if the worker that is waited for is slow",
                )

    def describe(self) -> str:
        """Who waits for whom, in one line."""
        episodes = [e.describe() for e in self._engines.values() if isinstance(e, EpisodeEngine)]
        waits = [*self.scheduler.waits(), *filter(None, episodes)]
        return "; ".join(waits) or f"nobody waits; samples: {self.scheduler.counts}"

    def _is_busy_with_dropped(self) -> bool:
        """Whether an engine or a scorer still has a sample that ended without it."""
        held = (*self._running.values(), self._answers_due)
        return any(self.store.get(sample) is None for samples in held for sample in samples)

    # -- events in ---------------------------------------------------------------------------

    def _next(self) -> int:
        self._event += 1
        return self._event

    def _emit(self, event: Event) -> None:
        """Steps the scheduler with `event` and with all events that its actions cause."""
        self._pending.append(event)
        self._settle()

    def _settle(self) -> None:
        """Steps the scheduler with the events that wait."""
        while self._pending:
            for action in self.scheduler.step(self._pending.popleft()):
                self._perform(action)

    def _poll_engines(self, seconds: Seconds) -> int:
        moved = 0
        for engine_id, engine in self._engines.items():
            if not self._running[engine_id]:
                continue
            started = self._clock()
            outputs = engine.poll(_POLL_S)
            seconds.generate += self._clock() - started
            moved += len(outputs)
            progress = tuple(
                (o.sample, o.attempt, o.num_tokens) for o in outputs if isinstance(o, Progress)
            )
            if progress:
                self._emit(Progressed(id=self._next(), engine=engine_id, progress=progress))
            finished = [o for o in outputs if isinstance(o, Finished)]
            if finished:
                self._finish(engine_id, finished)
        return moved

    def _finish(self, engine_id: EngineId, finished: list[Finished]) -> None:
        ends = []
        for end in finished:
            payload = self.store.get(end.sample)
            if payload is not None and payload.attempt != end.attempt:
                continue  # the end of a dead attempt; the scheduler fences it too
            self._running[engine_id].discard(end.sample)
            if payload is None:
                continue  # dropped meanwhile
            payload.extend(end)
            ends.append(
                SampleEnd(
                    sample=end.sample,
                    attempt=end.attempt,
                    reason=end.reason,
                    num_tokens=len(payload.tokens),
                    versions=end.versions,
                )
            )
        self._emit(SamplesFinished(id=self._next(), engine=engine_id, ends=tuple(ends)))

    def _poll_scoring(self, seconds: Seconds, *, wait: bool) -> int:
        if not self._answers_due:
            return 0
        started = self._clock()
        if wait:
            any(pool.wait(_POLL_S) for pool in self._scorers.values())
        answers = [(role, pool.poll()) for role, pool in self._scorers.items()]
        if wait:
            seconds.score_wait += self._clock() - started
        scored: list[tuple[SampleId, float]] = []
        for role, results in answers:
            for result in results:
                due = self._answers_due.pop(result.sample) - 1
                if due:
                    self._answers_due[result.sample] = due
                payload = self.store.get(result.sample)
                if payload is None:
                    continue  # dropped meanwhile
                if isinstance(result, ScoreResult):
                    self._note_score(payload, role, result)
                    if not due:
                        scored.append((result.sample, payload.score or 0.0))
                else:
                    self._emit(self._failed(result, payload))
        if scored:
            self._emit(SamplesScored(id=self._next(), scores=tuple(scored)))
        return sum(len(results) for _, results in answers)

    def _note_score(self, payload: Payload, role: RoleName, result: ScoreResult) -> None:
        payload.scores[role] = result.score
        if role == self._reported:
            payload.score = result.score
        if len(self._scorers) == 1 and not payload.terms:
            payload.terms = result.terms
            return
        terms = self._terms.setdefault(result.sample, {})
        terms[role] = result.terms
        if len(terms) == len(self._scorers):
            # In the order of roles, whichever answered first; an environment has spoken before.
            of_role = {role: terms[role] for role in self._scorers}
            if payload.is_episode:
                of_role = {next(iter(payload.scores)): payload.terms, **of_role}
            payload.terms = merged_terms(of_role)
            del self._terms[result.sample]

    def _failed(self, failure: ScoreFailure | EpisodeFailure, payload: Payload) -> RewardFailed:
        self._failures.spend(failure, payload)
        payload.failure = failure.message
        return RewardFailed(id=self._next(), sample=failure.sample, error=failure.message)

    # -- actions out -------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case Submit():
                self._submit(action)
            case Abort():
                self._engines[action.engine].abort(action.samples)
            case Score():
                self._score(action)
            case Judge():
                self._judge_groups(action)
            case Deliver():
                self._deliver(action)
            case Drop():
                ((sample, payload),) = self.store.take((action.sample,))
                self._terms.pop(sample, None)
                reason = f"{action.reason}: {payload.failure}" if payload.failure else action.reason
                self._dropped.append((sample, payload, reason))
            case NeedPrompts():
                raise SchedulerError(
                    "the scheduler asks for more prompts, but this run offers a fixed batch",
                    found=f"{action.groups} groups short",
                )

    def _submit(self, action: Submit) -> None:
        requests = []
        for dispatch in action.samples:
            payload = self.store[dispatch.sample]
            payload.attempt = dispatch.attempt
            requests.append(
                GenerateRequest(
                    sample=dispatch.sample,
                    attempt=dispatch.attempt,
                    prompt=payload.item.prompt_ids,
                    response=payload.tokens,
                    sampling=self._sampling,
                    seed=self._seed_of(dispatch.sample),
                    shares_prompt=payload.item.group,
                    grammar=self._grammar,
                )
            )
        self._running[action.engine].update(d.sample for d in action.samples)
        self._engines[action.engine].submit(requests)

    def _score(self, action: Score) -> None:
        payloads = [(sample, self.store[sample]) for sample in action.samples]
        broken = [payload for _, payload in payloads if payload.broken is not None]
        if broken:
            payloads = [(sample, payload) for sample, payload in payloads if not payload.broken]
            for payload in broken:
                assert payload.broken is not None
                self._pending.append(self._failed(payload.broken, payload))
        self._decode([payload for _, payload in payloads if not payload.is_episode])
        if self._scorers:
            self._ask_scorers(payloads)
        elif payloads:
            # The scheduler counts a sample as scored when it is told so; nobody reads the 0.
            scores = tuple((sample, payload.score or 0.0) for sample, payload in payloads)
            self._pending.append(SamplesScored(id=self._next(), scores=scores))

    def _decode(self, payloads: Sequence[Payload]) -> None:
        texts = self._tokenizer.decode_many(
            [p.tokens[:-1] if p.finish is FinishReason.STOP else p.tokens for p in payloads]
        )
        for payload, text in zip(payloads, texts, strict=True):
            payload.text = text

    def _ask_scorers(self, payloads: Sequence[tuple[SampleId, Payload]]) -> None:
        requests = [score_request(sample, payload) for sample, payload in payloads]
        for sample, _ in payloads:
            self._answers_due[sample] = len(self._scorers)
        for pool in self._scorers.values():
            pool.submit(requests)

    def _judge_groups(self, action: Judge) -> None:
        if self._judge is None:
            raise SchedulerError("a group is to be judged, but the workflow has no filter")
        groups: list[GroupRows] = [
            (group, [(sample, self.store[sample]) for sample in self._members(group)])
            for group in action.groups
        ]
        verdicts = tuple(zip(action.groups, self._judge(groups), strict=True))
        self._verdicts.update((group, reason) for group, reason in verdicts if reason is not None)
        self._pending.append(GroupsJudged(id=self._next(), verdicts=verdicts))

    def _members(self, group: GroupId) -> list[SampleId]:
        return [sample_id(group, member) for member in range(self._group_size)]

    def _deliver(self, action: Deliver) -> None:
        collected = Collected(dropped=self._dropped)
        self._dropped = []
        for delivered in action.groups:
            collected.groups.append((delivered.group, self.store.take(delivered.samples)))
        for group in action.filtered:
            reason = self._verdicts.pop(group, None)
            if reason is None:
                continue  # the group was dropped; its samples are among those already
            collected.num_filtered_groups += 1
            for sample, payload in self.store.take(self._members(group)):
                collected.filtered.append((sample, payload, reason))
        self._batches[action.batch] = collected


def score_request(sample: SampleId, payload: Payload) -> ScoreRequest:
    """What a scorer is told of a sample whose response is decoded."""
    row = payload.item.row
    return ScoreRequest(
        sample=sample,
        prompt=row.prompt,
        response=payload.text,
        answer=row.answer,
        row=row.fields,
        finish=payload.finish or FinishReason.LENGTH,
        num_tokens=len(payload.tokens) if payload.mask is None else payload.num_drawn,
    )


def merged_terms(terms: Mapping[RoleName, Mapping[str, float]]) -> dict[str, float]:
    """The terms of several scorers; a name that more than one has stands behind its role's.

    >>> merged_terms({"verifier": {"format": 1.0, "accuracy": 0.0}, "judge": {"format": 0.5}})
    {'verifier/format': 1.0, 'accuracy': 0.0, 'judge/format': 0.5}
    """
    names = Counter(name for of_role in terms.values() for name in of_role)
    return {
        name if names[name] == 1 else f"{role}/{name}": value
        for role, of_role in terms.items()
        for name, value in of_role.items()
    }


def _excerpt(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
