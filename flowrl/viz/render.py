"""Drawings of a graph in every format; Graphviz's language and Mermaid are written here."""

from __future__ import annotations

import json
from collections.abc import Iterator

from flowrl.errors import ConfigError
from flowrl.graph import Edge, Graph, Node, Op, format_graph, graph_to_json
from flowrl.viz.labels import edge_fields, node_groups, node_notes, region_title, role_colours
from flowrl.wording import suggestion

FORMATS = ("tree", "text", "mermaid", "dot", "json")


def render(graph: Graph, format: str = "tree", *, color: bool = False) -> str:  # noqa: A002
    """Returns the graph as text that ends in a newline.

    Args:
        format: `tree` for people, `text` for the canonical form, `mermaid` and `dot` for pictures,
            `json` for programs.
        color: True for terminal colours in the tree.

    Raises:
        ConfigError: The format is unknown.
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


# Graphviz: `flowrl graph FILE.py --format dot | dot -Tsvg > graph.svg`.

_DOT_SHAPES = {
    Op.SOURCE: "cylinder",
    Op.FILTER: "hexagon",
    Op.SELECT: "hexagon",
    Op.WHERE: "hexagon",
    Op.PROMPTS_OF: "cylinder",
    Op.REPLAY: "cylinder",
    Op.LOG: "note",
}
_NO_ROLE = ("#f4f4f4", "#777777")


def render_dot(graph: Graph) -> str:
    """Returns the graph in the DOT language.

    Roles are colours, regions are boxes, and carried edges are dashed.
    """
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f"  label={_quote(f'{graph.name} ({graph.level})')}; labelloc=t; fontname=Helvetica;",
        '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11];',
        '  edge [fontname=Helvetica, fontsize=9, color="#555555", fontcolor="#555555"];',
    ]
    lines += [f"  {line}" for line in _dot_nodes(graph)]
    lines += [f"  {_dot_edge(graph, edge)}" for edge in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_nodes(graph: Graph) -> Iterator[str]:
    for region, members in node_groups(graph):
        if region is None:
            yield from (_dot_node(graph, member) for member in members)
        else:
            title = _quote(region_title(region, members))
            yield f"subgraph {_quote(f'cluster {region}')} {{"
            yield f'  label={title}; style="rounded,dashed"; color="#777777"; fontsize=10;'
            yield from (f"  {_dot_node(graph, member)}" for member in members)
            yield "}"


def _dot_node(graph: Graph, node: Node) -> str:
    fill, border = _NO_ROLE
    if node.role is not None:
        colour = role_colours(graph)[node.role]
        fill, border = colour.fill, colour.border
    label = "\n".join([node.id, *node_notes(graph, node)])
    attrs = [f"label={_quote(label)}", f'fillcolor="{fill}"', f'color="{border}"']
    shape = _DOT_SHAPES.get(node.op)
    if shape is not None:
        attrs += [f"shape={shape}", "style=filled"]
    return f"{_quote(node.id)} [{', '.join(attrs)}];"


def _dot_edge(graph: Graph, edge: Edge) -> str:
    fields, per = edge_fields(graph, edge)
    parts = [", ".join(fields), per, "next step" if edge.carried else ""]
    attrs = [f"label={_quote(chr(10).join(part for part in parts if part))}"]
    if graph.is_inner(edge):
        attrs.append('color="#0072b2"')
    if edge.carried:
        # Without this, the edge back to the top would turn the picture upside down.
        attrs += ["style=dashed", "constraint=false"]
    return f"{_quote(edge.src)} -> {_quote(edge.dst)} [{', '.join(attrs)}];"


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
    for region, members in node_groups(graph):
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
