"""Passes of a trainer over whole samples: logprobs, and updates.

With R samples a replica of mean length s and mean squared length s2, packed without padding into n
micro-batches of at most `micro_tokens`:

    pass       kernels of R s / n tokens, over the device's `trainer_share`, attention of
               R s2 / (2 n) pairs, and what tensor, context and expert ranks exchange
    forward    (n + pp - 1) / pp passes                    (pipeline: Narayanan et al. 2021, arXiv
               2104.04473, section 2.2: (pp - 1) / n of the time is a bubble)
    update     that, with each pass worth 3 (a backward pass computes gradients of inputs and of
               weights; of attention 3.5), and where all activations are computed again one more
               for the layers; with `selective` for norms (what `flowrl.cost.activations` keeps
               nothing of)

What tensor ranks exchange is as much in a backward pass as in a forward pass.

Ranks lie in Megatron's order, `tp-cp-dp-pp`, as `flowrl.plan.parameters` has them for weight
routes: those that exchange gradients are `tp` devices apart, all within their stage, and the same
ranks of two stages `tp cp dp`, in another node wherever a stage fills one.

Data ranks (Rajbhandari et al. 2020, arXiv 1910.02054, section 7), P parameters of a device:

    none        an all-reduce of 4 P bytes of gradients for each optimizer step
    optimizer   a reduce-scatter of 4 P and an all-gather of w P, for each optimizer step
    full        an all-gather of w P for each pass forward and each backward, and a reduce-scatter
                of 4 P, for each micro-batch; what kernels do not hide counts

An optimizer step reads and writes 30 bytes a parameter that a device steps (AdamW in float32 with
master weights: 16 read, 14 written); from host memory, 12 bytes each way besides.

Samples are dealt out so that replicas have equal work. A replica never takes less than one sample,
and no step less than its longest sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flowrl.cluster.hardware import Machine
from flowrl.cost import collectives, efficiency
from flowrl.cost.activations import Recompute
from flowrl.cost.collectives import Ranks
from flowrl.cost.engine_steps import ring_s, sends_s
from flowrl.cost.flops import forward_flops
from flowrl.cost.forward_pass import PassParts, Tokens, dtype_bytes, forward_parts
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths, expected_maximum
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard
from flowrl.cost.sharding import stage_parameters

OPTIMIZER_BYTES = 30
OFFLOADED_BYTES = 24
GRADIENT_BYTES = 4

EXCHANGES = frozenset({"tensor parallel", "expert parallel", "context parallel"})

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass over those of its forward pass: five products of matrices
for two, the scores being computed again (Dao 2023, arXiv 2307.08691, section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a trainer is given.

    Attributes:
        samples: Of all replicas.
        micro_tokens: That a replica packs into a pass, at most; a longer sample is one of its own.
    """

    samples: float
    prompt_tokens: float
    lengths: Lengths
    micro_tokens: int


@lru_cache(maxsize=256)
def batch_of(samples: float, prompt_tokens: float, lengths: Lengths, micro_tokens: int) -> Batch:
    """The batch; all layouts are asked for the same few."""
    return Batch(
        samples=samples, prompt_tokens=prompt_tokens, lengths=lengths, micro_tokens=micro_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """The micro-batches of one replica."""

    number: int
    tokens: Tokens


def forward_batch_parts(
    shape: ModelShape, layout: Layout, machine: Machine, batch: Batch, shard: Shard
) -> PassParts:
    """Seconds of logprobs, values or scores, by part."""
    number, once = _once(shape, layout, machine, batch)
    turns = (number + layout.pp - 1) / layout.pp
    parts = {name: seconds * turns for name, seconds in once}
    if shard == "full":
        gathered = number * _gather_s(shape, layout, machine)
        parts["sharded parameters"] = max(0.0, gathered - sum(parts.values()))
    return parts


def replica_tokens(layout: Layout, batch: Batch) -> float:
    """Tokens of a batch that one replica passes on, in all micro-batches."""
    passes = _passes(layout, batch)
    return passes.number * passes.tokens.count


def update_parts(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    batch: Batch,
    *,
    mini_batches: int,
    recompute: Recompute,
    shard: Shard,
    offload_optimizer: bool,
) -> PassParts:
    """Seconds of all optimizer steps of a batch, by part.

    Args:
        batch: All of it; each optimizer step takes its share.
    """
    step = _step(shape, layout, machine, batch, mini_batches, shard)
    turns = mini_batches * (step.number + layout.pp - 1) / layout.pp
    parts = {name: seconds * turns * _worth(name, recompute) for name, seconds in step.once}
    if shard == "full":
        exchanged = mini_batches * step.number * step.exchanged_s
        parts["sharded parameters"] = max(0.0, exchanged - sum(parts.values()))
    else:
        parts["gradients"] = mini_batches * step.exchanged_s
    stepped_s = step.stepped_s + (step.streamed_s if offload_optimizer else 0.0)
    parts["optimizer"] = mini_batches * stepped_s
    return parts


def least_passes_s(
    shape: ModelShape, machine: Machine, *, devices: int, tokens: float, training: bool
) -> float:
    """Seconds of the products with all weights over so many tokens, shared out evenly with nothing
    exchanged: no layout is faster."""
    rates = efficiency.rates(machine.spec)
    parts = forward_flops(shape, [1])
    each = parts.projections + parts.mlp + parts.router + parts.head
    rate = max(rates.flops, rates.expert_flops) * rates.trainer_share
    return (3 if training else 1) * tokens * each / (devices * rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An optimizer step, as far as it is the same whatever it computes again or has on the host.

    Attributes:
        number: Micro-batches of a replica.
        once: Parts of a pass of one.
        exchanged_s: Of data ranks: of each micro-batch where parameters are divided, else once.
        stepped_s: Of the optimizer.
        streamed_s: Of its states from the host and back, where they are there.
    """

    number: int
    once: tuple[tuple[str, float], ...]
    exchanged_s: float
    stepped_s: float
    streamed_s: float


@lru_cache(maxsize=4096)
def _step(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    batch: Batch,
    mini_batches: int,
    shard: Shard,
) -> _Step:
    each = batch_of(
        batch.samples / mini_batches, batch.prompt_tokens, batch.lengths, batch.micro_tokens
    )
    number, once = _once(shape, layout, machine, each)
    if shard == "full":
        gathered = _gather_s(shape, layout, machine)
        exchanged_s = 2 * gathered + _reduce_s(shape, layout, machine)
    else:
        exchanged_s = _gradients_s(shape, layout, machine, shard)
    experts, dense = _largest_stage(shape, layout)
    stepped = float(dense + experts)
    if shard != "none":
        stepped = dense / layout.shards + experts / layout.expert_replicas
    link = machine.spec.host_bytes_per_s * efficiency.HOST_LINK_SHARE
    return _Step(
        number=number,
        once=once,
        exchanged_s=exchanged_s,
        stepped_s=stepped * OPTIMIZER_BYTES / efficiency.rates(machine.spec).nbytes,
        streamed_s=stepped * OFFLOADED_BYTES / link,
    )


def _worth(name: str, recompute: Recompute) -> float:
    """Forward passes that forward and backward of a part are worth together."""
    again = recompute == "full" and name not in ("head", "embedding", "pipeline")
    if name == "attention":
        return 1.0 + ATTENTION_BACKWARD + again
    if name in EXCHANGES or name == "pipeline":
        return 2.0 + again
    return 3.0 + (again or (recompute == "selective" and name == "norms"))


def _once(
    shape: ModelShape, layout: Layout, machine: Machine, batch: Batch
) -> tuple[int, tuple[tuple[str, float], ...]]:
    """Micro-batches of a replica, and the parts of a pass of one."""
    passes = _passes(layout, batch)
    return passes.number, tuple(_pass_parts(shape, layout, machine, passes.tokens).items())


def _passes(layout: Layout, batch: Batch) -> _Passes:
    prompt, lengths = batch.prompt_tokens, batch.lengths
    mean = prompt + lengths.mean
    square = prompt**2 + 2 * prompt * lengths.mean + lengths.mean_square
    rows = max(1.0, batch.samples / layout.dp)
    if rows < 8:
        rows = math.ceil(rows - 1e-9)
    longest = prompt + expected_maximum(lengths, max(1, round(batch.samples)))
    total = max(rows * mean, longest)
    pairs = max(rows * square, longest**2) / 2
    room = batch.micro_tokens * max(0.5, 1.0 - mean / batch.micro_tokens / 2)
    number = max(1, min(math.ceil(total / room), math.ceil(rows)))
    each = total / number
    return _Passes(
        number=number,
        tokens=Tokens(
            count=each, pairs=pairs / number, cached=False, num_logits=each, training=True
        ),
    )


def _pass_parts(shape: ModelShape, layout: Layout, machine: Machine, tokens: Tokens) -> PassParts:
    """One micro-batch through all stages."""
    parts = forward_parts(shape, layout, machine, tokens)
    if layout.cp > 1:
        # Blocks of keys and values travel while others are multiplied.
        ring = ring_s(shape, layout, machine, tokens.count)
        parts["context parallel"] = max(0.0, ring - parts["attention"])
    share = efficiency.rates(machine.spec).trainer_share
    for name in parts.keys() - EXCHANGES - {"attention"}:
        parts[name] /= share
    # Replicas of a stage are neighbours, so that gradients travel less far than hidden states.
    apart = layout.tp * layout.cp * layout.dp
    parts["pipeline"] = sends_s(shape, layout, machine, tokens.count, apart)
    return parts


@lru_cache(maxsize=1024)
def _largest_stage(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Parameters of the fullest stage on one device: of routed experts, and all others."""
    stages = stage_parameters(shape, layout.tp, layout.pp, layout.ep)
    fullest = max(stages, key=lambda stage: stage.total)
    return fullest.experts, fullest.dense


def _exchanges(shape: ModelShape, layout: Layout) -> tuple[tuple[int, Ranks], ...]:
    """Parameters of a device, with the ranks that have the same ones."""
    experts, dense = _largest_stage(shape, layout)
    shards = Ranks(size=layout.shards, stride=layout.tp)
    replicas = Ranks(size=layout.expert_replicas, stride=layout.expert_shards)
    return ((dense, shards), (experts, replicas))


def _gather_s(shape: ModelShape, layout: Layout, machine: Machine) -> float:
    width = dtype_bytes(machine)
    return sum(
        collectives.all_gather_s(count * width, ranks, machine)
        for count, ranks in _exchanges(shape, layout)
    )


def _reduce_s(shape: ModelShape, layout: Layout, machine: Machine) -> float:
    return sum(
        collectives.reduce_scatter_s(count * GRADIENT_BYTES, ranks, machine)
        for count, ranks in _exchanges(shape, layout)
    )


@lru_cache(maxsize=4096)
def _gradients_s(shape: ModelShape, layout: Layout, machine: Machine, shard: Shard) -> float:
    """Of one optimizer step."""
    if shard == "optimizer":
        return _reduce_s(shape, layout, machine) + _gather_s(shape, layout, machine)
    return sum(
        collectives.all_reduce_s(count * GRADIENT_BYTES, ranks, machine)
        for count, ranks in _exchanges(shape, layout)
    )
