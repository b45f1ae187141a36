"""Removes what no update, log or sync needs."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph, Op
from flowrl.ids import NodeId
from flowrl.passes.context import Context

__all__ = ["drop_dead_nodes"]


def drop_dead_nodes(graph: Graph, context: Context) -> Graph:
    """Keeps updates and logs, syncs of roles that do something, and all that these read."""
    live = _needed(graph, {node.id for node in graph.of_op(Op.UPDATE, Op.LOG)})
    asked = {graph.node(node_id).role for node_id in live}
    live = _needed(graph, live | {n.id for n in graph.of_op(Op.SYNC) if n.role in asked})
    return replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.id in live),
        edges=tuple(edge for edge in graph.edges if edge.dst in live),
    )


def _needed(graph: Graph, live: set[NodeId]) -> set[NodeId]:
    """These nodes and all that they read, directly or not."""
    found, waiting = set(live), list(live)
    while waiting:
        for edge in graph.in_edges(waiting.pop()):
            if edge.src not in found:
                found.add(edge.src)
                waiting.append(edge.src)
    return found
