"""The canonical text form of a graph.

    graph grpo traced

    prompts = source
      attr data = "prompts"
      out prompt: int64/prompts

    actor.generate = generate by actor
      in prompts = prompts{prompt}
      attr n = 8
      attr sampling = null
      out tokens: int64/tokens
      out response_mask: bool/tokens
      out rollout_logprobs: float32/tokens

`parse(format_graph(g, sources=True)) == g` for every graph. Without sources (the default, so that
golden files do not hold paths) everything else is equal. A carried edge ends in ` next step`; a
node of a region says so behind its role: `game.interact = interact by game in interact`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flowrl.specs import Scalar, Spec
from flowrl.specs.base import format_scalar

if TYPE_CHECKING:
    from flowrl.graph.ir import Attr, Graph

__all__ = ["CARRIED", "format_attr", "format_graph"]

CARRIED = " next step"


def format_attr(value: Attr) -> str:
    """The text of an attribute; a specification is written as `family:kind(field=value, ...)`."""
    return f"{value.family}:{value}" if isinstance(value, Spec) else _format_scalar(value)


def _format_scalar(value: Scalar) -> str:
    """Strings are JSON strings, so that no value can break a line."""
    return json.dumps(value) if isinstance(value, str) else format_scalar(value)


def _format_file(name: str) -> str:
    """As it is, where it is one line of text that nothing else could be."""
    plain = name.isprintable() and name.strip() == name and name and not name.startswith('"')
    return name if plain else json.dumps(name)


def format_graph(graph: Graph, *, sources: bool = False) -> str:
    """The canonical text; with `sources`, each node's file and line too."""
    blocks = [f"graph {graph.name} {graph.level}"]
    for node in graph.nodes:
        head = f"{node.id} = {node.op}"
        if node.role is not None:
            head += f" by {node.role}"
        if node.region is not None:
            head += f" in {node.region}"
        if sources and node.source is not None:
            head += f" @ {_format_file(node.source.file)}:{node.source.line}"
        lines = [head]
        for edge in graph.in_edges(node.id):
            fields = ", ".join(edge.fields)
            carried = CARRIED if edge.carried else ""
            lines.append(f"  in {edge.argument} = {edge.src}{{{fields}}}{carried}")
        lines += [f"  attr {name} = {format_attr(value)}" for name, value in node.attrs]
        lines += [f"  out {field}" for field in node.outputs]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
