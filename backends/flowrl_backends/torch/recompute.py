"""Full recompute: a layer keeps its input, and the backward pass runs its forward again.

The layers are those that Transformers marks (`GradientCheckpointingLayer`). Transformers' own
switch works in training mode only, which would turn dropout on and caches off for an engine on the
same model. Here the layers are wrapped during an update, and passes without gradient are unchanged.
The results equal those without recompute, bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from flowrl.errors import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Makes the backward passes of forwards in this context recompute each layer's activations.

    Raises:
        BackendError: Transformers marks no layer of this architecture.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise BackendError(
            "the layers of this architecture cannot be recomputed",
            found=type(model).__name__,
            hint="omit recompute",
        )
    for layer in layers:
        # An attribute of the instance, in front of its class's method.
        layer.__dict__["forward"] = _again(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Models are in evaluation mode, so no random numbers are used inside.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed
