"""Repeats a rollout's sampler in the trainer, at the response tokens of a packed pass.

The penalty and the forbidden stop tokens follow from the previous tokens, so they are recomputed.
The tokens that top-k, top-p and min-p kept are read from the batch: they depend on the weights that
sampled the token, not on the current ones.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """The transformation of the logits of a packed pass with R response tokens.

    Attributes:
        order: int64 `[R]`, the tokens by ascending predicting node.
        back: int64 `[R]`, the inverse of `order`.
        transform: The sampler's transformation, for the tokens in that order.
    """

    order: torch.Tensor
    back: torch.Tensor
    transform: SamplerTransform


def repeat_sampler(
    batch: SequenceBatch, packed: Packed, vocab_size: int, device: torch.device
) -> Repeat | None:
    """Returns the sampler's transformation for a packed pass; None if there is nothing to repeat.

    Raises:
        BackendError: The batch does not have the kept tokens, or a sampled token is not among them.
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
            early=_tensor(_sampled_before(batch)[source] < sampler.sampling.min_tokens, device),
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
    """Returns the kept tokens at the places `source`, which belong to the samples `row`."""
    if batch.kept is None:
        assert batch.sampler is not None
        raise BackendError(
            "the batch does not have the tokens that its sampler kept",
            found=f"{batch.sampler.sampling}",
            hint="use an engine that reports them (Finished.kept)",
        )
    kept = batch.kept.select(source)
    lacking = kept.lacking(batch.tokens[source])
    if len(lacking):
        place, sample = source[lacking[0]], row[lacking[0]]
        raise BackendError(
            "a sampled token is not among the tokens that its sampler kept",
            where=f"sample {batch.samples[sample]}, token {place - batch.offsets[sample]}",
            found=f"token {batch.tokens[place]}",
            expected=f"one of {kept.counts[lacking[0]]} kept tokens",
        )
    return kept


def _first_places(batch: SequenceBatch, rows: Ints, vocab_size: int) -> npt.NDArray[np.int32]:
    """Returns int32 `[len(rows), V]`, the first position of each token in each sample of `rows`."""
    lengths = batch.lengths[rows]
    number = np.repeat(np.arange(len(rows)), lengths)
    places = batch.places(rows.tolist())
    first = np.full((len(rows), vocab_size), np.iinfo(np.int32).max, np.int32)
    which, index = np.unique(number * vocab_size + batch.tokens[places], return_index=True)
    first.ravel()[which] = (places - batch.offsets[rows][number])[index]
    return first


def _sampled_before(batch: SequenceBatch) -> Ints:
    """Returns int64 `[T]`: at response tokens, the number of previous tokens of the response.

    In episodes, it is the number of previous tokens of the turn.
    """
    sampled = batch.response_mask
    # The sampler counts a whole response, whatever a hole in its mask means to the loss; in
    # episodes, it counts each turn.
    piece = np.repeat(np.arange(len(batch)), batch.lengths)
    if batch.turn is not None:
        piece = piece * (int(batch.turn.max(initial=0)) + 1) + batch.turn
    places = np.flatnonzero(sampled)
    _, first, number = np.unique(piece[places], return_index=True, return_inverse=True)
    before = np.zeros(len(sampled), np.int64)
    before[places] = places - places[first[number]]
    return before


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
