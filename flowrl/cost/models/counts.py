"""Numbers of parameters, from a shape.

With h hidden size, f intermediate size, V vocabulary, q and k the elements of all query and of all
key heads, a layer has

- attention `h (q + 2 k) + q h`; latent, with ranks r_q and r_k, heads a of p plain, r rotary and v
  value elements: `h r_q + r_q a (p + r)` for queries (`h a (p + r)` without a rank),
  `h (r_k + r) + r_k a (p + v)` for keys and values, `a v h` out of attention;
- a gated MLP `3 h f`; or E routed experts of `3 h f_e` each, shared ones of `3 h f_s` together and
  a router `h E`. The bias with which DeepSeek-V3 balances its experts is no parameter (no gradient
  reaches it), though its checkpoints hold it: E numbers a layer;
- norms `2 h`, of queries and keys `2 d` where each head of d elements is normalised, of latents
  their ranks.

Biases are added where there are some. Outside of layers: embedding and output layer `V h` each, one
norm `h`. A value head in the place of the output layer has `h + 1`, its bias among them.

A layer that predicts a further token (DeepSeek-V3, section 2.2) has a layer with experts, a
projection `2 h h` of two normalised inputs, and a last norm (`3 h` for these); embedding and output
layer are those of the main model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.cost.models.shape import LatentAttention, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameters, by the class that decides how a layout shards them.

    Attributes:
        mlp: Of dense MLPs and of shared experts.
        head: 0 where the output layer is tied to the embedding; a value head is not.
        router: What chooses the experts of a token.
        experts: Of all routed experts.
        active_experts: Of the routed experts that one token passes.
        mtp: Of the layers that predict further tokens; in no other number.
        active_mtp: Of those, what one token passes.
    """

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int
    router: int = 0
    experts: int = 0
    active_experts: int = 0
    mtp: int = 0
    active_mtp: int = 0

    @property
    def total(self) -> int:
        """All parameters of the main model, tied ones once."""
        return self._always_active + self.experts

    @property
    def active(self) -> int:
        """Those that one token passes, its embedding table included (DeepSeek-V3 counts so too)."""
        return self._always_active + self.active_experts

    @property
    def _always_active(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norm + self.head + self.router


@lru_cache(maxsize=64)
def count_parameters(shape: ModelShape) -> ParameterCounts:
    """The numbers of parameters of a shape."""
    h, layers, sparse = shape.hidden_size, shape.num_layers, shape.num_expert_layers
    attention, norm = _attention(shape), _norm(shape)
    mlp = (layers - sparse) * (3 * h * shape.intermediate_size + _mlp_bias(shape))
    router = expert = shared = num_experts = num_active = 0
    if shape.experts is not None:
        num_experts, num_active = shape.experts.num_experts, shape.experts.num_active
        router, expert = h * num_experts, 3 * h * shape.experts.expert_size
        shared = 3 * h * shape.experts.shared_size
    # Two norms of inputs and a last one, beside the projection of the inputs.
    ahead = attention + norm + router + shared + 2 * h * h + 3 * h
    return ParameterCounts(
        embedding=shape.vocab_size * h,
        attention=layers * attention,
        mlp=mlp + sparse * shared,
        norm=layers * norm + h,
        head=_head(shape),
        router=sparse * router,
        experts=sparse * num_experts * expert,
        active_experts=sparse * num_active * expert,
        mtp=shape.num_mtp_layers * (ahead + num_experts * expert),
        active_mtp=shape.num_mtp_layers * (ahead + num_active * expert),
    )


def count_tensors(shape: ModelShape) -> int:
    """Tensors of the main model's checkpoint: every matrix of every expert is one.

    Attention has 4 matrices, latent attention 5 (4 without a rank of queries); biases and norms are
    tensors of their own.
    """
    attention = 4 + 3 * shape.qkv_bias + shape.output_bias + 2 * shape.qk_norm
    if shape.latent is not None:
        ranks = 1 + (shape.latent.query_rank is not None)
        attention = 3 + ranks + ranks * (1 + shape.qkv_bias) + shape.output_bias
    mlp = 3 * (1 + shape.mlp_bias)
    sparse = 0
    if shape.experts is not None:
        sparse = 1 + 3 * shape.experts.num_experts + 3 * bool(shape.experts.shared_size)
    layers = shape.num_layers * (attention + 2)
    layers += (shape.num_layers - shape.num_expert_layers) * mlp + shape.num_expert_layers * sparse
    ends = 2 + (shape.head == "value" or not shape.tied) + (shape.head == "value")
    return layers + ends


def _head(shape: ModelShape) -> int:
    if shape.head == "value":
        return shape.hidden_size + 1
    return 0 if shape.tied else shape.vocab_size * shape.hidden_size


def _attention(shape: ModelShape) -> int:
    h, q, k = shape.hidden_size, shape.query_size, shape.kv_size
    output = shape.attention_size * h + h * shape.output_bias
    if shape.latent is not None:
        return _latent_projections(shape, shape.latent) + output
    return (h + shape.qkv_bias) * (q + 2 * k) + output


def _latent_projections(shape: ModelShape, latent: LatentAttention) -> int:
    h, q, bias = shape.hidden_size, shape.query_size, shape.qkv_bias
    keys_and_values = shape.num_heads * (latent.plain_dim + latent.value_dim)
    count = (h + bias) * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * keys_and_values
    if latent.query_rank is None:
        return count + h * q
    return count + (h + bias) * latent.query_rank + latent.query_rank * q


def _norm(shape: ModelShape) -> int:
    norm = 2 * shape.hidden_size + 2 * shape.head_dim * shape.qk_norm
    if shape.latent is not None:
        norm += shape.latent.kv_rank + (shape.latent.query_rank or 0)
    return norm


def _mlp_bias(shape: ModelShape) -> int:
    return (2 * shape.intermediate_size + shape.hidden_size) * shape.mlp_bias
