"""Checks that decoder, trainer and the model itself compute the same numbers.

Architectures differ in more ways than can be listed, so the assumptions are tested on a few tokens:
the trainer's packed rows when it opens, the decoder before the first request, both against the
model's own forward pass of one row. If a layer's computation changes with the length (sliding
windows, chunks of attention, scales that begin at a position), the rows are longer than every such
length up to `max_length`; other models are checked on rows of six tokens. A wide window changes
numbers by less than the rounding of 16-bit types, so masks are also compared, exactly: the mask
that Transformers makes from the config must agree with the windows of the layers, the only
information that the decoder and packed rows have.

Rotations that change for a whole row once it is longer than some length (longrope, dynamic) are
refused by `check_lengths`: the keys of the tokens before would have to be computed again, and rows
computed together would change each other.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flowrl.backend.batch import SequenceBatch
from flowrl.backend.protocols import Head, PolicyContext
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl_backends.torch.attention import ModelDecoder, attention_of
from flowrl_backends.torch.fused import FusedDecoder
from flowrl_backends.torch.packed_forward import (
    packed_logits,
    packed_values,
    supports_packing,
    window_mask,
)
from flowrl_backends.torch.packing import pack
from flowrl_backends.torch.slots import KVSlots

_PAST = 3
"""Tokens by which rows go past a switching length; rows where there is none have twice as many."""
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_CHECKED = "flowrl_checked"
_SWITCHES = re.compile(r"window$|window_size$|chunk_size$|floor_scale$|n_floor$|index_topk$")
"""Names of lengths in configs from which on a layer does something else."""
_OTHERS = (
    "take a model of a supported family, or a backend of its own; `flowrl backends` lists those "
    "that are installed"
)
_BY_ROW = ("longrope", "dynamic")
"""Kinds of rotation that depend on the length of the whole row."""


def check_lengths(config: Any, context: PolicyContext) -> None:
    """Refuses samples longer than the length at which the model's computation changes.

    Raises:
        BackendError: `context.max_length` exceeds that length; with the length.
    """
    text = config.get_text_config()
    limits: dict[int, str] = {}
    for name in ("max_position_embeddings", "max_seq_len"):
        longest = getattr(text, name, None)
        if isinstance(longest, int) and longest > 0:
            limits[longest] = name
    for rope in _rotations(text):
        kind = str(rope.get("rope_type", "default"))
        first = rope.get("original_max_position_embeddings")
        if kind in _BY_ROW and isinstance(first, int):
            limits[first] = f"original_max_position_embeddings of rope_type {kind}"
    limit = min(limits, default=context.max_length)
    if context.max_length > limit:
        raise BackendError(
            "samples would be longer than the torch backend computes with this model",
            where=f"roles.{context.role}.model",
            found=f"up to {context.max_length} tokens; {limits[limit]} is {limit} in "
            f"{context.model / 'config.json'}",
            expected=f"at most {limit} tokens",
            hint="lower data.max_prompt_tokens or train.sampling.max_tokens, or take a model for "
            "longer samples whose rotation is the same at every length, such as llama3 or yarn",
        )


def check_packing(model: PreTrainedModel, head: Head, max_length: int) -> None:
    """Compares the trainer's packed rows with the model's forward passes of each row.

    Raises:
        BackendError: They differ by more than the rounding of the parameter dtype.
    """
    longest = _lengths(model.config, max_length)[-1]
    if longest < 2 or not supports_packing(model):
        return
    short = min(longest, _PAST)
    tokens = _tokens(model, longest + short)
    rows = [tokens[:longest], tokens[longest:]]
    responses = [min(len(row) - 1, 2 * _PAST) for row in rows]
    places = [np.arange(len(row)) >= len(row) - n for row, n in zip(rows, responses, strict=True)]
    batch = SequenceBatch(
        samples=(SampleId("0/0/0"), SampleId("0/1/0")),
        tokens=tokens.cpu().numpy(),
        offsets=np.array([0, longest, longest + short]),
        response_mask=np.concatenate(places),
        groups=np.arange(2),
    )
    packed = pack(batch, np.arange(2))
    what = "the torch trainer cannot compute"
    with torch.no_grad(), _explained(model, what):
        outputs = (
            packed_values(model, packed)[:, None]
            if head == "value"
            else packed_logits(model, packed)
        )
        with attention_of(model, _reference_attention(model)):
            expected = [
                model(input_ids=row[None, :-1], use_cache=False).logits[0, -n:]
                for row, n in zip(rows, responses, strict=True)
            ]
    by_place = np.argsort(packed.source)
    found = outputs[torch.from_numpy(packed.target_row[packed.target_of][by_place])]
    _compare(model, found, torch.cat(expected), what)


def check_decoder(
    model: PreTrainedModel, decoder: ModelDecoder | FusedDecoder, slots: KVSlots
) -> None:
    """Compares the decoder with the model; leaves the slots empty.

    The decoder must be active.

    Raises:
        BackendError: They differ by more than the rounding of the parameter dtype.
    """
    what = "the torch engine cannot decode"
    for longest in _lengths(model.config, slots.max_length):
        if longest < 2:
            continue
        tokens = _tokens(model, longest)
        first = max(1, longest - 2 * _PAST + 1)
        with attention_of(model, _reference_attention(model)):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, first:]
        # Rows of different lengths that grow past the length; then one that is past it at once.
        with _explained(model, what):
            found = list(_decoded(decoder, tokens, first, min(2, slots.num_slots)))
            found += _decoded(decoder, tokens, longest - 1, 1)
        slots.release()
        expected = torch.cat((logits, logits[-1:]))
        _compare(model, torch.cat(found), expected, what)


def _decoded(
    decoder: ModelDecoder | FusedDecoder, tokens: Tensor, first: int, rows: int
) -> Iterator[Tensor]:
    """Returns logits `[1, V]` of each token from `first` on, in a row whose others are prefilled.

    A second row is shorter.
    """
    device = tokens.device
    decoder.slots.reserve(rows, len(tokens))
    lengths = torch.tensor([first, 1][:rows], device=device)
    for row in range(rows):
        target = torch.tensor([row], device=device)
        decoder.prefill(tokens[None, : int(lengths[row])], lengths[row : row + 1], target)
    for length in range(first + 1, len(tokens) + 1):
        equal = bool((lengths == length - 1).all())
        yield decoder.decode(tokens[lengths], lengths, length, equal)[:1]
        lengths = lengths + 1


def _lengths(config: Any, max_length: int) -> list[int]:
    """Returns the lengths of the rows to check, ascending: above each switch, or one short row."""
    text = config.get_text_config()
    points = [
        value
        for name, value in text.to_dict().items()
        if isinstance(value, int) and not isinstance(value, bool) and _SWITCHES.search(name)
    ]
    for rope in _rotations(text):
        # Ministral 3: queries are scaled by their positions in steps of this many.
        if "llama_4_scaling_beta" in rope:
            points.append(int(rope["original_max_position_embeddings"]))
    reached = {min(point + _PAST, max_length) for point in points if 0 < point < max_length}
    return sorted({min(2 * _PAST, max_length), *reached})


def _rotations(text: Any) -> Iterator[Mapping[str, Any]]:
    """Returns a config's settings of rotary embeddings, for all layers or each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)]
    yield from parts or [rope]


def _reference_attention(model: PreTrainedModel) -> str:
    """Returns the attention of Transformers for the reference run of the model."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if capped or not model._supports_sdpa or not model._supports_attention_backend:
        return "eager"
    AttentionInterface.register(_CHECKED, _checked_attention)
    AttentionMaskInterface.register(_CHECKED, sdpa_mask)
    return _CHECKED


def _checked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes Transformers' SDPA, after a check that the mask is that of the layer's window."""
    length = query.shape[2]
    window = window_mask(length, sliding_window, query.device)
    if attention_mask is not None:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        if window is None:
            window = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        same = bool((seen == window).all())
    else:
        same = window is None
    if not same:
        raise BackendError(
            "the torch backend cannot compute this architecture: a layer attends to other tokens "
            "than the window says that it hands to its attention",
            found=f"{type(module).__name__}, window {sliding_window}, row of {length} tokens",
            expected="causal attention, over the window or the whole row",
            hint="use backends of its own for this model; `flowrl backends` lists those installed",
        )
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs
    )[0], None


def _tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Returns some token ids, int64 `[count]`, on the model's device."""
    vocab_size = int(model.config.get_text_config().vocab_size)
    draw = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    return torch.randint(vocab_size, (count,), generator=draw).to(device)


@contextlib.contextmanager
def _explained(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Refuses an architecture whose code fails when it is called differently from Transformers."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as err:
        if isinstance(err, torch.OutOfMemoryError):
            raise
        raise BackendError(
            f"{what} this architecture: its own code fails",
            found=f"{type(model).__name__}, {type(err).__name__}: {str(err)[:200]}",
            hint=_OTHERS,
        ) from err


def _compare(model: PreTrainedModel, found: Tensor, expected: Tensor, what: str) -> None:
    dtype = next(model.parameters()).dtype
    expected = expected.float()
    scale = float(expected.abs().max())
    error = float((found.float() - expected).abs().max())
    tolerance = _TOLERANCE.get(dtype, 2e-1)
    # A difference that is no number fails too.
    if not error <= tolerance * max(scale, 1e-6):
        raise BackendError(
            f"{what} this architecture: its numbers differ from the model's",
            found=f"{type(model).__name__}, relative difference {error / max(scale, 1e-6):.2g}",
            expected=f"at most {tolerance:g}",
            hint=_OTHERS,
        )
