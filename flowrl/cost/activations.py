"""Bytes that one token leaves in a layer: kept for the backward pass, or alive inside a forward.

Symbols: h hidden size, f intermediate size, q and k elements of all query and of all key heads, v
of all value heads, a query heads, L tokens of a row, w bytes of the parameter type, t `tp`.

Kept of one token, in elements, without recompute (`flowrl.cost.memory` measured them):
- two RMSNorms, each its input, the normalised input and its output: `2 (3 h)`; the input is kept in
  float32 whatever w.
- attention: queries, keys and values after rotation (keys and values repeated to the query heads),
  its output and the copy that the output projection reads: `2 q + 3 v`. Query and key norms add
  `2 (q + k)`, latent attention both latents with their normalised form. Eager attention adds `a L`
  probabilities, fused attention `a` float32 numbers.
- the gated MLP: gate, up, silu(gate) and their product, `4 f`. Experts keep `4 f` with f what one
  token passes, two copies of the token for each expert that works on it, and the router's choice.

With `tp` all of it is divided by t: norms and residuals too, because a layout with t > 1 trains
with sequence parallelism, which keeps each device's share of the tokens and gathers them anew in
the backward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2 and equation 4).
Latents are computed by every device of the t whole.

Recompute keeps less and computes the rest again in the backward pass:
- `selective`: of a norm only its input, of the MLP gate and up only, no probabilities: what is
  cheap to compute (their section 5, where attention scores are the cheap part; fused attention has
  done away with those).
- `full`: only the input of each layer, `h`; one layer's tensors come back at a time.

Experts with `ep`: a device of n tokens receives n copies for each active expert on average, and
experts are not loaded equally, so the fullest takes `EXPERT_IMBALANCE` times that.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from flowrl.cost.layout import ONE_DEVICE, Layout
from flowrl.cost.models import ModelShape

AttentionKind: TypeAlias = Literal["eager", "sdpa"]
Recompute: TypeAlias = Literal["none", "selective", "full"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

EXPERT_IMBALANCE = 1.5
"""Tokens of the fullest device over the mean, with experts on several; an allowance, not measured.
Balanced routers stay below it; one that has collapsed does not."""


def norm_kept(shape: ModelShape, width: int, recompute: Recompute = "none") -> int:
    """Of one RMSNorm, which works on a float32 copy of its input; not divided."""
    kept = 4 * shape.hidden_size
    return kept if recompute == "selective" else kept + 2 * shape.hidden_size * width


def layer_input(shape: ModelShape, width: int, layout: Layout = ONE_DEVICE) -> float:
    """What full recompute keeps of a layer."""
    return shape.hidden_size * width / layout.tp


def attention_kept(
    shape: ModelShape,
    *,
    width: int,
    attention: AttentionKind,
    length: int,
    layout: Layout = ONE_DEVICE,
    recompute: Recompute = "none",
) -> float:
    """Of the norms and the attention of one layer."""
    whole = recompute == "none"
    divided = 2 * norm_kept(shape, width, recompute)
    divided += (2 * shape.query_size + 3 * shape.attention_size) * width
    normalised = 4 + width if whole else 4
    if shape.qk_norm:
        divided += (shape.query_size + shape.kv_size) * normalised
    # Eager softmax is float32 too; below that its cast is kept beside it.
    probability = 4 if width == 4 else 4 + width
    if attention == "sdpa":
        divided += shape.num_heads * 4
    elif whole:
        divided += shape.num_heads * length * probability
    latents = 0
    if shape.latent is not None:
        latents = (shape.latent.kv_rank + (shape.latent.query_rank or 0)) * normalised
    return divided / layout.tp + latents


def mlp_kept(
    shape: ModelShape,
    *,
    width: int,
    with_experts: bool,
    layout: Layout = ONE_DEVICE,
    recompute: Recompute = "none",
) -> float:
    """Of the MLP of one layer, or of its experts."""
    kept = 4 if recompute == "none" else 2
    if not with_experts or shape.experts is None:
        return kept * shape.intermediate_size * width / layout.tp
    experts = shape.experts
    copies = 2 * experts.num_active * shape.hidden_size * _spread(layout)
    routed = kept * experts.num_active * experts.expert_size + copies
    if layout.ep > 1:
        routed = int(routed * EXPERT_IMBALANCE)
    return (routed + kept * experts.shared_size + experts.num_experts) * width / layout.tp


def forward_tensors(
    shape: ModelShape,
    *,
    width: int,
    attention: AttentionKind,
    length: int,
    layout: Layout = ONE_DEVICE,
    engine: bool = False,
) -> float:
    """The largest tensors of one token alive at once inside one layer, without gradients.

    `3 h + 3 q + 3 f` elements in a trainer; `2 h + 3 q + 3 k + 4 f` in an engine, whose layers
    hold projections of gate and up together and those of attention until the next layer's. With
    experts f is what one token passes, and every copy of the token is there before and after its
    expert: `2 h` for each. Engines have no sequence parallelism: each device of `tp` holds the
    hidden states whole.
    """
    h, experts = shape.hidden_size, shape.experts
    states, wide = (2, 4) if engine else (3, 3)
    divided = 3 * shape.query_size + (3 * shape.kv_size if engine else 0)
    if attention == "eager":
        divided += shape.num_heads * length
    plain = shape.num_layers > shape.num_expert_layers
    mlp = wide * shape.intermediate_size if plain else 0
    if experts is not None:
        copies = 2 * experts.num_active * h * _spread(layout)
        routed = wide * experts.num_active * experts.expert_size + copies
        if layout.ep > 1:
            routed = int(routed * EXPERT_IMBALANCE)
        mlp = max(mlp, routed + wide * experts.shared_size)
    return (states * h / (1 if engine else layout.tp) + (divided + mlp) / layout.tp) * width


def _spread(layout: Layout) -> int:
    """Devices that an expert is divided over; it meets each of its tokens on all of them."""
    return layout.tp // min(layout.tp, layout.ep)
