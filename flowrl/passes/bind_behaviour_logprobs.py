"""Says where an update takes the logprobs of the policy that produced its samples from."""

from __future__ import annotations

import inspect
from dataclasses import replace

from flowrl.errors import GraphError
from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.node_errors import node_error
from flowrl.graph.signatures import PREFERRED, RESPONSE_MASK, ROLLOUT_LOGPROBS, TOKENS
from flowrl.passes.context import Context
from flowrl.passes.rollouts import drawn_by
from flowrl.specs import LossSpec
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
            _check_staleness(node, loss, context)
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


def _check_staleness(node: Node, loss: LossSpec, context: Context) -> None:
    """A critic learns returns, a reward model preferences: neither is a policy of its samples."""
    if context.max_staleness == 0 or loss.corrects_behaviour or loss.predicts != "logprobs":
        return
    raise _uncorrected(node, loss, context.max_staleness)


def _uncorrected(node: Node, loss: LossSpec, staleness: int) -> GraphError:
    hint = "use one of these, or set max_staleness to 0"
    if isinstance(loss, PolicyLoss):
        hint = (
            f"let this one correct: loss=fl.loss.{loss.kind}(correction=fl.loss.truncate(2.0), "
            f"...); or {hint}"
        )
    elif loss.kind.startswith("own"):
        hint = (
            f"where yours does, declare it: @fl.loss.own(corrects_behaviour=True, ...); or {hint}"
        )
    return node_error(
        node,
        f"update(loss={loss.kind}) gets samples of policies up to {staleness} publications old, "
        "but does not correct for the policy that produced them",
        expected="a loss that does: " + ", ".join(f"fl.loss.{n}()" for n in correcting_losses()),
        hint=hint,
    )


def correcting_losses() -> tuple[str, ...]:
    """Names of all losses of policies on rollouts that, as they are, correct for older policies."""
    found = []
    for name in losses.__all__:
        make = getattr(losses, name)
        if not inspect.isfunction(make) or not _needs_nothing(make):
            continue
        loss = make()
        if isinstance(loss, PolicyLoss) and loss.corrects_behaviour:
            found.append(name)
    return tuple(found)


def _needs_nothing(make: object) -> bool:
    parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)
