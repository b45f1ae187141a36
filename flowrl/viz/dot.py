"""A graph in Graphviz's language: `flowrl graph FILE.py --format dot | dot -Tsvg > graph.svg`."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph import Edge, Graph, Node, Op
from flowrl.viz.labels import edge_fields, node_notes, region_title, regions, role_colours

__all__ = ["render_dot"]

_SHAPES = {
    Op.SOURCE: "cylinder",
    Op.FILTER: "hexagon",
    Op.SELECT: "hexagon",
    Op.LOG: "note",
}
_NO_ROLE = ("#f4f4f4", "#777777")


def render_dot(graph: Graph) -> str:
    """Text in the DOT language; roles are colours, regions boxes, carried edges are dashed."""
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f"  label={_quote(f'{graph.name} ({graph.level})')}; labelloc=t; fontname=Helvetica;",
        '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11];',
        '  edge [fontname=Helvetica, fontsize=9, color="#555555", fontcolor="#555555"];',
    ]
    lines += [f"  {line}" for line in _nodes(graph)]
    lines += [f"  {_edge(graph, edge)}" for edge in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _nodes(graph: Graph) -> Iterator[str]:
    """All nodes in order; those of a region together, where its first one stands."""
    boxes = regions(graph)
    for node in graph.nodes:
        if node.region is None:
            yield _node(graph, node)
        elif (members := boxes.pop(node.region, None)) is not None:
            title = _quote(region_title(node.region, members))
            yield f"subgraph {_quote(f'cluster {node.region}')} {{"
            yield f'  label={title}; style="rounded,dashed"; color="#777777"; fontsize=10;'
            yield from (f"  {_node(graph, member)}" for member in members)
            yield "}"


def _node(graph: Graph, node: Node) -> str:
    fill, border = _NO_ROLE
    if node.role is not None:
        colour = role_colours(graph)[node.role]
        fill, border = colour.fill, colour.border
    label = "\n".join([node.id, *node_notes(graph, node)])
    attrs = [f"label={_quote(label)}", f'fillcolor="{fill}"', f'color="{border}"']
    shape = _SHAPES.get(node.op)
    if shape is not None:
        attrs += [f"shape={shape}", "style=filled"]
    return f"{_quote(node.id)} [{', '.join(attrs)}];"


def _edge(graph: Graph, edge: Edge) -> str:
    fields, per = edge_fields(graph, edge)
    parts = [", ".join(fields), per, "next step" if edge.carried else ""]
    attrs = [f"label={_quote(chr(10).join(part for part in parts if part))}"]
    if graph.is_inner(edge):
        attrs.append('color="#0072b2"')
    if edge.carried:
        # Without this the edge back to the top would turn the picture upside down.
        attrs += ["style=dashed", "constraint=false"]
    return f"{_quote(edge.src)} -> {_quote(edge.dst)} [{', '.join(attrs)}];"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
