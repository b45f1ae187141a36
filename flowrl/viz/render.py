"""One entry to all drawings of a graph."""

from __future__ import annotations

import json

from flowrl.errors import ConfigError
from flowrl.graph import Graph, format_graph, graph_to_json
from flowrl.viz.dot import render_dot
from flowrl.viz.mermaid import render_mermaid
from flowrl.wording import suggestion

__all__ = ["FORMATS", "render"]

FORMATS = ("tree", "text", "mermaid", "dot", "json")


def render(graph: Graph, format: str = "tree", *, color: bool = False) -> str:  # noqa: A002
    """The graph as text that ends in a newline.

    Args:
        format: `tree` for people, `text` the canonical form, `mermaid` and `dot` for pictures,
            `json` for programs.
        color: Terminal colours in the tree.

    Raises:
        ConfigError: an unknown format.
    """
    match format:
        case "tree":
            from flowrl.viz.tree import render_tree  # rich is slow to import

            return render_tree(graph, color=color)
        case "text":
            return format_graph(graph)
        case "mermaid":
            return render_mermaid(graph)
        case "dot":
            return render_dot(graph)
        case "json":
            return json.dumps(graph_to_json(graph), indent=2) + "\n"
    raise ConfigError(
        f"no drawing is called '{format}'",
        expected=f"one of {', '.join(FORMATS)}",
        hint=suggestion(format, FORMATS),
    )
