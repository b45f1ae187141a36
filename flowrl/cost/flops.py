"""Floating-point operations of a model on sequences.

A product of a (m x k) and a (k x n) matrix is `2 m k n` operations. Counted are matrix products:
the projections of attention, its scores and weighted values, MLPs, the experts that work on a
token, routers, and the output layer. Norms, softmax, rotary positions and activations are not
(below 1 % at sizes that are trained), and the embedding is a look-up unless a convention says else.

For a sequence of s tokens, a heads of d_k query and d_v value elements, attention multiplies
`2 a (d_k + d_v)` operations for each pair of a token and one that it sees. With a causal mask those
are s (s + 1) / 2 pairs; most counts take s^2 / 2, which differs by 1 / s (`causal_half`, our
default, so that figures compare with those of others), some all s^2.

A backward pass multiplies with each weight twice (gradients of inputs and of weights), so training
takes 3 forward passes; where activations are computed anew, 4 (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training", arXiv 2104.04473, section 5.1; Korthikanti et al. 2022, arXiv
2205.05198, appendix A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from flowrl.cost.models import ModelShape

Work: TypeAlias = Literal["forward", "training", "training_with_recompute"]

PASSES_OF: dict[Work, int] = {"forward": 1, "training": 3, "training_with_recompute": 4}
"""How many forward passes each kind of work is worth."""

Counted: TypeAlias = Literal["counted", "omitted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsConvention:
    """What is counted, where libraries differ. The defaults count what is really computed.

    Attributes:
        attention: Pairs of tokens: `causal_half` s^2 / 2, `causal_exact` s (s + 1) / 2, `full` s^2.
        embedding: A look-up, which multiplies nothing, or a product with a one-hot matrix.
        head: The output layer.
        router: The choice of experts.
        key_value_heads: `grouped` as they are, or `all_heads`: as many as query heads.
        output_projection: From all heads to the hidden size; `hidden` takes it for a square matrix
            of the hidden size, which is the same where `num_heads x head_dim` is the hidden size.
        mtp: The layers that predict further tokens, each with an output layer.
    """

    attention: Literal["causal_half", "causal_exact", "full"] = "causal_half"
    embedding: Literal["lookup", "product"] = "lookup"
    head: Counted = "counted"
    router: Counted = "counted"
    key_value_heads: Literal["grouped", "all_heads"] = "grouped"
    output_projection: Literal["heads", "hidden"] = "heads"
    mtp: Counted = "omitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsParts:
    """Operations of one forward pass, by part.

    Attributes:
        projections: To queries, keys and values, and out of attention.
        attention: Scores and weighted values.
        mlp: Dense MLPs, and the experts that work on each token.
        mtp: All of the layers that predict further tokens.
    """

    embedding: int
    projections: int
    attention: int
    mlp: int
    router: int
    head: int
    mtp: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, field.name) for field in fields(self))


def forward_flops(
    shape: ModelShape,
    lengths: Sequence[int],
    *,
    num_logits: int | None = None,
    convention: FlopsConvention | None = None,
) -> FlopsParts:
    """One forward pass over sequences that do not see each other.

    Also what it takes to generate them token by token with a KV cache.

    Args:
        lengths: Tokens of each sequence; 0 is allowed.
        num_logits: Tokens whose logits are computed, of all sequences together; None for all.

    Raises:
        ValueError: a length below 0.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"a sequence has no fewer than 0 tokens: {min(lengths)}")
    convention = convention or FlopsConvention()
    tokens, pairs = sum(lengths), _twice_pairs(lengths, convention)
    head_tokens = tokens if num_logits is None else num_logits
    h, layers, sparse = shape.hidden_size, shape.num_layers, shape.num_expert_layers
    table, output = 2 * shape.vocab_size * h, 2 * shape.output_size * h
    projections = 2 * tokens * _projection_weights(shape, convention)
    attention = pairs * shape.num_heads * (shape.head_dim + shape.value_head_dim)
    experts = 2 * tokens * _expert_weights(shape)
    router = 2 * tokens * _router_weights(shape, convention)
    head = output if convention.head == "counted" else 0
    # Besides a whole layer, a projection of two inputs to one.
    ahead = projections + attention + experts + router + 2 * tokens * 2 * h * h + tokens * head
    return FlopsParts(
        embedding=tokens * table if convention.embedding == "product" else 0,
        projections=layers * projections,
        attention=layers * attention,
        mlp=(layers - sparse) * 2 * tokens * 3 * h * shape.intermediate_size + sparse * experts,
        router=sparse * router,
        head=head_tokens * head,
        mtp=shape.num_mtp_layers * ahead if convention.mtp == "counted" else 0,
    )


def model_flops(
    shape: ModelShape,
    lengths: Sequence[int],
    *,
    work: Work = "forward",
    num_logits: int | None = None,
    convention: FlopsConvention | None = None,
) -> int:
    """Operations of a forward pass, or of a whole step of training, on sequences.

    Args:
        work: `training` with a backward pass; `training_with_recompute` where the backward pass
            computes all activations once more. Model FLOPs utilisation is quoted with `training`.

    Raises:
        ValueError: a length below 0.
    """
    parts = forward_flops(shape, lengths, num_logits=num_logits, convention=convention)
    return PASSES_OF[work] * parts.total


def flops_per_token(
    shape: ModelShape, num_seen: int, *, convention: FlopsConvention | None = None
) -> int:
    """One forward pass of one token that sees `num_seen` tokens, itself included.

    The number for a token of a long sequence that is being generated.
    """
    one = forward_flops(shape, [1], convention=convention).total
    pair = 2 * shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_head_dim)
    counted = forward_flops(shape, [1], convention=convention).attention
    return one - counted + num_seen * pair


def _twice_pairs(lengths: Sequence[int], convention: FlopsConvention) -> int:
    """Twice the number of pairs of tokens of which one sees the other."""
    match convention.attention:
        case "causal_half":
            return sum(length * length for length in lengths)
        case "causal_exact":
            return sum(length * (length + 1) for length in lengths)
        case "full":
            return sum(2 * length * length for length in lengths)


def _projection_weights(shape: ModelShape, convention: FlopsConvention) -> int:
    """Of the projections around attention, in one layer."""
    h, heads = shape.hidden_size, shape.num_heads
    output = h * (shape.attention_size if convention.output_projection == "heads" else h)
    latent = shape.latent
    if latent is None:
        grouped = convention.key_value_heads == "grouped"
        return (
            h * (shape.query_size + 2 * (shape.kv_size if grouped else shape.query_size)) + output
        )
    if latent.query_rank is None:
        queries = h * shape.query_size
    else:
        queries = latent.query_rank * (h + shape.query_size)
    expanded = heads * (latent.plain_dim + latent.value_dim)
    return queries + h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * expanded + output


def _expert_weights(shape: ModelShape) -> int:
    """Of the experts that work on a token, in a layer that has experts."""
    return 0 if shape.experts is None else 3 * shape.hidden_size * shape.experts.active_size


def _router_weights(shape: ModelShape, convention: FlopsConvention) -> int:
    if shape.experts is None or convention.router == "omitted":
        return 0
    return shape.hidden_size * shape.experts.num_experts
