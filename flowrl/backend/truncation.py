"""What stands between a model's distribution and the one that its tokens were drawn from.

A sampler takes the temperature-scaled logits through a repetition penalty and forbidden stop
tokens, which follow from the tokens before, and then keeps a set of tokens (top-k, top-p, min-p),
which follows from the model's weights. A trainer that is to give the logprobs of the sampler's
distribution repeats the former from the tokens, and takes the latter from the engine: the set that
was kept at each token stays as it was when the token was drawn, whatever the weights are now
("keep sampling mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Both policies of an importance
ratio then have one support, on which the ratio's expectation is right, and no drawn token ever has
probability 0. A reference is truncated alike: only then is an equal policy at no distance.

A set taken anew from today's weights would need no memory, but could lose the drawn token, would
jump with the weights in the middle of a step, and differ from the engine's by rounding at its edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowrl.specs import Sampling

__all__ = ["KeptTokens", "Sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The transformation that a batch's tokens were drawn behind.

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
            was drawn.
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
        """Places whose set does not hold the token of `tokens` `[T]` that was drawn there."""
        place = np.repeat(np.arange(len(self.counts)), self.counts)
        found = np.zeros(len(self.counts), np.bool_)
        found[place[self.ids == tokens[place]]] = True
        return np.flatnonzero(~found & (self.counts > 0))
