"""One role, one model: what its nodes ask of it must not exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import GraphError
from flowrl.graph.ir import Graph, Node
from flowrl.graph.node_errors import node_error
from flowrl.graph.types import Op
from flowrl.specs import LossSpec

__all__ = ["check_role_models"]

_POLICY = "a policy, whose model gives logprobs"
_CRITIC = "a critic, whose model gives values"
_REWARD_MODEL = "a reward model, which gives scores"
_RULES = "a reward by rules, without a model"
_ENVIRONMENT = "an environment, without a model"

_BY_OP = {
    Op.GENERATE: _POLICY,
    Op.LOGPROBS: _POLICY,
    Op.VALUES: _CRITIC,
    Op.INTERACT: _ENVIRONMENT,
}
_BY_PREDICTION = {"logprobs": _POLICY, "values": _CRITIC, "scores": _REWARD_MODEL}


def check_role_models(graph: Graph) -> Iterator[GraphError]:
    """Roles that are used for two incompatible models."""
    first: dict[str, tuple[str, Node]] = {}
    for node in graph.nodes:
        kind = _kind(node)
        if node.role is None or kind is None:
            continue
        known, before = first.setdefault(node.role, (kind, node))
        if known != kind:
            where = f" ({before.source})" if before.source is not None else ""
            yield node_error(
                node,
                f"role '{node.role}' is used for two incompatible models: "
                f"{node.id} asks for {kind}",
                found=f"{before.id}{where} asks for {known}",
                hint="make them two roles, each with its own entry under roles in the config",
            )


def _kind(node: Node) -> str | None:
    """What a node needs its role to be; None where any will do."""
    match node.op:
        case Op.SCORE:
            return _REWARD_MODEL if node.attr("by") == "model" else _RULES
        case Op.UPDATE:
            loss = node.attr("loss")
            return _BY_PREDICTION[loss.predicts] if isinstance(loss, LossSpec) else None
        case _:
            return _BY_OP.get(node.op)
