"""A KL penalty of coefficient 0 is none, and needs no reference logprobs."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph, Op
from flowrl.passes.context import Context
from flowrl.specs import KL, LossSpec

__all__ = ["drop_zero_kl"]


def drop_zero_kl(graph: Graph, context: Context) -> Graph:
    """Clears zero penalties and the edges that fed them; the reference then reaches nothing.

    A loss that compares with the reference itself (DPO) keeps it.
    """
    nodes, cleared = [], set()
    for node in graph.nodes:
        kl, loss = node.attr("kl"), node.attr("loss")
        if node.op is Op.UPDATE and isinstance(kl, KL) and kl.coefficient == 0:
            node = node.with_attrs(kl=None)
            if not (isinstance(loss, LossSpec) and "reference_logprobs" in loss.needs):
                cleared.add(node.id)
                inputs = tuple(name for name in node.inputs if name != "reference")
                node = replace(node, inputs=inputs)
        nodes.append(node)
    edges = [e for e in graph.edges if e.dst not in cleared or e.argument != "reference"]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))
