"""A check of the decoder against the model itself, before the first request.

Architectures differ in more ways than can be listed, so what is relied on is tested: logits of a
few tokens, prefilled and decoded through the slots in rows of different lengths, must equal those
of the model's own forward pass without a cache.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from flowrl.errors import BackendError
from flowrl_backends.torch.attention import ModelDecoder, attention_of
from flowrl_backends.torch.fused import FusedDecoder
from flowrl_backends.torch.slots import KVSlots

__all__ = ["check_decoder"]

_TOKENS = 5
"""Of the row that both compute."""
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def check_decoder(
    model: PreTrainedModel, decoder: ModelDecoder | FusedDecoder, slots: KVSlots
) -> None:
    """Compares the decoder with the model; leaves the slots empty.

    The decoder must be active.

    Raises:
        BackendError: they differ by more than the parameter type explains.
    """
    parameter = next(model.parameters())
    vocab_size = int(model.config.vocab_size)
    num = min(_TOKENS, slots.max_length)
    if num < 2:
        return
    tokens = (torch.arange(num, device=parameter.device) * 7 + 1) % vocab_size
    with attention_of(model, "eager"):
        expected = model(input_ids=tokens[None], use_cache=False).logits[0, -1].float()
    rows = min(2, slots.num_slots)
    slots.reserve(rows, num)
    lengths = torch.tensor([num - 1, 1][:rows], device=parameter.device)
    decoder.prefill(
        tokens[: num - 1].repeat(rows, 1), lengths, torch.arange(rows, device=parameter.device)
    )
    equal = bool((lengths == num - 1).all())
    found = decoder.decode(tokens[lengths], lengths, num, equal)[0]
    slots.release()
    scale = float(expected.abs().max())
    error = float((found - expected).abs().max())
    tolerance = _TOLERANCE.get(parameter.dtype, 2e-1)
    # A difference that is no number fails too.
    if not error <= tolerance * max(scale, 1e-6):
        raise BackendError(
            "the torch engine cannot decode this architecture: its logits differ from the model's",
            found=f"{type(model).__name__}, relative difference {error / max(scale, 1e-6):.2g}",
            expected=f"at most {tolerance:g}",
            hint="take a model of a supported family, or a backend of its own; `flowrl backends` "
            "lists those that are installed",
        )
