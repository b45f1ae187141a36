"""Episodes as samples: an engine whose requests are whole conversations with an environment.

    submit -> reset -> [generate a turn -> step]* -> end of the episode, reported by poll
                |           \\---------|
                \\----------------------\\--> abort, failure, environment lost

An `EpisodeEngine` is a `GenerateBackend` on top of another one and of an `EnvironmentPool`, so that
a scheduler and its driver treat an episode like any other sample: it is submitted, aborted, counted
and delivered by itself, and uses a slot of the decoder only while it generates.

- A turn is one request to the engine below, which continues from all tokens so far. So token t
after
  the opening depends on the sample's seed and t alone, and nothing is tokenised twice.
- `max_tokens` and `min_tokens` of the sampling options limit one turn, and so does a grammar.
- An episode ends with `stop` when the environment is done; with `length` after `max_turns`, or
  when an observation is longer than its limit or leaves no space for another turn; for these two
  the sample has the term `CUT_OBSERVATION` or `CUT_LENGTH`.
- Several policies take turns in their order, each by its own engine. All continue from the same
  tokens, so they have one tokenizer.
- An aborted episode keeps nothing and restarts from the reset: an environment cannot be set back to
  the middle. So does one whose environment was lost.
- An episode that its environment cannot finish ends with `FinishedEpisode.failure`.

With equal seeds and weights, episodes are equal whatever the order in which an environment answers,
up to the rounding of the engine's arithmetic. While the environment answers quickly (`patience_s`),
even the batches that the engine decodes are the same in every run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.backend.environment import (
    Action,
    EnvironmentState,
    EpisodeStart,
    Observation,
    Outcome,
    Said,
)
from flowrl.backend.protocols import (
    Finished,
    GenerateBackend,
    GenerateRequest,
    Loaded,
    Progress,
    Weights,
)
from flowrl.data import PromptItem, Tokenizer
from flowrl.errors import BackendError, DataError
from flowrl.ids import GroupId, RoleName, SampleId
from flowrl.runtime.environments.pool import Answered, EnvironmentPool, EpisodeLost
from flowrl.runtime.environments.transcript import (
    CUT_LENGTH,
    CUT_OBSERVATION,
    EpisodeFailure,
    Transcript,
    state_number,
)
from flowrl.runtime.local.engine_restarts import Restartable
from flowrl.runtime.scoring.pool import FailureKind
from flowrl.runtime.workers import Waitable, wait_for_any
from flowrl.specs import FinishReason, Sampling

_NO_INTS = np.zeros(0, np.int64)
_NO_FLOATS = np.zeros(0, np.float32)
_MAX_ENCODED = 4096
"""Texts whose tokens are cached: a game repeats the same few observations."""


class _Phase(StrEnum):
    """Who acts next in an episode."""

    OPENING = "opening"  # the environment, before the first turn
    GENERATING = "generating"  # the policy
    STEPPING = "stepping"  # the environment


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    """A live episode.

    Attributes:
        number: Number of the latest call of environment or engine; numbers rise over all episodes.
        state: Number of the environment's state now.
        context: int64, prompt and opening; what the engine has as the prompt.
        aborting: Its turn was aborted; it leaves when the engine reports that.
    """

    request: GenerateRequest
    number: int
    phase: _Phase = _Phase.OPENING
    transcript: Transcript = field(default_factory=Transcript)
    state: int = -1
    context: Ints = field(default_factory=lambda: _NO_INTS)
    aborting: bool = False

    @property
    def sample(self) -> SampleId:
        return self.request.sample


class EpisodeEngine:
    """See the module. The engine below and the environment are borrowed: who opened them, closes
    them, once this one is closed.

    Args:
        engines: Those of the policies that take turns, in order; used by this engine only. One
            may stand for several policies.
        policies: The policies that take turns, in order.
        environments: Answers them; used by this engine only.
        tokenizer: The policy's.
        item_of: The prompt of a sample, with its data row.
        seed_of: Seed of a group's episodes.
        max_turns: Turns of an episode at most.
        max_length: Tokens of an episode at most, prompt included; what the engine below can hold.
        max_observation_tokens: Tokens of one observation at most.
        needs_states: True if an episode whose environment returns no state has failed.
        num_slots: Episodes to have under way; by default as many as the engine below decodes at
            once. More of them keep it busy while a slow environment thinks.
        patience_s: Seconds that the engine waits for answers before it decodes on without them.
            After a wait in vain it decodes on at once, until all those calls are answered.
    """

    def __init__(
        self,
        *,
        engines: Sequence[GenerateBackend],
        policies: tuple[RoleName, ...] = (),
        environments: EnvironmentPool,
        tokenizer: Tokenizer,
        item_of: Callable[[SampleId], PromptItem],
        seed_of: Callable[[GroupId], int],
        max_turns: int,
        max_length: int,
        max_observation_tokens: int,
        needs_states: bool = False,
        num_slots: int | None = None,
        patience_s: float = 0.25,
    ) -> None:
        self._policies = policies
        self._turn_engines = tuple(engines)
        self._engines = tuple(dict.fromkeys(self._turn_engines))
        self._environments = environments
        self._tokenizer = tokenizer
        self._item_of = item_of
        self._seed_of = seed_of
        self._max_turns = max_turns
        self._max_length = max_length
        self._max_observation_tokens = max_observation_tokens
        self._needs_states = needs_states
        self._num_slots = engines[0].num_slots if num_slots is None else num_slots
        self._patience_s = patience_s
        self._patient = True
        self._numbers = itertools.count()
        self._episodes: dict[SampleId, _Episode] = {}
        self._ended: list[Finished] = []
        # To be generated, not yet with an engine; and how many each engine has.
        self._turns: list[tuple[GenerateBackend, GenerateRequest]] = []
        self._generating: Counter[GenerateBackend] = Counter()
        self._encoded: dict[str, Ints] = {"": _NO_INTS}
        self._samplings: dict[tuple[Sampling, int, int], Sampling] = {}

    # What a driver calls

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """See `GenerateBackend`; begins the episodes.

        Raises:
            BackendError: a sample that is here already, or one with a response: an episode cannot
                be taken up in the middle. No request of the call is taken then.
        """
        seen: set[SampleId] = set()
        for request in requests:
            live = request.sample in self._episodes or request.sample in seen
            if live or len(request.response):
                raise BackendError(
                    "the episode is under way already"
                    if live
                    else "an episode cannot go on from tokens that it has already",
                    where=f"sample {request.sample}",
                    found=f"attempt {request.attempt}, {len(request.response)} response tokens",
                    hint="abort the earlier attempt first" if live else "start it again",
                )
            seen.add(request.sample)
        for request in requests:
            item = self._item_of(request.sample)
            self._episodes[request.sample] = _Episode(
                request=request,
                number=next(self._numbers),
                transcript=Transcript(policies=self._policies),
            )
            self._environments.start(
                EpisodeStart(
                    sample=request.sample,
                    seed=self._seed_of(item.group),
                    row=item.row.fields,
                    prompt=item.row.prompt,
                    answer=item.row.answer,
                )
            )
        self._environments.flush()

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `GenerateBackend`; the ends, without tokens, are reported by `poll`."""
        generating: dict[GenerateBackend, list[SampleId]] = {}
        for sample in samples:
            episode = self._episodes.get(sample)
            if episode is None or episode.aborting:
                continue
            if episode.phase is _Phase.GENERATING:
                episode.aborting = True
                generating.setdefault(self._engine_of(episode), []).append(sample)
            else:
                self._end_aborted(episode)
        for engine, aborted in generating.items():
            engine.abort(aborted)

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        """See `GenerateBackend`; returns also when nothing is left to do but to wait."""
        self._take_answers(timeout_s)
        turns, self._turns = self._turns, []
        progress: list[Progress] = []
        for engine in self._engines:
            if own := [request for asked, request in turns if asked is engine]:
                engine.submit(own)
        generating = [engine for engine in self._engines if self._generating[engine]]
        away = [engine for engine in generating if isinstance(engine, Waitable)]
        if len(generating) > 1:
            if len(away) == len(generating):
                wait_for_any(away, timeout_s)
            progress += [p for e in away for p in self._generate_turn(e, 0.0)]
            generating = [engine for engine in generating if engine not in away]
        for engine in generating:
            progress += self._generate_turn(engine, timeout_s)
        self._environments.flush()
        ended, self._ended = self._ended, []
        return [*progress, *ended]

    def load(self, weights: Weights) -> None:
        """See `GenerateBackend`; episodes under way go on with the new weights."""
        self._turn_engines[0].load(weights)

    def sleep(self) -> None:
        """See `GenerateBackend`.

        Raises:
            BackendError: an episode is under way.
        """
        if self._episodes:
            raise BackendError(
                "the engine cannot sleep while episodes are under way",
                found=f"{len(self._episodes)} episodes",
                hint="abort them or poll until they end",
            )
        for engine in self._engines:
            engine.sleep()

    def wake(self) -> None:
        for engine in self._engines:
            engine.wake()

    def restart(self) -> None:
        """Restarts the engines below, if they can be restarted; all episodes are gone.

        Raises:
            BackendError: one cannot be.
        """
        for engine in self._engines:
            if not isinstance(engine, Restartable):
                raise BackendError(
                    "the engine below cannot be restarted", found=type(engine).__name__
                )
            engine.restart()
        self.close()

    def end(self) -> None:
        """Closes the engines below, as they were given up."""
        for engine in self._engines:
            if isinstance(engine, Restartable):
                engine.end()
        self.close()

    def close(self) -> None:
        """Ends all episodes; engine and environment stay open. Idempotent."""
        self.abort(tuple(self._episodes))
        for episode in tuple(self._episodes.values()):
            self._forget(episode)
        self._environments.flush()
        self._ended.clear()
        self._turns.clear()
        self._generating.clear()

    def describe(self) -> str:
        """Returns who waits for whom, in one line, or "". May be called from any thread."""
        phases = [episode.phase for episode in self._episodes.copy().values()]
        if not phases:
            return ""
        counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in _Phase)
        return "; ".join(filter(None, (f"episodes: {counts}", self._environments.describe())))

    # Turns of the environment

    def _take_answers(self, timeout_s: float) -> None:
        """Takes the environment's answers, in the order of the calls."""
        environments = self._environments
        if not environments.num_pending:
            self._patient = True
            return
        idle = not self._generating.total() and not self._turns and not self._ended
        if self._patient or idle:
            self._patient = environments.settle(min(self._patience_s, timeout_s))
        if idle:
            environments.wait(timeout_s)
        answers: list[tuple[_Episode, Answered]] = []
        for answered in environments.poll():
            episode = self._episodes.get(answered.sample)
            if episode is not None:
                answers.append((episode, answered))
        for episode, answered in sorted(answers, key=lambda pair: pair[0].number):
            self._answer(episode, answered)

    def _answer(self, episode: _Episode, answered: Answered) -> None:
        match answered.answer:
            case EpisodeLost():
                self._end_aborted(episode)
            case EpisodeFailure() as failure:
                self._finish(episode, FinishReason.STOP, failure)
            case Observation() as observation:
                self._open(episode, observation)
            case Outcome() as outcome:
                self._go_on(episode, outcome)
            case _ as never:
                assert_never(never)

    def _open(self, episode: _Episode, observation: Observation) -> None:
        tokens = self._tokens_of(episode, observation.content)
        if tokens is None or not self._enter_state(episode, observation.state):
            return
        prompt = episode.request.prompt
        space = self._max_length - len(prompt) - len(tokens)
        if space < 1 or len(tokens) > self._max_observation_tokens:
            self._fail(
                episode,
                f"opens with {len(tokens)} tokens behind a prompt of {len(prompt)}, of at most "
                f"{self._max_observation_tokens} (max_observation_tokens) that leave space for a "
                f"turn (max_length={self._max_length})",
            )
            return
        episode.transcript.open(tokens)
        episode.context = np.concatenate([prompt, tokens]) if len(tokens) else prompt
        self._begin_turn(episode)

    def _go_on(self, episode: _Episode, outcome: Outcome) -> None:
        transcript = episode.transcript
        wrong = transcript.reward(outcome.reward, outcome.metrics)
        if wrong is not None:
            self._fail(episode, wrong)
            return
        if outcome.done or transcript.num_turns >= self._max_turns:
            if self._send_turn(episode, outcome.observation):
                reason = FinishReason.STOP if outcome.done else FinishReason.LENGTH
                self._finish(episode, reason)
            return
        tokens = self._tokens_of(episode, outcome.observation)
        if tokens is None or not self._enter_state(episode, outcome.state):
            return
        used = len(episode.request.prompt) + transcript.num_tokens + len(tokens)
        if len(tokens) > self._max_observation_tokens or used >= self._max_length:
            observation_too_long = len(tokens) > self._max_observation_tokens
            transcript.cut(CUT_OBSERVATION if observation_too_long else CUT_LENGTH)
            self._finish(episode, FinishReason.LENGTH)
            return
        before = tokens if len(tokens) else transcript.response
        if int(before[-1]) in self._tokenizer.stop_ids:
            self._fail(
                episode,
                f"{'ends with a stop token' if len(tokens) else 'says nothing'} after turn "
                f"{transcript.num_turns - 1} and is not done; an engine takes tokens that end with "
                "a stop token as complete",
            )
            return
        if len(tokens):
            transcript.observe(tokens)
        self._begin_turn(episode)

    def _tokens_of(self, episode: _Episode, said: Said) -> Ints | None:
        """Returns int64, the observation's tokens; None if the observation ended the episode."""
        if not self._send_turn(episode, said):
            return None
        if isinstance(said, str):
            known = self._encoded.get(said)
            if known is not None:
                return known
            try:
                tokens = self._tokenizer.encode(said)
            except DataError as reason:
                found = f" ({reason.found})" if reason.found else ""
                self._fail(episode, f"says what cannot be tokenised: {reason.what}{found}")
                return None
            if len(self._encoded) < _MAX_ENCODED:
                self._encoded[said] = tokens
            return tokens
        return said.astype(np.int64)

    def _send_turn(self, episode: _Episode, said: Said) -> bool:
        """Notes the observation's text; returns False if the observation ended the episode."""
        size = self._tokenizer.model_vocab_size
        if isinstance(said, str):
            episode.transcript.say(said)
        elif len(said) and not 0 <= int(said.min()) <= int(said.max()) < size:
            self._fail(
                episode,
                f"says token ids {int(said.min())} to {int(said.max())}, of a vocabulary of {size}",
            )
            return False
        else:
            episode.transcript.say(self._tokenizer.decode_many([said])[0])
        return True

    def _enter_state(self, episode: _Episode, state: EnvironmentState) -> bool:
        """Notes the environment's state; returns False if a missing state ended the episode."""
        if state is None and self._needs_states:
            self._fail(
                episode, "returned no state, by which the workflow's advantage compares turns"
            )
            return False
        episode.state = state_number(state, episode.sample, episode.transcript.num_turns)
        return True

    # Turns of the policy

    def _begin_turn(self, episode: _Episode) -> None:
        request, have = episode.request, episode.transcript.response
        limit = min(
            len(have) + request.sampling.max_tokens, self._max_length - len(episode.context)
        )
        episode.phase = _Phase.GENERATING
        episode.number = next(self._numbers)
        turn = replace(
            request,
            attempt=episode.number,
            prompt=episode.context,
            response=have,
            sampling=self._sampling(request.sampling, len(have), limit),
            grammar_from=len(have),
        )
        engine = self._engine_of(episode)
        self._generating[engine] += 1
        self._turns.append((engine, turn))

    def _engine_of(self, episode: _Episode) -> GenerateBackend:
        """Returns the engine of the policy whose turn it is."""
        return self._turn_engines[episode.transcript.num_turns % len(self._turn_engines)]

    def _sampling(self, sampling: Sampling, have: int, limit: int) -> Sampling:
        """Returns the options of a turn after `have` tokens; one object for equal options."""
        key = (sampling, have, limit)
        found = self._samplings.get(key)
        if found is None:
            least = min(have + sampling.min_tokens, limit) if sampling.min_tokens else 0
            found = replace(sampling, max_tokens=limit, min_tokens=least)
            self._samplings[key] = found
        return found

    def _generate_turn(self, engine: GenerateBackend, timeout_s: float) -> list[Progress]:
        """Lets an engine decode, and hands the turns that ended to the environment."""
        progress: list[Progress] = []
        ended: list[tuple[_Episode, Finished]] = []
        for output in engine.poll(timeout_s):
            if isinstance(output, Loaded):
                continue
            episode = self._episodes.get(output.sample)
            if episode is None or episode.number != output.attempt:
                continue
            if isinstance(output, Finished):
                self._generating[engine] -= 1
                ended.append((episode, output))
            else:
                progress.append(
                    Progress(
                        sample=output.sample,
                        attempt=episode.request.attempt,
                        num_tokens=len(episode.transcript.opening) + output.num_tokens,
                    )
                )
        made = [pair for pair in ended if not self._is_aborted(*pair)]
        said = [self._tokenizer.without_end(turn.tokens) for _, turn in made]
        texts = self._tokenizer.decode_many(said)
        for (episode, turn), text in zip(made, texts, strict=True):
            self._hand_over(episode, turn, text)
        return progress

    def _is_aborted(self, episode: _Episode, turn: Finished) -> bool:
        if turn.reason is FinishReason.ABORT or episode.aborting:
            self._end_aborted(episode)
            return True
        return False

    def _hand_over(self, episode: _Episode, turn: Finished, text: str) -> None:
        if not len(turn.tokens):
            raise BackendError(
                "the engine ended a turn without a token",
                where=f"sample {episode.sample}, turn {episode.transcript.num_turns}",
            )
        number = episode.transcript.num_turns
        episode.transcript.act(turn, episode.state, text)
        episode.phase = _Phase.STEPPING
        episode.number = next(self._numbers)
        self._environments.submit(
            episode.sample,
            Action(text=text, tokens=turn.tokens, turn=number, finish=turn.reason),
        )

    # Ends

    def _fail(self, episode: _Episode, message: str) -> None:
        """Ends an episode with the reason why its observation cannot be used."""
        turns = episode.transcript.num_turns
        failure = EpisodeFailure(
            sample=episode.sample,
            turn=turns - 1 if turns else None,
            kind=FailureKind.INVALID,
            message=message,
        )
        self._finish(episode, FinishReason.STOP, failure)

    def _finish(
        self, episode: _Episode, reason: FinishReason, failure: EpisodeFailure | None = None
    ) -> None:
        self._ended.append(
            episode.transcript.end(
                episode.sample, episode.request.attempt, self._environments.role, reason, failure
            )
        )
        self._forget(episode)

    def _end_aborted(self, episode: _Episode) -> None:
        """Ends an episode as aborted, without tokens; it may be submitted again."""
        self._ended.append(
            Finished(
                sample=episode.sample,
                attempt=episode.request.attempt,
                reason=FinishReason.ABORT,
                tokens=_NO_INTS,
                logprobs=_NO_FLOATS,
                versions=(),
            )
        )
        self._forget(episode)

    def _forget(self, episode: _Episode) -> None:
        del self._episodes[episode.sample]
        self._environments.end(episode.sample)
