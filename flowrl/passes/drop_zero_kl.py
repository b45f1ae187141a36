"""A KL penalty of coefficient 0 is none, and needs no reference logprobs."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph, Op
from flowrl.passes.context import Context
from flowrl.specs import KL

__all__ = ["drop_zero_kl"]


def drop_zero_kl(graph: Graph, context: Context) -> Graph:
    """Clears zero penalties and the edges that fed them; the reference then reaches nothing."""
    nodes, cleared = [], set()
    for node in graph.nodes:
        kl = node.attr("kl")
        if node.op is Op.UPDATE and isinstance(kl, KL) and kl.coefficient == 0:
            cleared.add(node.id)
            inputs = tuple(name for name in node.inputs if name != "reference")
            node = replace(node, inputs=inputs).with_attrs(kl=None)
        nodes.append(node)
    edges = [e for e in graph.edges if e.dst not in cleared or e.argument != "reference"]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))
