"""The model's outputs that a loss reads: logprobs, values or scores in a packed pass.

A score is the value head's number at a token: the last one of a sample, or each. It is computed as
the value before the token that follows, of which `closed` adds one to every sample, so scores share
prefixes like everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from flowrl.algo.logprobs import (
    chosen_logprobs,
    sampler_logits,
    sampler_logprobs,
    squared_probabilities,
)
from flowrl.backend.batch import Floats, Ints, SequenceBatch
from flowrl.specs.loss import Prediction
from flowrl_backends.torch.packed_forward import packed_logits, packed_values
from flowrl_backends.torch.packing import Packed, micro_batches, pack
from flowrl_backends.torch.ranks import Ranks
from flowrl_backends.torch.repeat import Repeat, repeat_sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FORWARD_ROWS, _FORWARD_TOKENS = 128, 4096
"""Bounds of a forward pass without gradient; they bound the memory of its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predictions of a pass for its R response tokens, with gradient.

    Attributes:
        values: `[R]`, the logprobs or values that the loss reads.
        node: int64 `[R]`, the predicting node of each token.
        entropy: `[R]`, the entropy of each token's distribution; None for a value head.
        logits: `[K, V]`, the logits of the predicting nodes; None for a value head.
        repeat: The sampler's transformation of the logits, besides the temperature.
    """

    values: torch.Tensor
    node: torch.Tensor
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    repeat: Repeat | None = None


def predict(
    model: PreTrainedModel,
    batch: SequenceBatch,
    packed: Packed,
    kind: Prediction,
    temperature: float,
) -> Predicted:
    """Runs the model over a packed pass.

    Args:
        batch: The batch from which the pass was packed.
        kind: `logprobs`, or the output of a value head.
        temperature: The divisor of the logits; a value head ignores it.
    """
    row, token, target = (
        torch.from_numpy(index).to(model.device)
        for index in (packed.target_row, packed.target_token, packed.target_of)
    )
    node = row[target]
    if kind != "logprobs":
        return Predicted(values=packed_values(model, packed)[node], node=node)
    logits = packed_logits(model, packed)
    repeat = repeat_sampler(batch, packed, logits.shape[1], model.device)
    if repeat is None:
        distinct, entropy = chosen_logprobs(logits, row, token, temperature)
        values, entropy = distinct.index_select(0, target), entropy[node]
    else:
        order, back = repeat.order, repeat.back
        values, entropy = sampler_logprobs(
            logits, node[order], token[target[order]], temperature, repeat.transform
        )
        values, entropy = values[back], entropy[back]
    return Predicted(values=values, node=node, entropy=entropy, logits=logits, repeat=repeat)


def _passes(batch: SequenceBatch, rows: Ints, ranks: Ranks) -> Iterator[tuple[Packed, bool]]:
    """Yields the passes without gradient of this rank, and False where one is empty."""
    own = ranks.part(batch, rows)
    parts = micro_batches(batch, own, _FORWARD_ROWS, max_tokens=_FORWARD_TOKENS)
    for part, counts in ranks.passes(parts, rows):
        yield pack(batch, part), counts


def predict_all(
    model: PreTrainedModel,
    batch: SequenceBatch,
    rows: Ints,
    kind: Prediction,
    temperature: float = 1.0,
    *,
    ranks: Ranks,
) -> Floats:
    """Returns float32 `[T]`, the predictions at response tokens of `rows`, else 0; no gradient."""
    result = np.zeros(len(batch.tokens), np.float32)
    with torch.no_grad():
        for packed, counts in _passes(batch, rows, ranks):
            predicted = predict(model, batch, packed, kind, temperature)
            if counts:
                result[packed.source] = predicted.values.float().cpu().numpy()
            del predicted  # its logits are not to be in memory beside those of the next pass
    return ranks.summed(result)


def distributions(
    model: PreTrainedModel, batch: SequenceBatch, temperature: float, *, ranks: Ranks
) -> Floats:
    """Returns float32 `[R, V]`, logprobs of the whole vocabulary at each response token, in order.

    They are those of logits / temperature, or of their transformation by the batch's sampler.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    order = np.cumsum(batch.response_mask) - 1
    result = np.zeros((int(batch.response_mask.sum()), int(model.config.vocab_size)), np.float32)
    rows = np.flatnonzero(batch.response_lengths)
    with torch.no_grad():
        for packed, counts in _passes(batch, rows, ranks):
            logits = packed_logits(model, packed)
            node = packed.target_row[packed.target_of]
            repeat = repeat_sampler(batch, packed, logits.shape[1], model.device)
            if repeat is None:
                found = (logits.float() * scale).log_softmax(-1).cpu().numpy()[node]
            else:
                ascending = torch.from_numpy(node).to(model.device)[repeat.order]
                left = sampler_logits(logits, ascending, temperature, repeat.transform)
                found = left.log_softmax(-1)[repeat.back].cpu().numpy()
            if counts:
                result[order[packed.source]] = found
            del logits
    return ranks.summed(result)


def squares(
    model: PreTrainedModel, batch: SequenceBatch, temperature: float, *, ranks: Ranks
) -> Floats:
    """Returns float32 `[T]`, the sum of squared probabilities at each response token, else 0.

    They are those of softmax(logits / temperature), or of its transformation by the batch's
    sampler.
    """
    result = np.zeros(len(batch.tokens), np.float32)
    rows = np.flatnonzero(batch.response_lengths)
    with torch.no_grad():
        for packed, counts in _passes(batch, rows, ranks):
            logits = packed_logits(model, packed)
            node = torch.from_numpy(packed.target_row[packed.target_of]).to(model.device)
            repeat = repeat_sampler(batch, packed, logits.shape[1], model.device)
            if repeat is None:
                found = squared_probabilities(logits, temperature)[node]
            else:
                ascending = node[repeat.order]
                found = squared_probabilities(logits, temperature, ascending, repeat.transform)
                found = found[repeat.back]
            if counts:
                result[packed.source] = found.cpu().numpy()
            del logits
    return ranks.summed(result)


def closed(batch: SequenceBatch, places: Ints | None = None) -> SequenceBatch:
    """Appends one token to every sample; the tokens that follow `places` alone count as responses.

    The state after a token predicts the one that follows it. The added token's id has no effect, as
    it is no input.

    Args:
        places: int64, places in the concatenated tokens; those of the samples' last tokens by
            default.
    """
    ends = batch.offsets[1:]
    read = ends - 1 if places is None else places
    follows = np.zeros(len(batch.tokens) + len(ends), np.bool_)
    follows[read + np.searchsorted(ends, read, side="right") + 1] = True
    return replace(
        batch,
        tokens=np.insert(batch.tokens, ends, 0),
        offsets=batch.offsets + np.arange(len(batch.offsets)),
        response_mask=follows,
        turn=None,
        token_reward=None,
        state=None,
        kept=None,
        sampler=None,
    )
