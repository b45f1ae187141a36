"""Loads a causal language model for training and generation, and runs it over packed nodes.

Models come from Transformers, from a local folder, in safetensors, and without code from the
folder. They are loaded with an attention function of our own, registered as `flowrl`: it is
Transformers' SDPA in every ordinary call, and block-wise attention over packed rows (see `packing`)
where the caller passes `packing=`. Nothing global is switched, so an engine may use the same model
object at any time.

Transformers takes seconds to import, so it is imported when the first model is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from flowrl.backend.protocols import PolicyContext
from flowrl.errors import BackendError
from flowrl_backends.torch.packing import Block, Packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "DTYPES",
    "load_model",
    "move_tensor",
    "packed_logits",
    "quiet_transformers",
    "supports_packing",
    "tokenizer_files",
]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_ATTENTION = "flowrl"
_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
_NOT_PACKED = ("softcap", "position_bias", "s_aux")
"""Arguments of Transformers' attention functions that change the scores."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class _Layout:
    """`Packed`'s attention part as tensors on the model's device."""

    blocks: tuple[Block, ...]
    gather: torch.Tensor
    owner: torch.Tensor


def load_model(context: PolicyContext) -> PreTrainedModel:
    """The model of `context`, in eval mode (no dropout), on its device and in its type.

    With `context.fresh` the weights are drawn from `context.seed`, in float32 on the CPU, whatever
    the device, so that every device begins from the same numbers. The process's random state is
    left as it was.

    Raises:
        BackendError: folder, config or weights are missing or unreadable, the device is not there,
            or the architecture needs code that Transformers does not bring.
    """
    _check_folder(context)
    if context.dtype not in DTYPES:
        raise BackendError(
            "unknown parameter type",
            where=f"roles.{context.role}",
            found=context.dtype,
            expected=" ".join(DTYPES),
        )
    _register_attention()
    with _explained(context), quiet_transformers():
        model = _fresh(context) if context.fresh else _pretrained(context)
        model.eval()
        model.requires_grad_(context.trainable)
        for tensor in (*model.parameters(), *model.buffers()):
            move_tensor(tensor, torch.device(context.device))
    return model


def move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """Moves a parameter or buffer to `device`; the Python object stays the same.

    `Module.to` keeps the object only where torch takes the two devices' tensors for compatible, as
    it does CPU's and CUDA's. Elsewhere (NPU) it makes new parameters: tied weights come apart, and
    an optimizer or engine that holds the old ones goes on with those.
    """
    moved = tensor.detach().to(device)
    if moved.device == tensor.device:
        return
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    elif isinstance(tensor, torch.nn.Parameter):
        torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
            tensor, torch.nn.Parameter(moved, tensor.requires_grad)
        )
    else:
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a Hugging Face folder; no code, no weights."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the model's layers see other positions through the attention function only.

    Recurrent and linear-attention layers mix positions elsewhere, and capped attention scores need
    Transformers' eager attention; such models are padded instead.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config._attn_implementation == _ATTENTION
        and not model._is_stateful
        and kinds <= _PACKABLE_LAYERS
    )


def packed_logits(model: PreTrainedModel, packed: Packed) -> torch.Tensor:
    """Logits `[K, vocabulary]` of the predicting nodes, in the model's type, with gradient."""
    device = model.device
    if not supports_packing(model):
        return _padded_logits(model, packed, device)
    layout = _Layout(packed.blocks, _tensor(packed.gather, device), _tensor(packed.owner, device))
    # A four-dimensional mask is passed through untouched, so none is built; ours is not read.
    no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    output = model(
        input_ids=_tensor(packed.tokens, device)[None],
        position_ids=_tensor(packed.positions, device)[None],
        attention_mask=no_mask,
        logits_to_keep=_tensor(packed.predicting, device),
        use_cache=False,
        packing=layout,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _padded_logits(model: PreTrainedModel, packed: Packed, device: torch.device) -> torch.Tensor:
    """The same for a model that cannot be packed: rows padded on the right, block by block."""
    tokens = _tensor(packed.tokens[packed.gather], device)
    hidden: list[torch.Tensor] = []
    begin = 0
    for block in packed.blocks:
        end = begin + block.rows * block.length
        ids = tokens[begin:end].view(block.rows, block.length)
        # Padding stands on the right, where causal layers of any kind never look.
        logits = model(input_ids=ids, use_cache=False).logits
        hidden.append(logits.reshape(block.rows * block.length, -1))
        begin = end
    wanted = _tensor(packed.owner[packed.predicting], device)
    return torch.cat(hidden).index_select(0, wanted)


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
    """Causal attention over the rows of a packed forward; SDPA where nothing is packed.

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
        mask = _window(length, sliding_window, query.device)
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


def _window(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """The boolean mask of sliding-window attention, or None where plain causal is the same."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    gap = place[:, None] - place[None, :]
    return (gap >= 0) & (gap < window)


@cache
def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _packed_attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def _check_folder(context: PolicyContext) -> None:
    folder = context.model
    if not folder.is_dir():
        raise BackendError(
            f"no model folder {folder}", where=f"roles.{context.role}.model",
            hint="name a folder with config.json, tokenizer files and *.safetensors",
        )  # fmt: skip
    if not (folder / "config.json").is_file():
        raise BackendError(
            f"{folder} has no config.json", where=f"roles.{context.role}.model",
            hint="name a Hugging Face model folder",
        )  # fmt: skip
    if context.fresh or any(folder.glob("*.safetensors")):
        return
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    raise BackendError(
        f"{folder} has no *.safetensors weights",
        where=f"roles.{context.role}.model",
        found="pickled weights (*.bin, *.pt), which are never loaded" if pickled else None,
        hint="save the model with save_pretrained(..., safe_serialization=True)"
        if pickled
        else "copy the weights into the folder",
    )


def _attention_of(kind: Any, config: Any) -> str:
    """Ours where the architecture takes any function; eager where it needs more than SDPA does.

    Capped scores and attention sinks are of the second sort.
    """
    if not kind._supports_sdpa or getattr(config, "attn_logit_softcapping", None):
        return "eager"
    return _ATTENTION if kind._supports_attention_backend else "sdpa"


def _config(context: PolicyContext) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(context.model, local_files_only=True, trust_remote_code=False)


def _model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _pretrained(context: PolicyContext) -> Any:
    config = _config(context)
    kind = _model_class(config)
    model, report = kind.from_pretrained(
        context.model,
        config=config,
        dtype=DTYPES[context.dtype],
        attn_implementation=_attention_of(kind, config),
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise BackendError(
            f"the weights in {context.model} lack {len(missing)} tensors of the model",
            where=f"roles.{context.role}.model",
            found=", ".join(missing[:3]) + (" ..." if len(missing) > 3 else ""),
            hint="copy all weight files, or check that config.json belongs to them",
        )
    return model


def _fresh(context: PolicyContext) -> Any:
    config = _config(context)
    kind = _model_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        model = kind._from_config(
            config, attn_implementation=_attention_of(kind, config), dtype=torch.float32
        )
    # Buffers (rotary frequencies) stay in float32, as from_pretrained leaves them.
    dtype = DTYPES[context.dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps Transformers' progress bars off the terminal; the run has its own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(context: PolicyContext) -> Iterator[None]:
    """Turns what the libraries raise while loading into a `BackendError` that names the folder."""
    try:
        yield
    except BackendError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as err:
        text = str(err).strip().splitlines() or [type(err).__name__]
        raise BackendError(
            f"the model in {context.model} cannot be loaded on {context.device}",
            where=f"roles.{context.role}",
            found=f"{type(err).__name__}: {text[0][:200]}",
        ) from err
