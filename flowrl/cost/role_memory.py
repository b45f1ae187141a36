"""Bytes that a role needs on one device under a layout, by phase and by part.

`flowrl.cost.memory` holds for one device, and says what the parts are; this module divides them.
On one device without options both give the same numbers. Symbols: P parameters of the device's
stage after `tp`, `pp` and `ep`, w bytes of the parameter type, d = `dp x cp` devices with the same
parameters (of routed experts those with the same experts).

Resident:
- parameters `P w`; divided by d with `shard="full"` (ZeRO-3, FSDP; Rajbhandari et al. 2020, arXiv
  1910.02054, section 5).
- AdamW moments `8 P`, and a master copy `4 P` where w < 4; divided by d with `shard` `optimizer` or
  `full` (ZeRO-1), on the host with `offload_optimizer` (Ren et al. 2021, arXiv 2101.06840).
- KV cache `2 n k w` a token, with n the stage's layers and k as `flowrl.cost.sharding` says.

While the optimizer runs:
- gradients in float32 `4 P`, divided by d with `shard="full"`. On one device a pass's own `P w`
  stand beside them at its end where w < 4; on several they are added into the float32 ones layer by
  layer (Megatron's distributed optimizer: `6 + 12/d` bytes a parameter for bfloat16, parameters
  included) or reduced layer by layer (FSDP), which leaves those of one layer.
- gathered parameters with `shard="full"` on several devices: two layers (the one that works and the
  one that is fetched ahead), and the stage's tables, which stay from forward to backward.
- activations of a micro-batch (`flowrl.cost.activations`), of its tokens `/ cp`, times the
  micro-batches in flight: `pp - i` in stage i from 0 with the schedule 1F1B (Narayanan et al. 2021,
  arXiv 2104.04473, section 2.2), or all there are. Full recompute keeps one layer's besides.
- logits and their gradient on the last stage, divided by `tp` (a vocabulary-parallel loss). Of a
  packed micro-batch every token may be of a response.
- with `offload_optimizer` two transfer buffers, one filled while the other is read.

A forward pass takes the tokens that `flowrl.cost.memory` says, or a packed micro-batch. A rollout
holds one layer's tensors for a prompt pass, in which engines keep hidden states whole on each
device of `tp`, or the logits of all slots, gathered whole. On accelerators an engine has captured
graphs (2 MiB for each sequence of the largest captured batch, SGLang's own reserve) and
workspaces of kernels, and receives new weights through a transfer buffer; every group of devices
has communication buffers.

The fullest stage counts: the first has the embedding and most micro-batches in flight, the last the
logits. The framework's own memory is not in here: it is a process's, not a role's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from flowrl.cost.activations import (
    DTYPE_BYTES,
    Recompute,
    attention_kept,
    forward_tensors,
    layer_input,
    mlp_kept,
    norm_kept,
)
from flowrl.cost.layout import Layout
from flowrl.cost.memory import (
    DRAW_COPIES,
    FORWARD_ROWS,
    FORWARD_TOKENS,
    MARGIN_FRACTION,
    MARGIN_MIN_BYTES,
    PREFILL_TOKENS,
    STACKED_LIMIT_BYTES,
    TRUNCATED_DRAW_COPIES,
    MemoryPart,
    Phase,
    PhaseMemory,
    Workload,
    forward_peak,
    update_logits,
    update_peak,
)
from flowrl.cost.models import ModelShape
from flowrl.cost.sharding import StageParameters, cache_elements, stage_parameters

MIB = 1 << 20

Shard: TypeAlias = Literal["none", "optimizer", "full"]

TRANSFER_BYTES = 512 * MIB
"""Weights are sent, and optimizer states streamed, in buffers of this size: the default of slime
(`update-weight-buffer-size`) and what verl's examples set."""

GRAPH_BYTES, MAX_CAPTURED = 2 * MIB, 256
"""Of captured graphs, for a sequence of the largest captured batch (`cuda_graph_max_bs x 2` MB in
SGLang's `server_args.py`), and that batch on devices of 60 to 160 GiB."""

WORKSPACE_BYTES = 3 * 1024 * MIB
"""Of an engine besides: workspaces of kernels, the allocator's slack, the pools of its graphs.
AIConfigurator allows SGLang 4.2 GiB for all that is neither weights, cache, activations nor
communication; this is what is left of it without graphs and the framework's own memory."""

COMMUNICATION_BYTES = 384 * MIB
"""Of a group that a device communicates in: 0.33 GiB between 2 GPUs and 0.38 between 4 or 8, by
AIConfigurator's database for SGLang on H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How a role spends or saves memory.

    Attributes:
        recompute: Which activations are computed again in the backward pass; `none` leaves it to
            the workload.
        shard: What is divided over the devices with the same parameters: nothing, the optimizer's
            states (ZeRO-1), or parameters, gradients and states (FSDP).
        offload_optimizer: The optimizer's states are in the memory of the host, and stream through
            the device while it steps.
        packed_tokens: Tokens of a micro-batch that is packed without padding, on one replica; None
            for rows padded to the longest.
        kv_tokens: Tokens that the KV cache of one replica holds; None for the longest sample in
            every slot. `Workload.num_slots` counts the slots of one replica.
        device_type: On a CPU nothing is captured and no kernel has a workspace.
    """

    recompute: Recompute = "none"
    shard: Shard = "optimizer"
    offload_optimizer: bool = False
    packed_tokens: int | None = None
    kv_tokens: int | None = None
    device_type: Literal["cpu", "cuda", "npu"] = "cuda"


def role_memory(
    role: str,
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    phase: Phase,
    options: MemoryOptions,
) -> PhaseMemory:
    """All that the fullest device of a role holds in `phase`, alone, by parts.

    Raises:
        ValueError: more pipeline stages than layers.
    """
    fullest = max(
        (
            _stage_parts(shape, layout, work, phase, options, stage)
            for stage in _stages(shape, layout)
        ),
        key=lambda parts: sum(parts.values()),
    )
    named = tuple(
        MemoryPart(role=role, name=name, nbytes=nbytes)
        for name, nbytes in fullest.items()
        if nbytes
    )
    return PhaseMemory(phase=phase, parts=named)


def role_peak(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    phase: Phase,
    options: MemoryOptions,
) -> int:
    """Bytes of `role_memory`, without the parts."""
    held = stage_residents(shape, layout, work, options)
    works = stage_working(shape, layout, work, phase, options)
    return max(one + other for one, other in zip(held, works, strict=True))


def stage_working(
    shape: ModelShape, layout: Layout, work: Workload, phase: Phase, options: MemoryOptions
) -> tuple[int, ...]:
    """Bytes of one device of each stage that can be the fullest, while it works, besides the
    resident ones."""
    return tuple(
        sum(_working(shape, layout, work, phase, options, stage).values())
        for stage in _stages(shape, layout)
    )


def working_key(layout: Layout, work: Workload, options: MemoryOptions) -> tuple[object, ...]:
    """What `stage_working` depends on, of layouts and options of one task: most numbers of
    replicas are alike."""
    return (
        layout.tp,
        layout.pp,
        layout.cp,
        layout.ep,
        layout.num_devices == 1,
        layout.dp if options.shard == "full" else 0,
        _most_in_flight(layout, work, options),
        work.num_slots,
        options.recompute,
        options.packed_tokens,
        options.offload_optimizer,
    )


def parameter_bytes(
    shape: ModelShape, layout: Layout, work: Workload, options: MemoryOptions
) -> int:
    """Of the resident bytes, the model's parameters: what tasks of one role may hold once."""
    sharded = options.shard == "full"
    return DTYPE_BYTES[work.dtype] * max(
        _divided(stage, layout) if sharded else stage.total for stage in _stages(shape, layout)
    )


def resident_bytes(
    shape: ModelShape, layout: Layout, work: Workload, options: MemoryOptions
) -> int:
    """Bytes that the fullest device of a role holds while others work."""
    return max(stage_residents(shape, layout, work, options))


def stage_residents(
    shape: ModelShape, layout: Layout, work: Workload, options: MemoryOptions
) -> tuple[int, ...]:
    """Bytes of one device of each stage that can be the fullest, while others work.

    They are the same whatever is computed again, and of whatever micro-batches.
    """
    return tuple(
        sum(_resident(shape, layout, work, options, stage).values())
        for stage in _stages(shape, layout)
    )


def offloadable_bytes(
    shape: ModelShape, layout: Layout, work: Workload, options: MemoryOptions
) -> int:
    """Of the resident bytes, those that can go to the host's memory until the role works again.

    Parameters, optimizer states and an engine's weights can; a KV cache is dropped, not moved, and
    captured graphs hold on to their buffers.
    """
    kept = ("kv cache", "captured graphs", "workspace", "communication")
    return max(
        sum(
            nbytes
            for name, nbytes in _resident(shape, layout, work, options, stage).items()
            if name not in kept
        )
        for stage in _stages(shape, layout)
    )


def kv_bytes_per_token(shape: ModelShape, layout: Layout, dtype: str = "bfloat16") -> float:
    """Bytes of KV cache that a token takes on the fullest device of a replica."""
    layers = max(stage.num_layers for stage in _stages(shape, layout))
    return layers * cache_elements(shape, layout.tp) * DTYPE_BYTES[dtype] / layout.cp


def kv_capacity(
    shape: ModelShape, layout: Layout, *, free_bytes: int, dtype: str = "bfloat16"
) -> int:
    """Tokens of KV cache that one replica holds in `free_bytes` of each of its devices."""
    return max(0, int(free_bytes / kv_bytes_per_token(shape, layout, dtype)))


def _stages(shape: ModelShape, layout: Layout) -> tuple[StageParameters, ...]:
    """Stages that can be the fullest: the first two, the last two, and whichever has most layers.

    Stages between them hold no tables and fewer micro-batches than the second.
    """
    return _fullest(shape, layout.tp, layout.pp, layout.ep)


@lru_cache(maxsize=4096)
def _fullest(shape: ModelShape, tp: int, pp: int, ep: int) -> tuple[StageParameters, ...]:
    stages = stage_parameters(shape, tp, pp, ep)
    if len(stages) <= 4:
        return stages
    most = max(stages[1:-1], key=lambda stage: (stage.num_layers, -stage.index))
    experts = max(stages[1:-1], key=lambda stage: (stage.total, -stage.index))
    chosen = {stage.index: stage for stage in (*stages[:2], most, experts, *stages[-2:])}
    return tuple(chosen.values())


def _stage_parts(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    phase: Phase,
    options: MemoryOptions,
    stage: StageParameters,
) -> dict[str, int]:
    working = _working(shape, layout, work, phase, options, stage)
    return _resident(shape, layout, work, options, stage) | working


def _working(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    phase: Phase,
    options: MemoryOptions,
    stage: StageParameters,
) -> dict[str, int]:
    match phase:
        case Phase.ROLLOUT:
            working = _rollout_parts(shape, layout, work, options)
        case Phase.LOGPROBS | Phase.VALUES | Phase.SCORES:
            working = _forward_parts(shape, layout, work, options, stage)
        case Phase.UPDATE:
            working = _update_parts(shape, layout, work, options, stage)
    working["margin"] = max(int(sum(working.values()) * MARGIN_FRACTION), MARGIN_MIN_BYTES)
    return working


def _resident(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    options: MemoryOptions,
    stage: StageParameters,
) -> dict[str, int]:
    width = DTYPE_BYTES[work.dtype]
    whole = stage.total
    divided = _divided(stage, layout)
    parts = {"parameters": (divided if options.shard == "full" else whole) * width}
    if work.trainable and not options.offload_optimizer:
        states = whole if options.shard == "none" else divided
        parts["optimizer"] = 8 * states
        parts["master weights"] = 4 * states if width < 4 else 0
    if work.num_slots:
        tokens = options.kv_tokens
        tokens = work.num_slots * work.max_length if tokens is None else tokens
        token = stage.num_layers * cache_elements(shape, layout.tp) * width
        parts["kv cache"] = -(-tokens * token // layout.cp)
        parts["engine weights"] = _engine_weights(shape, layout, work, stage)
        if options.device_type != "cpu":
            parts["captured graphs"] = GRAPH_BYTES * min(work.num_slots, MAX_CAPTURED)
            parts["workspace"] = WORKSPACE_BYTES
    if options.device_type != "cpu":
        parts["communication"] = COMMUNICATION_BYTES * _num_groups(layout, work, options)
    return parts


def _num_groups(layout: Layout, work: Workload, options: MemoryOptions) -> int:
    """Groups that a device is in. Replicas that neither train nor share weights need none."""
    joined = work.trainable or options.shard == "full"
    groups = (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1) + (layout.ep > 1)
    return groups + (joined and layout.dp > 1)


def _divided(stage: StageParameters, layout: Layout) -> int:
    """Parameters of a device where those with the same ones divide them."""
    return -(-stage.dense // layout.shards) - (-stage.experts // layout.expert_replicas)


def _engine_weights(
    shape: ModelShape, layout: Layout, work: Workload, stage: StageParameters
) -> int:
    width = DTYPE_BYTES[work.dtype]
    own = 0 if work.shares_weights or not work.trainable else stage.total * width
    counts = shape.parameters
    if layout.model_devices == 1 and counts.total * width <= STACKED_LIMIT_BYTES:
        own += (counts.attention + counts.mlp) * width
    return own


def _update_parts(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    options: MemoryOptions,
    stage: StageParameters,
) -> dict[str, int]:
    width = DTYPE_BYTES[work.dtype]
    gradients = 4 * (_divided(stage, layout) if options.shard == "full" else stage.total)
    own = 0
    if width < 4 and layout.num_devices == 1:
        own = width * stage.total
    elif width < 4:
        gradients += width * stage.largest_layer
    elements = 0
    if stage.last:
        positions = options.packed_tokens or work.micro_batch * work.max_response_tokens
        elements = -(-positions * shape.output_size // (layout.cp * _head_shards(shape, layout)))
    tokens = (options.packed_tokens or work.micro_batch * work.max_length) / layout.cp
    kept, recomputed = _kept(shape, layout, work, options, stage)
    parts = update_peak(
        gradients=gradients,
        own=own,
        kept=int(tokens * kept),
        recomputed=int(tokens * recomputed),
        logits=update_logits(elements, width),
    )
    parts["gathered weights"] = 2 * _gathered(layout, options, stage, width)
    parts["transfer buffers"] = 2 * TRANSFER_BYTES if options.offload_optimizer else 0
    return parts


def _head_shards(shape: ModelShape, layout: Layout) -> int:
    return layout.tp if shape.head == "lm" else 1


def _gathered(layout: Layout, options: MemoryOptions, stage: StageParameters, width: int) -> int:
    """Bytes of parameters that FSDP has gathered; with a backward pass, their gradients again."""
    if options.shard != "full" or layout.shards == 1:
        return 0
    return (2 * stage.largest_layer + stage.vocabulary) * width


def _kept(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    options: MemoryOptions,
    stage: StageParameters,
) -> tuple[float, float]:
    """Bytes that a token leaves for the backward passes of a stage, and that come back in one."""
    width = DTYPE_BYTES[work.dtype]
    recompute = options.recompute if options.recompute != "none" else work.recompute
    partial: Recompute = "none" if recompute == "full" else recompute
    attention = attention_kept(
        shape,
        width=width,
        attention=work.attention,
        length=work.max_length,
        layout=layout,
        recompute=partial,
    )
    plain = stage.num_layers - stage.num_expert_layers
    dense = experts = 0.0
    if plain:
        dense = mlp_kept(shape, width=width, with_experts=False, layout=layout, recompute=partial)
    if stage.num_expert_layers:
        experts = mlp_kept(shape, width=width, with_experts=True, layout=layout, recompute=partial)
    flight = _in_flight(layout, work, options, stage)
    norm = norm_kept(shape, width) / layout.tp if stage.last else 0
    if recompute == "full":
        one = attention + max(dense, experts)
        return flight * stage.num_layers * layer_input(shape, width, layout) + norm, one
    kept = stage.num_layers * attention + plain * dense + stage.num_expert_layers * experts
    return flight * (kept + norm), 0


def _in_flight(
    layout: Layout, work: Workload, options: MemoryOptions, stage: StageParameters
) -> int:
    """Micro-batches whose activations a stage keeps at once."""
    return min(layout.pp - stage.index, _most_in_flight(layout, work, options))


def _most_in_flight(layout: Layout, work: Workload, options: MemoryOptions) -> int:
    """Of the first stage."""
    if layout.pp == 1:
        return 1
    rows = work.num_samples / layout.dp
    if options.packed_tokens is None:
        micro_batches = rows / work.micro_batch
    else:
        micro_batches = rows * work.max_length / options.packed_tokens
    return max(1, min(layout.pp, int(-(-micro_batches // 1))))


def _forward_parts(
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    options: MemoryOptions,
    stage: StageParameters,
) -> dict[str, int]:
    width = DTYPE_BYTES[work.dtype]
    if options.packed_tokens is None:
        rows = max(1, min(FORWARD_ROWS, FORWARD_TOKENS // work.max_length, work.num_samples))
        tokens, positions = rows * work.max_length, rows * work.max_response_tokens
    else:
        tokens = positions = options.packed_tokens
    token = forward_tensors(
        shape, width=width, attention=work.attention, length=work.max_length, layout=layout
    )
    elements = -(-positions * shape.output_size // (layout.cp * _head_shards(shape, layout)))
    parts = forward_peak(
        layer=int(tokens / layout.cp * token),
        hidden=int(tokens / layout.cp * 2 * shape.hidden_size * width / layout.tp),
        elements=elements if stage.last else 0,
        width=width,
    )
    gathered = _gathered(layout, options, stage, width)
    return parts | ({"gathered weights": gathered} if gathered else {})


def _rollout_parts(
    shape: ModelShape, layout: Layout, work: Workload, options: MemoryOptions
) -> dict[str, int]:
    longest = work.max_prompt_tokens
    tokens = min(work.num_slots * longest, max(PREFILL_TOKENS, longest))
    token = forward_tensors(
        shape,
        width=DTYPE_BYTES[work.dtype],
        attention=work.attention,
        length=longest,
        layout=layout,
        engine=True,
    )
    copies = TRUNCATED_DRAW_COPIES if work.truncates else DRAW_COPIES
    activations, logits = int(tokens * token), 4 * copies * work.num_slots * shape.vocab_size
    parts = {"activations": activations} if activations >= logits else {"logits": logits}
    apart = not work.shares_weights or not work.trainable
    if apart and options.device_type != "cpu":
        parts["transfer buffers"] = TRANSFER_BYTES
    return parts
