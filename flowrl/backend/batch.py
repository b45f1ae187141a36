"""Payloads between workers: ragged batches of token sequences, in numpy.

A sample is its prompt's tokens followed by its response's. Samples lie end to end without padding;
`offsets` says where each begins. Every per-token array has the same length, so that position `t`
of any of them speaks of token `t`. numpy, not torch: it crosses process borders far cheaper, and
the core imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flowrl.ids import SampleId

__all__ = ["Floats", "Ints", "Mask", "SequenceBatch", "TrainBatch"]

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
        response_mask: bool `[T]`, true where the policy produced the token and the loss counts it.
        groups: int64 `[N]`; samples with equal numbers answer the same prompt and are adjacent.
    """

    samples: tuple[SampleId, ...]
    tokens: Ints
    offsets: Ints
    response_mask: Mask
    groups: Ints

    def __post_init__(self) -> None:
        n, t = len(self.samples), len(self.tokens)
        if len(self.offsets) != n + 1 or len(self.groups) != n or len(self.response_mask) != t:
            raise ValueError(
                f"{n} samples of {t} tokens, but {len(self.offsets)} offsets, "
                f"{len(self.groups)} groups and {len(self.response_mask)} mask values"
            )
        if n and (self.offsets[0] != 0 or self.offsets[-1] != t):
            raise ValueError("offsets must begin at 0 and end at the number of tokens")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What an update reads; every per-token array is float32 `[T]` and zero off the response mask.

    Attributes:
        sequences: The samples.
        behaviour_logprobs: Of the policy that produced the tokens, at the rollout's temperature.
        old_logprobs: Of the trained policy at the start of the step, at the same temperature.
        reference_logprobs: Of the reference policy, at the same temperature.
        advantages: One value a token; a per-sample advantage is repeated over its response.
    """

    sequences: SequenceBatch
    behaviour_logprobs: Floats | None = None
    old_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    advantages: Floats | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def select(self, rows: Sequence[int]) -> TrainBatch:
        """The batch of the samples `rows`, in that order."""
        seq = self.sequences
        spans = [np.arange(seq.offsets[i], seq.offsets[i + 1]) for i in rows]
        flat = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        lengths = [len(span) for span in spans]

        def pick(values: Floats | None) -> Floats | None:
            return None if values is None else values[flat]

        return replace(
            self,
            sequences=SequenceBatch(
                samples=tuple(seq.samples[i] for i in rows),
                tokens=seq.tokens[flat],
                offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                response_mask=seq.response_mask[flat],
                groups=seq.groups[list(rows)],
            ),
            behaviour_logprobs=pick(self.behaviour_logprobs),
            old_logprobs=pick(self.old_logprobs),
            reference_logprobs=pick(self.reference_logprobs),
            advantages=pick(self.advantages),
        )
