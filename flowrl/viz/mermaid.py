"""A graph as a Mermaid flowchart, for documents and web pages."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph import Edge, Graph, Node, Op
from flowrl.viz.labels import edge_fields, node_notes, region_title, regions, role_colours

__all__ = ["render_mermaid"]

_SHAPES: dict[Op, tuple[str, str]] = {
    Op.SOURCE: ("[(", ")]"),
    Op.GENERATE: ("([", "])"),
    Op.INTERACT: ("([", "])"),
    Op.FILTER: ("{{", "}}"),
    Op.SELECT: ("{{", "}}"),
    Op.LOG: (">", "]"),
}


def render_mermaid(graph: Graph) -> str:
    """A flowchart: a colour for each role, a box for each region, shapes by kind of node."""
    names: dict[str, str] = {node.id: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = ["---", f"title: {graph.name} ({graph.level})", "---", "flowchart TD"]
    lines += [f"  {line}" for line in _nodes(graph, names)]
    lines += [f"  {_edge(graph, edge, names)}" for edge in graph.edges]
    for i, (role, colour) in enumerate(role_colours(graph).items()):
        members = ",".join(names[node.id] for node in graph.nodes if node.role == role)
        lines.append(f"  classDef role{i} fill:{colour.fill},stroke:{colour.border},color:#111")
        lines.append(f"  class {members} role{i}")
    return "\n".join(lines) + "\n"


def _nodes(graph: Graph, names: dict[str, str]) -> Iterator[str]:
    """All nodes in order; those of a region together, where its first one stands."""
    boxes = regions(graph)
    for node in graph.nodes:
        if node.region is None:
            yield f"{names[node.id]}{_node(graph, node)}"
        elif (members := boxes.pop(node.region, None)) is not None:
            title = _escape(region_title(node.region, members))
            yield f'subgraph r{names[members[0].id]}["{title}"]'
            yield from (f"  {names[member.id]}{_node(graph, member)}" for member in members)
            yield "end"


def _node(graph: Graph, node: Node) -> str:
    left, right = _SHAPES.get(node.op, ("[", "]"))
    parts = [f"<b>{_escape(node.id)}</b>", *map(_escape, node_notes(graph, node))]
    return f'{left}"{"<br/>".join(parts)}"{right}'


def _edge(graph: Graph, edge: Edge, names: dict[str, str]) -> str:
    fields, per = edge_fields(graph, edge)
    label = "<br/>".join(_escape(part) for part in (", ".join(fields), per) if part)
    src, dst = names[edge.src], names[edge.dst]
    if edge.carried:
        return f'{src} -. "{label}<br/>next step" .-> {dst}'
    return f'{src} -- "{label}" --> {dst}'


def _escape(text: str) -> str:
    # A # begins the name of a character.
    return (
        text.replace("#", "#35;").replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;")
    )
