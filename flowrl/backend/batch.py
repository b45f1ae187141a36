"""Payloads between workers: ragged batches of token sequences, in numpy.

A sample is its prompt's tokens followed by its response's. Samples lie end to end without padding;
`offsets` says where each begins. Every per-token array has the same length, so that position `t`
of any of them speaks of token `t`. numpy, not torch: it crosses process borders far cheaper, and
the core imports no torch.

Truncated sampling. A sampler takes the temperature-scaled logits through a repetition penalty and
forbidden stop tokens, which follow from the tokens before, and then keeps a set of tokens (top-k,
top-p, min-p), which follows from the model's weights. A trainer that gives the logprobs of the
sampler's distribution repeats the former from the tokens and takes the latter from the engine: the
set kept at each token stays as it was when the token was sampled, whatever the weights are now
("keep sampling mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Both policies of an importance
ratio then have one support, on which the ratio's expectation is right, and no sampled token ever
has probability 0. A reference is truncated in the same way: only then does an equal policy have
distance 0. A set computed from today's weights would need no memory, but could lose the sampled
token, would change with the weights within a step, and would differ from the engine's by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.ids import SampleId
from flowrl.specs import Sampling

__all__ = [
    "Floats",
    "Ints",
    "KeptTokens",
    "Mask",
    "Sampler",
    "SequenceBatch",
    "TrainBatch",
]


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """N samples of T tokens in all.

    Attributes:
        samples: N ids, in the order that decides the order of gradients.
        tokens: int64 `[T]`, prompt and response of each sample, end to end.
        offsets: int64 `[N + 1]`; sample i is `tokens[offsets[i]:offsets[i + 1]]`.
        response_mask: bool `[T]`, true where the policy produced the token and the loss counts it;
            false in prompts and in what an environment said between turns.
        groups: int64 `[N]`; samples with equal numbers answer the same prompt and are adjacent.
        turn: int64 `[T]`, turn of each response token, counted from 0; -1 at other tokens.
        token_reward: float32 `[T]`, reward given at a token; a turn's lies on its last response
            token.
        state: int64 `[T]`, at each response token a number of the environment's state before the
            turn, equal where states are equal; -1 at other tokens.
        kept: `[T]`, the tokens that the sampler kept at each response token; set where it cut
            anything off and its logprobs are of that.
        sampler: What logprobs of these samples are to repeat; None where they are the model's own.
    """

    samples: tuple[SampleId, ...]
    tokens: Ints
    offsets: Ints
    response_mask: Mask
    groups: Ints
    turn: Ints | None = None
    token_reward: Floats | None = None
    state: Ints | None = None
    kept: KeptTokens | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        n, t = len(self.samples), len(self.tokens)
        if len(self.offsets) != n + 1 or len(self.groups) != n or len(self.response_mask) != t:
            raise ValueError(
                f"{n} samples of {t} tokens, but {len(self.offsets)} offsets, "
                f"{len(self.groups)} groups and {len(self.response_mask)} mask values"
            )
        if n and (self.offsets[0] != 0 or self.offsets[-1] != t):
            raise ValueError("offsets must begin at 0 and end at the number of tokens")
        for name in (*_PER_TOKEN, "kept"):
            values = getattr(self, name)
            if values is not None and len(values) != t:
                raise ValueError(f"{t} tokens, but {len(values)} values of {name}")

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> Ints:
        """int64 `[N]`, tokens of each sample."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> Ints:
        """int64 `[N]`, response tokens (mask true) of each sample."""
        counted: Ints = np.concatenate([[0], np.cumsum(self.response_mask)])
        return counted[self.offsets[1:]] - counted[self.offsets[:-1]]

    def places(self, rows: Sequence[int]) -> Ints:
        """int64, where the tokens of samples `rows` lie, in that order."""
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in rows]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def over_tokens(self, values: npt.NDArray[Any]) -> Floats:
        """float32 `[T]`: values `[N]` of samples at their response tokens, 0 at other tokens."""
        spread = np.repeat(values, self.lengths)
        return np.where(self.response_mask, spread, np.float32(0)).astype(np.float32)

    def select(self, rows: Sequence[int]) -> SequenceBatch:
        """The samples `rows`, in that order."""
        chosen, places = np.asarray(rows, np.int64), self.places(rows)
        return replace(
            self,
            samples=tuple(self.samples[i] for i in rows),
            tokens=self.tokens[places],
            offsets=np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int64),
            response_mask=self.response_mask[places],
            groups=self.groups[chosen],
            kept=None if self.kept is None else self.kept.select(places),
            **_picked(self, _PER_TOKEN, places),
        )

    @classmethod
    def joined(cls, parts: Sequence[SequenceBatch], groups: Sequence[Ints]) -> SequenceBatch:
        """Samples of several batches, one behind the other, which `select` is to put in order.

        Args:
            parts: The batches, of which no logprobs repeat a sampler.
            groups: The groups that the samples of each part have in the joined batch.
        """
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        ends = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        optional: dict[str, Any] = {}
        for name, absent in _PER_TOKEN.items():
            if any(getattr(part, name) is not None for part in parts):
                optional[name] = np.concatenate(
                    [
                        np.full_like(part.tokens, absent, np.asarray(absent).dtype)
                        if (values := getattr(part, name)) is None
                        else values
                        for part in parts
                    ]
                )
        return cls(
            samples=tuple(sample for part in parts for sample in part.samples),
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=np.concatenate([[0], *ends]).astype(np.int64),
            response_mask=np.concatenate([part.response_mask for part in parts]),
            groups=np.concatenate(groups),
            **optional,
        )


_PER_TOKEN = {"turn": np.int64(-1), "token_reward": np.float32(0), "state": np.int64(-1)}
"""Optional arrays of `SequenceBatch`, and their values at tokens of no turn."""


def _picked(batch: object, names: Iterable[str], places: Ints) -> dict[str, Any]:
    """The arrays of those names that the batch has, at `places`."""
    found = {name: getattr(batch, name) for name in names}
    return {name: values[places] for name, values in found.items() if values is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The input of an update; per-token arrays are float32 `[T]`, zero off the response mask.

    Attributes:
        sequences: The samples.
        behaviour_logprobs: Of the policy that produced the tokens, at the rollout's temperature.
        old_logprobs: Of the trained policy at the start of the step, at the same temperature.
        reference_logprobs: Of the reference policy, at the same temperature.
        reference_distributions: float32 `[R, V]`, the reference's logprobs of the whole vocabulary
            at each of the R response tokens, in order; what `kl.full` reads.
        advantages: One value a token; a per-sample advantage is repeated over its response.
        returns: A critic's targets.
        old_values: A critic's values at the start of the step.
        sampled: bool `[N]`, false for samples that no policy generated, whose behaviour logprobs
            are what the program says in their place; None if all of them were generated.
        preferred: bool `[N]`; samples come in adjacent pairs, and of each pair the preferred one,
            which comes first, is true.
        extra: Fields by name that the program computed for a loss of its own, `[T]` each.
    """

    sequences: SequenceBatch
    behaviour_logprobs: Floats | None = None
    old_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    reference_distributions: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    old_values: Floats | None = None
    sampled: Mask | None = None
    preferred: Mask | None = None
    extra: Mapping[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sequences)

    def select(self, rows: Sequence[int]) -> TrainBatch:
        """The batch of the samples `rows`, in that order."""
        places = self.sequences.places(rows)
        distributions = self.reference_distributions
        if distributions is not None:
            mask = self.sequences.response_mask
            distributions = distributions[(np.cumsum(mask) - 1)[places[mask[places]]]]
        return replace(
            self,
            sequences=self.sequences.select(rows),
            reference_distributions=distributions,
            sampled=None if self.sampled is None else self.sampled[np.asarray(rows, int)],
            preferred=None if self.preferred is None else self.preferred[np.asarray(rows, int)],
            extra={name: values[places] for name, values in self.extra.items()},
            **_picked(self, _FIELDS, places),
        )


_FIELDS = (
    "behaviour_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "advantages",
    "returns",
    "old_values",
)
"""Optional arrays of `TrainBatch` with a value a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The transformation after which a batch's tokens were sampled.

    Attributes:
        sampling: Its options; the temperature is not among those that are read here.
        stop_token_ids: What `min_tokens` forbids.
    """

    sampling: Sampling
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The tokens that top-k, top-p and min-p left, at each of T places of a sequence.

    Memory is 4 bytes for each kept token: some hundred bytes a place at the usual top-p.

    Attributes:
        ids: int32 `[sum(counts)]`, place by place.
        counts: int32 `[T]`, how many were kept; 0 where the whole vocabulary was, and where nothing
            was sampled.
    """

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]

    @classmethod
    def everything(cls, places: int) -> KeptTokens:
        """Nothing was cut off at any of them."""
        return cls(ids=np.zeros(0, np.int32), counts=np.zeros(places, np.int32))

    @classmethod
    def of_places(cls, places: Sequence[npt.NDArray[np.int32]]) -> KeptTokens:
        """From the ids at each place; none of them means all."""
        return cls(
            ids=np.concatenate([np.zeros(0, np.int32), *places]),
            counts=np.array([len(ids) for ids in places], np.int32),
        )

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Places of all parts, one part behind the other."""
        empty = np.zeros(0, np.int32)
        return cls(
            ids=np.concatenate([empty, *(part.ids for part in parts)]),
            counts=np.concatenate([empty, *(part.counts for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 `[T + 1]`; the ids of place t are `ids[offsets[t]:offsets[t + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def select(self, places: npt.NDArray[np.int64]) -> KeptTokens:
        """The sets at `places`, in that order."""
        counts, starts = self.counts[places], self.offsets[places]
        begins = np.cumsum(counts, dtype=np.int64) - counts
        within = np.arange(int(counts.sum())) - np.repeat(begins, counts)
        return KeptTokens(ids=self.ids[np.repeat(starts, counts) + within], counts=counts)

    def lacking(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Places whose set does not hold the token of `tokens` `[T]` that was sampled there."""
        place = np.repeat(np.arange(len(self.counts)), self.counts)
        found = np.zeros(len(self.counts), np.bool_)
        found[place[self.ids == tokens[place]]] = True
        return np.flatnonzero(~found & (self.counts > 0))
