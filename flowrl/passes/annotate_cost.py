"""Annotates each node with its cost in a step: operations, bytes, activations and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.cost import Phase, Work, model_flops
from flowrl.cost.demand import phase_of, samples_of_step
from flowrl.cost.memory import DTYPE_BYTES, resident_memory, working_memory
from flowrl.graph import DType, Field, Graph, Node, Op, Unit
from flowrl.passes.context import Context, RoleCost
from flowrl.specs.attributes import NodeCost

_BYTES = {DType.INT64: 8, DType.FLOAT32: 4, DType.BOOL: 1}


def annotate_cost(graph: Graph, context: Context) -> Graph:
    """Sets the attribute `cost` of every node whose cost is known.

    Sizes are upper bounds: samples of the greatest length, and none that a filter drops. A node
    that runs a model is left without where `context.costs` does not hold its role; without any
    role, so is every node.
    """
    if not context.costs:
        return graph
    works = [cost.work for cost in context.costs.values()]
    sizes = _Sizes(
        num_prompts=context.prompts_per_step,
        max_prompt_tokens=max(work.max_prompt_tokens for work in works),
        max_length=max(work.max_length for work in works),
    )
    annotated = []
    for node in graph.nodes:
        cost = _cost(graph, node, context, sizes)
        annotated.append(node if cost is None else node.with_attrs(cost=cost))
    return graph.with_nodes(annotated)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    num_prompts: int
    max_prompt_tokens: int
    max_length: int


def _cost(graph: Graph, node: Node, context: Context, sizes: _Sizes) -> NodeCost | None:
    role = None if node.role is None else context.costs.get(node.role)
    phase = phase_of(node)
    if role is None and (phase is not None or node.op is Op.SYNC):
        return None
    num_samples = samples_of_step(graph, node, sizes.num_prompts, context.group_size)
    flops = activations = kv = 0
    if role is not None and phase is not None:
        flops = _flops(phase, role, num_samples)
        activations = _activation_bytes(phase, role)
        kv = _kv_bytes(role) if phase is Phase.ROLLOUT else 0
    return NodeCost(
        flops=flops,
        output_bytes=sum(_bytes(field, role, num_samples, sizes) for field in node.outputs),
        activation_bytes=activations,
        kv_bytes=kv,
    )


def _flops(phase: Phase, role: RoleCost, num_samples: int) -> int:
    """Returns the FLOPs of all samples of a step; an update passes each sample once."""
    shape, lengths = role.shape, [role.work.max_length]
    # A score is read at one position, everything else at all of the response.
    logits = 1 if phase is Phase.SCORES else role.work.max_response_tokens
    work: Work = "training" if phase is Phase.UPDATE else "forward"
    return num_samples * model_flops(shape, lengths, work=work, num_logits=logits)


def _bytes(field: Field, role: RoleCost | None, num_samples: int, sizes: _Sizes) -> int:
    if field.dtype is DType.MODEL:
        assert role is not None  # only nodes of models give weights
        return role.shape.parameters.total * DTYPE_BYTES[role.work.dtype]
    match field.unit:
        case Unit.PROMPTS:
            # A prompt is a row of tokens.
            number = sizes.num_prompts * sizes.max_prompt_tokens
        case Unit.GROUPS:
            number = sizes.num_prompts
        case Unit.SAMPLES:
            number = num_samples
        case Unit.TOKENS:
            number = num_samples * sizes.max_length
        case Unit.ROLES:
            number = 1
    return number * _BYTES[field.dtype]


def _activation_bytes(phase: Phase, role: RoleCost) -> int:
    parts = working_memory("", role.shape, role.work, phase)
    return sum(part.nbytes for part in parts if part.name in ("activations", "logits"))


def _kv_bytes(role: RoleCost) -> int:
    parts = resident_memory("", role.shape, role.work)
    return sum(part.nbytes for part in parts if part.name == "kv cache")
