"""The fast path for the Llama family: the same arithmetic as the model's layers, fewer operations.

For a model of a million parameters a decode step of the general path spends most of its time in
Python and in small tensor operations. Here query, key and value projections are one matrix, gate
and up projections another, the rotation of all query and key heads is three operations, and no
module, mask or output object is made. The results equal those of the general path up to rounding.

The stacked matrices are copies, made for models of up to 256 MiB only (larger models are bound by
arithmetic and would lose memory) and made again when a parameter has changed, which every poll
checks (`SeenParameters`); `refresh` covers changes that it cannot detect, and `load` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name
from transformers import PreTrainedModel

from flowrl_backends.torch.seen import SeenParameters
from flowrl_backends.torch.slots import DecodeStep, KVSlots, PrefillStep, RowSpan

_FAMILY = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_STACK_LIMIT = 256 * 2**20
"""Bytes of a model's parameters up to which copies of its projections are stacked: one product in
the place of several is faster in small models, and large ones have no memory for copies."""


def is_llama_like(model: PreTrainedModel) -> bool:
    """Returns True if the fast path supports the model."""
    if type(model).__name__ not in _FAMILY:
        return False
    rope = getattr(model.config, "rope_parameters", None) or {}
    # Other kinds of rotation depend on the length of the batch.
    return rope.get("rope_type", "default") in {"default", "linear", "llama3", "yarn"} and (
        float(rope.get("partial_rotary_factor") or 1.0) == 1.0
    )


@dataclass(slots=True)
class _Layer:
    """The parameters of one layer that a step reads.

    Matrices are `[in, out]`, views of the parameters' transposes or of their stacked copies: the
    plain matrix product costs a third less to call than `linear`, and adds the residual for free.
    """

    qkv: list[tuple[Tensor, Tensor | None]]
    gate_up: list[tuple[Tensor, Tensor | None]]
    out: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    norm_in: Tensor
    norm_mlp: Tensor
    norm_q: Tensor | None
    norm_k: Tensor | None
    window: int | None
    act: nn.Module


class FusedDecoder:
    """A decoder for Llama, Mistral, Qwen2 and Qwen3 models; see the module."""

    def __init__(self, model: PreTrainedModel, slots: KVSlots) -> None:
        self.slots = slots
        self._model: Any = model
        config = model.config
        attention = self._model.model.layers[0].self_attn
        self._num_heads = int(config.num_attention_heads)
        self._num_kv = int(config.num_key_value_heads)
        self._head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._eps = float(config.rms_norm_eps)
        self._layers: list[_Layer] = []
        self._seen = SeenParameters(model)
        self._cos = self._sin = torch.empty(0)

    @property
    def weights_seen(self) -> int:
        """See `Decoder.weights_seen`."""
        return self._seen.count

    def refresh(self) -> None:
        """See `Decoder.refresh`: forgets copies of parameters."""
        self._seen.forget()

    def release(self) -> None:
        """Frees copies of parameters; `active` makes them again."""
        self._layers = []
        self.refresh()

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `Decoder.active`: makes the copies again if a parameter has changed."""
        self._prepare()
        yield

    def _prepare(self) -> None:
        if not self._seen.changed():
            return
        parameters = list(self._model.parameters())
        stack = sum(p.nbytes for p in parameters) <= _STACK_LIMIT
        count = int(self._model.config.num_hidden_layers)
        self._layers = [_read_layer(layer, stack) for layer in self._model.model.layers[:count]]
        device, dtype = parameters[0].device, parameters[0].dtype
        if self._cos.device != device or self._cos.dtype != dtype or not len(self._cos):
            self._make_rotation(device, dtype)

    def _make_rotation(self, device: torch.device, dtype: torch.dtype) -> None:
        """Tables `[max_length, 1, D]`; the sines carry the sign of `rotate_half`."""
        positions = torch.arange(self.slots.max_length, device=device)[None]
        like = torch.empty(0, device=device, dtype=dtype)
        cos, sin = self._model.model.rotary_emb(like, positions)
        half = self._head_dim // 2
        self._cos = cos[0][:, None].contiguous()
        self._sin = torch.cat((-sin[0][:, :half], sin[0][:, half:]), -1)[:, None].contiguous()

    def prefill(self, tokens: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        """See `Decoder.prefill`."""
        m, length = tokens.shape
        step = PrefillStep(slots=self.slots, targets=targets, length=length)
        cos = self._cos[:length].repeat(m, 1, 1)
        sin = self._sin[:length].repeat(m, 1, 1)
        hidden = self._forward(tokens.reshape(-1), cos, sin, step)
        last = torch.arange(m, device=tokens.device) * length + lengths - 1
        return self._logits(hidden[last])

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: int,
        equal: bool,
        spans: Sequence[RowSpan] = (),
    ) -> Tensor:
        """See `Decoder.decode`."""
        step = DecodeStep(
            slots=self.slots, positions=positions, length=length, equal=equal, spans=spans
        )
        if equal:
            cos, sin = self._cos[length - 1], self._sin[length - 1]
        else:
            cos, sin = self._cos[positions], self._sin[positions]
        return self._logits(self._forward(tokens, cos, sin, step))

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self._model.lm_head
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._model.model.norm.weight, self._eps)
        return F.linear(normed, head.weight, head.bias).float()

    def _forward(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, step: DecodeStep | PrefillStep
    ) -> Tensor:
        """Returns hidden states `[N, hidden]` after the last layer, with rotations `cos`, `sin`."""
        num_heads, num_kv, head_dim, eps = self._num_heads, self._num_kv, self._head_dim, self._eps
        rotated, half = num_heads + num_kv, head_dim // 2
        hidden = F.embedding(tokens, self._model.model.embed_tokens.weight)
        shape = hidden.shape[-1:]
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, shape, layer.norm_in, eps)
            heads = _project(normed, layer.qkv).view(-1, rotated + num_kv, head_dim)
            qk = heads[:, :rotated]
            if layer.norm_q is not None:
                qk = torch.cat(
                    (
                        F.rms_norm(qk[:, :num_heads], (head_dim,), layer.norm_q, eps),
                        F.rms_norm(qk[:, num_heads:], (head_dim,), layer.norm_k, eps),
                    ),
                    1,
                )
            qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin)
            attended = step.attend(
                index,
                qk[:, :num_heads],
                qk[:, num_heads:],
                heads[:, rotated:],
                self._scale,
                layer.window,
            )
            hidden = _add_projected(hidden, attended, layer.out)
            normed = F.rms_norm(hidden, shape, layer.norm_mlp, eps)
            gate, up = _project(normed, layer.gate_up).chunk(2, -1)
            hidden = _add_projected(hidden, layer.act(gate) * up, layer.down)
        return hidden


def _project(x: Tensor, parts: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    if len(parts) > 1:
        return torch.cat([_project(x, [part]) for part in parts], -1)
    weight, bias = parts[0]
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_projected(residual: Tensor, x: Tensor, part: tuple[Tensor, Tensor | None]) -> Tensor:
    weight, bias = part
    out = torch.addmm(residual, x, weight)
    return out if bias is None else out.add_(bias)


def _read_layer(module: Any, stack: bool) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    qkv = [_matrix(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    gate_up = [_matrix(p) for p in (mlp.gate_proj, mlp.up_proj)]
    if stack:
        qkv, gate_up = [_stacked(qkv)], [_stacked(gate_up)]
    norm_q, norm_k = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        qkv=qkv,
        gate_up=gate_up,
        out=_matrix(attention.o_proj),
        down=_matrix(mlp.down_proj),
        norm_in=module.input_layernorm.weight,
        norm_mlp=module.post_attention_layernorm.weight,
        norm_q=None if norm_q is None else norm_q.weight,
        norm_k=None if norm_k is None else norm_k.weight,
        window=_window(attention),
        act=cast("nn.Module", mlp.act_fn),
    )


def _window(attention: Any) -> int | None:
    """Mistral's layers read their window from the config, the others hold it."""
    if type(attention).__name__ == "MistralAttention":
        return cast("int | None", attention.config.sliding_window)
    return cast("int | None", getattr(attention, "sliding_window", None))


def _matrix(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight.t(), linear.bias


def _stacked(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([w.t() for w, _ in parts]).t()
    biases = [b for _, b in parts if b is not None]
    return weight, torch.cat(biases) if biases else None
