"""Says where an update takes the logprobs of the policy that produced its samples from."""

from __future__ import annotations

from dataclasses import replace

from flowrl.errors import GraphError
from flowrl.graph import Graph, Node, Op
from flowrl.graph.signatures import ROLLOUT_LOGPROBS
from flowrl.passes.context import Context
from flowrl.specs import LossSpec

__all__ = ["bind_behaviour_logprobs"]


def bind_behaviour_logprobs(graph: Graph, context: Context) -> Graph:
    """Binds the loss's behaviour logprobs to those that the engine reported with each token.

    The engine's are exactly the behaviour policy's, so no forward pass of the old policy is made;
    the attribute `behaviour_logprobs` says so in the graph and the plan. An update whose loss does
    not read them does not carry them.

    Raises:
        GraphError: samples may be stale, and the loss does not correct for the policy that
            produced them.
    """
    unread = set()
    for node in graph.of_op(Op.UPDATE):
        loss = node.attr("loss")
        if not isinstance(loss, LossSpec):
            continue
        _check_staleness(graph, node, loss, context)
        if "behaviour_logprobs" in loss.needs:
            graph = graph.replacing(node.with_attrs(behaviour_logprobs=ROLLOUT_LOGPROBS.name))
        else:
            unread.add(node.id)
    edges = [
        replace(edge, fields=tuple(f for f in edge.fields if f != ROLLOUT_LOGPROBS.name))
        if edge.dst in unread and edge.argument == "rollout"
        else edge
        for edge in graph.edges
    ]
    return replace(graph, edges=tuple(edges))


def _check_staleness(graph: Graph, node: Node, loss: LossSpec, context: Context) -> None:
    rollout = graph.feeding(node.id, "rollout")
    generated = rollout is not None and graph.node(rollout.src).output(ROLLOUT_LOGPROBS.name)
    if generated and context.max_staleness > 0 and not loss.corrects_behaviour:
        raise GraphError(
            f"update(loss={loss.kind}) gets samples of policies up to {context.max_staleness} "
            "publications old, but does not correct for the policy that produced them",
            where=str(node.source) if node.source else f"node {node.id}",
            expected="a loss that does, such as fl.loss.policy_clip(0.2)",
            hint="use such a loss, or set max_staleness to 0",
        )
