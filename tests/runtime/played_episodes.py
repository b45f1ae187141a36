"""Episodes played to their end, for tests: an environment that says what it is told to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flowrl.backend.environment import (
    Action,
    EnvironmentContext,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.backend.protocols import Finished, GenerateBackend
from flowrl.data import Tokenizer
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.environments.transcript import EpisodeFailure, FinishedEpisode
from flowrl.runtime.setup.policies import derive_seed
from tests.runtime.episode_worlds import (
    ALPHABET,
    STOP,
    Limits,
    RuleEngine,
    RuleGame,
    item,
)

__all__ = [
    "DEADLINE_S",
    "Saying",
    "Step",
    "done_with",
    "end_game",
    "ends",
    "episodes",
    "failure_of",
    "never_done",
    "only",
    "tokens_of",
]

DEADLINE_S = 60.0

Step = Callable[[SampleId, Action], Awaitable[Outcome]]


class Saying(RuleGame):
    """Opens with `content` and answers with `step`."""

    def __init__(self, step: Step | None = None, content: object = "") -> None:
        super().__init__()
        self._step = step
        self._content = content

    async def reset(self, episode: EpisodeStart) -> Observation:
        await super().reset(episode)
        return Observation(content=self._content)  # type: ignore[arg-type]

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        self.actions.append((sample, action))
        return Outcome(done=True) if self._step is None else await self._step(sample, action)


@contextmanager
def episodes(
    engine: RuleEngine,
    game: RuleGame,
    tokenizer: Tokenizer,
    *,
    others: Sequence[GenerateBackend] = (),
    limits: Limits | None = None,
    timeout_s: float = DEADLINE_S,
    grace_s: float = DEADLINE_S,
    again: Sequence[RuleGame] = (),
    **changes: Any,
) -> Iterator[EpisodeEngine]:
    bounds = limits or Limits()
    games = iter([game, *again])
    context = EnvironmentContext(role=RoleName("game"), timeout_s=timeout_s)
    with EnvironmentPool(lambda _: next(games), context, grace_s=grace_s) as pool:
        made = EpisodeEngine(
            engines=[engine, *others],
            environments=pool,
            tokenizer=tokenizer,
            item_of=lambda sample: item(int(sample.split("/")[1])),
            seed_of=lambda group: derive_seed(7, group),
            max_turns=bounds.max_turns,
            max_length=bounds.max_length,
            max_observation_tokens=bounds.max_observation_tokens,
            **changes,
        )
        yield made
        made.close()


def ends(engine: EpisodeEngine, number: int = 1) -> dict[SampleId, Finished]:
    """Polls until so many episodes have ended; each ends once."""
    found: dict[SampleId, Finished] = {}
    for _ in range(100_000):
        for output in engine.poll(1.0):
            if isinstance(output, Finished):
                assert output.sample not in found, "an episode ended twice"
                found[output.sample] = output
        if len(found) == number:
            return found
    raise AssertionError(engine.describe())


def only(engine: EpisodeEngine) -> FinishedEpisode:
    ((_, end),) = ends(engine).items()
    assert isinstance(end, FinishedEpisode)
    return end


def failure_of(engine: EpisodeEngine) -> EpisodeFailure:
    failure = only(engine).failure
    assert failure is not None
    return failure


def tokens_of(text: str) -> list[int]:
    return [STOP if character == "." else ALPHABET.index(character) for character in text]


def end_game(engine: EpisodeEngine) -> list[tuple[SampleId, Action]]:
    game = engine._environments._loop._environment
    assert isinstance(game, RuleGame)
    return game.actions


def done_with(said: object) -> Step:
    async def step(sample: SampleId, action: Action) -> Outcome:
        return Outcome(observation=said, done=True)  # type: ignore[arg-type]

    return step


def never_done(said: object = "<") -> Step:
    async def step(sample: SampleId, action: Action) -> Outcome:
        return Outcome(observation=said, reward=0.25)  # type: ignore[arg-type]

    return step
