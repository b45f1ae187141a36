"""Where scores come from: the rewards, environments and maps behind an argument that reads them."""

from __future__ import annotations

from flowrl.graph.ir import Graph, Node, Op

_PASSES_ON = (Op.FILTER, Op.SELECT, Op.WHERE, Op.REPLAY)
_COMPUTE = (Op.MAP, Op.ADVANTAGE, Op.PARENT, Op.MEAN_OF_CHILDREN, Op.CONCAT)
_SCORE = "score"


def score_source(graph: Graph, node_id: str, argument: str = "scores") -> Node | None:
    """Returns the node whose scores an argument reads, through subsets and replays."""
    while True:
        edge = graph.feeding(node_id, argument)
        if edge is None:
            return None
        node = graph.node(edge.src)
        if node.op not in _PASSES_ON:
            return node
        node_id, argument = node.id, "scores"


def scoring_nodes(graph: Graph, node_id: str) -> tuple[Node, ...]:
    """Returns the `score` and `interact` nodes whose scores a node reads.

    They are found through whatever computes with scores, in the order of the arguments.
    """
    found: dict[str, Node] = {}
    for edge in graph.in_edges(node_id):
        source = graph.node(edge.src)
        if source.op in _PASSES_ON and _SCORE in edge.fields:
            passed_on = score_source(graph, source.id)
            assert passed_on is not None  # the verifier of graphs proves it
            source = passed_on
        if source.op in _COMPUTE:
            found |= {node.id: node for node in scoring_nodes(graph, source.id)}
        elif source.op in (Op.SCORE, Op.INTERACT) and _SCORE in edge.fields:
            found[source.id] = source
    return tuple(found.values())
