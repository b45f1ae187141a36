"""Inserts the nodes and edges by which an update's weights reach the next step's generation."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.signatures import WEIGHTS
from flowrl.ids import NodeId, RoleName
from flowrl.passes.context import Context


def insert_weight_sync(graph: Graph, context: Context) -> Graph:
    """Inserts a `sync` after the last update of each role that also generates.

    The edge from the sync is carried: it brings the weights into the next step. `in_place` is true
    where the engine reads the trainer's parameters, so that publishing moves nothing.

    A sync of the program (`reference.sync(actor, every=50)`) is kept, and feeds the generation of
    the role that takes the weights over.

    Raises:
        GraphError: a role is updated, and takes over the weights of another one besides.
    """
    for sync in graph.of_op(Op.SYNC):
        _refuse_two_origins(graph, sync)
        readers = [node for node in graph.of_op(Op.GENERATE) if node.role == sync.role]
        graph = _feed(graph, sync, [node for node in readers if "weights" not in node.inputs])
        if sync.attr("in_place") is None:
            graph = graph.replacing(sync.with_attrs(in_place=False))
    synced = {node.role for node in graph.of_op(Op.SYNC)}
    for role in graph.roles:
        updates = [node for node in graph.of_op(Op.UPDATE) if node.role == role]
        readers = [node for node in graph.of_op(Op.GENERATE) if node.role == role]
        if role not in synced and updates and readers:
            in_place = context.shares_weights.get(role, False)
            graph = _insert(graph, role, updates[-1], readers, in_place=in_place)
    return graph


def _refuse_two_origins(graph: Graph, sync: Node) -> None:
    edge = graph.feeding(sync.id, "weights")
    own = next((node for node in graph.of_op(Op.UPDATE) if node.role == sync.role), None)
    if edge is None or own is None or graph.node(edge.src).role == sync.role:
        return
    raise sync.error(
        f"{sync.role} takes over the weights of {graph.node(edge.src).role}, but is updated too",
        found=f"{own.id} ({own.source})" if own.source is not None else own.id,
        hint=f"leave {sync.role}.sync or {own.id} out, or make them two roles",
    )


def _feed(graph: Graph, sync: Node, readers: list[Node]) -> Graph:
    """Carries the weights of a sync into the next step's generation."""
    graph = graph.replacing(*(replace(r, inputs=(*r.inputs, "weights")) for r in readers))
    carried = (
        Edge(src=sync.id, dst=reader.id, argument="weights", fields=(WEIGHTS.name,), carried=True)
        for reader in readers
    )
    return replace(graph, edges=(*graph.edges, *carried))


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
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += [node, sync] if node.id == update.id else [node]
    edge = Edge(src=update.id, dst=sync.id, argument="weights", fields=(WEIGHTS.name,))
    return _feed(replace(graph, nodes=tuple(nodes), edges=(*graph.edges, edge)), sync, readers)
