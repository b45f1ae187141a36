"""What may begin while samples still run, and what must wait for the batch.

Rules score a sample as it ends, maps that look at one sample alone follow them, and filters that
read such scores judge a group as it is complete. In an episode, each turn of a sample waits for
that sample alone. Everything else starts on the whole batch: order and batch statistics must not
depend on which sample finished first.
"""

from __future__ import annotations

from flowrl.graph.ir import Graph, Node, Op
from flowrl.graph.streaming import streaming_nodes
from flowrl.ids import NodeId
from flowrl.plan.schema import StartUnit


def start_units(graph: Graph) -> dict[NodeId, StartUnit]:
    """What must have arrived before each node begins."""
    streaming = streaming_nodes(graph)
    judges = [n.id for n in graph.of_op(Op.FILTER) if n.id in streaming]
    # A map that no filter waits for may as well see the batch.
    waited_for = {edge.src for edge in graph.edges if edge.dst in judges}
    for node in reversed(graph.nodes):
        if node.op is Op.MAP and node.id in waited_for:
            waited_for |= {edge.src for edge in graph.in_edges(node.id)}
    return {
        node.id: _start(node, node.id in streaming, node.id in waited_for) for node in graph.nodes
    }


def _start(node: Node, streams: bool, waited_for: bool) -> StartUnit:
    match node.op:
        case Op.SOURCE:
            return StartUnit.STEP
        case Op.GENERATE if node.region is not None:
            return StartUnit.SAMPLE
        case Op.PROMPTS_OF:
            return StartUnit.SAMPLE
        case Op.SCORE if streams:
            return StartUnit.SAMPLE
        case Op.MAP if streams and waited_for:
            return StartUnit.SAMPLE
        case Op.FILTER if streams:
            return StartUnit.GROUP
        case _:
            return StartUnit.BATCH
