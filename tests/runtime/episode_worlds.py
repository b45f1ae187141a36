"""Episodes without a model: an engine that draws by a rule, an environment that answers by one.

Both rules are pure functions, so that `expected` can say what an episode must be, one token after
the other, while engine and environment work in whatever order a seed gives them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from flowrl.backend.environment import Action, EpisodeStart, Observation, Outcome
from flowrl.backend.protocols import Finished, GenerateRequest, Progress, Weights
from flowrl.config.roles import CharTokenizer
from flowrl.data import PromptItem, Tokenizer
from flowrl.data.model_folder import build_tokenizer
from flowrl.data.rows import Row
from flowrl.ids import GroupId, SampleId, group_id, sample_id
from flowrl.runtime.environments.transcript import FinishedEpisode, state_number
from flowrl.specs import FinishReason, Sampling

ALPHABET = "0123456789abcdef<>=?#"
STOP = len(ALPHABET)
"""The end token of a character tokenizer stands behind its alphabet."""


def tokenizer_in(folder: Path) -> Tokenizer:
    """A character tokenizer over `ALPHABET`."""
    spec = CharTokenizer(kind="char", alphabet=ALPHABET)
    for name, text in build_tokenizer(spec, (), max_length=256).items():
        (folder / name).write_text(text)
    return Tokenizer.load(folder)


def item(index: int, prompt: str = "#") -> PromptItem:
    row = Row(
        index=index,
        prompt=prompt,
        answer=f"answer {index}",
        solution="",
        fields={"number": index % 16, "index": index},
        where=f"rows:{index + 1}",
    )
    ids = np.array([ALPHABET.index(character) for character in prompt], np.int64)
    return PromptItem(epoch=0, index=index, group=group_id(0, index), row=row, prompt_ids=ids)


def group_of(sample: SampleId) -> GroupId:
    return GroupId(sample.rpartition("/")[0])


def request(
    index: int,
    member: int = 0,
    *,
    prompt: str = "#",
    attempt: int = 0,
    sampling: Sampling | None = None,
) -> GenerateRequest:
    of = item(index, prompt)
    return GenerateRequest(
        sample=sample_id(of.group, member),
        attempt=attempt,
        prompt=of.prompt_ids,
        response=np.zeros(0, np.int64),
        sampling=Sampling(max_tokens=3) if sampling is None else sampling,
        seed=1000 * index + member,
        shares_prompt=of.group,
    )


def drawn(seed: int, place: int) -> tuple[int, float]:
    """Token `place` behind the context, and its logprob; one in four ends the turn."""
    mixed = crc32(f"{seed}/{place}".encode())
    token = STOP if mixed % 4 == 0 else mixed // 4 % 16
    return token, -(1 + mixed % 1000) / 512


class RuleEngine:
    """Draws `drawn` tokens for at most `slots` requests at once, one token a turn and poll.

    Args:
        order: Which requests gain a token in a poll, and in what order they are told.
    """

    def __init__(self, *, slots: int = 4, order: random.Random | None = None) -> None:
        self.num_slots = slots
        self.requests: dict[SampleId, GenerateRequest] = {}
        self.log: list[str] = []
        self.submitted: list[GenerateRequest] = []
        self.version = 0
        self._order = order
        self._tokens: dict[SampleId, list[tuple[int, float, int]]] = {}
        self._ended: list[Finished] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for one in requests:
            assert one.sample not in self.requests
            assert len(one.response) < one.sampling.max_tokens
            assert not len(one.response) or one.response[-1] != STOP
            self.requests[one.sample] = one
            self._tokens[one.sample] = []
            self.submitted.append(one)
            self.log.append(f"submit {one.sample}")

    def abort(self, samples: Sequence[SampleId]) -> None:
        for sample in samples:
            if sample in self.requests:
                self.log.append(f"abort {sample}")
                self._ended.append(self._end(sample, FinishReason.ABORT))

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        outputs: list[Progress | Finished] = list(self._ended)
        self._ended = []
        for sample in self._chosen():
            one, tokens = self.requests[sample], self._tokens[sample]
            token, logprob = drawn(one.seed, len(one.response) + len(tokens))
            tokens.append((token, logprob, self.version))
            count = len(one.response) + len(tokens)
            if token == STOP and count > one.sampling.min_tokens:
                outputs.append(self._end(sample, FinishReason.STOP))
            elif count == one.sampling.max_tokens:
                outputs.append(self._end(sample, FinishReason.LENGTH))
            else:
                outputs.append(Progress(sample=sample, attempt=one.attempt, num_tokens=count))
        return outputs

    def _chosen(self) -> list[SampleId]:
        here = list(self.requests)[: self.num_slots]
        if self._order is None:
            return here
        return self._order.sample(here, self._order.randint(min(1, len(here)), len(here)))

    def _end(self, sample: SampleId, reason: FinishReason) -> Finished:
        one, drawn_tokens = self.requests.pop(sample), self._tokens.pop(sample)
        spans: list[tuple[int, int]] = []
        for _, _, version in drawn_tokens:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + 1)
            else:
                spans.append((version, 1))
        return Finished(
            sample=sample,
            attempt=one.attempt,
            reason=reason,
            tokens=np.array([token for token, _, _ in drawn_tokens], np.int64),
            logprobs=np.array([logprob for _, logprob, _ in drawn_tokens], np.float32),
            versions=tuple(spans),
        )

    def load(self, weights: Weights) -> None:
        self.version = weights.version

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")

    def close(self) -> None:
        self.log.append("close")


def opening(index: int) -> Observation:
    """How the game of a prompt begins; every third one says nothing."""
    return Observation(content="<>"[: index % 3], state=index % 2)


def answer(sample: SampleId, turn: int, text: str) -> Outcome:
    """What the game says to a turn."""
    mixed = crc32(f"{sample}/{turn}/{text}".encode())
    return Outcome(
        observation="<=>"[: 1 + mixed % 3],
        reward=(mixed // 3 % 5) / 4,
        done=mixed // 15 % 6 == 0,
        state=mixed // 90 % 3,
        metrics={"longest": float(len(text))},
    )


class RuleGame:
    """An environment that answers by the rules above.

    Args:
        order: How long each answer takes, in turns of the event loop.
    """

    def __init__(self, order: random.Random | None = None) -> None:
        self.starts: dict[SampleId, EpisodeStart] = {}
        self.actions: list[tuple[SampleId, Action]] = []
        self.live: set[SampleId] = set()
        self._order = order

    async def _dawdle(self) -> None:
        for _ in range(0 if self._order is None else self._order.randint(0, 20)):
            await asyncio.sleep(0)

    async def reset(self, episode: EpisodeStart) -> Observation:
        await self._dawdle()
        assert episode.sample not in self.live
        self.starts[episode.sample] = episode
        self.live.add(episode.sample)
        index = episode.row["index"]
        assert isinstance(index, int)
        return opening(index)

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        assert sample in self.live
        self.actions.append((sample, action))
        await self._dawdle()
        return answer(sample, action.turn, action.text)

    async def close_episode(self, sample: SampleId) -> None:
        self.live.discard(sample)

    async def close(self) -> None:
        self.live.clear()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an episode, as `EpisodeEngine` takes them."""

    max_turns: int = 6
    max_length: int = 64
    max_observation_tokens: int = 8


def expected(one: GenerateRequest, limits: Limits) -> FinishedEpisode:
    """The episode of a request, made in one piece by the rules alone; weights of version 0."""
    index = int(one.sample.split("/")[1])
    begin = opening(index)
    said = str(begin.content)
    tokens = [ALPHABET.index(c) for c in said]
    columns: list[tuple[float, int, float, int]] = [(0.0, -1, 0.0, -1)] * len(tokens)
    head, state, score, longest = len(said), begin.state, 0.0, 0.0
    reason, turn, cut = FinishReason.LENGTH, 0, {}
    while True:
        number = state_number(state, one.sample, turn)
        limit = min(len(tokens) + one.sampling.max_tokens, limits.max_length - len(one.prompt))
        text = ""
        while len(tokens) < limit:
            token, logprob = drawn(one.seed, len(tokens) - head)
            tokens.append(token)
            columns.append((logprob, turn, 0.0, number))
            if token == STOP:
                break
            text += ALPHABET[token]
        outcome = answer(one.sample, turn, text)
        columns[-1] = (columns[-1][0], turn, outcome.reward, number)
        said += text
        score, longest = score + outcome.reward, longest + len(text)
        turn, state = turn + 1, outcome.state
        more = [ALPHABET.index(c) for c in str(outcome.observation)]
        if outcome.done:
            reason = FinishReason.STOP
            break
        used = len(one.prompt) + len(tokens) + len(more)
        if turn == limits.max_turns:
            break
        if used >= limits.max_length:
            cut = {"cut_length": 1.0}
            break
        tokens += more
        said += str(outcome.observation)
        columns += [(0.0, -1, 0.0, -1)] * len(more)
    logprobs, turns, rewards, states = zip(*columns, strict=True)
    return FinishedEpisode(
        sample=one.sample,
        attempt=one.attempt,
        reason=reason,
        tokens=np.array(tokens),
        logprobs=np.array(logprobs, np.float32),
        versions=((0, len(tokens)),),
        role="game",  # type: ignore[arg-type]
        mask=np.array(turns) >= 0,
        turn=np.array(turns),
        token_reward=np.array(rewards, np.float32),
        state=np.array(states),
        text=said,
        last_words=str(outcome.observation),
        score=score,
        terms={"longest": longest, **cut, "turns": float(turn)},
    )


def assert_equal(found: Finished, wanted: FinishedEpisode) -> None:
    assert isinstance(found, FinishedEpisode)
    for name in ("tokens", "logprobs", "mask", "turn", "token_reward", "state"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, err_msg=f"{name} of {found.sample}")
    for name in ("sample", "attempt", "reason", "versions", "role", "text", "last_words"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("score", "terms"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.failure is None
