"""A rollout's sampler, as the trainer repeats it at the response tokens of a packed pass.

The penalty and the forbidden stop tokens follow from the tokens before, so that they are found
anew. Which tokens top-k, top-p and min-p left is read from the batch: it was decided by the weights
that drew the token, not by those of today.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from flowrl.algo.logprobs import SamplerTransform
from flowrl.backend.batch import Ints, KeptTokens, SequenceBatch
from flowrl.errors import BackendError
from flowrl_backends.torch.packing import Packed

__all__ = ["Repeat", "repeat_sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What to do to the logits of a packed pass with R response tokens.

    Attributes:
        order: int64 `[R]`, the tokens by ascending predicting node.
        back: int64 `[R]`, its inverse.
        transform: Of the tokens in that order.
    """

    order: torch.Tensor
    back: torch.Tensor
    transform: SamplerTransform


def repeat_sampler(
    batch: SequenceBatch, packed: Packed, vocab_size: int, device: torch.device
) -> Repeat | None:
    """How the tokens of a packed pass were drawn; None where nothing is to be repeated.

    Raises:
        BackendError: the batch does not say which tokens were left to draw from, or says that a
            drawn token was not among them.
    """
    sampler = batch.sampler
    if sampler is None or not sampler.sampling.truncates:
        return None
    order = np.argsort(packed.target_row[packed.target_of], kind="stable")
    source, row = packed.source[order], packed.sample[order]
    transform = SamplerTransform()
    if sampler.sampling.repetition_penalty != 1.0:
        rows, sample = np.unique(row, return_inverse=True)
        transform = replace(
            transform,
            penalty=sampler.sampling.repetition_penalty,
            first=_tensor(_first_places(batch, rows, vocab_size), device),
            sample=_tensor(sample.astype(np.int64), device),
            place=_tensor(source - batch.offsets[row], device),
        )
    if sampler.sampling.min_tokens > 0 and sampler.stop_token_ids:
        transform = replace(
            transform,
            stops=torch.tensor(sampler.stop_token_ids, device=device),
            early=_tensor(_drawn_before(batch)[source] < sampler.sampling.min_tokens, device),
        )
    if sampler.sampling.cuts:
        kept = _kept(batch, source, row)
        transform = replace(
            transform,
            kept_ids=_tensor(kept.ids.astype(np.int64), device),
            kept_counts=_tensor(kept.counts.astype(np.int64), device),
            kept_offsets=tuple(kept.offsets.tolist()),
        )
    return Repeat(
        order=_tensor(order, device), back=_tensor(np.argsort(order), device), transform=transform
    )


def _kept(batch: SequenceBatch, source: Ints, row: Ints) -> KeptTokens:
    """What was left to draw from at the places `source`, which belong to the samples `row`."""
    if batch.kept is None:
        assert batch.sampler is not None
        raise BackendError(
            "the batch does not say which tokens its sampler left to draw from",
            found=f"{batch.sampler.sampling}",
            hint="take samples of an engine that reports them (Finished.kept)",
        )
    kept = batch.kept.select(source)
    lacking = kept.lacking(batch.tokens[source])
    if len(lacking):
        place, sample = source[lacking[0]], row[lacking[0]]
        raise BackendError(
            "a token is not among those that it was drawn from",
            where=f"sample {batch.samples[sample]}, token {place - batch.offsets[sample]}",
            found=f"token {batch.tokens[place]}",
            expected=f"one of {kept.counts[lacking[0]]} kept tokens",
        )
    return kept


def _first_places(batch: SequenceBatch, rows: Ints, vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 `[len(rows), V]`, where each token first stands in each sample of `rows`."""
    lengths = batch.lengths[rows]
    number = np.repeat(np.arange(len(rows)), lengths)
    places = batch.places(rows.tolist())
    first = np.full((len(rows), vocab_size), np.iinfo(np.int32).max, np.int32)
    which, index = np.unique(number * vocab_size + batch.tokens[places], return_index=True)
    first.ravel()[which] = (places - batch.offsets[rows][number])[index]
    return first


def _drawn_before(batch: SequenceBatch) -> Ints:
    """int64 `[T]`: at response tokens, how many tokens the response, or the turn, had before."""
    drawn = batch.response_mask
    # A response is of one piece for the sampler, whatever a hole in its mask may mean to the loss;
    # of episodes, each turn is.
    piece = np.repeat(np.arange(len(batch)), batch.lengths)
    if batch.turn is not None:
        piece = piece * (int(batch.turn.max(initial=0)) + 1) + batch.turn
    places = np.flatnonzero(drawn)
    _, first, number = np.unique(piece[places], return_index=True, return_inverse=True)
    before = np.zeros(len(drawn), np.int64)
    before[places] = places - places[first[number]]
    return before


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
