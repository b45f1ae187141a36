"""Places what a graph does: operations, channels, weight routes and residency switches."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.graph.ir import Graph, Node
from flowrl.graph.types import Op
from flowrl.plan.request import PlanRequest
from flowrl.plan.schema import (
    Channel,
    Operation,
    Placement,
    ResidencySwitch,
    StartUnit,
    Transport,
    WeightRoute,
)

__all__ = ["place_channels", "place_operations", "place_residency", "place_routes"]

_START = {
    Op.SOURCE: StartUnit.STEP,
    Op.SCORE: StartUnit.SAMPLE,
    Op.INTERACT: StartUnit.SAMPLE,
    Op.FILTER: StartUnit.GROUP,
    Op.SELECT: StartUnit.GROUP,
}
"""Every other operation starts on the whole batch: order and batch statistics must not depend on
which sample finished first."""

_MODEL_PASSES = (Op.LOGPROBS, Op.VALUES, Op.UPDATE)


def place_operations(
    graph: Graph, placements: Mapping[str, Placement], request: PlanRequest
) -> tuple[Operation, ...]:
    """One operation a node, in the graph's order."""
    return tuple(_operation(node, graph, placements, request) for node in graph.nodes)


def _operation(
    node: Node, graph: Graph, placements: Mapping[str, Placement], request: PlanRequest
) -> Operation:
    placement = placements.get(node.role) if node.role is not None else None
    start = _START.get(node.op, StartUnit.BATCH)
    chunk = 1 if start is StartUnit.SAMPLE else 0
    if node.op is Op.GENERATE and placement is not None:
        chunk = placement.num_slots
    sources = {edge.src for edge in graph.in_edges(node.id) if not edge.carried}
    rows = -(-request.samples_per_step // request.mini_batches)
    return Operation(
        node=node.id,
        op=str(node.op),
        role=node.role,
        devices=placement.devices if placement else (),
        start=start,
        after=tuple(before.id for before in graph.nodes if before.id in sources),
        replicas=placement.replicas if placement else 1,
        chunk=chunk,
        micro_batch=min(request.micro_batch, rows) if node.op is Op.UPDATE else 0,
    )


def place_channels(graph: Graph, placements: Mapping[str, Placement]) -> tuple[Channel, ...]:
    """One channel for each edge that carries samples; weights travel by routes."""
    channels = []
    for edge in graph.edges:
        source, destination = graph.node(edge.src), graph.node(edge.dst)
        if edge.carried or Op.SYNC in (source.op, destination.op):
            continue
        here, there = (_process(node, placements) for node in (source, destination))
        channels.append(
            Channel(
                source=edge.src,
                destination=edge.dst,
                fields=edge.fields,
                transport=Transport.MEMORY if here == there else Transport.PIPE,
            )
        )
    return tuple(channels)


def _process(node: Node, placements: Mapping[str, Placement]) -> str:
    placement = placements.get(node.role) if node.role is not None else None
    return placement.process if placement else "main"


def place_routes(
    graph: Graph, placements: Mapping[str, Placement], request: PlanRequest
) -> tuple[WeightRoute, ...]:
    """How the weights of each trained role reach the engine that samples from them."""
    routes = []
    # Of several updates of a role in a step, the last one publishes.
    last = {update.role: update for update in graph.of_op(Op.UPDATE)}
    for update in last.values():
        placement = placements.get(update.role) if update.role is not None else None
        if placement is None or not placement.num_slots:
            continue
        role = request.role(placement.role)
        shape = request.shape_of(role)
        classes = ["embedding", "attention", "mlp", "norm"]
        if shape is None or not shape.tied:
            classes.append("head")
        sync = next((n for n in graph.of_op(Op.SYNC) if n.role == update.role), update)
        shared = role.capabilities.shares_weights
        routes.append(
            WeightRoute(
                source=placement.role,
                destination=placement.role,
                after=sync.id,
                transport=Transport.IN_PLACE if shared else Transport.FOLDER,
                source_layout=placement.layout,
                destination_layout=placement.layout,
                parameter_classes=tuple(classes),
            )
        )
    return tuple(routes)


def place_residency(
    graph: Graph, placements: Mapping[str, Placement], sleeping: tuple[str, ...]
) -> tuple[ResidencySwitch, ...]:
    """KV caches leave before the first model pass and come back before the next rollout."""
    switches = []
    for role in sleeping:
        device = placements[role].devices[0]
        passes = graph.of_op(*_MODEL_PASSES)
        rollouts = [node for node in graph.of_op(Op.GENERATE) if node.role == role]
        for action, nodes in (("take", rollouts), ("release", passes)):
            if nodes:
                switches.append(
                    ResidencySwitch(
                        role=role,
                        device=device,
                        what="kv cache",
                        action=action,
                        before=nodes[0].id,
                    )
                )
    return tuple(switches)
