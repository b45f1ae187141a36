"""Tokens that stay in a store of the cluster, from the engine that made them to the trainer.

    an engine's report -> AttemptTokens, put once -> Ray's store
    the run: lengths, and a StoredSpan for each attempt; its own node's store is mapped to decode
    a trainer's actor: StoredRows -> SequenceBatch and behaviour logprobs, in the store again

An attempt that came with its message, because the report was small or its engine is in this
machine's processes, has no span; its arrays go into the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from flowrl.backend.batch import Floats, Ints, KeptTokens, Sampler, SequenceBatch
from flowrl.backend.protocols import Finished
from flowrl.ids import SampleId

_NO_INTS: Ints = np.zeros(0, np.int64)
_NO_FLOATS: Floats = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTokens:
    """Response tokens of one attempt, or of several, end to end.

    Attributes:
        tokens: int64 `[T]`.
        logprobs: float32 `[T]`.
        kept: `[T]`, what truncated sampling kept; None if no attempt reports it.
    """

    tokens: Ints
    logprobs: Floats
    kept: KeptTokens | None = None

    @classmethod
    def joined(cls, parts: Sequence[AttemptTokens | Finished]) -> AttemptTokens:
        """Returns the tokens of all parts; one that reports nothing kept everything."""
        kept = None
        if any(part.kept is not None for part in parts):
            kept = KeptTokens.joined(
                [part.kept or KeptTokens.everything(len(part.tokens)) for part in parts]
            )
        return cls(
            tokens=np.concatenate([_NO_INTS, *(part.tokens for part in parts)]),
            logprobs=np.concatenate([_NO_FLOATS, *(part.logprobs for part in parts)]),
            kept=kept,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        kept = 0 if self.kept is None else self.kept.ids.nbytes + self.kept.counts.nbytes
        return self.tokens.nbytes + self.logprobs.nbytes + kept

    def parts(self, sizes: Sequence[int]) -> Iterator[tuple[AttemptTokens, tuple[slice, slice]]]:
        """Yields parts of so many tokens, with their places for `part`; nothing is copied."""
        begin = first = 0
        for size in sizes:
            counts = None if self.kept is None else self.kept.counts[begin : begin + size]
            last = first + (0 if counts is None else int(counts.sum()))
            places = slice(begin, begin + size), slice(first, last)
            yield self.part(*places), places
            begin, first = begin + size, last

    def part(self, tokens: slice, ids: slice | None) -> AttemptTokens:
        """Returns some of the tokens, with the kept `ids` if they report any; nothing is copied."""
        kept = None
        if ids is not None and self.kept is not None:
            kept = KeptTokens(ids=self.kept.ids[ids], counts=self.kept.counts[tokens])
        return AttemptTokens(tokens=self.tokens[tokens], logprobs=self.logprobs[tokens], kept=kept)

    def copy(self) -> AttemptTokens:
        """Returns a copy with memory of its own."""
        kept = self.kept
        if kept is not None:
            kept = KeptTokens(ids=kept.ids.copy(), counts=kept.counts.copy())
        return AttemptTokens(tokens=self.tokens.copy(), logprobs=self.logprobs.copy(), kept=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpan:
    """Where the tokens of an attempt are in a store.

    Attributes:
        handle: Of the `AttemptTokens` of a report.
        tokens: Their places there.
        ids: The places of what truncated sampling kept; None if the attempt does not report it.
    """

    handle: object
    tokens: slice
    ids: slice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEnd(Finished):
    """The end of an attempt whose arrays are mapped from a store.

    Attributes:
        span: Where other workers find them.
    """

    span: StoredSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Samples by name, of which a trainer's actor makes a batch.

    Attributes:
        samples: N ids.
        groups: int64 `[N]`, as in `SequenceBatch`.
        prompts: Prompts, each once.
        prompt_of: N places in `prompts`.
        attempts: The attempts of each of the N samples, in order.
        sampler: As in `SequenceBatch`.
    """

    samples: tuple[SampleId, ...]
    groups: Ints
    prompts: tuple[Ints, ...]
    prompt_of: tuple[int, ...]
    attempts: tuple[tuple[StoredSpan | AttemptTokens, ...], ...]
    sampler: Sampler | None

    def batch(self, get: Callable[[object], object]) -> tuple[SequenceBatch, Floats]:
        """Returns the samples, and float32 `[T]`: behaviour logprobs, 0 off the response mask.

        Args:
            get: Returns what a handle names.
        """
        reports: dict[Any, AttemptTokens] = {}

        def found(attempt: StoredSpan | AttemptTokens) -> AttemptTokens:
            if isinstance(attempt, AttemptTokens):
                return attempt
            if attempt.handle not in reports:
                reports[attempt.handle] = cast(AttemptTokens, get(attempt.handle))
            return reports[attempt.handle].part(attempt.tokens, attempt.ids)

        responses = [
            found(attempts[0])
            if len(attempts) == 1
            else AttemptTokens.joined([found(attempt) for attempt in attempts])
            for attempts in self.attempts
        ]
        prompts = [self.prompts[place] for place in self.prompt_of]
        batch = ragged_batch(self.samples, prompts, responses, self.groups)
        logprobs = np.zeros(len(batch.tokens), np.float32)
        logprobs[batch.response_mask] = np.concatenate([r.logprobs for r in responses])
        return replace(batch, sampler=self.sampler), logprobs


class _Response(Protocol):
    @property
    def tokens(self) -> Ints: ...
    @property
    def kept(self) -> KeptTokens | None: ...


def ragged_batch(
    samples: Sequence[SampleId],
    prompts: Sequence[Ints],
    responses: Sequence[_Response],
    groups: Ints,
) -> SequenceBatch:
    """Returns the ragged batch of N samples, of whose responses the policy produced all tokens."""
    lengths = np.empty(2 * len(samples), np.int64)
    lengths[::2] = [len(prompt) for prompt in prompts]
    lengths[1::2] = [len(response.tokens) for response in responses]
    rows = list(zip(prompts, responses, strict=True))
    kept = None
    if any(response.kept is not None for response in responses):
        parts: list[KeptTokens] = []
        for prompt, response in rows:
            parts.append(KeptTokens.everything(len(prompt)))
            parts.append(response.kept or KeptTokens.everything(len(response.tokens)))
        kept = KeptTokens.joined(parts)
    pieces = [piece for prompt, response in rows for piece in (prompt, response.tokens)]
    return SequenceBatch(
        samples=tuple(samples),
        tokens=np.concatenate([_NO_INTS, *pieces]),
        offsets=np.concatenate([[0], np.cumsum(lengths)[1::2]]).astype(np.int64),
        response_mask=np.repeat(np.tile([False, True], len(samples)), lengths),
        groups=groups,
        kept=kept,
    )
