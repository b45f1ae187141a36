"""Runs a loaded model over packed nodes: logits of a language model, values of a value head.

Models are loaded with an attention function of our own, registered as `flowrl`: it is Transformers'
SDPA in every ordinary call, and block-wise attention over packed rows (see `packing`) where the
caller passes `packing=`. Nothing global is switched, so an engine may use the same model object at
any time. Models whose layers mix positions elsewhere are run over padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from flowrl.errors import BackendError
from flowrl_backends.torch.packing import Block, Packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION = "flowrl"
_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
_NOT_PACKED = ("softcap", "position_bias", "s_aux")
"""Arguments of Transformers' attention functions that change the scores."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """`Packed`'s attention part as tensors on the model's device."""

    blocks: tuple[Block, ...]
    gather: torch.Tensor
    owner: torch.Tensor


def supports_packing(model: PreTrainedModel) -> bool:
    """Returns True if the model's layers see other positions through the attention function only.

    Recurrent and linear-attention layers mix positions elsewhere, and capped attention scores need
    Transformers' eager attention; such models are padded instead.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config._attn_implementation == ATTENTION
        and not model._is_stateful
        and kinds <= _PACKABLE_LAYERS
    )


def packed_logits(model: PreTrainedModel, packed: Packed) -> torch.Tensor:
    """Returns logits `[K, vocabulary]` of the predicting nodes, in the model's dtype."""
    if not supports_packing(model):
        return _over_padded_rows(
            lambda ids: model(input_ids=ids, use_cache=False).logits, packed, model.device
        )
    keep = _tensor(packed.predicting, model.device)
    logits: torch.Tensor = model(**_inputs(packed, model.device), logits_to_keep=keep).logits[0]
    return logits


def packed_values(model: PreTrainedModel, packed: Packed) -> torch.Tensor:
    """Returns the value head's output `[K]` at the predicting nodes, with gradient.

    The head is computed in float32 whatever the model's type: values are targets of regression and
    differences of rewards, which 16 bits would round to three digits.
    """
    body = model.base_model
    if supports_packing(model):
        output = body(**_inputs(packed, model.device)).last_hidden_state[0]
        hidden = output.index_select(0, _tensor(packed.predicting, model.device))
    else:
        hidden = _over_padded_rows(
            lambda ids: body(input_ids=ids, use_cache=False).last_hidden_state,
            packed,
            model.device,
        )
    head = value_head(model)
    if isinstance(head, FSDPModule):  # its parameters are there in its own forward alone
        numbers: torch.Tensor = head(hidden.float())[:, 0]
        return numbers
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)[:, 0]


def value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Returns the linear map from hidden states to one number; its name differs by architecture."""
    for name, module in model.named_children():
        if name != model.base_model_prefix and isinstance(module, torch.nn.Linear):
            return module
    raise BackendError("the model has no value head", found=type(model).__name__)


def _inputs(packed: Packed, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of a packed forward pass, for a whole model or its body."""
    layout = _Layout(packed.blocks, _tensor(packed.gather, device), _tensor(packed.owner, device))
    return {
        "input_ids": _tensor(packed.tokens, device)[None],
        "position_ids": _tensor(packed.positions, device)[None],
        # A four-dimensional mask is passed through untouched, so none is built; ours is not read.
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
        "use_cache": False,
        "packing": layout,
    }


def _over_padded_rows(
    run: Callable[[torch.Tensor], torch.Tensor], packed: Packed, device: torch.device
) -> torch.Tensor:
    """`run`'s vectors at the predicting nodes: rows padded on the right, block by block."""
    tokens = _tensor(packed.tokens[packed.gather], device)
    found: list[torch.Tensor] = []
    begin = 0
    for block in packed.blocks:
        end = begin + block.rows * block.length
        # Padding stands on the right, where causal layers of any kind never look.
        vectors = run(tokens[begin:end].view(block.rows, block.length))
        found.append(vectors.reshape(block.rows * block.length, -1))
        begin = end
    return torch.cat(found).index_select(0, _tensor(packed.owner[packed.predicting], device))


def _tensor(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: _Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention over the rows of a packed forward; SDPA if nothing is packed.

    Args:
        query: `[1, heads, N, head]`; `key` and `value` have `[1, kv_heads, N, head]`.

    Returns:
        `[1, N, heads, head]`.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
        return output, None
    extra = [name for name in _NOT_PACKED if kwargs.get(name) is not None]
    if extra:
        raise BackendError(
            f"attention of {type(module).__name__} takes {', '.join(extra)}, which the torch "
            "trainer does not compute",
            hint="use another train backend for this architecture",
        )
    # split, not slices: the gradients of its parts are joined once, not each added to zeros.
    sizes = [block.rows * block.length for block in packing.blocks]
    parts = [torch.split(_slots(x, packing.gather), sizes) for x in (query, key, value)]
    outputs = []
    for block, *slots in zip(packing.blocks, *parts, strict=True):
        rows, length = block.rows, block.length
        # [rows, heads, length, head]
        bq, bk, bv = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in slots)
        mask = window_mask(length, sliding_window, query.device)
        out = torch.nn.functional.scaled_dot_product_attention(
            bq,
            bk,
            bv,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return merged.index_select(0, packing.owner)[None], None


def _slots(x: torch.Tensor, gather: torch.Tensor) -> torch.Tensor:
    """`[S, heads, head]` of `[1, heads, N, head]`: the vector of each slot's node."""
    return x[0].transpose(0, 1).index_select(0, gather)


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Returns the boolean mask of sliding-window attention; None if plain causal is the same."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    gap = place[:, None] - place[None, :]
    return (gap >= 0) & (gap < window)


@cache
def register_attention() -> None:
    """Makes the attention known to Transformers, once a process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
