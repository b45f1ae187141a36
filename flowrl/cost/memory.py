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

While the optimizer runs, in `update`:
- gradients `4 P` (accumulated in float32), and where w < 4 a pass's own `P w` beside them.
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
- logits of response positions only, and their gradient: `2 w B R V`; softmax runs over pieces of at
  most 4 Mi elements, three float32 copies of each.

In `logprobs`, `values` and `scores` nothing is kept. A pass takes N tokens, at most 4,096 and 128
rows but at least one row, and needs the larger of two things, which are never there at once: one
layer's largest tensors `N (3h + 3q + 3f) w` with eager probabilities `N a L w` (experts: `2h` more
for each that works on the token); or the logits of its response positions once, and the pieces of
their softmax.

In `rollout`, the larger of: one layer's tensors for a prompt pass of at most 8,192 tokens (at least
one prompt); or float32 copies of the logits of one token a slot, `4 c S V`: logits, scaled,
probabilities and their running sum (c = 4); with top-k, top-p or min-p the sorted values, 8-byte
indices and their sums too (c = 11).

Measured on a CPU with the torch backend (allocator events, packed rows without common prefixes,
cases of 356 to 600 MiB), an update's gradients, activations and logits come out 3 to 5 % above what
was allocated, and the margin comes on top.

The margin covers what no formula names: the largest backward temporaries, allocator rounding and
fragmentation. It is 10 % of the parts that change, and at least 16 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flowrl.cost.activations import (
    DTYPE_BYTES,
    AttentionKind,
    attention_kept,
    forward_tensors,
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
    "phase_memory",
    "resident_memory",
    "softmax_bytes",
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
        truncates: Tokens are drawn with top-k, top-p or min-p.
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
        """`optimizer 1.1 GiB, activations 0.9 GiB, ...`, largest first, roles added up."""
        sums: dict[str, int] = {}
        for part in self.parts:
            sums[part.name] = sums.get(part.name, 0) + part.nbytes
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
    width = DTYPE_BYTES[work.dtype]
    sparse = shape.num_expert_layers
    attention = attention_kept(shape, width=width, attention=work.attention, length=work.max_length)
    dense = mlp_kept(shape, width=width, with_experts=False)
    experts = mlp_kept(shape, width=width, with_experts=True)
    kept = shape.num_layers * attention + (shape.num_layers - sparse) * dense + sparse * experts
    return int(work.micro_batch * work.max_length * (kept + norm_kept(shape, width)))


def _engine_weights(shape: ModelShape, work: Workload) -> int:
    width, counts = DTYPE_BYTES[work.dtype], shape.parameters
    own = 0 if work.shares_weights or not work.trainable else counts.total * width
    if counts.total * width <= STACKED_LIMIT_BYTES:
        own += (counts.attention + counts.mlp) * width
    return own


def _update_parts(shape: ModelShape, work: Workload) -> dict[str, int]:
    width, count = DTYPE_BYTES[work.dtype], shape.parameters.total
    elements = work.micro_batch * work.max_response_tokens * shape.output_size
    return {
        "gradients": count * (4 if width == 4 else 4 + width),
        "activations": activation_bytes(shape, work),
        "logits": 2 * width * elements + softmax_bytes(elements),
    }


def _logprobs_parts(shape: ModelShape, work: Workload) -> dict[str, int]:
    rows = max(1, min(FORWARD_ROWS, FORWARD_TOKENS // work.max_length, work.num_samples))
    elements = rows * work.max_response_tokens * shape.output_size
    return _larger(
        activations=_layer_bytes(shape, work, rows * work.max_length, work.max_length),
        logits=DTYPE_BYTES[work.dtype] * elements + softmax_bytes(elements),
    )


def _rollout_parts(shape: ModelShape, work: Workload) -> dict[str, int]:
    longest = work.max_prompt_tokens
    tokens = min(work.num_slots * longest, max(PREFILL_TOKENS, longest))
    copies = TRUNCATED_DRAW_COPIES if work.truncates else DRAW_COPIES
    return _larger(
        activations=_layer_bytes(shape, work, tokens, longest),
        logits=4 * copies * work.num_slots * shape.vocab_size,
    )


def _larger(*, activations: int, logits: int) -> dict[str, int]:
    """One part, of two that are not there at the same time."""
    return {"activations": activations} if activations >= logits else {"logits": logits}


def _layer_bytes(shape: ModelShape, work: Workload, tokens: int, length: int) -> int:
    """The largest tensors alive at once inside one layer, without gradients."""
    token = forward_tensors(
        shape, width=DTYPE_BYTES[work.dtype], attention=work.attention, length=length
    )
    return int(tokens * token)


def softmax_bytes(elements: int) -> int:
    """Three float32 copies of the pieces that softmax runs over."""
    return 3 * 4 * min(elements, SOFTMAX_PIECE)


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
