"""Makes explicit how an update's weights reach the next step's generation."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.signatures import WEIGHTS
from flowrl.ids import NodeId, RoleName
from flowrl.passes.context import Context

__all__ = ["insert_weight_sync"]


def insert_weight_sync(graph: Graph, context: Context) -> Graph:
    """After the last update of each role that also generates, a `sync` that feeds its generation.

    The edge from the sync is carried: it brings the weights into the next step. `in_place` is true
    where the engine reads the trainer's parameters, so that publishing moves nothing.
    """
    synced = {node.role for node in graph.of_op(Op.SYNC)}
    for role in graph.roles:
        updates = [node for node in graph.of_op(Op.UPDATE) if node.role == role]
        readers = [node for node in graph.of_op(Op.GENERATE) if node.role == role]
        if role not in synced and updates and readers:
            in_place = context.shares_weights.get(role, False)
            graph = _insert(graph, role, updates[-1], readers, in_place=in_place)
    return graph


def _insert(
    graph: Graph, role: RoleName, update: Node, readers: list[Node], *, in_place: bool
) -> Graph:
    sync = Node(
        id=NodeId(f"{role}.sync"),
        op=Op.SYNC,
        role=role,
        inputs=("weights",),
        outputs=(WEIGHTS,),
        attrs=(("in_place", in_place),),
        source=update.source,
    )
    graph = graph.replacing(*(replace(r, inputs=(*r.inputs, "weights")) for r in readers))
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += [node, sync] if node.id == update.id else [node]
    fields = (WEIGHTS.name,)
    edges = [
        *graph.edges,
        Edge(src=update.id, dst=sync.id, argument="weights", fields=fields),
        *(
            Edge(src=sync.id, dst=reader.id, argument="weights", fields=fields, carried=True)
            for reader in readers
        ),
    ]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))
