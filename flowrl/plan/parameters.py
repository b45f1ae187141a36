"""The parameter tensors of a model, and which part of each a device holds under a layout.

Names are those of Hugging Face checkpoints. A part is a box: where it begins and ends in each
dimension.

What tensor parallelism divides (Shoeybi et al. 2019, arXiv 1909.08053, section 3): rows of the
vocabulary, heads, and MLP columns; norms are whole on every device. Stages have layers as
`flowrl.cost.sharding` says; the first has the embedding, the last the final norm and the output
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard
from flowrl.cost.sharding import stage_layers
from flowrl.errors import PlanError

Box: TypeAlias = tuple[tuple[int, int], ...]
"""`(begin, end)` of each dimension."""

ParameterClass: TypeAlias = Literal["embedding", "attention", "mlp", "experts", "norm", "head"]

Split: TypeAlias = Literal["whole", "even", "heads", "vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A tensor.

    Attributes:
        split: How tensor ranks divide it: not at all, into equal parts, by key heads (which
            several ranks may hold), or by rows of the vocabulary.
        dim: That is divided.
        layer: None of what belongs to no layer.
        expert: Of routed experts.
    """

    name: str
    size: tuple[int, ...]
    kind: ParameterClass
    split: Split = "whole"
    dim: int = 0
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How a set of devices holds a model.

    Ranks: of a trainer, tensor ranks come first, then context, replicas and stages (Megatron's
    order `tp-cp-dp-pp`); of an engine, replicas come last, for each is a server of its own.

    Attributes:
        shard: `full` divides the first dimension of what a rank holds among replicas (FSDP2).
        replicas_last: Of engines.
        vocabulary_step: Rows of the vocabulary are padded to a multiple of it.
    """

    layout: Layout
    shard: Shard = "none"
    replicas_last: bool = False
    vocabulary_step: int = 64

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """`(tp, cp, dp, pp)` indices of a rank."""
        one = self.layout
        tensor, rest = rank % one.tp, rank // one.tp
        if self.replicas_last:
            stage, replica = rest % one.pp, rest // one.pp
            return tensor, 0, replica, stage
        context, rest = rest % one.cp, rest // one.cp
        return tensor, context, rest % one.dp, rest // one.dp


def parameter_classes(shape: ModelShape) -> tuple[str, ...]:
    """Classes that a model has; a tied output layer is the embedding."""
    classes = ["embedding", "attention", "mlp", "norm"]
    if shape.experts is not None:
        classes.append("experts")
        if not shape.experts.num_dense_layers:
            classes.remove("mlp")
    if not shape.tied or shape.head == "value":
        classes.append("head")
    return tuple(classes)


def parameters_of(shape: ModelShape) -> Iterator[Parameter]:
    """Every tensor of a model, in the order of its layers.

    Raises:
        PlanError: latent attention, whose tensors are not listed here.
    """
    if shape.latent is not None:
        raise PlanError(
            "the tensors of latent attention are not listed, so their routes cannot be written out",
            found=shape.family,
            expected="a family with grouped-query attention",
            where="weight_routes",
            hint="take the routes as rules; they are not written out for this family",
        )
    h = shape.hidden_size
    table = (shape.vocab_size, h)
    yield Parameter(
        name="model.embed_tokens.weight", size=table, kind="embedding", split="vocabulary"
    )
    for layer in range(shape.num_layers):
        yield from _layer(shape, layer)
    yield Parameter(name="model.norm.weight", size=(h,), kind="norm")
    if shape.head == "value":
        yield Parameter(name="score.weight", size=(1, h), kind="head")
        yield Parameter(name="score.bias", size=(1,), kind="head")
    elif not shape.tied:
        yield Parameter(name="lm_head.weight", size=table, kind="head", split="vocabulary")


def _layer(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    at, h = f"model.layers.{layer}", shape.hidden_size
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Parameter(name=f"{at}.{name}.weight", size=(h,), kind="norm", layer=layer)
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Parameter(
                name=f"{at}.self_attn.{name}.weight",
                size=(shape.head_dim,),
                kind="norm",
                layer=layer,
            )
    sizes: tuple[tuple[str, int, Split], ...] = (
        ("q", shape.query_size, "even"),
        ("k", shape.kv_size, "heads"),
        ("v", shape.kv_size, "heads"),
    )
    for name, size, split in sizes:
        base = f"{at}.self_attn.{name}_proj"
        yield Parameter(
            name=f"{base}.weight", size=(size, h), kind="attention", split=split, layer=layer
        )
        if shape.qkv_bias:
            yield Parameter(
                name=f"{base}.bias", size=(size,), kind="attention", split=split, layer=layer
            )
    base = f"{at}.self_attn.o_proj"
    yield Parameter(
        name=f"{base}.weight",
        size=(h, shape.attention_size),
        kind="attention",
        split="even",
        dim=1,
        layer=layer,
    )
    if shape.output_bias:
        yield Parameter(name=f"{base}.bias", size=(h,), kind="attention", layer=layer)
    yield from _mlps(shape, layer)


def _mlps(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    at, experts = f"model.layers.{layer}.mlp", shape.experts
    if experts is None or layer < experts.num_dense_layers:
        yield from _mlp(shape, at, shape.intermediate_size, "mlp", layer, None)
        return
    yield Parameter(
        name=f"{at}.gate.weight",
        size=(experts.num_experts, shape.hidden_size),
        kind="experts",
        layer=layer,
    )
    for expert in range(experts.num_experts):
        base = f"{at}.experts.{expert}"
        yield from _mlp(shape, base, experts.expert_size, "experts", layer, expert)
    if experts.shared_size:
        base = f"{at}.shared_experts"
        yield from _mlp(shape, base, experts.shared_size, "experts", layer, None)


def _mlp(
    shape: ModelShape,
    at: str,
    columns: int,
    kind: ParameterClass,
    layer: int,
    expert: int | None,
) -> Iterator[Parameter]:
    h = shape.hidden_size
    for name, size, dim in (
        ("gate_proj", (columns, h), 0),
        ("up_proj", (columns, h), 0),
        ("down_proj", (h, columns), 1),
    ):
        yield Parameter(
            name=f"{at}.{name}.weight",
            size=size,
            kind=kind,
            split="even",
            dim=dim,
            layer=layer,
            expert=expert,
        )
    if shape.mlp_bias:
        for name, bias in (("gate_proj", columns), ("up_proj", columns), ("down_proj", h)):
            yield Parameter(
                name=f"{at}.{name}.bias",
                size=(bias,),
                kind=kind,
                split="whole" if name == "down_proj" else "even",
                layer=layer,
                expert=expert,
            )


def part_of(parameter: Parameter, rank: int, holding: Holding, shape: ModelShape) -> Box | None:
    """The part of a parameter that a rank holds; None where it holds nothing of it."""
    tensor, context, replica, stage = holding.place(rank)
    layout = holding.layout
    if not _in_stage(parameter, stage, layout.pp, shape):
        return None
    parts = layout.tp
    if parameter.expert is not None and shape.experts is not None:
        owner, tensor, parts = _expert_place(tensor, context, replica, layout)
        if parameter.expert // (shape.experts.num_experts // layout.ep) != owner:
            return None
    box = [(0, size) for size in parameter.size]
    box[parameter.dim] = _divided(parameter, tensor, parts, holding, shape)
    if holding.shard == "full" and layout.shards > 1:
        begin, end = box[0]
        each = -(-(end - begin) // layout.shards)
        first = begin + each * (replica * layout.cp + context)
        box[0] = (min(first, end), min(first + each, end))
    return None if any(begin >= end for begin, end in box) else tuple(box)


def _in_stage(parameter: Parameter, stage: int, stages: int, shape: ModelShape) -> bool:
    if parameter.layer is not None:
        return _stage_of(parameter.layer, shape.num_layers, stages) == stage
    if parameter.kind == "embedding":
        # A tied output layer needs the table on the last stage too.
        return stage == 0 or (shape.tied and shape.head == "lm" and stage == stages - 1)
    return stage == stages - 1


@lru_cache(maxsize=4096)
def _stage_of(layer: int, num_layers: int, stages: int) -> int:
    for stage, size in enumerate(stage_layers(num_layers, stages)):
        if layer < size:
            return stage
        layer -= size
    raise AssertionError("stages have all layers")


def _expert_place(tensor: int, context: int, replica: int, layout: Layout) -> tuple[int, int, int]:
    """Which set of experts a rank has, which part of each, of how many."""
    if layout.ep < layout.tp:
        each = layout.tp // layout.ep
        return tensor // each, tensor % each, each
    linear = tensor + layout.tp * (context + layout.cp * replica)
    return linear % layout.ep, 0, 1


def _divided(
    parameter: Parameter, tensor: int, parts: int, holding: Holding, shape: ModelShape
) -> tuple[int, int]:
    size = parameter.size[parameter.dim]
    match parameter.split:
        case "whole":
            return 0, size
        case "even":
            each = size // parts
            return tensor * each, (tensor + 1) * each
        case "heads":
            heads = shape.num_kv_heads
            if parts <= heads:
                each = size // parts
                return tensor * each, (tensor + 1) * each
            head = tensor * heads // parts
            return head * shape.head_dim, (head + 1) * shape.head_dim
        case "vocabulary":
            step = holding.vocabulary_step or parts
            padded = -(-size // step) * step
            each = -(-padded // parts)
            return min(tensor * each, size), min((tensor + 1) * each, size)
