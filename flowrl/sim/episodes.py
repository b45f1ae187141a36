"""Episodes on a virtual clock: what a scheduler takes for one sample is several turns.

    submit -> reset -> [a turn, drawn by the engine -> step of the environment]* -> ended
                 |                    |
                 +---------> abort, engine lost: the episode begins anew

As in a run (`flowrl.runtime.environments.episodes`) an episode has a row of the engine only while
it draws, each turn is a request that goes on from all tokens so far, and an aborted episode keeps
nothing. The environment is one thread: a call takes it for `call_s` seconds, and its answer comes
`wait_s` later, while others are served. The engine waits for all answers up to `patience_s` before
it goes on.

Several policies take turns in their order, each on an engine of its own.

The length of an episode is that of what is drawn in it, as logs tell it. How it is cut into turns
follows from that: every turn is as long as it may be, and so is every observation. An engine that
keeps the keys and values of what it has seen computes only what is new of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from flowrl.ids import EngineId, SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.engine import SimEngine
from flowrl.sim.lanes import Lane, LaneGroup
from flowrl.sim.rows import Ended, Request, Spans, join_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTimes:
    """What a call of an environment costs, a reset or a step.

    Attributes:
        call_s: Seconds of its thread, in which it does nothing else.
        wait_s: Seconds that it waits beside, for a network or another process.
    """

    call_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShape:
    """How tokens of an episode are shared out.

    Attributes:
        turn: Tokens of a turn at most.
        observation: Tokens of what the environment answers at most.
        max_turns: Of an episode.
        stretches: `turn` is a mean: of an episode with more tokens in all its turns each is longer.
    """

    turn: int
    observation: int
    max_turns: int
    stretches: bool = False

    def turns(self, drawn: int) -> tuple[int, ...]:
        """Tokens of each turn of an episode in which so many are drawn.

        >>> EpisodeShape(turn=4, observation=2, max_turns=8).turns(9)
        (4, 4, 1)
        """
        if self.stretches and drawn > self.turn * self.max_turns:
            each, more = divmod(drawn, self.max_turns)
            return (each + 1,) * more + (each,) * (self.max_turns - more)
        whole, rest = divmod(max(1, drawn), self.turn)
        return ((self.turn,) * whole + ((rest,) if rest else ()))[: self.max_turns]

    def said(self, drawn: int) -> int:
        """Tokens of the observations between those turns; behind the last one none is kept."""
        return self.observation * (len(self.turns(drawn)) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimEnvironment:
    """What a rollout's episodes are played with.

    Attributes:
        lane: Its thread, or the devices that it computes on.
    """

    lane: Lane | LaneGroup
    times: EnvironmentTimes
    shape: EpisodeShape

    def beside(self, engine: SimEngine) -> SimEnvironment:
        """As an engine's episodes have it: on its own devices, where it is on those of all engines.

        A part of its devices serves a call as much more slowly, so that less of it is waited for.
        """
        if self.lane.names.isdisjoint(engine.lane.names) or self.lane is engine.lane:
            return self
        call_s = self.times.call_s * len(self.lane.names) / len(engine.lane.names)
        wait_s = max(0.0, self.times.wait_s + self.times.call_s - call_s)
        times = EnvironmentTimes(call_s=call_s, wait_s=wait_s)
        return replace(self, lane=engine.lane, times=times)


@dataclass(slots=True, eq=False, kw_only=True)
class _Episode:
    request: Request  # as the scheduler's driver made it
    turns: tuple[int, ...]  # tokens of each
    turn: int = 0  # the one that is drawn, or comes next
    drawn: int = 0
    context: int = 0
    spans: Spans = ()
    is_drawing: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class SimEpisodes:
    """An engine whose requests are episodes; see the module.

    Attributes:
        engine: The one that a rollout knows it by.
        turns: The engines of the policies that take turns, in order; their reports go to
            `turns_ended`.
        report: Called with episodes that are over.
        patience_s: Seconds that the engine waits for answers before it draws on without them.
    """

    engine: SimEngine
    turns: Sequence[SimEngine]
    clock: Clock
    environment: SimEnvironment
    report: Callable[[SimEngine, Sequence[Ended]], None]
    patience_s: float = 0.25
    _live: dict[SampleId, _Episode] = field(default_factory=dict)

    @property
    def id(self) -> EngineId:
        """The engine's."""
        return self.engine.id

    # What a rollout asks for

    def submit(self, requests: Iterable[Request]) -> None:
        """Begins episodes."""
        begun = []
        for request in requests:
            episode = _Episode(
                request=request,
                turns=self.environment.shape.turns(request.left),
                context=request.context,
            )
            self._live[request.sample] = episode
            begun.append(episode)
        self._ask(begun)

    def abort(self, samples: Iterable[SampleId], rollout: str = "") -> None:
        """Ends episodes of a rollout without tokens; unknown ones are ignored."""
        drawing, others = dict[EngineId, list[SampleId]](), []
        for sample in samples:
            episode = self._live.get(sample)
            if episode is not None and episode.is_drawing:
                drawing.setdefault(self._engine_of(episode).id, []).append(sample)
            elif episode is not None:
                others.append(episode)
        for episode in others:
            del self._live[episode.request.sample]
        if others:
            self.clock.at(self.clock.now, self._aborted, others)
        for engine in self._engines:
            engine.abort(drawing.get(engine.id, ()), rollout)

    def _engine_of(self, episode: _Episode) -> SimEngine:
        """The engine of the policy whose turn it is."""
        return self.turns[episode.turn % len(self.turns)]

    @property
    def _engines(self) -> Iterable[SimEngine]:
        return {engine.id: engine for engine in self.turns}.values()

    def _aborted(self, episodes: Sequence[_Episode]) -> None:
        self.report(self.engine, [_nothing(episode) for episode in episodes])

    def publish(self, version: int, load_s: float = 0.0) -> None:
        """Its own turns are drawn with other weights from now on."""
        self.engine.publish(version, load_s)

    def pause(self) -> None:
        """Draws nothing; environments go on."""
        for engine in self._engines:
            engine.pause()

    def go_on(self) -> None:
        """Draws again."""
        for engine in self._engines:
            engine.go_on()

    def hush(self) -> None:
        """Draws and says nothing until `go_on`."""
        for engine in self._engines:
            engine.hush()

    def lose(self) -> None:
        """It is gone with all episodes."""
        rollouts = {episode.request.rollout for episode in self._live.values()}
        for engine in self._engines:
            for rollout in rollouts if engine is not self.engine else ():
                engine.abort([*self._live], rollout)
        self._live.clear()
        self.engine.lose()

    def progress(self, rollout: str = "") -> list[tuple[SampleId, int, int]]:
        """`(sample, attempt, tokens drawn)` of every episode; they are of one rollout."""
        drawing = [each for engine in self._engines for each in engine.progress(rollout)]
        now = {sample: drawn for sample, _, drawn in drawing}
        return [
            (sample, episode.request.attempt, episode.drawn + now.get(sample, 0))
            for sample, episode in self._live.items()
        ]

    # Turn by turn

    def _ask(self, episodes: Sequence[_Episode]) -> None:
        """Calls the environment for each; answers that come soon are taken together."""
        lane, times, now = self.environment.lane, self.environment.times, self.clock.now
        if times.call_s and lane is self.engine.lane and self.engine.poll is None:
            self.engine.give_way()
        answers = []
        for episode in episodes:
            end = lane.work("environment", now, times.call_s)[1] if times.call_s else now
            answers.append((end + times.wait_s, episode))
        soon = now + self.patience_s
        last = max((at_s for at_s, _ in answers if at_s <= soon), default=now)
        together = [episode for at_s, episode in answers if at_s <= soon]
        if together:
            self.clock.at(last, self._answered, together)
        for at_s, episode in answers:
            if at_s > soon:
                self.clock.at(at_s, self._answered, [episode])

    def _answered(self, episodes: Sequence[_Episode]) -> None:
        """The environment has said something: the next turn is drawn, or the episode is over."""
        turns, over = dict[EngineId, list[Request]](), []
        for episode in episodes:
            request = episode.request
            if self._live.get(request.sample) is not episode:
                continue  # aborted or lost meanwhile
            if episode.turn == len(episode.turns):
                del self._live[request.sample]
                over.append(
                    Ended(request=request, aborted=False, drawn=episode.drawn, spans=episode.spans)
                )
                continue
            episode.is_drawing = True
            engine = self._engine_of(episode)
            turns.setdefault(engine.id, []).append(
                Request(
                    sample=request.sample,
                    attempt=request.attempt,
                    prompt=request.prompt,
                    context=episode.context,
                    left=episode.turns[episode.turn],
                    fresh=episode.turn == 0,
                    shared=request.shared,
                    cached=self._cached(episode, engine),
                    rollout=request.rollout,
                )
            )
        if over:
            self.report(self.engine, over)
        for engine in self._engines:
            if engine.id in turns:
                engine.submit(turns[engine.id])

    def _cached(self, episode: _Episode, engine: SimEngine) -> int:
        """Tokens of a turn's context whose keys and values the engine has kept.

        They are those of the policy's own last turn; the turns of others come between.
        """
        since = len(self.turns) - 1
        if episode.turn <= since or not engine.keeps_prefixes:
            return 0
        said = (since + 1) * self.environment.shape.observation
        return episode.context - said - sum(episode.turns[episode.turn - since : episode.turn])

    def turns_ended(self, ends: Sequence[Ended]) -> None:
        """The engine has drawn turns, or ended some that were aborted."""
        drawn, aborted = [], []
        for end in ends:
            episode = self._live.get(end.request.sample)
            if episode is None or episode.request.attempt != end.request.attempt:
                continue
            episode.is_drawing = False
            if end.aborted:
                del self._live[end.request.sample]
                aborted.append(_nothing(episode))
                continue
            episode.drawn += end.drawn
            episode.context += end.drawn + self.environment.shape.observation
            # Each policy counts versions of its own, and the samples are those of one.
            own = self._engine_of(episode) is self.engine
            spans = end.spans if own else ((self.engine.version, end.drawn),)
            episode.spans = join_spans(episode.spans, spans)
            episode.turn += 1
            drawn.append(episode)
        if aborted:
            self.report(self.engine, aborted)
        if drawn:
            self._ask(drawn)


def _nothing(episode: _Episode) -> Ended:
    return Ended(request=episode.request, aborted=True, drawn=0, spans=())
