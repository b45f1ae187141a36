"""The payload store: tokens, logprobs and scores of the samples that the scheduler only names.

A payload is made when its group is offered, grows when an attempt ends, and is taken out when the
sample is delivered or dropped. It is plain data, so that it can be written into a checkpoint
together with the scheduler's state.

A step works on sets of samples: one for each rollout and each source of data, one for each filter
or selection, which makes a smaller set of a larger one, and one for each `pair`, which makes a set
of two. Every node works on one set
(`flowrl.graph.sample_sets`); its values are arrays of that set, `[N]` for sample units and `[T]`
for token units. `receive_rollout` puts a rollout's payloads into a step as the set that its batch
part reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.backend.batch import (
    Floats,
    Ints,
    KeptTokens,
    Mask,
    Sampler,
    SequenceBatch,
    TrainBatch,
)
from flowrl.backend.protocols import Finished, OptimizerStep, UpdateSpec
from flowrl.data import PromptItem
from flowrl.errors import SchedulerError
from flowrl.graph import Node, Op, score_source
from flowrl.graph.signatures import ROLLOUT_LOGPROBS, SCORE
from flowrl.ids import EngineId, GroupId, NodeId, RoleName, SampleId
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of
from flowrl.runtime.environments.transcript import EpisodeFailure, FinishedEpisode
from flowrl.runtime.groups import Answer, DataRef, Stored
from flowrl.runtime.spans import DRIVER, SPANS
from flowrl.runtime.stored_tokens import (
    AttemptTokens,
    StoredEnd,
    StoredRows,
    StoredSpan,
    ragged_batch,
)
from flowrl.specs import FinishReason

_NO_INTS: Ints = np.zeros(0, np.int64)
_NO_FLOATS: Floats = np.zeros(0, np.float32)


@dataclass(slots=True, kw_only=True)
class Payload:
    """The data of one sample.

    Attributes:
        item: Its prompt and data row.
        attempt: The running attempt, or the last one; ends of others are not joined.
        tokens: int64 `[R]` response tokens of all attempts so far.
        logprobs: float32 `[R]`, of the policy that produced each token.
        versions: `((version, count), ...)` over the R tokens; observations of an environment have
            the version of the tokens before them.
        kept: `[R]`, the tokens that truncated sampling kept at each position; None if unreported.
        finish: How the last attempt ended; None while it runs.
        text: The decoded response, set when it is sent to the scorer; of an episode, the
            conversation as far as the policy read it.
        last_words: The last observation of an episode, as text for people.
        score: The reported score, set when all scorers have answered; `terms` are its parts.
        scores: The score of each scoring role; an episode ends with that of its environment.
        judged: The score that each filter read, by the filter's node.
        failure: The failure of the reward in place of a score; empty where it did not fail.
        failed_term: `ROLE/TERM` where a term of a scoring role did that, and it is known which.
        mask: bool `[R]`, true at tokens that the policy produced; None where it produced all.
        turn: int64 `[R]` of an episode; this and the next two as in `SequenceBatch`.
        token_reward: float32 `[R]` of an episode.
        state: int64 `[R]` of an episode.
        broken: The reason why an episode ended without a score; None otherwise.
        spans: Where workers find the tokens of each attempt; None where they are here alone.
        engine: The engine that sampled all tokens; None where there are several, or where another
            process of the run had it.
    """

    item: PromptItem
    attempt: int = 0
    tokens: Ints = field(default_factory=lambda: _NO_INTS)
    logprobs: Floats = field(default_factory=lambda: _NO_FLOATS)
    versions: tuple[tuple[int, int], ...] = ()
    kept: KeptTokens | None = None
    finish: FinishReason | None = None
    text: str = ""
    last_words: str = ""
    score: float | None = None
    scores: dict[RoleName, float] = field(default_factory=dict)
    judged: dict[NodeId, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    failed_term: str = ""
    mask: Mask | None = None
    turn: Ints | None = None
    token_reward: Floats | None = None
    state: Ints | None = None
    broken: EpisodeFailure | None = None
    spans: tuple[StoredSpan, ...] | None = None
    engine: EngineId | None = None

    @property
    def has_ended(self) -> bool:
        """True if its response is whole."""
        return self.finish not in (None, FinishReason.ABORT)

    @property
    def is_episode(self) -> bool:
        """True for a whole episode with an environment, which has scored it."""
        return self.turn is not None

    @property
    def asked(self) -> Ints:
        """int64 `[P]`: the prompt, without the tokens of a response that is continued."""
        ids = self.item.prompt_ids
        return ids[: len(ids) - self.item.num_continued]

    @property
    def response(self) -> Ints:
        """int64: the response as rewards see it, with the tokens before the cut it continues."""
        if not self.item.num_continued:
            return self.tokens
        return np.concatenate([self.item.prompt_ids[-self.item.num_continued :], self.tokens])

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy produced; an environment's words are not among them."""
        return len(self.tokens) if self.mask is None else int(self.mask.sum())

    @property
    def sampled_versions(self) -> tuple[tuple[int, int], ...]:
        """`((version, count), ...)` over the tokens that the policy produced, in order."""
        if self.mask is None:
            return self.versions
        spans: list[tuple[int, int]] = []
        start = 0
        for version, count in self.versions:
            sampled = int(self.mask[start : start + count].sum())
            start += count
            if sampled and spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + sampled)
            elif sampled:
                spans.append((version, sampled))
        return tuple(spans)

    def extend(self, end: Finished, engine: EngineId | None = None) -> None:
        """Joins what an attempt produced to what the sample already had."""
        self.engine = engine if not len(self.tokens) or self.engine == engine else None
        if isinstance(end, FinishedEpisode):
            self._take_episode(end)
        spans = (end.span,) if isinstance(end, StoredEnd) else None
        if len(self.tokens):
            self.spans = None if self.spans is None or spans is None else self.spans + spans
            self.tokens = np.concatenate([self.tokens, end.tokens])
            self.logprobs = np.concatenate([self.logprobs, end.logprobs])
        else:
            self.spans, self.tokens, self.logprobs = spans, end.tokens, end.logprobs
        self.versions += end.versions
        if end.kept is not None:
            self.kept = KeptTokens.joined(
                [end.kept] if self.kept is None else [self.kept, end.kept]
            )
        self.finish = end.reason

    def _take_episode(self, end: FinishedEpisode) -> None:
        if len(self.tokens):
            # An aborted episode restarts, so that no attempt before has left tokens.
            raise SchedulerError(
                "an episode ended for a sample that has tokens already",
                where=f"sample {end.sample}, attempt {end.attempt}",
                found=f"{len(self.tokens)} tokens",
            )
        self.mask, self.turn, self.state = end.mask, end.turn, end.state
        self.token_reward = end.token_reward
        self.text, self.last_words, self.terms = end.text, end.last_words, end.terms
        if end.failure is None:
            self.score = self.scores[end.role] = end.score
        else:
            self.broken, self.failure = end.failure, end.failure.message


class PayloadStore:
    """Payloads by sample id."""

    def __init__(self) -> None:
        self._payloads: dict[SampleId, Payload] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def __getitem__(self, sample: SampleId) -> Payload:
        try:
            return self._payloads[sample]
        except KeyError:
            raise SchedulerError(f"no payload is stored for sample {sample}") from None

    def get(self, sample: SampleId) -> Payload | None:
        """Returns the payload, or None if the sample is unknown or already taken out."""
        return self._payloads.get(sample)

    def add(self, sample: SampleId, item: PromptItem) -> None:
        """Opens an empty payload."""
        self._payloads[sample] = Payload(item=item)

    def restore(self, payloads: Mapping[SampleId, Payload]) -> None:
        """Adds the payloads of a checkpoint."""
        self._payloads.update(payloads)

    def all(self) -> dict[SampleId, Payload]:
        """Returns every payload that is stored."""
        return dict(self._payloads)

    def take(self, samples: Iterable[SampleId]) -> list[tuple[SampleId, Payload]]:
        """Takes payloads out, in the order asked for."""
        return [(sample, self._payloads.pop(sample)) for sample in samples]

    def discard(self, samples: Iterable[SampleId]) -> None:
        """Forgets payloads; unknown ones are ignored."""
        for sample in samples:
            self._payloads.pop(sample, None)


def sequence_batch(
    payloads: Sequence[tuple[SampleId, Payload]], groups: Sequence[GroupId]
) -> SequenceBatch:
    """Returns the ragged batch of finished payloads, with the turns of episodes.

    Args:
        payloads: N samples, the members of a group adjacent; all of them episodes, or none.
        groups: N ids, one for each sample.
    """
    responses = [payload for _, payload in payloads]
    _require_kept(responses)
    prompts = [payload.item.prompt_ids for payload in responses]
    samples = [sample for sample, _ in payloads]
    batch = ragged_batch(samples, prompts, responses, _numbers(groups))
    return _with_turns(batch, responses)


def _numbers(groups: Sequence[GroupId]) -> Ints:
    """Returns int64 `[N]`, the groups numbered in the order in which they come."""
    numbers: dict[GroupId, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], np.int64)


def _require_kept(payloads: Sequence[Payload]) -> None:
    """Checks that all samples report what truncated sampling kept, or none."""
    if all(payload.kept is None for payload in payloads):
        return
    for payload in payloads:
        if payload.kept is None and payload.num_sampled:
            raise SchedulerError(
                "a sample does not report what its sampler kept, as the others of its batch do",
                found=f"{payload.num_sampled} tokens for prompt {payload.item.group}",
            )


def _with_turns(batch: SequenceBatch, payloads: Sequence[Payload]) -> SequenceBatch:
    """Returns the batch with the holes, turns, rewards and states of its episodes."""
    episodes = [payload for payload in payloads if payload.is_episode]
    if not episodes:
        return batch
    if len(episodes) < len(payloads):
        raise SchedulerError(
            "episodes and plain responses in one batch",
            found=f"{len(episodes)} episodes of {len(payloads)} samples",
        )
    response = batch.response_mask
    mask = np.zeros(len(response), np.bool_)
    turn, state = np.full((2, len(response)), -1, np.int64)
    token_reward = np.zeros(len(response), np.float32)
    for flat, parts in (
        (mask, [payload.mask for payload in episodes]),
        (turn, [payload.turn for payload in episodes]),
        (state, [payload.state for payload in episodes]),
        (token_reward, [payload.token_reward for payload in episodes]),
    ):
        flat[response] = np.concatenate([part for part in parts if part is not None])
    return replace(batch, response_mask=mask, turn=turn, token_reward=token_reward, state=state)


def behaviour_logprobs(
    batch: SequenceBatch, payloads: Sequence[tuple[SampleId, Payload]]
) -> Floats:
    """Returns float32 `[T]`, the rollout's logprobs at response tokens and 0 at other tokens."""
    flat = np.zeros(len(batch.tokens), np.float32)
    if payloads:
        flat[batch.response_mask] = np.concatenate(
            [p.logprobs if p.mask is None else p.logprobs[p.mask] for _, p in payloads]
        )
    return flat


# The sets of samples that a step works on, and the values that its nodes have computed.

Array = npt.NDArray[np.generic]

GroupRows = tuple[GroupId, Sequence[tuple[SampleId, Payload]]]
"""A group and its members in member order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleSet:
    """N samples.

    Attributes:
        origin: The rollout or the source that they come from.
        samples: N ids.
        groups: N ids, the prompt that each one answers; equal ones are adjacent.
        numbers: int64 `[N]`, `groups` as numbers.
        payloads: N; what the driver knows of each.
        made: Their tokens; None for those of the payloads, which are laid out when they are read.
    """

    origin: NodeId
    samples: tuple[SampleId, ...]
    groups: tuple[GroupId, ...]
    numbers: Ints
    payloads: tuple[Payload, ...]
    made: SequenceBatch | None = None

    @classmethod
    def of(
        cls,
        origin: NodeId,
        sequences: SequenceBatch,
        groups: Sequence[GroupId],
        payloads: Sequence[Payload],
    ) -> SampleSet:
        """Makes a set whose tokens are not those of its payloads."""
        return cls(
            origin=origin,
            samples=sequences.samples,
            groups=tuple(groups),
            numbers=sequences.groups,
            payloads=tuple(payloads),
            made=sequences,
        )

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def rows(self) -> tuple[tuple[SampleId, Payload], ...]:
        """The samples with their payloads."""
        return tuple(zip(self.samples, self.payloads, strict=True))

    @cached_property
    def sequences(self) -> SequenceBatch:
        """Their tokens, in the memory of this process."""
        if self.made is not None:
            return self.made
        return replace(sequence_batch(self.rows, self.groups), groups=self.numbers)

    @property
    def has_episodes(self) -> bool:
        """True for whole episodes with an environment."""
        return any(payload.is_episode for payload in self.payloads)

    @property
    def lengths(self) -> Ints:
        """int64 `[N]`, tokens of each sample."""
        if self.made is not None:
            return self.made.lengths
        sizes = [len(p.item.prompt_ids) + len(p.tokens) for p in self.payloads]
        return np.array(sizes, np.int64)

    def stored(self, sampler: Sampler | None) -> StoredRows | None:
        """Returns them by name for a trainer's actor; None where no store has tokens of them."""
        spans = [payload.spans for payload in self.payloads]
        if self.made is not None or not any(spans):
            return None
        _require_kept(self.payloads)
        prompts = {id(p.item.prompt_ids): p.item.prompt_ids for p in self.payloads}
        places = {name: place for place, name in enumerate(prompts)}
        return StoredRows(
            samples=self.samples,
            groups=self.numbers,
            prompts=tuple(prompts.values()),
            prompt_of=tuple(places[id(p.item.prompt_ids)] for p in self.payloads),
            attempts=tuple(
                (AttemptTokens(tokens=p.tokens, logprobs=p.logprobs, kept=p.kept),)
                if p.spans is None
                else p.spans
                for p in self.payloads
            ),
            sampler=sampler,
        )

    def select(self, rows: Ints) -> SampleSet:
        """Returns the samples `rows`, in that order."""
        chosen: list[int] = rows.tolist()
        return SampleSet(
            origin=self.origin,
            samples=tuple(self.samples[i] for i in chosen),
            groups=tuple(self.groups[i] for i in chosen),
            numbers=self.numbers[rows],
            payloads=tuple(self.payloads[i] for i in chosen),
            made=None if self.made is None else self.made.select(chosen),
        )

    @classmethod
    def joined(cls, origin: NodeId, parts: Sequence[SampleSet]) -> SampleSet:
        """Makes one set of several, one behind the other, which `select` is to put in order.

        Samples that answer one prompt have one group, whichever part they come from.
        """
        numbers: dict[GroupId, int] = {}
        groups = [
            np.array([numbers.setdefault(g, len(numbers)) for g in part.groups], np.int64)
            for part in parts
        ]
        return cls.of(
            origin,
            SequenceBatch.joined([part.sequences for part in parts], groups),
            [group for part in parts for group in part.groups],
            [payload for part in parts for payload in part.payloads],
        )


def sample_set(origin: NodeId, groups: Sequence[GroupRows]) -> SampleSet:
    """Makes the set of whole groups, in their order."""
    rows = [row for _, members in groups for row in members]
    names = [group for group, members in groups for _ in members]
    return SampleSet(
        origin=origin,
        samples=tuple(sample for sample, _ in rows),
        groups=tuple(names),
        numbers=_numbers(names),
        payloads=tuple(payload for _, payload in rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term of a sum of losses that is ready for the others.

    Attributes:
        number: Its place in the sum, from 1.
        groups: int64 `[N]`; samples with equal numbers answer the same prompt.
        spec: Its mini-batches are as many as its own samples make.
    """

    node: Node
    number: int
    batch: DataRef[TrainBatch]
    groups: Ints
    spec: UpdateSpec


class StepValues(dict[tuple[NodeId, str], Array]):
    """Arrays by (node, field). What a worker still computes is waited for when it is first read.

    Attributes:
        waited_s: Seconds of waiting so far, by the node that was waited for.
        stored: Where trainers find what a worker has computed, if a store keeps it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._coming: dict[tuple[NodeId, str], Future[Any]] = {}
        self._of_payloads: dict[tuple[NodeId, str], SampleSet] = {}
        self.waited_s: dict[NodeId, float] = {}
        self.stored: dict[tuple[NodeId, str], Stored] = {}

    def expect(self, node: NodeId, field: str, array: Future[Any]) -> None:
        """Adds an array that a worker computes."""
        self._coming[node, field] = array
        if array.done():
            self._arrived((node, field))

    def add_sampled(self, node: NodeId, field: str, samples: SampleSet) -> None:
        """Adds the logprobs of a rollout, which are laid out when they are read here."""
        self._of_payloads[node, field] = samples

    def are_sampled(self, node: NodeId, field: str, samples: SampleSet) -> bool:
        """True for the logprobs of a rollout as the payloads of `samples` have them."""
        return self._of_payloads.get((node, field)) is samples

    def __setitem__(self, key: tuple[NodeId, str], array: Array) -> None:
        self._of_payloads.pop(key, None)
        super().__setitem__(key, array)

    def __getitem__(self, key: tuple[NodeId, str]) -> Array:
        self._make(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._coming or key in self._of_payloads

    def find(self, node: NodeId, field: str) -> Array | None:
        """Returns an array; None where the node has not given it."""
        self._make((node, field))
        return super().get((node, field))

    def _make(self, key: tuple[NodeId, str]) -> None:
        self._arrived(key)
        samples = self._of_payloads.get(key)
        if samples is not None and not super().__contains__(key):
            super().__setitem__(key, behaviour_logprobs(samples.sequences, samples.rows))

    def settle(self) -> None:
        """Waits for everything that workers compute."""
        for key in list(self._coming):
            self._arrived(key)

    def _arrived(self, key: tuple[NodeId, str]) -> None:
        array = self._coming.pop(key, None)
        if array is not None:
            began = time.monotonic()
            with SPANS.waiting_for(array, DRIVER, str(key[0])):
                self[key] = array.result()
            if isinstance(array, Answer) and array.handle is not None:
                self.stored[key] = Stored(array.handle, array.result())
            waited_s = self.waited_s.get(key[0], 0.0) + time.monotonic() - began
            self.waited_s[key[0]] = waited_s


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """A step's samples on their way through the graph.

    Attributes:
        number: Number of the step in its stage, from 1.
        sets: Sets of samples, by the node that made each.
        values: Arrays by (node, field).
        refs: References to sequences that were put, by what `BatchProgram` knows them by.
        updates: The optimizer steps of each update node, in order.
        terms: Terms of a sum of losses, while its last one has not run.
        kl_coefficients: The coefficient that each update node's adaptive penalty had.
        logged: Numbers that the program logs, by name.
        replayed: Numbers of replayed samples, by name.
        skipped: Nodes that had no sample to work on.
        seconds: Wall time by operation.
    """

    number: int = 1
    sets: dict[NodeId, SampleSet] = field(default_factory=dict)
    values: StepValues = field(default_factory=StepValues)
    refs: dict[tuple[int, bool, type], DataRef[SequenceBatch]] = field(default_factory=dict)
    updates: dict[NodeId, list[OptimizerStep]] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)
    kl_coefficients: dict[NodeId, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    replayed: dict[str, float] = field(default_factory=dict)
    skipped: list[NodeId] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def receive_rollout(
    parts: GraphParts, part: RolloutPart, step: StepBatch, groups: Sequence[GroupRows]
) -> None:
    """Puts a rollout's samples into the step, as the set that its batch part reads.

    Args:
        groups: Delivered groups in offer order; with `part.whole` filtered ones too.
    """
    samples = step.sets[part.kept] = sample_set(part.node.id, groups)
    maker = parts.graph.node(part.kept)
    fill_fields(maker, step, samples)
    if maker.op is Op.FILTER:
        step.values[maker.id, SCORE.name] = _scores_read(parts, maker, samples)


def fill_fields(maker: Node, step: StepBatch, samples: SampleSet) -> None:
    """Fills in the fields of samples that a rollout, or a filter of it, passes on.

    Those of tokens, mask and turns are in the set's sequences.
    """
    if maker.output(ROLLOUT_LOGPROBS.name) is not None:
        step.values.add_sampled(maker.id, ROLLOUT_LOGPROBS.name, samples)
    if maker.op is Op.INTERACT:
        step.values[maker.id, SCORE.name] = scores_by(role_of(maker), samples.payloads)


def _scores_read(parts: GraphParts, node: Node, samples: SampleSet) -> Floats:
    """Returns float32 `[N]`: the scores that a streaming filter read."""
    source = score_source(parts.graph, node.id)
    assert source is not None  # the verifier of graphs proves it
    if source.op is Op.MAP:  # the filter judged the groups by its scores
        return np.array([payload.judged[node.id] for payload in samples.payloads], np.float32)
    return scores_by(role_of(source), samples.payloads)


def scores_by(role: RoleName, payloads: Sequence[Payload]) -> Floats:
    """Returns float32 `[N]`: the scores of a reward or an environment."""
    return np.array([payload.scores[role] for payload in payloads], np.float32)
