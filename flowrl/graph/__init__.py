"""The graph: frozen data that says what a workflow does, its text and JSON forms, its verifier."""

from flowrl.graph.ir import (
    Attr,
    DType,
    Edge,
    Field,
    Graph,
    Level,
    Node,
    Op,
    Unit,
    format_attr,
    format_graph,
)
from flowrl.graph.sample_sets import results, sample_sets, score_source, scoring_nodes
from flowrl.graph.serialization import graph_from_json, graph_to_json
from flowrl.graph.verify import problems, verify

__all__ = [
    "Attr",
    "DType",
    "Edge",
    "Field",
    "Graph",
    "Level",
    "Node",
    "Op",
    "Unit",
    "format_attr",
    "format_graph",
    "graph_from_json",
    "graph_to_json",
    "problems",
    "results",
    "sample_sets",
    "score_source",
    "scoring_nodes",
    "verify",
]
