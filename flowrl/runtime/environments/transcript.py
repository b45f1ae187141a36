"""The transcript of an episode, token by token: turns of the policy and observations.

    tokens   o o | a a a e | o o | a e      o: the environment's, a: the policy's, e: its stop token
    mask     0 0 | 1 1 1 1 | 0 0 | 1 1
    turn    -1-1 | 0 0 0 0 |-1-1 | 1 1
    reward   0 0 | 0 0 0 r | 0 0 | 0 r      each on the last token of its turn

Tokens are those that were sampled, and observations are tokenised once, by themselves: nothing is
ever tokenised again. An observation joins the tokens only when a turn follows it.

An environment is foreign code, so what it returns is checked before it becomes part of a
transcript.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Real

import numpy as np

from flowrl.backend.batch import Floats, Ints, KeptTokens, Mask
from flowrl.backend.environment import EnvironmentState, Observation, Outcome, Said
from flowrl.backend.protocols import Finished
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.scoring.pool import FailureKind
from flowrl.specs import FinishReason

NUM_TURNS = "turns"
"""The term for the number of turns, which every episode has with its environment's metrics."""

CUT_OBSERVATION = "cut_observation"
"""The term, of value 1, of an episode that ended as an observation was longer than it may be."""

CUT_LENGTH = "cut_length"
"""The term, of value 1, of an episode that ended as there was no space for another turn."""

_NO_INTS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """An episode that its environment could not finish.

    Attributes:
        turn: The turn that was to be answered; None at the reset.
        message: The failure, to follow "the environment": `raised KeyError: 'x' in turn 1
            (game.py:9 in step)`.
        frames: The user's own innermost frames, outermost first: `game.py:9 in step`.
    """

    sample: SampleId
    turn: int | None
    kind: FailureKind
    message: str
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode(Finished):
    """The end of an episode, as an engine reports it: R tokens after the prompt.

    `logprobs` are 0 at observation tokens; `versions` cover all R tokens and are those of the first
    policy, an observation or the turn of another policy counting to the weights of the turn before
    it (the first observation to those of the turn after it).

    Attributes:
        role: The environment's, whose score it is.
        mask: bool `[R]`, true at the policy's tokens.
        turn: int64 `[R]`, counted from 0; -1 at observation tokens.
        token_reward: float32 `[R]`, a turn's reward at its last token; 0 at other tokens.
        state: int64 `[R]`, `state_number` of the state before the turn; -1 at observation tokens.
        text: The conversation as text, as far as it is in the tokens.
        last_words: Text of the last observation, which no turn follows.
        score: Sum of the turns' rewards; of several policies, of those of the first.
        terms: The environment's metrics, summed over the turns, and `NUM_TURNS`.
        failure: The reason why the episode failed; `score` means nothing then.
    """

    role: RoleName
    mask: Mask
    turn: Ints
    token_reward: Floats
    state: Ints
    text: str
    last_words: str
    score: float
    terms: Mapping[str, float]
    failure: EpisodeFailure | None = None


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Tokens of one speaker; a turn where `turn` is not None."""

    tokens: Ints
    logprobs: Floats
    turn: int | None = None
    state: int = -1
    reward: float = 0.0
    kept: KeptTokens | None = None


@dataclass(slots=True)
class Transcript:
    """The transcript of an episode so far.

    Attributes:
        policies: Those that take turns, in order.
        num_turns: Turns of the policy.
        num_tokens: Tokens after the prompt.
        opening: int64, the first observation.
        response: int64, everything after the opening; what an engine goes on from.
    """

    policies: tuple[RoleName, ...] = ()
    num_turns: int = 0
    num_tokens: int = 0
    opening: Ints = field(default_factory=lambda: _NO_INTS)
    response: Ints = field(default_factory=lambda: _NO_INTS)
    _pieces: list[_Piece] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _last_words: str = ""  # of the observation that no turn has followed yet
    _spans: list[tuple[int, int]] = field(default_factory=list)
    _terms: dict[str, float] = field(default_factory=dict)

    def open(self, tokens: Ints) -> None:
        """Adds the opening observation."""
        assert not self._pieces
        self.opening = tokens
        self._append(_Piece(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32)))

    def observe(self, tokens: Ints) -> None:
        """Adds an observation between two turns."""
        self.response = np.concatenate([self.response, tokens])
        self._append(_Piece(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32)))
        self._extend_spans(((self._spans[-1][0], len(tokens)),))

    def cut(self, reason: str) -> None:
        """Ends the episode before the environment is done: its next observation does not fit."""
        self._terms[reason] = 1.0

    def act(self, turn: Finished, state: int, text: str) -> None:
        """Adds a turn of the policy.

        Args:
            state: Number of the environment's state before it.
            text: The turn as text.
        """
        self._texts += [self._last_words, text]
        self._last_words = ""
        self.response = np.concatenate([self.response, turn.tokens])
        piece = _Piece(
            tokens=turn.tokens,
            logprobs=turn.logprobs,
            turn=self.num_turns,
            state=state,
            kept=turn.kept,
        )
        self._append(piece)
        versions = turn.versions
        if self.num_turns == 0 and versions:
            self._extend_spans(((versions[0][0], len(self.opening)),))
        if self._policy_of(piece) and self._spans:
            # Each policy counts versions of its own, and the samples are those of the first.
            versions = ((self._spans[-1][0], len(turn.tokens)),)
        self._extend_spans(versions)
        self.num_turns += 1

    def reward(self, reward: float | tuple[float, ...], metrics: Mapping[str, float]) -> str | None:
        """Adds the reward of the last turn, or one of each policy to the last turn of each.

        Returns:
            What is wrong with it; None if it can be used.
        """
        for name, value in metrics.items():
            self._terms[name] = self._terms.get(name, 0.0) + value
        if not isinstance(reward, tuple):
            self._pieces[-1].reward += reward
            return None
        if len(reward) != len(self.policies):
            return f"gave {len(reward)} rewards to {len(self.policies)} policies"
        for place, each in enumerate(reward):
            own = [piece for piece in self._pieces if self._policy_of(piece) == place]
            if own:
                own[-1].reward += each
            elif each:
                return f"gave a reward to {self.policies[place]}, which has not taken a turn yet"
        return None

    def _policy_of(self, piece: _Piece) -> int | None:
        """Returns the place of the policy whose turn it is; None for an observation."""
        return None if piece.turn is None else piece.turn % max(1, len(self.policies))

    def _scores(self) -> dict[str, float]:
        """Returns the score of each policy by name, where several take turns.

        One that takes several of them is `actor`, `actor_2` ...
        """
        scores: dict[str, float] = {}
        for k, policy in enumerate(self.policies if len(self.policies) > 1 else ()):
            times = self.policies[: k + 1].count(policy)
            name = policy if times == 1 else f"{policy}_{times}"
            own = (piece.reward for piece in self._pieces if self._policy_of(piece) == k)
            scores[f"{name}_score"] = float(sum(own))
        return scores

    def say(self, text: str) -> None:
        """Notes the text of an observation; rewards read it only if a turn follows."""
        self._last_words = text

    def end(
        self,
        sample: SampleId,
        attempt: int,
        role: RoleName,
        reason: FinishReason,
        failure: EpisodeFailure | None = None,
    ) -> FinishedEpisode:
        """Makes the finished episode."""
        pieces = self._pieces
        sizes = [len(piece.tokens) for piece in pieces]
        token_reward = np.zeros(self.num_tokens, np.float32)
        lasts = np.cumsum(sizes, dtype=np.int64) - 1
        for piece, last in zip(pieces, lasts, strict=True):
            if piece.turn is not None:
                token_reward[last] = piece.reward
        turn = np.repeat([-1 if p.turn is None else p.turn for p in pieces], sizes)
        return FinishedEpisode(
            sample=sample,
            attempt=attempt,
            role=role,
            reason=reason,
            tokens=np.concatenate([_NO_INTS, *(p.tokens for p in pieces)]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(p.logprobs for p in pieces)]),
            versions=tuple(self._spans),
            kept=_kept(pieces),
            mask=turn >= 0,
            turn=turn.astype(np.int64),
            token_reward=token_reward,
            state=np.repeat([piece.state for piece in pieces], sizes).astype(np.int64),
            text="".join(self._texts),
            last_words=self._last_words,
            # In reports it is the first policy's; the terms have that of each.
            score=float(sum(p.reward for p in pieces if self._policy_of(p) == 0)),
            terms={**self._terms, **self._scores(), NUM_TURNS: float(self.num_turns)},
            failure=failure,
        )

    def _append(self, piece: _Piece) -> None:
        self._pieces.append(piece)
        self.num_tokens += len(piece.tokens)

    def _extend_spans(self, spans: tuple[tuple[int, int], ...]) -> None:
        for version, count in spans:
            if not count:
                continue
            if self._spans and self._spans[-1][0] == version:
                self._spans[-1] = (version, self._spans[-1][1] + count)
            else:
                self._spans.append((version, count))


def _kept(pieces: Sequence[_Piece]) -> KeptTokens | None:
    """Joins the tokens that truncated sampling kept; None if no turn reports them."""
    if all(piece.kept is None for piece in pieces):
        return None
    return KeptTokens.joined(
        [
            KeptTokens.everything(len(piece.tokens)) if piece.kept is None else piece.kept
            for piece in pieces
        ]
    )


def state_number(state: EnvironmentState, sample: SampleId, turn: int) -> int:
    """Returns a number from 0 that is equal for equal states; a state of None equals no other.

    63 bits of a hash: two different states among a million share one with probability 5e-8.
    """
    name = f"{sample}\x1f{turn}" if state is None else str(state)
    text = f"{type(state).__name__}\x1f{name}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


_RESERVED = frozenset({NUM_TURNS, "score", "length", "truncated"})
"""Names of terms that evaluations report in addition to an environment's metrics."""
_MAX_REWARD = 1e30
"""Batches hold rewards in float32, whose largest number is 3.4e38; sums of them stay below it."""


class InvalidAnswer(Exception):
    """An answer of an environment that cannot be used; the message follows "gave"."""


def checked_observation(value: object) -> Observation:
    """Returns the answer of a reset, with plain types.

    Raises:
        InvalidAnswer: it is no observation.
    """
    if not isinstance(value, Observation):
        raise InvalidAnswer(f"no Observation but {_shown(value)}")
    _check_said(value.content)
    return Observation(content=value.content, state=_checked_state(value.state))


def checked_outcome(value: object) -> Outcome:
    """Returns the answer of a step, with plain types.

    Raises:
        InvalidAnswer: it is no outcome, or a part of it cannot be used.
    """
    if not isinstance(value, Outcome):
        raise InvalidAnswer(f"no Outcome but {_shown(value)}")
    _check_said(value.observation)
    if not isinstance(value.done, bool | np.bool_):
        raise InvalidAnswer(f"done={_shown(value.done)}, which is no truth value")
    metrics = value.metrics
    if not isinstance(metrics, Mapping):
        raise InvalidAnswer(f"metrics={_shown(metrics)}, which is no mapping")
    if taken := sorted(_RESERVED & set(metrics)):
        raise InvalidAnswer(f"a metric called {taken[0]!r}, which is a name of flowrl's own")
    return Outcome(
        observation=value.observation,
        reward=_checked_reward(value.reward),
        done=bool(value.done),
        state=_checked_state(value.state),
        metrics={str(name): _checked_number(metrics[name], f"metric {name}") for name in metrics},
    )


def _checked_reward(value: object) -> float | tuple[float, ...]:
    if isinstance(value, tuple):
        return tuple(_checked_number(each, f"reward {place}") for place, each in enumerate(value))
    return _checked_number(value, "reward")


def _checked_number(value: object, name: str) -> float:
    number = float(value) if isinstance(value, Real) else math.nan
    if not abs(number) <= _MAX_REWARD:
        raise InvalidAnswer(
            f"{name}={_shown(value)}, which is no number of at most {_MAX_REWARD:g}"
        )
    return number


def _checked_state(value: object) -> EnvironmentState:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    raise InvalidAnswer(f"state={_shown(value)}, which is no text, whole number or None")


def _check_said(value: Said | object) -> None:
    ids = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
    if not ids and not isinstance(value, str):
        raise InvalidAnswer(
            f"the observation {_shown(value)}, which is no text and no array of ids"
            + ("; token ids are np.array([...])" if isinstance(value, list | tuple) else "")
        )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    # repr of the user's own objects may raise anything.
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}... ({type(value).__name__})"
