"""What is known of a group as soon as it is scored, while other samples of a step still run."""

from __future__ import annotations

from flowrl.graph.ir import Graph, Node, Op
from flowrl.graph.sample_sets import origin_of, sample_sets
from flowrl.ids import NodeId
from flowrl.specs import MapSpec


def streaming_nodes(graph: Graph) -> set[NodeId]:
    """Returns the nodes whose result for a group follows from the group alone, once it is scored.

    They are rollouts, scores of their samples by rules, maps that look at one sample alone, and
    filters that read such scores.
    """
    made = sample_sets(graph)
    streaming: set[NodeId] = set()
    for node in graph.nodes:
        # A rollout's driver scores all of its samples. What is known of a part of them by row, of
        # joined sets and of data is scored when the batch is there.
        maker = origin_of(graph, graph.node(made[node.id]), (Op.FILTER, Op.SELECT))
        scored_at_once = is_rule_score(node) and maker.op in (Op.GENERATE, Op.INTERACT)
        if node.op in (Op.GENERATE, Op.INTERACT) or scored_at_once:
            streaming.add(node.id)
            continue
        spec = node.attr("spec")
        if node.op is not Op.FILTER and not (isinstance(spec, MapSpec) and spec.per_sample):
            continue
        reads = [edge.src for edge in graph.in_edges(node.id) if not edge.carried]
        origins = {origin_of(graph, graph.node(made[source])).id for source in reads}
        if len(origins) == 1 and all(source in streaming for source in reads):
            streaming.add(node.id)
    return streaming


def is_rule_score(node: Node) -> bool:
    """True if a node scores text by rules, sample by sample, and not with a model."""
    return node.op is Op.SCORE and node.attr("by") != "model"


def scores_at_once(node: Node) -> bool:
    """True if a node's score is there as soon as its sample is finished."""
    return node.op is Op.INTERACT or is_rule_score(node)
