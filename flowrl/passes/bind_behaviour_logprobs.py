"""Says where an update takes the logprobs of the policy that produced its samples from."""

from __future__ import annotations

import inspect
from dataclasses import replace

from flowrl.errors import GraphError
from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.ir import called, node_error
from flowrl.graph.signatures import PREFERRED, RESPONSE_MASK, ROLLOUT_LOGPROBS, TOKENS
from flowrl.passes.context import Context
from flowrl.passes.rollouts import drawn_by
from flowrl.specs import LossSpec, OwnLoss
from flowrl.specs import loss as losses
from flowrl.specs.loss import PolicyLoss

__all__ = ["bind_behaviour_logprobs", "correcting_losses"]


def bind_behaviour_logprobs(graph: Graph, context: Context) -> Graph:
    """Binds behaviour logprobs to those that the engine reported with each token.

    The engine's are exactly the behaviour policy's, so no forward pass of that policy is made; the
    attribute `behaviour_logprobs` says so in the graph and the plan. An update on its own role's
    rollout has them whatever its loss reads: the mismatch of engine and trainer is measured with
    them. The edge from the rollout then carries what the update reads, and nothing else.

    Raises:
        GraphError: samples may be stale, and the loss does not correct for the policy that
            produced them.
    """
    carried: dict[str, tuple[str, ...]] = {}
    for node in graph.of_op(Op.UPDATE):
        loss = node.attr("loss")
        if not isinstance(loss, LossSpec):
            continue
        drawn = drawn_by(graph, node)
        if drawn is not None:
            _check_staleness(graph, node, loss, drawn, context)
        reads = "behaviour_logprobs" in loss.needs
        measures = drawn is not None and drawn.role == node.role and loss.predicts == "logprobs"
        if (reads or measures) and not loss.pairs:
            graph = graph.replacing(node.with_attrs(behaviour_logprobs=ROLLOUT_LOGPROBS.name))
        carried[node.id] = _read_fields(graph.node(node.id), loss)
    return replace(graph, edges=tuple(_trimmed(edge, carried) for edge in graph.edges))


def _read_fields(update: Node, loss: LossSpec) -> tuple[str, ...]:
    fields = [TOKENS.name, RESPONSE_MASK.name]
    if update.attr("behaviour_logprobs") is not None:
        fields.append(ROLLOUT_LOGPROBS.name)
    if "preferred" in loss.needs:
        fields.append(PREFERRED.name)
    return tuple(fields)


def _trimmed(edge: Edge, carried: dict[str, tuple[str, ...]]) -> Edge:
    if edge.argument != "rollout" or edge.dst not in carried:
        return edge
    return replace(edge, fields=tuple(f for f in edge.fields if f in carried[edge.dst]))


def _check_staleness(
    graph: Graph, node: Node, loss: LossSpec, drawn: Node, context: Context
) -> None:
    """A critic learns returns, a reward model preferences: neither is a policy of its samples."""
    if loss.corrects_behaviour or loss.predicts != "logprobs":
        return
    sync = _refresh(graph, node, drawn)
    every = sync.attr("every") if sync is not None else 1
    late = every - 1 if isinstance(every, int) else 0
    if context.max_staleness + late > 0:
        raise _uncorrected(node, loss, context.max_staleness + late, sync if late else None)


def _refresh(graph: Graph, update: Node, drawn: Node) -> Node | None:
    """The sync by which who draws follows the policy that is updated, from time to time."""
    for sync in graph.of_op(Op.SYNC):
        edge = graph.feeding(sync.id, "weights")
        if sync.role == drawn.role != update.role and edge is not None:
            return sync if graph.node(edge.src).role == update.role else None
    return None


def _uncorrected(node: Node, loss: LossSpec, staleness: int, sync: Node | None) -> GraphError:
    fresh = f"write {sync.role}.sync without every" if sync else "set max_staleness to 0"
    hint = f"use one of these, or {fresh}"
    if isinstance(loss, PolicyLoss):
        hint = (
            f"let this one correct: loss=fl.loss.{loss.kind}(correction=fl.loss.truncate(2.0), "
            f"...); or {hint}"
        )
    elif isinstance(loss, OwnLoss):
        hint = (
            f"where yours does, declare it: @fl.loss.own(corrects_behaviour=True, ...); or {hint}"
        )
    names = correcting_losses(pairs=loss.pairs)
    return node_error(
        node,
        f"update(loss={called(loss)}) gets samples of policies up to {staleness} "
        f"publication{'s' if staleness > 1 else ''} old, but does not correct for the policy that "
        "produced them",
        found=None if sync is None else f"{sync.id}, every={sync.attr('every')} ({sync.source})",
        expected="a loss that does: " + ", ".join(f"fl.loss.{name}()" for name in names),
        hint=hint,
    )


def correcting_losses(*, pairs: bool = False) -> tuple[str, ...]:
    """Names of all losses on rollouts that, as they are, correct for older policies.

    Args:
        pairs: Of those on pairs of samples; otherwise of policy losses.
    """
    found = []
    for name in losses.__all__:
        make = getattr(losses, name)
        if not inspect.isfunction(make) or not _needs_nothing(make):
            continue
        loss = make()
        policy = isinstance(loss, LossSpec) and loss.predicts == "logprobs"
        if policy and loss.corrects_behaviour and loss.pairs == pairs:
            found.append(name)
    return tuple(found)


def _needs_nothing(make: object) -> bool:
    parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)
