"""One forward pass where several would give the same numbers."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph, Node, Op
from flowrl.ids import NodeId
from flowrl.passes.context import Context
from flowrl.passes.decision import Decision

__all__ = ["decisions_on_merging", "merge_logprobs"]


def merge_logprobs(graph: Graph, context: Context) -> Graph:
    """Of several logprobs, values or model scores of one model on the same samples keeps the first.

    Two roles have one model where neither changes within the run's stage and both began as copies
    of the same third, or one as a copy of the other. Scores of rules are left alone: they may be a
    person's own functions, which need not give the same twice.
    """
    kept = _kept(graph, context)
    if not kept:
        return graph
    edges = [
        replace(edge, src=kept.get(edge.src, edge.src))
        for edge in graph.edges
        if edge.dst not in kept
    ]
    nodes = tuple(node for node in graph.nodes if node.id not in kept)
    return replace(graph, nodes=nodes, edges=tuple(edges))


def decisions_on_merging(graph: Graph, context: Context) -> tuple[Decision, ...]:
    """Of a graph that the pass has not seen yet: what it will merge, and why."""
    return tuple(
        Decision(
            subject=dropped,
            choice=f"the same as {first}",
            why="the same model on the same samples gives the same numbers",
        )
        for dropped, first in _kept(graph, context).items()
    )


def _kept(graph: Graph, context: Context) -> dict[NodeId, NodeId]:
    """For each node that is dropped, the one that stands for it."""
    first: dict[tuple[object, ...], NodeId] = {}
    kept: dict[NodeId, NodeId] = {}
    changes: dict[str, int] = {}
    changing = {node.role for node in graph.of_op(Op.UPDATE, Op.SYNC)}
    for node in graph.nodes:
        role, edge = str(node.role), graph.feeding(node.id, "rollout")
        if node.op in (Op.UPDATE, Op.SYNC):
            changes[role] = changes.get(role, 0) + 1
        if edge is None or not _is_pass(node):
            continue
        # A model that nothing changes is that with which some role began.
        model = context.copies.get(role, role) if node.role not in changing else None
        key = (node.op, edge.src, model or (role, changes.get(role, 0)))
        if first.setdefault(key, node.id) != node.id:
            kept[node.id] = first[key]
    return kept


def _is_pass(node: Node) -> bool:
    scores = node.op is Op.SCORE and node.attr("by") == "model"
    return scores or node.op in (Op.LOGPROBS, Op.VALUES)
