"""What may begin while samples still run, and what must wait for the batch.

Rules score a sample as it ends, maps that look at one sample alone follow them, and filters that
read such scores judge a group as it is complete. In an episode, each turn of a sample waits for
that sample alone. Everything else starts on the whole batch: order and batch statistics must not
depend on which sample finished first.
"""

from __future__ import annotations

from flowrl.cost.demand import phase_of
from flowrl.graph.ir import Graph, Node, Op
from flowrl.graph.sample_sets import sample_sets
from flowrl.ids import NodeId
from flowrl.plan.schema import StartUnit
from flowrl.specs import MapSpec

__all__ = ["start_units"]


def start_units(graph: Graph) -> dict[NodeId, StartUnit]:
    """What must have arrived before each node begins."""
    streaming = _streaming(graph)
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
        case Op.SCORE if streams:
            return StartUnit.SAMPLE
        case Op.MAP if streams and waited_for:
            return StartUnit.SAMPLE
        case Op.FILTER if streams:
            return StartUnit.GROUP
        case _:
            return StartUnit.BATCH


def _streaming(graph: Graph) -> set[NodeId]:
    """Nodes of which something of a group is known as soon as the group is scored."""
    made = sample_sets(graph)
    found: set[NodeId] = set()
    origin: dict[NodeId, str] = {}
    for node in graph.nodes:
        reads = [edge.src for edge in graph.in_edges(node.id) if not edge.carried]
        sets = node.op in (Op.FILTER, Op.SELECT)
        origin[node.id] = origin[reads[0]] if sets else origin.get(NodeId(made[node.id]), node.id)
        rule = node.op is Op.SCORE and phase_of(node) is None
        if node.op in (Op.GENERATE, Op.INTERACT):
            found.add(node.id)
        elif rule or node.op is Op.FILTER or _looks_at_one(node):
            together = len({origin[source] for source in reads}) == 1
            if together and all(source in found for source in reads):
                found.add(node.id)
    return found


def _looks_at_one(node: Node) -> bool:
    spec = node.attr("spec")
    return isinstance(spec, MapSpec) and spec.per_sample
