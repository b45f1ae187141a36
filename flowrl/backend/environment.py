"""The plug-in protocol of environments: what a policy talks with, turn by turn.

    reset -> observation -> [the policy's turn -> step -> outcome]* -> close_episode

One `Environment` serves many episodes at once; an episode goes by its sample's id. Its methods are
coroutines on one event loop in a thread of its own, so they may wait for a network or for another
process, and must not block: what blocks goes into a thread. Calls for one episode come one after
the other, calls for different episodes in any order and at the same time.

A call has a time limit (`EnvironmentContext.timeout_s`). One that takes longer, raises, or returns
something unusable ends its episode as failed, with the sample, the turn and the user's own lines;
the run goes on where `rewards.max_failures` allows. Such a call is cancelled.

What an episode does may depend on its start and on the policy's actions, never on other episodes or
on the clock: that makes a run repeatable.

A game of one number, played without a policy:

>>> import asyncio
>>> import numpy as np
>>> class Guess:
...     def __init__(self) -> None:
...         self.hidden: dict[SampleId, int] = {}
...
...     async def reset(self, episode: EpisodeStart) -> Observation:
...         self.hidden[episode.sample] = int(str(episode.row["number"]))
...         return Observation()  # the prompt has said it all
...
...     async def step(self, sample: SampleId, action: Action) -> Outcome:
...         hidden = self.hidden[sample]
...         if not action.text.isdecimal():
...             return Outcome(observation="?")
...         guess = int(action.text)
...         if guess == hidden:
...             return Outcome(observation="=", reward=1.0, done=True)
...         return Outcome(observation="<" if hidden < guess else ">")
...
...     async def close_episode(self, sample: SampleId) -> None:
...         self.hidden.pop(sample, None)
...
...     async def close(self) -> None: ...
>>> async def play(game: Environment, *turns: str) -> list[Outcome]:
...     start = EpisodeStart(
...         sample=SampleId("0/0/0"), seed=1, row={"number": 7}, prompt="guess", answer=""
...     )
...     await game.reset(start)
...     outcomes = []
...     for number, text in enumerate(turns):
...         action = Action(
...             text=text, tokens=np.array([1]), turn=number, finish=FinishReason.STOP
...         )
...         outcomes.append(await game.step(start.sample, action))
...     await game.close_episode(start.sample)
...     return outcomes
>>> [(o.observation, o.reward) for o in asyncio.run(play(Guess(), "9", "4", "7"))]
[('<', 0.0), ('>', 0.0), ('=', 1.0)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from flowrl.backend.batch import Ints
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason

__all__ = [
    "Action",
    "Environment",
    "EnvironmentContext",
    "EnvironmentState",
    "EpisodeStart",
    "Observation",
    "Outcome",
    "Said",
]

Said: TypeAlias = str | Ints
"""An observation: text, which is tokenised once without special tokens, or token ids."""

EnvironmentState: TypeAlias = str | int | None
"""A name for the state that an environment is in: equal names say that all that matters for what
follows is equal. None says nothing, so that the state counts as equal to no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentContext:
    """The inputs from which an environment is opened.

    Attributes:
        role: The role that it serves; for messages.
        environment: As `roles.<role>.environment` says; the plug-in knows what it means.
        options: Of `roles.<role>.options`, as JSON values.
        seed: Of everything random in it that is not of one episode.
        timeout_s: Seconds that one `reset` or `step` may take.
    """

    role: RoleName
    environment: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """One episode to begin.

    Attributes:
        sample: Names the episode in all further calls. An episode that was aborted starts again
            under the same name, after `close_episode`.
        seed: Of everything random in the episode. Equal for all samples of a group, so that they
            face the same task; an environment that shall differ among them adds `sample`.
        row: Every field of the data row.
        prompt: Text of the prompt, which the policy reads first.
        answer: The reference answer of the data row.
    """

    sample: SampleId
    seed: int
    row: Mapping[str, object]
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The start of an episode.

    Attributes:
        content: What the policy reads after the prompt, before its first turn; may be empty.
        state: Before the first turn.
    """

    content: Said = ""
    state: EnvironmentState = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the policy.

    Attributes:
        text: Its tokens decoded, without the stop token and other special tokens.
        tokens: int64 `[n]`, as they were sampled, the stop token included.
        turn: Counted from 0.
        finish: `stop`, or `length` where the turn met its limit of tokens.
    """

    text: str
    tokens: Ints
    turn: int
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a turn.

    Attributes:
        observation: What the policy reads before its next turn. Of the last turn nobody reads it;
            it is kept as text, for people. After a turn that ended with a stop token it must not be
            empty: nothing else would show the policy that the episode continues.
        reward: Of this turn; the score of an episode is the sum over its turns. Where several
            policies take turns, also one number for each of them, in their order, which count for
            the last turn that each has taken.
        done: The episode is over.
        state: After the turn.
        metrics: Further numbers of this turn by name; summed over the turns of an episode.
    """

    observation: Said = ""
    reward: float | tuple[float, ...] = 0.0
    done: bool = False
    state: EnvironmentState = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """Many episodes at once; the module says how it is called, and shows one."""

    async def reset(self, episode: EpisodeStart) -> Observation:
        """Begins an episode."""
        ...

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        """Answers a turn of the policy."""
        ...

    async def close_episode(self, sample: SampleId) -> None:
        """Forgets an episode: it is done, was cut off, or failed; idempotent."""
        ...

    async def close(self) -> None:
        """Frees everything; idempotent."""
        ...
