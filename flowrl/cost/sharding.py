"""Parameters of one device under a layout, by pipeline stage.

With t = `tp`, a device has of each layer of its stage

- attention: `h q/t + q/t h`, and keys and values of `max(1, kv heads / t)` heads: where t is larger
  than the number of key heads, several devices hold the same one (SGLang, vLLM and Megatron alike);
- latent attention: the projections to the latents whole, those out of them divided by t;
- MLPs and shared experts divided by t, routed experts by `Layout.expert_shards`; norms and routers
  whole.

The first stage has the embedding, the last one the output layer, both divided by t; a tied model of
several stages holds its table on both. A stage has `layers // pp` layers; those that are left over
go one each to the last stages but the very last, from the back (vLLM, `get_pp_indices`). Dense
layers of a model with experts are its first ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.models.counts import count_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Numbers of parameters that one device of a pipeline stage holds, not divided by ZeRO.

    Attributes:
        index: Of the stage.
        num_layers: Of the stage.
        num_expert_layers: Of them, those with experts.
        dense: All but routed experts.
        experts: Routed ones.
        largest_layer: Of the layer with most.
        vocabulary: Of `dense`, embedding and output layer.
        first: It has the embedding.
        last: It has the output layer.
    """

    index: int
    num_layers: int
    num_expert_layers: int
    dense: int
    experts: int
    largest_layer: int
    vocabulary: int
    first: bool
    last: bool

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def stage_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage.

        >>> stage_layers(61, 4)
        (15, 15, 16, 15)

    Raises:
        ValueError: more stages than layers.
    """
    if not 1 <= pp <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided among {pp} stages")
    layers = [num_layers // pp] * pp
    for place in range(num_layers % pp):
        layers[-2 - place] += 1
    return tuple(layers)


@lru_cache(maxsize=4096)
def stage_parameters(shape: ModelShape, tp: int, pp: int, ep: int) -> tuple[StageParameters, ...]:
    """What a device of each stage holds.

    Raises:
        ValueError: more stages than layers.
    """
    layer = _Layer.of(shape, Layout(tp=tp, ep=ep, dp=ep))
    sizes = stage_layers(shape.num_layers, pp)
    counts = count_parameters(shape)
    table, head = -(-counts.embedding // tp), _head(shape, tp)
    stages, start = [], 0
    dense_layers = shape.num_layers - shape.num_expert_layers
    for index, size in enumerate(sizes):
        first, last = index == 0, index == pp - 1
        plain = min(max(dense_layers - start, 0), size)
        sparse = size - plain
        vocabulary = table * first + head * last
        if last and pp > 1 and shape.tied and shape.head == "lm":
            vocabulary += table
        body = size * layer.attention + plain * layer.mlp + sparse * layer.shared
        stages.append(
            StageParameters(
                index=index,
                num_layers=size,
                num_expert_layers=sparse,
                dense=body + vocabulary + shape.hidden_size * last,
                experts=sparse * layer.experts,
                largest_layer=layer.attention
                + max(layer.mlp if plain else 0, layer.shared + layer.experts if sparse else 0),
                vocabulary=vocabulary,
                first=first,
                last=last,
            )
        )
        start += size
    return tuple(stages)


def cache_elements(shape: ModelShape, tp: int) -> int:
    """Elements that one device keeps in its KV cache for a token in a layer.

    A latent is not divided: every device of `tp` keeps it whole.
    """
    if shape.latent is not None:
        return shape.cache_size
    return 2 * shape.head_dim * _local_heads(shape.num_kv_heads, tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Parameters of one layer on one device."""

    attention: int
    mlp: int
    shared: int
    experts: int

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout) -> _Layer:
        h, tp = shape.hidden_size, layout.tp
        mlp = 3 * h * -(-shape.intermediate_size // tp)
        if shape.mlp_bias:
            mlp += 2 * -(-shape.intermediate_size // tp) + h
        shared = experts = 0
        if shape.experts is not None:
            size = 3 * h * shape.experts.expert_size * shape.experts.num_experts
            experts = -(-size // layout.expert_shards)
            shared = 3 * h * -(-shape.experts.shared_size // tp) + h * shape.experts.num_experts
        return cls(attention=_attention(shape, tp), mlp=mlp, shared=shared, experts=experts)


def _attention(shape: ModelShape, tp: int) -> int:
    """With the norms of the layer."""
    h, heads = shape.hidden_size, _local_heads(shape.num_heads, tp)
    norms = 2 * h + 2 * shape.head_dim * shape.qk_norm
    output = heads * shape.value_head_dim * h + h * shape.output_bias
    q = heads * shape.head_dim
    latent = shape.latent
    if latent is None:
        kv = _local_heads(shape.num_kv_heads, tp) * shape.head_dim
        return (h + shape.qkv_bias) * (q + 2 * kv) + output + norms
    norms += latent.kv_rank + (latent.query_rank or 0)
    whole = (h + shape.qkv_bias) * (latent.kv_rank + latent.rope_dim)
    expanded = latent.kv_rank * heads * (latent.plain_dim + latent.value_dim)
    if latent.query_rank is None:
        return whole + expanded + h * q + output + norms
    whole += (h + shape.qkv_bias) * latent.query_rank
    return whole + expanded + latent.query_rank * q + output + norms


def _head(shape: ModelShape, tp: int) -> int:
    """Of the output layer; a value head is whole on each device."""
    if shape.head == "value":
        return shape.hidden_size + 1
    return 0 if shape.tied else -(-shape.vocab_size * shape.hidden_size // tp)


def _local_heads(heads: int, tp: int) -> int:
    return max(1, -(-heads // tp))
