"""A forward pass of one device: kernels of all layers that it has, and what tensor ranks exchange.

One device of a replica has `1 / tp` of every layer of its pipeline stage. With m tokens, hidden
size h, q and k elements of all query and of all key heads, f intermediate size, V outputs:

    projections   h -> (q + 2 k) / tp,  q / tp -> h       (key heads are repeated below one a rank)
    MLP           h -> 2 f / tp,        f / tp -> h
    experts       h -> 2 f_e,           f_e -> h           of the distinct experts hit
    head          h -> V / tp           for tokens whose logits are needed
    norms         2 a layer, each 4 m h elements: input and residual read, both written
    activation    3 m f / tp elements
    all-reduce    2 a layer, m h elements each (Shoeybi et al. 2019, arXiv 1909.08053, section 3)

Distinct experts: with E experts of which each token takes K at random, T tokens hit
`E (1 - (1 - K / E)^T)`. Experts lie divided over `max(tp, ep)` devices; `ep` beyond `tp` makes the
T tokens those of `ep / tp` replicas, which exchange them in two all-to-alls a layer (DeepSpeed-MoE,
arXiv 2201.05596, section 5).

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): while decoding, queries and outputs
are multiplied into the latent, so that each token reads `r + p` elements a layer whatever the
heads, on every tensor rank; over whole prompts keys and values are expanded.

`Tokens` says what a pass works on; the same function serves an engine's decode step, its prefill,
and a trainer's pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.cluster.hardware import Machine
from flowrl.cost import collectives, efficiency, kernels
from flowrl.cost.collectives import Ranks
from flowrl.cost.efficiency import Rates
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.models.shape import Experts, LatentAttention

PassParts = dict[str, float]
"""Seconds by name, of all layers of the model on one device of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a pass works on.

    Attributes:
        count: Tokens that pass through the layers.
        pairs: Pairs of a token and one that it sees, of all rows.
        cached: Of those pairs, whether keys and values come from the cache (a decode step).
        num_logits: Tokens whose logits are computed.
        training: A trainer's pass: its kernels start at once, its logits are float32, its experts
            are balanced.
    """

    count: float
    pairs: float
    cached: bool
    num_logits: float
    training: bool = False


def dtype_bytes(machine: Machine) -> int:
    """Of an element: bfloat16, and float32 on CPUs."""
    return 4 if machine.spec.type == "cpu" else 2


def forward_parts(shape: ModelShape, layout: Layout, machine: Machine, tokens: Tokens) -> PassParts:
    """Seconds of a pass through all layers, by part, one stage after the other.

    Context ranks share the tokens of a pass: each has `1 / cp` of the tokens and pairs.
    """
    rates, width = efficiency.rates(machine.spec), dtype_bytes(machine)
    m = tokens.count / layout.cp
    tp, h, layers, sparse = layout.tp, shape.hidden_size, shape.num_layers, shape.num_expert_layers
    norm_ranks = tp if tokens.training else 1  # trainers divide them by sequence parallelism
    parts = {
        "embedding": kernels.elementwise_s(rates, 2 * m * h * width),
        "projections": layers * _projections_s(shape, tp, rates, m, tokens.cached, width),
        "attention": layers * _attention_s(shape, layout, rates, tokens, width),
        "norms": layers * 2 * kernels.elementwise_s(rates, 4 * m * h * width / norm_ranks),
        "mlp": (layers - sparse) * _mlp_s(rates, m, h, shape.intermediate_size / tp, width),
        "head": _head_s(shape, layout, rates, tokens, width),
        "tensor parallel": _tensor_parallel_s(shape, layout, machine, m * h * width),
    }
    if shape.experts is not None:
        experts = shape.experts
        shared = experts.shared_size / tp
        parts["mlp"] += sparse * _mlp_s(rates, m, h, shared, width) if shared else 0.0
        parts["router"] = sparse * kernels.matmul_s(rates, m, h, experts.num_experts, width)
        parts["experts"] = sparse * _experts_s(experts, layout, rates, h, m, tokens, width)
        parts["expert parallel"] = sparse * _exchange_s(experts, layout, machine, m * h * width)
    return parts


def _projections_s(
    shape: ModelShape, tp: int, rates: Rates, m: float, cached: bool, width: int
) -> float:
    h = shape.hidden_size
    output = kernels.matmul_s(rates, m, shape.attention_size / tp, h, width)
    if shape.latent is not None:
        return output + _latent_s(shape, shape.latent, tp, rates, m, cached, width)
    heads = -(-shape.num_kv_heads // tp)
    inputs = shape.query_size / tp + 2 * heads * shape.head_dim
    return output + kernels.matmul_s(rates, m, h, inputs, width)


def _latent_s(
    shape: ModelShape,
    latent: LatentAttention,
    tp: int,
    rates: Rates,
    m: float,
    cached: bool,
    width: int,
) -> float:
    """Down to the latents, up to queries; and the latent's way into queries or into keys."""
    h, heads = shape.hidden_size, shape.num_heads / tp
    down = kernels.matmul_s(
        rates, m, h, latent.kv_rank + latent.rope_dim + (latent.query_rank or 0), width
    )
    queries = kernels.matmul_s(rates, m, latent.query_rank or h, shape.query_size / tp, width)
    if not cached:
        expanded = heads * (latent.plain_dim + latent.value_dim)
        return down + queries + kernels.matmul_s(rates, m, latent.kv_rank, expanded, width)
    # A product for each head: the weights are those of the expansion, read once.
    into = kernels.matmul_s(rates, m, latent.kv_rank, heads * latent.plain_dim, width)
    out = kernels.matmul_s(rates, m, latent.kv_rank, heads * latent.value_dim, width)
    return down + queries + into + out


def _attention_s(
    shape: ModelShape, layout: Layout, rates: Rates, tokens: Tokens, width: int
) -> float:
    heads, pairs = shape.num_heads / layout.tp, tokens.pairs / layout.cp
    kv_heads = -(-shape.num_kv_heads // layout.tp)
    if tokens.cached:
        if shape.latent is not None:
            elements = float(shape.cache_size)
            each = 2.0 * heads * (shape.cache_size + shape.latent.kv_rank)
        else:
            elements = 2.0 * kv_heads * shape.head_dim
            each = 2.0 * heads * (shape.head_dim + shape.value_head_dim)
        return kernels.decode_attention_s(
            rates, nbytes=pairs * elements * width, operations=pairs * each
        )
    m = tokens.count / layout.cp
    operations = 2.0 * pairs * heads * (shape.head_dim + shape.value_head_dim)
    sizes = heads * (shape.head_dim + shape.value_head_dim)
    keys = kv_heads * (shape.head_dim + shape.value_head_dim)
    nbytes = m * (sizes + keys) * width
    return kernels.prefill_attention_s(
        rates, operations=operations, nbytes=nbytes, training=tokens.training
    )


def _mlp_s(rates: Rates, m: float, h: int, size: float, width: int) -> float:
    """A gated MLP of `size` intermediate elements on this device."""
    products = kernels.matmul_s(rates, m, h, 2 * size, width)
    products += kernels.matmul_s(rates, m, size, h, width)
    return products + kernels.elementwise_s(rates, 3 * m * size * width)


def _experts_s(
    experts: Experts, layout: Layout, rates: Rates, h: int, m: float, tokens: Tokens, width: int
) -> float:
    """Of one device; see the module for what it holds and whose tokens it gets."""
    tp, ep = layout.tp, layout.ep
    apart = max(1.0, ep / tp)  # replicas whose tokens come together
    split = max(1.0, tp / ep)  # devices that one expert is divided over
    held = experts.num_experts / ep
    choices = m * apart * experts.num_active
    skew = 1.0 if tokens.training else efficiency.expert_skew(ep)
    missed = (1.0 - experts.num_active / experts.num_experts) ** (m * apart)
    each = 3.0 * h * experts.expert_size / split
    # Ranks of one replica have every token, so each of them orders and adds up all choices.
    return kernels.experts_s(
        rates,
        operations=2.0 * choices / ep * each * skew,
        weight_bytes=held * (1.0 - missed) * each * width,
        token_bytes=choices / apart * h * width,
        start_s=efficiency.TRAINER_EXPERTS_S if tokens.training else efficiency.EXPERTS_S,
    )


def _exchange_s(experts: Experts, layout: Layout, machine: Machine, nbytes: float) -> float:
    """Tokens to the experts of other replicas and back; `nbytes` of the tokens of a replica."""
    if layout.ep <= layout.tp:
        return 0.0
    ranks = Ranks(size=layout.ep)
    sent = nbytes / layout.tp * experts.num_active
    return 2.0 * collectives.all_to_all_s(sent, ranks, machine)


def _head_s(shape: ModelShape, layout: Layout, rates: Rates, tokens: Tokens, width: int) -> float:
    if not tokens.num_logits:
        return 0.0
    m, outputs = tokens.num_logits / layout.cp, max(1.0, shape.output_size / layout.tp)
    seconds = kernels.matmul_s(rates, m, shape.hidden_size, outputs, width)
    if tokens.training and shape.head == "lm":
        seconds += efficiency.LOGIT_PASSES * 4 * m * outputs / rates.nbytes
    return seconds


def _tensor_parallel_s(shape: ModelShape, layout: Layout, machine: Machine, nbytes: float) -> float:
    """Two all-reduces a layer, and one of the embedding."""
    if layout.tp == 1:
        return 0.0
    once = collectives.all_reduce_s(nbytes, Ranks(size=layout.tp), machine)
    return (2 * shape.num_layers + 1) * once
