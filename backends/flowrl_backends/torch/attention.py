"""The general decoder: a Transformers model's own layers, with attention over the KV slots.

Transformers lets a model's attention be any registered function (`AttentionInterface`), passes
unknown keyword arguments down to it, and makes no mask for implementations without a mask
function. So any architecture with that interface decodes from the slots as it is; what the layers
hand to attention beyond queries, keys, values, scale and window (soft caps, sinks, position
biases) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from flowrl.errors import BackendError
from flowrl_backends.torch.seen import SeenParameters
from flowrl_backends.torch.slots import DecodeStep, KVSlots, PrefillStep, RowSpan

_NAME = "flowrl_slots"
_REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


class Decoder(Protocol):
    """Runs a model over the slots; both methods return float32 logits."""

    slots: KVSlots

    @property
    def weights_seen(self) -> int:
        """A number that changes whenever `active` detects changed parameters."""
        ...

    def refresh(self) -> None:
        """Treats the parameters as changed."""
        ...

    def active(self) -> AbstractContextManager[None]:
        """Prepares for steps and cleans up after them; both other methods require it."""
        ...

    def prefill(self, tokens: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        """Fills rows `targets` `[m]` from int64 `tokens` `[m, L]`, padded on the right.

        Returns:
            `[m, V]`, after each row's last real token.
        """
        ...

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: int,
        equal: bool,
        spans: Sequence[RowSpan] = (),
    ) -> Tensor:
        """Decodes one token for each of the rows 0 to n-1.

        Args:
            tokens: int64 `[n]`.
            positions: int64 `[n]`.
            length: The longest row with its new token.
            equal: True if all rows have the same length.
            spans: The rows that attend together, in order; () if all rows do.

        Returns:
            `[n, V]`.
        """
        ...


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    flowrl_step: DecodeStep | PrefillStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of Transformers; `query` is `[n, heads, tokens, D]`."""
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    layer = getattr(module, "layer_idx", None)
    if flowrl_step is None or refused or layer is None:
        missing = "the decoding step" if flowrl_step is None else "a layer number"
        problem = (
            f"its attention uses {', '.join(refused)}"
            if refused
            else (f"it does not hand {missing} to its attention")
        )
        raise BackendError(
            f"the torch engine cannot decode this architecture: {problem}",
            found=type(module).__name__,
            hint="use another generate backend (vllm, sglang)",
        )
    n, num_heads, num_tokens, head_dim = query.shape
    if num_tokens == 1:
        flat = [x.squeeze(2) for x in (query, key, value)]
    else:
        flat = [
            x.transpose(1, 2).reshape(n * num_tokens, x.shape[1], -1) for x in (query, key, value)
        ]
    scale = head_dim**-0.5 if scaling is None else scaling
    out = flowrl_step.attend(int(layer), flat[0], flat[1], flat[2], scale, sliding_window)
    return out.view(n, num_tokens, num_heads, -1), None


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Runs `model` with another attention implementation, and restores its own."""
    before = model.config._attn_implementation
    if before == name:
        yield
        return
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


class ModelDecoder:
    """A decoder for any architecture with Transformers' attention interface."""

    def __init__(self, model: PreTrainedModel, slots: KVSlots) -> None:
        if not model._supports_attention_backend:
            raise BackendError(
                "the torch engine cannot decode this architecture: Transformers gives it no "
                "exchangeable attention",
                found=type(model).__name__,
                expected="a decoder-only model with AttentionInterface support",
                hint="use another generate backend (vllm, sglang)",
            )
        AttentionInterface.register(_NAME, _attend)
        self._model = model
        self._seen = SeenParameters(model)
        self.slots = slots

    @property
    def weights_seen(self) -> int:
        """See `Decoder.weights_seen`."""
        return self._seen.count

    def refresh(self) -> None:
        """See `Decoder.refresh`."""
        self._seen.forget()

    def active(self) -> AbstractContextManager[None]:
        """Runs the model with this attention and restores the model's own afterwards."""
        self._seen.changed()
        return attention_of(self._model, _NAME)

    def prefill(self, tokens: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        """See `Decoder.prefill`."""
        m, length = tokens.shape
        step = PrefillStep(slots=self.slots, targets=targets, length=length)
        last, where = torch.unique(lengths - 1, return_inverse=True)
        positions = torch.arange(length, device=tokens.device).expand(m, length)
        logits = self._forward(tokens, positions, step, last)
        return logits[torch.arange(m, device=tokens.device), where].float()

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
        return self._forward(tokens[:, None], positions[:, None], step, 0)[:, -1].float()

    def _forward(
        self, tokens: Tensor, positions: Tensor, step: DecodeStep | PrefillStep, keep: Tensor | int
    ) -> Tensor:
        out = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            flowrl_step=step,
        )
        logits: Tensor = out.logits
        return logits
