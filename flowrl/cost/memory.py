"""How many bytes a role needs on its device, by phase and by part.

Symbols: P parameters, B rows of a micro-batch, L tokens of a row (the longest: a backend that packs
its rows needs less), R response positions of a row, S slots, M tokens of a slot, V vocabulary (1
where the model ends in a value head), h hidden size, f intermediate size, n layers, a query heads,
q and k elements of all query and of all key heads, w bytes of the parameter type.

Resident, in every phase:
- parameters `P w`; for a trained role the AdamW moments `8 P`, and a master copy `4 P` where w < 4.
- KV cache of a generating role `2 n k S M w` (with latent attention `n (r + p) S M w`, the latent
  and the shared rotary key), allocated once, and the engine's own weights: a whole
  copy `P w` where it does not read the trainer's, else stacked copies of the projections for fast
  decoding, attention and MLP parameters times w, of models whose parameters take at most 256 MiB.

While the optimizer runs, in `update`, the fullest of these moments: all activations and the logits
are there, and the backward pass begins; with full recompute, one layer's tensors have come back; or
the backward pass ends, and its own gradients are complete.
- gradients `4 P`, accumulated in float32; where w < 4 a pass's own `P w` at its end.
- activations kept for the backward pass, per token of the `B L` of a micro-batch:
  `n (6h + 5q + 4f) + 3h` elements. Per layer, RMSNorm keeps its input, the normalised input and its
  output (3h, twice); attention keeps queries, keys and values after rotation (keys and values
  repeated to the query heads), its output, and the copy that the output projection reads (5q); the
  gated MLP keeps gate, up, silu(gate) and their product (4f). Query/key norms add `2 (q + k)`.
  Eager attention adds `n a L` (the probabilities); fused attention (sdpa) `n a` float32 numbers.
  Experts keep `4f` with f what one token passes, two copies of the token for each routed expert
  that works on it, and the router's choice. Latent attention keeps `2q + 3v` with v the elements of
  all value heads, and both latents with their normalised form.
  Below float32, what RMSNorm reads and the eager probabilities are kept in float32, the latter
  beside their cast.
  Full recompute keeps the input of each layer, `h`, and the tensors of one layer at a time
  (`flowrl.cost.activations` has these formulas and those of selective recompute).
- logits of response positions only, and their gradient: `2 w B R V`; softmax runs over pieces of at
  most 4 Mi elements, three float32 copies of each, four where w < 4.

In `logprobs`, `values` and `scores` nothing is kept. A pass takes N tokens, at most 4,096 and 128
rows but at least one row, and needs the larger of two things, which are never there at once: one
layer's largest tensors `N (3h + 3q + 3f) w` with eager probabilities `N a L w` (experts: `2h` more
for each that works on the token); or the logits of its response positions once, the pieces of
their softmax with four copies, and the last hidden states twice, `2 N h w`.

In `rollout`, the larger of: one layer's tensors `N (2h + 3q + 3k + 4f) w` for a prompt pass of at
most 8,192 tokens (at least one prompt); or float32 copies of the logits of one token a slot,
`4 c S V`: logits, scaled, what a grammar, top-k or min-p leave, probabilities (c = 4); with top-p
the sorted values, 8-byte indices and their sums too (c = 11).

Measured on a CPU with the torch backend (allocator events, packed rows without common prefixes):
updates of 171 to 441 MiB, models of 1 to 70 M parameters of three families, in float32 and
bfloat16, with and without recompute, come out 5 % below to 9 % above what was allocated, smaller
ones 5 % below to 10 % above, forward passes 8 % below to 15 % above, rollouts 1 to 9 % above where
prompts are most; the margin comes on top.

The margin covers what no formula names: the largest backward temporaries, allocator rounding and
fragmentation. It is 10 % of the parts that change, and at least 16 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flowrl.cost.activations import (
    DTYPE_BYTES,
    AttentionKind,
    Recompute,
    attention_kept,
    forward_tensors,
    layer_input,
    mlp_kept,
    norm_kept,
)
from flowrl.cost.models import ModelShape

__all__ = [
    "DTYPE_BYTES",
    "AttentionKind",
    "MemoryPart",
    "Phase",
    "PhaseMemory",
    "Workload",
    "activation_bytes",
    "format_bytes",
    "forward_peak",
    "phase_memory",
    "recomputed_bytes",
    "resident_memory",
    "update_logits",
    "update_peak",
    "working_memory",
]

SOFTMAX_PIECE = 1 << 22
STACKED_LIMIT_BYTES = 256 << 20
FORWARD_ROWS, FORWARD_TOKENS = 128, 4096
PREFILL_TOKENS = 8192
DRAW_COPIES, TRUNCATED_DRAW_COPIES = 4, 11

MARGIN_FRACTION = 0.10
MARGIN_MIN_BYTES = 16 << 20


class Phase(StrEnum):
    """What a device is doing."""

    ROLLOUT = "rollout"
    LOGPROBS = "logprobs"
    VALUES = "values"
    SCORES = "scores"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a role is asked to do at once.

    Attributes:
        num_slots: Samples decoded at once; 0 for a role that does not generate.
        max_length: Tokens of the longest sample, prompt and response.
        max_prompt_tokens: Of the longest prompt.
        max_response_tokens: Of the longest response.
        micro_batch: Rows of one forward and backward pass.
        num_samples: Rows of a step's batch.
        dtype: Parameter type.
        trainable: Whether the role has an optimizer.
        attention: Which attention kernel runs.
        shares_weights: The engine reads the trainer's parameters.
        truncates: Tokens are drawn with top-p, which sorts.
        recompute: Activations that the backward pass computes again instead of keeping them.
    """

    num_slots: int
    max_length: int
    max_prompt_tokens: int
    max_response_tokens: int
    micro_batch: int
    num_samples: int
    dtype: str
    trainable: bool
    attention: AttentionKind = "sdpa"
    shares_weights: bool = True
    truncates: bool = False
    recompute: Recompute = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A named share of a role's memory: `optimizer`, `activations`, ..."""

    role: str
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """The memory of one role, or of one device, in one phase."""

    phase: Phase
    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def describe(self) -> str:
        """`optimizer 1.1 GiB, activations 0.9 GiB, ...`, largest first.

        Where several roles hold something, each part says whose it is: `actor optimizer 1.1 GiB`.
        """
        several = len({part.role for part in self.parts if part.role and part.nbytes}) > 1
        sums: dict[str, int] = {}
        for part in self.parts:
            name = f"{part.role} {part.name}" if several and part.role else part.name
            sums[name] = sums.get(name, 0) + part.nbytes
        ordered = sorted(sums.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in ordered if nbytes)


def resident_memory(role: str, shape: ModelShape, work: Workload) -> tuple[MemoryPart, ...]:
    """What the role holds in every phase."""
    width, count = DTYPE_BYTES[work.dtype], shape.parameters.total
    parts = {"parameters": count * width}
    if work.trainable:
        parts["optimizer"] = 8 * count
        parts["master weights"] = 4 * count if width < 4 else 0
    if work.num_slots:
        tokens = work.num_slots * work.max_length
        parts["kv cache"] = shape.num_layers * shape.cache_size * tokens * width
        parts["engine weights"] = _engine_weights(shape, work)
    return _parts(role, parts)


def working_memory(
    role: str, shape: ModelShape, work: Workload, phase: Phase
) -> tuple[MemoryPart, ...]:
    """What the role needs besides while it is the one that works, with the margin."""
    match phase:
        case Phase.ROLLOUT:
            parts = _rollout_parts(shape, work)
        case Phase.LOGPROBS | Phase.VALUES | Phase.SCORES:
            parts = _logprobs_parts(shape, work)
        case Phase.UPDATE:
            parts = _update_parts(shape, work)
    parts["margin"] = max(int(sum(parts.values()) * MARGIN_FRACTION), MARGIN_MIN_BYTES)
    return _parts(role, parts)


def phase_memory(role: str, shape: ModelShape, work: Workload, phase: Phase) -> PhaseMemory:
    """All that one role needs in `phase`, alone on its device."""
    parts = resident_memory(role, shape, work) + working_memory(role, shape, work, phase)
    return PhaseMemory(phase=phase, parts=parts)


def activation_bytes(shape: ModelShape, work: Workload) -> int:
    """Kept for the backward pass of one micro-batch, without the logits."""
    width, full = DTYPE_BYTES[work.dtype], work.recompute == "full"
    norm = norm_kept(shape, width)
    if full:
        token = shape.num_layers * layer_input(shape, width) + norm
    else:
        attention, dense, experts = _layer_kept(shape, work)
        sparse = shape.num_expert_layers
        plain = shape.num_layers - sparse
        token = shape.num_layers * attention + plain * dense + sparse * experts + norm
    return int(work.micro_batch * work.max_length * token)


def recomputed_bytes(shape: ModelShape, work: Workload) -> int:
    """Of the one layer that full recompute has at a time."""
    if work.recompute != "full":
        return 0
    attention, dense, experts = _layer_kept(shape, work)
    sparse = shape.num_expert_layers
    largest = max(dense if sparse < shape.num_layers else 0, experts if sparse else 0)
    return int(work.micro_batch * work.max_length * (attention + largest))


def _layer_kept(shape: ModelShape, work: Workload) -> tuple[float, float, float]:
    """Of one token: by attention, by a dense MLP, by experts."""
    width = DTYPE_BYTES[work.dtype]
    recompute: Recompute = "none" if work.recompute == "full" else work.recompute
    attention = attention_kept(
        shape, width=width, attention=work.attention, length=work.max_length, recompute=recompute
    )
    dense = mlp_kept(shape, width=width, with_experts=False, recompute=recompute)
    experts = mlp_kept(shape, width=width, with_experts=True, recompute=recompute)
    return attention, dense, experts


def update_peak(
    *, gradients: int, own: int, kept: int, recomputed: int, logits: int
) -> dict[str, int]:
    """The fullest of the moments of a forward and backward pass.

    Args:
        gradients: Accumulated in float32.
        own: The pass's own gradients, beside those, at its end.
        kept: Activations, which are complete when the backward pass begins.
        recomputed: Those of a layer that is computed again; the logits are gone by then.
        logits: With their gradient.
    """
    moments = (
        {"gradients": gradients, "activations": kept, "logits": logits},
        {"gradients": gradients, "activations": kept + recomputed},
        {"gradients": gradients + own},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def update_logits(elements: int, width: int) -> int:
    """The logits of a micro-batch, their gradient, and what softmax takes besides."""
    return 2 * width * elements + softmax_bytes(elements, copies=3 if width == 4 else 4)


def forward_peak(*, layer: int, hidden: int, elements: int, width: int) -> dict[str, int]:
    """The larger of two things that are not there at once, without gradients.

    Args:
        layer: One layer's tensors.
        hidden: The last hidden states, with their normalised form, beside the logits.
        elements: Of the logits.
    """
    logits = hidden + width * elements + softmax_bytes(elements, copies=4) if elements else 0
    return {"activations": layer} if layer >= logits else {"logits": logits}


def _engine_weights(shape: ModelShape, work: Workload) -> int:
    width, counts = DTYPE_BYTES[work.dtype], shape.parameters
    own = 0 if work.shares_weights or not work.trainable else counts.total * width
    if counts.total * width <= STACKED_LIMIT_BYTES:
        own += (counts.attention + counts.mlp) * width
    return own


def _update_parts(shape: ModelShape, work: Workload) -> dict[str, int]:
    width, count = DTYPE_BYTES[work.dtype], shape.parameters.total
    elements = work.micro_batch * work.max_response_tokens * shape.output_size
    return update_peak(
        gradients=4 * count,
        own=width * count if width < 4 else 0,
        kept=activation_bytes(shape, work),
        recomputed=recomputed_bytes(shape, work),
        logits=update_logits(elements, width),
    )


def _logprobs_parts(shape: ModelShape, work: Workload) -> dict[str, int]:
    width = DTYPE_BYTES[work.dtype]
    rows = max(1, min(FORWARD_ROWS, FORWARD_TOKENS // work.max_length, work.num_samples))
    tokens = rows * work.max_length
    return forward_peak(
        layer=_layer_bytes(shape, work, tokens, work.max_length),
        hidden=2 * shape.hidden_size * width * tokens,
        elements=rows * work.max_response_tokens * shape.output_size,
        width=width,
    )


def _rollout_parts(shape: ModelShape, work: Workload) -> dict[str, int]:
    longest = work.max_prompt_tokens
    tokens = min(work.num_slots * longest, max(PREFILL_TOKENS, longest))
    copies = TRUNCATED_DRAW_COPIES if work.truncates else DRAW_COPIES
    activations = _layer_bytes(shape, work, tokens, longest, engine=True)
    logits = 4 * copies * work.num_slots * shape.vocab_size
    return {"activations": activations} if activations >= logits else {"logits": logits}


def _layer_bytes(
    shape: ModelShape, work: Workload, tokens: int, length: int, *, engine: bool = False
) -> int:
    """The largest tensors alive at once inside one layer, without gradients."""
    token = forward_tensors(
        shape,
        width=DTYPE_BYTES[work.dtype],
        attention=work.attention,
        length=length,
        engine=engine,
    )
    return int(tokens * token)


def softmax_bytes(elements: int, *, copies: int) -> int:
    """float32 copies of the pieces that softmax runs over."""
    return copies * 4 * min(elements, SOFTMAX_PIECE)


def _parts(role: str, parts: dict[str, int]) -> tuple[MemoryPart, ...]:
    return tuple(
        MemoryPart(role=role, name=name, nbytes=nbytes) for name, nbytes in parts.items() if nbytes
    )


def format_bytes(nbytes: int) -> str:
    """`3.2 GiB`, `41 MiB`: three significant digits at most, binary units."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            value = nbytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{nbytes / 1024:.0f} KiB"
