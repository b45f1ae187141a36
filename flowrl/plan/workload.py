"""What a role with a model is asked to do at once: the sizes that its memory follows from."""

from __future__ import annotations

from flowrl.cost.demand import phase_of, samples_of_step
from flowrl.cost.memory import Phase, Workload
from flowrl.graph.ir import Graph, Node, Op
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.specs import Sampling


def workload(role: RoleRequest, request: PlanRequest, graph: Graph, dtype: str) -> Workload:
    """What a role with a model is asked to do at once.

    Args:
        dtype: Of its parameters, as the plan has chosen it.
    """
    own = [node for node in graph.nodes if node.role == role.name]
    drawn = [samples_of(node, graph, request) for node in own if node.op is Op.GENERATE]
    slots = role.num_slots if drawn or role.evaluated else 0
    if not role.evaluated:
        slots = min(slots, max(drawn, default=0))
    rows = [rows_per_update(node, graph, request) for node in own if node.op is Op.UPDATE]
    passed = [samples_of(node, graph, request) for node in own if phase_of(node) is not None]
    return Workload(
        num_slots=slots,
        max_length=request.max_length,
        max_prompt_tokens=request.max_prompt_tokens,
        max_response_tokens=request.max_response_tokens,
        micro_batch=min(request.micro_batch, max(rows, default=request.micro_batch)),
        num_samples=max(passed, default=1),
        dtype=dtype,
        trainable=bool(rows),
        shares_weights=role.capabilities.shares_weights and role.ranks == 1,
        truncates=any(_truncates(node) for node in graph.of_op(Op.GENERATE)),
        recompute="full" if rows and role.recompute == "full" else "none",
    )


def samples_of(node: Node, graph: Graph, request: PlanRequest) -> int:
    """Samples of a step that a node makes or reads at most."""
    return samples_of_step(graph, node, request.prompts_per_step, request.group_size)


def rows_per_update(node: Node, graph: Graph, request: PlanRequest) -> int:
    """Samples of one optimizer update, where mini-batches are not all of one size the most."""
    return -(-samples_of(node, graph, request) // request.mini_batches)


def phases_of(role: RoleRequest, graph: Graph) -> set[Phase]:
    """The kinds of work that a role does."""
    found = [phase_of(node) for node in graph.nodes if node.role == role.name]
    phases = {phase for phase in found if phase is not None}
    return phases | {Phase.ROLLOUT} if role.evaluated else phases


def _truncates(generate: Node) -> bool:
    sampling = generate.attr("sampling")
    return isinstance(sampling, Sampling) and sampling.top_p < 1
