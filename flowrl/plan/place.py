"""The placed graph: what a plan says of each node, written into the graph."""

from __future__ import annotations

from dataclasses import replace

from flowrl.errors import PlanError
from flowrl.graph import Graph, Level, Node, Op, verify
from flowrl.graph.ir import Attr
from flowrl.plan.check.numbers import UNDO
from flowrl.plan.names import device_names
from flowrl.plan.schema import PlacementPlan
from flowrl.specs.attributes import NodeCost


def place(graph: Graph, plan: PlacementPlan) -> Graph:
    """The graph at the level `placed`: every node says where and how it runs.

    Each has `start` (what must have arrived before it begins) and `chunk` (units of that which it
    takes at once; 0 for all that are there). A role's has `devices`, `process` and `replicas`, and
    how many `samples` of a step reach it and each of its replicas besides; an update
    `micro_batch` (and `micro_tokens`, where samples are packed), a sync the `transport` of its
    weights. Attributes that are open in a lowered graph, because there is nothing to say, are left
    out; so are bytes of activations and caches where a plan divides a model over devices: those of
    its `cost` are of one device that does all, and the plan has its own.

    Args:
        graph: A lowered graph.
        plan: Of that graph.

    Raises:
        PlanError: the plan is of another graph.
        GraphError: the placed graph breaks its specification.
    """
    placed = [_placed(node, plan) for node in graph.nodes]
    return verify(replace(graph, level=Level.PLACED, nodes=tuple(placed)))


def _placed(node: Node, plan: PlacementPlan) -> Node:
    try:
        operation = plan.operation(node.id)
        home = None if node.role is None else plan.placement(node.role)
    except KeyError as error:
        raise PlanError(
            f"the plan of {plan.graph!r} does not say where {node.id} runs",
            where=str(node.source) if node.source is not None else f"node {node.id}",
            found=f"no {error.args[0]!r} in it",
            hint="make the plan again, of this very graph",
        ) from None
    attrs: dict[str, Attr] = {}
    if home is not None:
        attrs["devices"] = device_names(operation.devices or home.devices)
        attrs |= {"process": operation.process or home.process, "replicas": operation.replicas}
        attrs |= {"samples": operation.num_samples}
        attrs["samples_per_replica"] = -(-operation.num_samples // operation.replicas)
    attrs |= {"start": str(operation.start), "chunk": operation.chunk}
    if node.op is Op.UPDATE:
        attrs["micro_batch"] = operation.micro_batch
        if operation.micro_tokens:
            attrs["micro_tokens"] = operation.micro_tokens
    if node.op is Op.SYNC:
        attrs["transport"] = _transport(node, plan)
    cost = node.attr("cost")
    if isinstance(cost, NodeCost) and operation.seconds is not None:
        attrs["cost"] = replace(cost, activation_bytes=0, kv_bytes=0)
    said = replace(node, attrs=tuple(item for item in node.attrs if item[1] is not None))
    return said.with_attrs(**attrs)


def _transport(sync: Node, plan: PlacementPlan) -> str:
    for route in plan.weight_routes:
        if route.after == sync.id:
            return str(route.transport)
    raise PlanError(
        f"the plan of {plan.graph!r} has no route for the weights of {sync.id}",
        where=str(sync.source) if sync.source is not None else f"node {sync.id}",
        expected="an entry of weight_routes after it",
        hint=UNDO,
    )
