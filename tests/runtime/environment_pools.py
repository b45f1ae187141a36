"""Pools of scripted environments, and what tests do with their episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import numpy as np

from flowrl.backend.environment import (
    Action,
    EnvironmentContext,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.environments.pool import Answered, EnvironmentPool
from flowrl.runtime.environments.transcript import EpisodeFailure
from flowrl.specs import FinishReason

DEADLINE_S = 60.0
LIMIT_S = 20.0


class Scripted:
    """An environment whose answers are functions; notes what it is asked."""

    def __init__(
        self,
        step: Callable[[SampleId, Action], Awaitable[object]] | None = None,
        reset: Callable[[EpisodeStart], Awaitable[object]] | None = None,
        close_episode: Callable[[SampleId], Awaitable[None]] | None = None,
    ) -> None:
        self.log: list[str] = []
        self._step = step
        self._reset = reset
        self._close_episode = close_episode

    async def reset(self, episode: EpisodeStart) -> Observation:
        self.log.append(f"reset {episode.sample}")
        if self._reset is None:
            return Observation(content="go")
        return await self._reset(episode)  # type: ignore[return-value]

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        self.log.append(f"step {sample} {action.turn}")
        if self._step is None:
            return Outcome(observation=action.text, reward=0.5)
        return await self._step(sample, action)  # type: ignore[return-value]

    async def close_episode(self, sample: SampleId) -> None:
        self.log.append(f"close {sample}")
        if self._close_episode is not None:
            await self._close_episode(sample)

    async def close(self) -> None:
        self.log.append("close")


@contextmanager
def pool_of(
    *environments: Scripted,
    timeout_s: float = DEADLINE_S,
    grace_s: float = DEADLINE_S,
    room: int = 256,
) -> Iterator[EnvironmentPool]:
    """A pool that opens these environments, one after the other."""
    opened = iter(environments)
    context = EnvironmentContext(role=RoleName("game"), timeout_s=timeout_s)
    pool = EnvironmentPool(lambda _: next(opened), context, concurrency=room, grace_s=grace_s)
    with pool:
        yield pool


def start(sample: str = "0/0/0") -> EpisodeStart:
    return EpisodeStart(sample=SampleId(sample), seed=1, row={}, prompt="", answer="")


def action(text: str = "a", turn: int = 0) -> Action:
    return Action(text=text, tokens=np.array([1]), turn=turn, finish=FinishReason.STOP)


def answers(pool: EnvironmentPool, number: int = 1) -> list[Answered]:
    """The next answers."""
    found: list[Answered] = []
    while len(found) < number:
        assert pool.wait(DEADLINE_S), pool.describe()
        found += pool.poll()
    assert len(found) == number
    return found


def begun(pool: EnvironmentPool, *samples: str) -> None:
    for sample in samples:
        pool.start(start(sample))
    for answered in answers(pool, len(samples)):
        assert isinstance(answered.answer, Observation)


def stepped(pool: EnvironmentPool, sample: str = "0/0/0") -> object:
    pool.submit(SampleId(sample), action())
    return answers(pool)[0].answer


def failure(pool: EnvironmentPool) -> EpisodeFailure:
    """What a step of a new episode fails with."""
    begun(pool, "0/0/0")
    answer = stepped(pool)
    assert isinstance(answer, EpisodeFailure)
    return answer
