"""Removes what no update needs."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph, Op
from flowrl.passes.context import Context

__all__ = ["drop_dead_nodes"]

_LIVE = (Op.UPDATE, Op.SYNC, Op.LOG)


def drop_dead_nodes(graph: Graph, context: Context) -> Graph:
    """Keeps updates, syncs and logs, and all that they read, directly or not."""
    live = {node.id for node in graph.of_op(*_LIVE)}
    waiting = list(live)
    while waiting:
        for edge in graph.in_edges(waiting.pop()):
            if edge.src not in live:
                live.add(edge.src)
                waiting.append(edge.src)
    return replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.id in live),
        edges=tuple(edge for edge in graph.edges if edge.dst in live),
    )
