"""Drawings of a graph in every format; Graphviz's language and Mermaid are written here."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from flowrl.errors import ConfigError
from flowrl.graph import Edge, Graph, Level, Node, Op, format_graph, graph_to_json
from flowrl.viz.labels import edge_fields, node_groups, node_notes, region_title, role_colours
from flowrl.wording import suggestion

FORMATS = ("tree", "text", "mermaid", "dot", "json", "svg", "html")


def render(graph: Graph, format: str = "tree", *, color: bool = False) -> str:  # noqa: A002
    """Returns the graph as text that ends in a newline.

    Args:
        format: `tree` for people, `text` for the canonical form, `mermaid` and `dot` for pictures,
            `json` for programs, `svg` for a picture, `html` for a page with it.
        color: True for terminal colours in the tree.

    Raises:
        ConfigError: The format is unknown, or what draws pictures is not installed.
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
        case "svg":
            from flowrl.viz.picture import render_svg

            return render_svg(graph, render_dot(graph))
        case "html":
            from flowrl.viz.picture import render_html

            return render_html(graph, render_dot(graph))
    raise ConfigError(
        f"no drawing is called '{format}'",
        expected=f"one of {', '.join(FORMATS)}",
        hint=suggestion(format, FORMATS),
    )


def render_png(graph: Graph) -> bytes:
    """Returns the picture of a graph as PNG.

    Raises:
        ConfigError: What draws pictures is not installed.
    """
    from flowrl.viz.picture import render_png

    return render_png(graph, render_dot(graph))


# Graphviz, whose language other programs read too.

_DOT_SHAPES = {
    Op.SOURCE: "cylinder",
    Op.SCORE: "ellipse",
    Op.FILTER: "hexagon",
    Op.SELECT: "hexagon",
    Op.WHERE: "hexagon",
    Op.UPDATE: "box, peripheries=2",
    Op.SYNC: "box3d",
    Op.PROMPTS_OF: "cylinder",
    Op.REPLAY: "cylinder",
    Op.LOG: "note",
}
_NO_ROLE = ("#f4f4f4", "#777777")
_WIDTH = 40
"""Characters of a line of a label."""


def render_dot(graph: Graph) -> str:
    """Returns the graph in the DOT language.

    Roles are colours, operations are shapes, regions and the devices of a placed graph are boxes,
    and carried edges are dashed.
    """
    title = _label([f"{graph.name} ({graph.level})"])
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f"  label={title}; labelloc=t; fontname=Helvetica; fontsize=12;",
        # Room for fonts that are wider than Helvetica, where there is none.
        '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11];',
        '  node [margin="0.3,0.06"];',
        '  edge [fontname=Helvetica, fontsize=9, color="#555555", fontcolor="#555555"];',
    ]
    if graph.level is Level.PLACED:
        # Edges leave the box of a device and come back; without this some would point upwards.
        lines.append("  newrank=true;")
    lines += [f"  {line}" for line in _dot_boxes(graph)]
    lines += [f"  {_dot_edge(graph, edge)}" for edge in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_boxes(graph: Graph) -> Iterator[str]:
    """Yields the nodes, in a box for the devices that a plan gives them."""
    places = {node.id: node.attr("devices") for node in graph.nodes}
    for devices in dict.fromkeys(places.values()):
        members = [node for node in graph.nodes if places[node.id] == devices]
        if devices is None:
            yield from _dot_nodes(graph, members)
        else:
            yield f"subgraph {_quote(f'cluster on {devices}')} {{"
            title = _label([str(devices)])
            yield f'  label={title}; labeljust=l; style="rounded"; color="#777777";'
            yield from (f"  {line}" for line in _dot_nodes(graph, members))
            yield "}"


def _dot_nodes(graph: Graph, nodes: Sequence[Node]) -> Iterator[str]:
    for region, members in node_groups(nodes):
        if region is None:
            yield from (_dot_node(graph, member) for member in members)
        else:
            title = _label([region_title(region, members)])
            yield f"subgraph {_quote(f'cluster {region} {members[0].id}')} {{"
            yield f'  label={title}; labeljust=l; style="rounded,dashed"; color="#777777";'
            yield from (f"  {_dot_node(graph, member)}" for member in members)
            yield "}"


def _dot_node(graph: Graph, node: Node) -> str:
    fill, border = _NO_ROLE
    if node.role is not None:
        colour = role_colours(graph)[node.role]
        fill, border = colour.fill, colour.border
    label = _label([node.id, *node_notes(graph, node)])
    place = graph.nodes.index(node)  # by which `flowrl.viz.picture` finds the node
    attrs = [f'id="n{place}"', f"label={label}", f'fillcolor="{fill}"', f'color="{border}"']
    shape = _DOT_SHAPES.get(node.op)
    if shape is not None:
        attrs += [f"shape={shape}", "style=filled"]
    return f"{_quote(node.id)} [{', '.join(attrs)}];"


def _dot_edge(graph: Graph, edge: Edge) -> str:
    fields, per = edge_fields(graph, edge)
    # Graphviz may put the label of an edge that leaves a box under a node, but no outer label.
    src, dst = (graph.node(end).attr("devices") for end in (edge.src, edge.dst))
    kind = "label" if src == dst else "xlabel"
    attrs = [f"{kind}={_label([', '.join(fields), per, 'next step' if edge.carried else ''])}"]
    if graph.is_inner(edge):
        attrs.append('color="#0072b2"')
    if edge.carried:
        # Without this, the edge back to the top would turn the picture upside down.
        attrs += ["style=dashed", "constraint=false"]
    return f"{_quote(edge.src)} -> {_quote(edge.dst)} [{', '.join(attrs)}];"


def _label(texts: Iterable[str]) -> str:
    """Returns the lines of texts that are not empty, as one quoted label."""
    lines = [line for text in texts for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False)]
    return _quote("\n".join(lines).replace("&", "&amp;"))  # labels have the characters of HTML


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# Mermaid, for documents and web pages.

_MERMAID_SHAPES: dict[Op, tuple[str, str]] = {
    Op.SOURCE: ("[(", ")]"),
    Op.GENERATE: ("([", "])"),
    Op.INTERACT: ("([", "])"),
    Op.FILTER: ("{{", "}}"),
    Op.SELECT: ("{{", "}}"),
    Op.WHERE: ("{{", "}}"),
    Op.PROMPTS_OF: ("[(", ")]"),
    Op.REPLAY: ("[(", ")]"),
    Op.LOG: (">", "]"),
}


def render_mermaid(graph: Graph) -> str:
    """Returns the graph as a Mermaid flowchart.

    Roles are colours, regions are boxes, and shapes show the kind of a node.
    """
    names: dict[str, str] = {node.id: f"n{i}" for i, node in enumerate(graph.nodes)}
    # A quoted scalar of YAML, in which no name is markup, also not in a page that holds the text.
    title = json.dumps(f"{graph.name} ({graph.level})", ensure_ascii=False).replace("<", "\\u003c")
    lines = ["---", f"title: {title}", "---", "flowchart TD"]
    lines += [f"  {line}" for line in _mermaid_nodes(graph, names)]
    lines += [f"  {_mermaid_edge(graph, edge, names)}" for edge in graph.edges]
    for i, (role, colour) in enumerate(role_colours(graph).items()):
        members = ",".join(names[node.id] for node in graph.nodes if node.role == role)
        lines.append(f"  classDef role{i} fill:{colour.fill},stroke:{colour.border},color:#111")
        lines.append(f"  class {members} role{i}")
    return "\n".join(lines) + "\n"


def _mermaid_nodes(graph: Graph, names: dict[str, str]) -> Iterator[str]:
    for region, members in node_groups(graph.nodes):
        nodes = [f"{names[member.id]}{_mermaid_node(graph, member)}" for member in members]
        if region is None:
            yield from nodes
        else:
            title = _escape(region_title(region, members))
            yield f'subgraph r{names[members[0].id]}["{title}"]'
            yield from (f"  {node}" for node in nodes)
            yield "end"


def _mermaid_node(graph: Graph, node: Node) -> str:
    left, right = _MERMAID_SHAPES.get(node.op, ("[", "]"))
    parts = [f"<b>{_escape(node.id)}</b>", *map(_escape, node_notes(graph, node))]
    return f'{left}"{"<br/>".join(parts)}"{right}'


def _mermaid_edge(graph: Graph, edge: Edge, names: dict[str, str]) -> str:
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
