"""Says what each node costs in a step: operations, bytes, activations and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.cost import FlopsConvention, Phase, forward_flops, model_flops
from flowrl.cost.memory import DTYPE_BYTES, resident_memory, working_memory
from flowrl.graph import DType, Field, Graph, Node, Op, Unit
from flowrl.passes.context import Context, RoleCost
from flowrl.specs.cost import NodeCost

__all__ = ["annotate_cost"]

_PHASE_OF = {
    Op.GENERATE: Phase.ROLLOUT,
    Op.INTERACT: Phase.ROLLOUT,
    Op.LOGPROBS: Phase.LOGPROBS,
    Op.VALUES: Phase.LOGPROBS,
    Op.UPDATE: Phase.UPDATE,
}
"""The operations that run a model."""

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
    if role is None and (node.op in _PHASE_OF or node.op is Op.SYNC):
        return None
    num_samples = sizes.num_prompts * _samples_per_prompt(graph, node, context)
    return NodeCost(
        flops=0 if role is None else _flops(node.op, role, num_samples),
        output_bytes=sum(_bytes(field, role, num_samples, sizes) for field in node.outputs),
        activation_bytes=0 if role is None else _activation_bytes(node.op, role),
        kv_bytes=0 if role is None else _kv_bytes(node.op, role),
    )


def _samples_per_prompt(graph: Graph, node: Node, context: Context) -> int:
    """Of the rollout that the node makes or reads; 1 where it reads what no role generated."""
    while node.op not in (Op.GENERATE, Op.INTERACT):
        edge = next((e for e in graph.in_edges(node.id) if not e.carried), None)
        if edge is None:
            return 1
        node = graph.node(edge.src)
    number = node.attr("n")
    return number if isinstance(number, int) else context.group_size


def _flops(op: Op, role: RoleCost, num_samples: int) -> int:
    """Of all samples of a step. An update passes each of them once, in all its mini-batches."""
    shape, lengths = role.shape, [role.work.max_length]
    logits = role.work.max_response_tokens
    match op:
        case Op.GENERATE | Op.INTERACT | Op.LOGPROBS:
            return num_samples * forward_flops(shape, lengths, num_logits=logits).total
        case Op.VALUES:
            headless = FlopsConvention(head="omitted")
            return num_samples * forward_flops(shape, lengths, convention=headless).total
        case Op.UPDATE:
            return num_samples * model_flops(shape, lengths, work="training", num_logits=logits)
        case _:
            return 0


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


def _activation_bytes(op: Op, role: RoleCost) -> int:
    if op not in _PHASE_OF:
        return 0
    parts = working_memory("", role.shape, role.work, _PHASE_OF[op])
    return sum(part.nbytes for part in parts if part.name in ("activations", "logits"))


def _kv_bytes(op: Op, role: RoleCost) -> int:
    if _PHASE_OF.get(op) is not Phase.ROLLOUT:
        return 0
    parts = resident_memory("", role.shape, role.work)
    return sum(part.nbytes for part in parts if part.name == "kv cache")
