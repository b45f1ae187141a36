"""One rollout of a simulated stage: the real scheduler, with simulated engines and scorers.

The scheduler is that of executors, `flowrl.rollout.scheduler`. This module tells it what
happened and does what it asks, on a virtual clock:

    offer -> [Submit] -> engines -> SamplesFinished -> [Score] -> scorers -> SamplesScored ->
    [Judge] -> GroupsJudged -> [Deliver] -> taken by the trainer

What a driver does with a sample that is offered, that ended or that is scored costs time too where
it was measured (`host`): it is taken from the driver's lane, and the scheduler learns of the sample
after it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId, group_id
from flowrl.observe.rows import DRIVER_WORK
from flowrl.rollout.actions import (
    Abort,
    Action,
    ContinueEngine,
    Deliver,
    Drop,
    Judge,
    NeedPrompts,
    PauseEngine,
    ReleaseEngine,
    Score,
    Submit,
    UpdateEngine,
    Wake,
)
from flowrl.rollout.events import (
    BatchAsked,
    DeadlineReached,
    EngineJoined,
    EngineLost,
    EngineUpdated,
    Event,
    GroupsJudged,
    HeartbeatLost,
    HeartbeatSeen,
    ParentsDropped,
    Progressed,
    PromptsOffered,
    RewardFailed,
    SampleEnd,
    SampleFailed,
    SamplesFinished,
    SamplesScored,
    StopAsked,
    WeightsPublished,
)
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.batch import Batch
from flowrl.sim.clock import Clock
from flowrl.sim.costs import HostCost
from flowrl.sim.driver import SimDriver
from flowrl.sim.engine import SimEngine
from flowrl.sim.episodes import SimEnvironment, SimEpisodes
from flowrl.sim.live_groups import GroupListener, LiveGroups
from flowrl.sim.model import ChildPrompt
from flowrl.sim.rows import Ended, Request
from flowrl.sim.scorers import SimScorers
from flowrl.sim.workload import Workload
from flowrl.specs import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFaults:
    """Which attempts and which rewards fail."""

    attempt_fails: Callable[[SampleId, int], bool]
    reward_fails: Callable[[SampleId, int], bool]


@dataclass(slots=True, eq=False, kw_only=True)
class SimRollout:
    """See the module.

    Attributes:
        name: The node that draws.
        settings: Of the scheduler.
        workload: What is offered, in the order of its numbers.
        driver: What drives it.
        host: What samples cost the driver.
        capacity: Samples that an engine is given at once.
        load_s: Seconds in which an engine loads weights.
        environment: What episodes are played with; None where samples are responses.
        turns_of: The engines of the policies that take turns in an engine's episodes, in order.
        tells_lengths: Groups are offered with the mean length that their samples will have.
        listener: Is told of groups; None where nobody begins on them before the batch.
        batches: Delivered ones that nobody has taken yet, by number.
        dropped: Samples that ended unused, by reason.
        live: Groups that no batch has yet, and their samples.
    """

    name: str
    clock: Clock
    settings: SchedulerSettings
    workload: Workload
    driver: SimDriver
    host: HostCost = field(default_factory=HostCost)
    faults: RolloutFaults | None = None
    capacity: Callable[[SimEngine], int] = field(default=lambda engine: engine.num_slots)
    load_s: Callable[[EngineId], float] = field(default=lambda engine: 0.0)
    environment: SimEnvironment | None = None
    turns_of: Callable[[SimEngine], Sequence[SimEngine]] = field(default=lambda engine: [engine])
    tells_lengths: bool = False
    listener: GroupListener | None = None
    scheduler: RolloutScheduler = field(init=False)
    batches: dict[int, Batch] = field(default_factory=dict)
    engines: dict[EngineId, SimEngine | SimEpisodes] = field(default_factory=dict)
    scorers: list[SimScorers] = field(default_factory=list)
    num_offered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    live: LiveGroups = field(init=False)
    num_events: int = 0
    num_offering: int = 0  # groups that the driver is about to offer
    num_unasked: int = 0  # groups of children that no batch was asked for yet
    expected: dict[int, list[GroupId]] = field(default_factory=dict)  # of batches that name theirs
    children: list[tuple[SimRollout, ChildPrompt]] = field(default_factory=list)
    of_kept: list[tuple[SimRollout, ChildPrompt]] = field(default_factory=list)  # when delivered
    _lost: set[GroupId] = field(default_factory=set)  # whose parents were dropped
    _admitted: set[SampleId] = field(default_factory=set)  # whose children were offered
    _last_end: tuple[float, float] = (0.0, 0.0)  # when samples last ended, and its seconds by then
    _pending: deque[Event] = field(default_factory=deque)
    _fronts: dict[EngineId, SimEngine | SimEpisodes] = field(default_factory=dict)  # ever joined
    _in_hand: list[tuple[SimEngine, Sequence[Ended]]] = field(default_factory=list)  # the driver's
    _event: int = -1
    _settling: bool = False

    def __post_init__(self) -> None:
        self.scheduler = RolloutScheduler(self.settings)
        self.live = LiveGroups(rollout=self.name, listener=self.listener)
        if self.settings.patience.stall_s:
            self._tell_progress()

    def _tell_progress(self) -> None:
        """Says how far samples are, often enough for the scheduler's patience."""
        for engine in list(self.engines.values()):
            lives = self.live.lives
            told = tuple(
                (sample, attempt, lives[sample].tokens + drawn)
                for sample, attempt, drawn in engine.progress(self.name)
                if sample in lives and lives[sample].attempt == attempt
            )
            if told:
                event = Progressed(
                    id=self._next(), at_s=self.clock.now, engine=engine.id, progress=told
                )
                self._emit(event)
        if self.scheduler.stopped is None:
            next_s = self.clock.now + self.settings.patience.stall_s / 4
            self.clock.at(next_s, self._tell_progress)

    # What the trainer does

    def offer(self, num_groups: int, source: str = "") -> None:
        """Offers the next groups of the workload, as soon as the driver has time."""
        samples = num_groups * self.settings.num_members
        self.num_offering += num_groups
        self.driver.work(
            "dispatch", self.host.offer_s * samples, lambda: self._offer(num_groups, source)
        )

    def _offer(self, num_groups: int, source: str) -> None:
        groups, expected = [], []
        size = self.settings.num_members
        self.num_offering -= num_groups
        for number in range(self.num_offered, self.num_offered + num_groups):
            group = group_id(0, number)
            draw = self.workload.group(number, size)
            self.live.offer(group, draw)
            groups.append(group)
            expected.append(sum(draw.lengths) / size)
        self.num_offered += num_groups
        self._emit(
            PromptsOffered(
                id=self._next(),
                at_s=self.clock.now,
                groups=tuple(groups),
                source=source,
                expected_tokens=tuple(expected) if self.tells_lengths else (),
            )
        )

    def offer_rows(self, batch: int, num_groups: int) -> None:
        """Offers the groups of a batch that names them."""
        first = self.num_offered + self.num_offering
        self.expected[batch] = [group_id(0, first + place) for place in range(num_groups)]
        self.offer(num_groups)

    def _admit_children(self, samples: Sequence[SampleId]) -> None:
        """Has the prompts that are made of samples offered to other rollouts; once."""
        fresh = [sample for sample in samples if sample not in self._admitted]
        self._admitted.update(fresh)
        self._offer_to(self.children, fresh)

    def _offer_to(
        self, children: Sequence[tuple[SimRollout, ChildPrompt]], samples: Sequence[SampleId]
    ) -> None:
        lives = [(sample, self.live.lives[sample]) for sample in samples]
        for child, prompt in children:
            made = [
                (GroupId(sample), prompt.tokens(life.draw.prompt_tokens, life.length))
                for sample, life in lives
            ]
            child.offer_children(made)

    def offer_children(self, prompts: Sequence[tuple[GroupId, int]]) -> None:
        """Offers prompts that are made of samples, with their tokens, when the driver has time."""
        samples = len(prompts) * self.settings.num_members
        self.num_offering += len(prompts)
        self.driver.work("dispatch", self.host.offer_s * samples, lambda: self._offer_made(prompts))

    def _offer_made(self, made: Sequence[tuple[GroupId, int]]) -> None:
        self.num_offering -= len(made)
        prompts = [row for row in made if row[0] not in self._lost]
        self.num_unasked += len(prompts)
        for group, tokens in prompts:
            draw = self.workload.group(self.num_offered, self.settings.num_members)
            self.live.offer(group, replace(draw, prompt_tokens=tokens))
            self.num_offered += 1
        groups = tuple(group for group, _ in prompts)
        self._emit(PromptsOffered(id=self._next(), at_s=self.clock.now, groups=groups))

    def lose_parent(self, group: GroupId) -> None:
        """Drops the children of a sample that was dropped, also where they are still to come."""
        self._lost.add(group)
        if group in self.scheduler.state.offered:
            self._emit(ParentsDropped(id=self._next(), at_s=self.clock.now, groups=(group,)))

    def ask(self, batch: int, num_groups: int, names: Sequence[GroupId] = ()) -> None:
        """Asks for a batch; it is in `batches` once it is delivered.

        Args:
            names: Its groups, where batches name them.
        """
        event = BatchAsked(
            id=self._next(), at_s=self.clock.now, batch=batch, groups=num_groups, names=tuple(names)
        )
        self._emit(event)

    def ask_expected(self, batch: int) -> None:
        """Asks for a batch by its groups: its rows, or children of what its parents delivered."""
        names = self.expected.pop(batch)
        offered = self.scheduler.state.offered
        self.clock.run_until(lambda: all(name in offered for name in names))
        if names:
            self.ask(batch, len(names), names)
        else:
            self.batches[batch] = Batch(delivered=(), filtered=(), ages={})

    def publish(self, version: int) -> None:
        """The engines serve weights `version`."""
        self._emit(WeightsPublished(id=self._next(), at_s=self.clock.now, version=version))

    def stop(self) -> None:
        """Ends every live sample."""
        self._emit(StopAsked(id=self._next(), at_s=self.clock.now, reason="the simulation ends"))

    # What happens to engines

    def join(self, engine: SimEngine) -> None:
        """An engine takes samples from now on."""
        front = self._fronts.get(engine.id)
        if front is None:
            front = self._fronts[engine.id] = self._front(engine)
        self.engines[engine.id] = front
        capacity = self.capacity(engine)
        self._emit(
            EngineJoined(id=self._next(), at_s=self.clock.now, engine=engine.id, capacity=capacity)
        )

    def _front(self, engine: SimEngine) -> SimEngine | SimEpisodes:
        """What samples are given to."""
        if self.environment is None:
            return engine
        return SimEpisodes(
            engine=engine,
            turns=self.turns_of(engine),
            clock=self.clock,
            environment=self.environment.beside(engine),
            report=self._over,
        )

    def silence(self, engine: SimEngine) -> None:
        """An engine says nothing, and does nothing."""
        engine.hush()
        self._emit(HeartbeatLost(id=self._next(), at_s=self.clock.now, engine=engine.id))

    def speak(self, engine: SimEngine) -> None:
        """A silent engine is there again; it joins anew where it was given up meanwhile."""
        if engine.id in self.engines:
            engine.go_on()
            self._emit(HeartbeatSeen(id=self._next(), at_s=self.clock.now, engine=engine.id))
        else:
            engine.publish(self.scheduler.version)
            self.join(engine)

    def lose(self, engine: SimEngine, reason: str) -> None:
        """An engine is gone."""
        for hand in [hand for hand in self._in_hand if hand[0] is engine]:
            self._put_down(hand)
        self.engines.pop(engine.id).lose()
        self._emit(
            EngineLost(id=self._next(), at_s=self.clock.now, engine=engine.id, reason=reason)
        )

    def ended(self, engine: SimEngine, ends: Sequence[Ended]) -> None:
        """What an engine was asked for is over: samples, or turns of episodes."""
        if self.environment is None:
            self._over(engine, ends)
            return
        for front in self._fronts.values():
            if isinstance(front, SimEpisodes) and engine in front.turns:
                front.turns_ended(ends)

    def _over(self, engine: SimEngine, ends: Sequence[Ended]) -> None:
        """Attempts are over: the driver takes its time, and then the scheduler learns of them."""
        self._last_end = (self.clock.now, self._driven_s)
        if not self.host.sample_s:
            self._tell_ends(engine, ends)
            return
        hand = (engine, ends)
        self._in_hand.append(hand)
        self.driver.work("collect", self.host.sample_s * len(ends), lambda: self._put_down(hand))

    @property
    def _driven_s(self) -> float:
        """Seconds of the driver so far that samples cost it; those that are booked ahead too."""
        return sum(self.driver.lane.spent(what) for what in DRIVER_WORK)

    @property
    def idle_s(self) -> float:
        """Seconds since samples last ended in which the driver had nothing to do but to wait."""
        ended_s, driven_s = self._last_end
        return max(0.0, self.clock.now - ended_s - (self._driven_s - driven_s))

    def _put_down(self, hand: tuple[SimEngine, Sequence[Ended]]) -> None:
        if hand in self._in_hand:  # a loss may have come first
            self._in_hand.remove(hand)
            self._tell_ends(*hand)

    def _tell_ends(self, engine: SimEngine, ends: Sequence[Ended]) -> None:
        told = []
        for end in ends:
            request = end.request
            life = self.live.lives.get(request.sample)
            if life is None or life.attempt != request.attempt:
                continue  # dropped meanwhile
            if (
                not end.aborted
                and self.faults is not None
                and self.faults.attempt_fails(request.sample, request.attempt)
            ):
                self._emit(
                    SampleFailed(
                        id=self._next(),
                        at_s=self.clock.now,
                        engine=engine.id,
                        sample=request.sample,
                        attempt=request.attempt,
                        error="simulated",
                    )
                )
                continue
            life.tokens += end.drawn
            if end.spans:
                oldest = min(end.spans)[0]
                first = life.first_version
                life.first_version = oldest if first is None else min(first, oldest)
            told.append(
                SampleEnd(
                    sample=request.sample,
                    attempt=request.attempt,
                    reason=FinishReason.ABORT if end.aborted else FinishReason.STOP,
                    num_tokens=life.tokens,
                    versions=end.spans,
                )
            )
        if told:
            self._emit(
                SamplesFinished(
                    id=self._next(), at_s=self.clock.now, engine=engine.id, ends=tuple(told)
                )
            )

    def scored(self, samples: Sequence[SampleId]) -> None:
        """A scorer's answers."""
        scores: list[tuple[SampleId, float]] = []
        failed: list[SampleId] = []
        for sample in samples:
            life = self.live.lives.get(sample)
            if life is None:
                continue  # dropped meanwhile
            life.due -= 1
            if life.due > 0:
                continue
            life.num_scored += 1
            if self.faults is not None and self.faults.reward_fails(sample, life.num_scored):
                failed.append(sample)
            else:
                scores.append((sample, 0.0))
        for sample in failed:
            if sample in self.live.lives:  # or it was dropped with one that failed before it
                self._emit(
                    RewardFailed(
                        id=self._next(), at_s=self.clock.now, sample=sample, error="simulated"
                    )
                )
        if scores:
            self._emit(SamplesScored(id=self._next(), at_s=self.clock.now, scores=tuple(scores)))

    # The scheduler

    def _next(self) -> int:
        self._event += 1
        return self._event

    def _emit(self, event: Event) -> None:
        """Steps the scheduler with `event`, then with those that its actions cause, in order."""
        self._pending.append(event)
        if self._settling:
            return
        self._settling = True
        pending, step = self._pending, self.scheduler.step
        while pending:
            self.num_events += 1
            event = pending.popleft()
            actions = step(event)
            if self.listener is not None:
                self.live.tell_complete(event, self.scheduler.state.groups)
            for action in actions:
                self._perform(action)
        self._settling = False

    def _perform(self, action: Action) -> None:
        match action:
            case Submit():
                self._submit(action)
            case Abort():
                self.engines[action.engine].abort(action.samples, self.name)
            case Score():
                self._score(action.samples)
            case Judge():
                self._judge(action.groups)
            case Deliver():
                self._deliver(action)
            case Drop():
                self._drop(action)
            case NeedPrompts():
                self.offer(action.groups, action.source)
            case PauseEngine():
                self.engines[action.engine].pause()
            case ContinueEngine():
                self.engines[action.engine].go_on()
            case UpdateEngine():
                self._update(action)
            case ReleaseEngine():
                # Given up for its silence: whatever it still does, nobody listens.
                self.engines.pop(action.engine).lose()
                self._in_hand = [hand for hand in self._in_hand if hand[0].id != action.engine]
            case Wake():
                self.clock.at(action.at_s, self._reach, action.at_s)
            case _:
                assert_never(action)

    def _update(self, action: UpdateEngine) -> None:
        """An engine that was emptied loads the weights, and says so."""
        engine = self.engines[action.engine]
        load_s = self.load_s(action.engine)
        engine.publish(action.version, load_s)
        self.clock.at(self.clock.now + load_s, self._updated, action)

    def _updated(self, action: UpdateEngine) -> None:
        if action.engine in self.engines:
            event = EngineUpdated(
                id=self._next(),
                at_s=self.clock.now,
                engine=action.engine,
                version=action.version,
            )
            self._emit(event)

    def _reach(self, at_s: float) -> None:
        self._emit(DeadlineReached(id=self._next(), at_s=at_s))

    def _submit(self, action: Submit) -> None:
        requests = []
        for dispatch in action.samples:
            life = self.live.lives[dispatch.sample]
            life.attempt = dispatch.attempt
            kept = dispatch.kept_tokens
            if kept != life.tokens:
                raise SchedulerError(
                    "the scheduler goes on from other tokens than the sample has",
                    where=f"sample {dispatch.sample}",
                    found=f"{kept} kept tokens",
                    expected=f"{life.tokens}",
                    hint="this is a fault of the scheduler: report it",
                )
            requests.append(
                Request(
                    sample=dispatch.sample,
                    attempt=dispatch.attempt,
                    prompt=GroupId(f"{self.name}:{life.group}"),
                    context=life.draw.prompt_tokens + kept,
                    left=max(1, life.length - kept),
                    fresh=kept == 0,
                    shared=life.draw.prompt_tokens,
                    rollout=self.name,
                )
            )
        self.engines[action.engine].submit(requests)

    def _score(self, samples: Sequence[SampleId]) -> None:
        if self.children:
            self._admit_children(samples)
        if not self.scorers:
            self._scored_at_once(samples)
            return
        for sample in samples:
            self.live.lives[sample].due = len(self.scorers)
        for scorers in self.scorers:
            scorers.submit(samples)

    def _scored_at_once(self, samples: Iterable[SampleId]) -> None:
        scores = tuple((sample, 0.0) for sample in samples)
        self._pending.append(SamplesScored(id=self._next(), at_s=self.clock.now, scores=scores))

    def _judge(self, groups: Sequence[GroupId]) -> None:
        verdicts = [(group, self.live.judge(group)) for group in groups]
        self._pending.append(
            GroupsJudged(id=self._next(), at_s=self.clock.now, verdicts=tuple(verdicts))
        )

    def _deliver(self, action: Deliver) -> None:
        kept = [sample for group in action.groups for sample in group.samples]
        self._offer_to(self.of_kept, kept)
        batch = self.batches[action.batch] = self.live.deliver(action)
        ended = [(self.children, batch.of_samples), (self.of_kept, kept)]
        for children, samples in ended:
            for child, _ in children:
                if child.settings.named:
                    ages = {GroupId(sample): batch.of_samples[sample] for sample in samples}
                    child.live.of_parents.update(ages)
                    child.expected[action.batch] = list(ages)

    def _drop(self, action: Drop) -> None:
        self.dropped[action.reason] += 1
        self.live.lives.pop(action.sample, None)
        if action.sample in self._admitted:
            for child, _ in self.children:
                if child.settings.named:
                    child.lose_parent(GroupId(action.sample))
