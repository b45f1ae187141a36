"""How errors about a node are worded: where it was written, units, fields, names of formulas."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.errors import GraphError
from flowrl.graph.ir import Node
from flowrl.graph.types import Field, Unit
from flowrl.specs import Spec

__all__ = ["called", "names_of", "node_error", "per"]

_PER = {
    Unit.PROMPTS: "per prompt",
    Unit.GROUPS: "per group",
    Unit.SAMPLES: "per sample",
    Unit.TOKENS: "per token",
    Unit.ROLES: "per role",
}


def node_error(node: Node, what: str, **more: str | None) -> GraphError:
    """An error at the line that made the node."""
    where = str(node.source) if node.source is not None else f"node {node.id}"
    return GraphError(what, where=where, **more)


def per(field: Field) -> str:
    """`per token`, `per sample`."""
    return _PER[field.unit]


def names_of(fields: Sequence[Field]) -> str:
    """Field names for messages."""
    return ", ".join(field.name for field in fields) or "nothing"


def called(spec: Spec) -> str:
    """What a specification is called: its kind, or the name of the user's own function."""
    function = getattr(spec, "function", None)
    return str(function).rpartition(":")[2] if function else spec.kind
