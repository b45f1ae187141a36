"""Places what a graph does: operations, channels, weight routes and residency switches."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.cost.demand import phase_of, response_bound
from flowrl.graph.ir import Graph, Node, Op
from flowrl.graph.signatures import WEIGHTS
from flowrl.plan.host import MAIN_PROCESS
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
from flowrl.plan.streaming import start_units
from flowrl.plan.workload import rows_per_update, samples_of
from flowrl.specs import Sampling

_NO_SAMPLES = (Op.SYNC, Op.LOG)


def place_operations(
    graph: Graph, placements: Mapping[str, Placement], request: PlanRequest
) -> tuple[Operation, ...]:
    """One operation a node, in the graph's order."""
    starts = start_units(graph)
    return tuple(
        _operation(node, starts[node.id], graph, placements, request) for node in graph.nodes
    )


def _operation(
    node: Node,
    start: StartUnit,
    graph: Graph,
    placements: Mapping[str, Placement],
    request: PlanRequest,
) -> Operation:
    placement = placements.get(node.role) if node.role is not None else None
    chunk = 1 if start is StartUnit.SAMPLE else 0
    tokens = 0
    if node.op is Op.GENERATE:
        chunk = placement.num_slots if placement is not None else 0
        tokens = min(
            response_bound(graph, node, Sampling(max_tokens=request.max_response_tokens)),
            request.max_length,
        )
    sources = {e.src for e in graph.in_edges(node.id) if not e.carried and not graph.is_inner(e)}
    updates = node.op is Op.UPDATE
    rows = rows_per_update(node, graph, request) if updates else 0
    turns, every = node.attr("max_turns"), node.attr("every")
    return Operation(
        node=node.id,
        op=str(node.op),
        role=node.role,
        devices=placement.devices if placement else (),
        start=start,
        after=tuple(before.id for before in graph.nodes if before.id in sources),
        replicas=placement.replicas if placement else 1,
        chunk=chunk,
        micro_batch=min(request.micro_batch, rows),
        num_samples=0 if node.op in _NO_SAMPLES else samples_of(node, graph, request),
        max_tokens=tokens,
        max_turns=turns if isinstance(turns, int) else 0,
        every=every if isinstance(every, int) else 1,
        region=node.region,
        recompute="full" if updates and _recomputes(node, request) else "none",
    )


def _recomputes(node: Node, request: PlanRequest) -> bool:
    return node.role is not None and request.role(node.role).recompute == "full"


def place_channels(graph: Graph, placements: Mapping[str, Placement]) -> tuple[Channel, ...]:
    """One channel for each edge that carries samples; weights travel by routes."""
    channels = []
    for edge in graph.edges:
        source, destination = graph.node(edge.src), graph.node(edge.dst)
        if edge.carried or WEIGHTS.name in edge.fields:
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
    return placement.process if placement else MAIN_PROCESS


def place_routes(
    graph: Graph, placements: Mapping[str, Placement], request: PlanRequest
) -> tuple[WeightRoute, ...]:
    """How the weights of each trained role reach whoever uses them.

    Besides the routes of sync nodes: a role that is trained, and sampled from only to be evaluated,
    has no sync; its last update publishes.
    """
    routes = []
    for sync in graph.of_op(Op.SYNC):
        edge = graph.feeding(sync.id, "weights")
        trained = None if edge is None else graph.node(edge.src).role
        if trained is not None and sync.role is not None:
            routes.append(_route(trained, sync.role, sync, placements, request))
    served = {route.source for route in routes if route.source == route.destination}
    last = {update.role: update for update in graph.of_op(Op.UPDATE) if update.role is not None}
    for role, update in last.items():
        if role not in served and placements[role].num_slots:
            routes.append(_route(role, role, update, placements, request))
    return tuple(routes)


def _route(
    source: str,
    destination: str,
    after: Node,
    placements: Mapping[str, Placement],
    request: PlanRequest,
) -> WeightRoute:
    role = request.role(source)
    shape = request.shape_of(role)
    classes = ["embedding", "attention", "mlp", "norm"]
    if shape is None or not shape.tied:
        classes.append("head")
    in_place = source == destination and role.capabilities.shares_weights and role.ranks == 1
    every = after.attr("every")
    return WeightRoute(
        source=source,
        destination=destination,
        after=after.id,
        transport=Transport.IN_PLACE if in_place else Transport.FOLDER,
        source_layout=placements[source].layout,
        destination_layout=placements[destination].layout,
        parameter_classes=tuple(classes),
        every=every if isinstance(every, int) else 1,
    )


def place_residency(
    graph: Graph, placements: Mapping[str, Placement], sleeping: tuple[str, ...]
) -> tuple[ResidencySwitch, ...]:
    """Where KV caches of `sleeping` roles go and come back: they are there in rollouts alone."""
    switches = []
    working = [node for node in graph.nodes if phase_of(node) is not None]
    for role in sleeping:
        own = [node.id for node in working if node.op is Op.GENERATE and node.role == role]
        # A role that is only evaluated comes from a rollout, and goes to one, outside of the step.
        awake = not own
        for node in working:
            if (node.id in own) == awake:
                continue
            awake = not awake
            switches.append(
                ResidencySwitch(
                    role=role,
                    device=placements[role].devices[0],
                    what="kv cache",
                    action="take" if awake else "release",
                    before=node.id,
                )
            )
    return tuple(switches)
