"""A graph as a tree for the terminal.

Each node is below the last of those that it waits for, and the lines under it show what it reads.
The nodes of a region are marked as the corners of a box, and their edges have arrows both ways.
"""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.text import Text

from flowrl.graph import Graph, Node
from flowrl.viz.labels import cost_note, node_notes, read_text, regions, role_colours

_NOTES_WIDTH = 50
"""The number of characters of notes that fit on the line of a node's name."""


def render_tree(graph: Graph, *, color: bool = False) -> str:
    """Returns the tree, with terminal colours for roles if `color` is set."""
    children = _children(graph)
    lines: list[tuple[Text, str]] = []
    for root in children[None]:
        _add(graph, root, children, Text(), Text(), lines)
    width = max((text.cell_len for text, source in lines if source), default=0)
    roles = Text.assemble((graph.name, "bold"), f" ({graph.level})")
    for i, (role, colour) in enumerate(role_colours(graph).items()):
        roles.append("   roles " if i == 0 else ", ")
        roles.append(role, colour.terminal)
    out = StringIO()
    console = Console(
        file=out,
        force_terminal=color,
        color_system="standard" if color else None,
        width=1000,
        highlight=False,
        legacy_windows=False,
    )
    console.print(roles, end="\n\n", soft_wrap=True)
    for text, source in lines:
        if source:
            text = text + Text(" " * (width - text.cell_len + 3)) + Text(source, "dim")
        console.print(text, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _children(graph: Graph) -> dict[str | None, list[Node]]:
    place = {node.id: i for i, node in enumerate(graph.nodes)}
    children: dict[str | None, list[Node]] = {None: []}
    for node in graph.nodes:
        # A node does not wait for the edge that closes a cycle.
        reads = [
            edge.src
            for edge in graph.in_edges(node.id)
            if not edge.carried and place[edge.src] < place[node.id]
        ]
        parent = max(reads, key=lambda src: place[src], default=None)
        children.setdefault(parent, []).append(node)
    return children


def _add(
    graph: Graph,
    node: Node,
    children: dict[str | None, list[Node]],
    first: Text,
    rest: Text,
    lines: list[tuple[Text, str]],
) -> None:
    """Appends the node's lines: `first` is the prefix of its name, `rest` of the lines below."""
    below = children.get(node.id, [])
    colour = role_colours(graph)[node.role].terminal if node.role is not None else ""
    head = first + Text(_box(graph, node), "dim") + Text(node.id, f"bold {colour}".strip())
    notes = node_notes(graph, node)
    short, under = _split(notes)
    if short:
        head = head + Text("  " + short)
    lines.append((head, str(node.source) if node.source is not None else ""))
    bar = Text("│  " if below else "   ", "dim")
    lines += [(rest + bar + Text(note), "") for note in under]
    cost = cost_note(node)
    if cost is not None:
        lines.append((rest + bar + Text(cost), ""))
    for edge in graph.in_edges(node.id):
        lines.append((rest + bar + Text(read_text(graph, edge), "dim"), ""))
    for i, child in enumerate(below):
        last = i == len(below) - 1
        branch = Text("└─ " if last else "├─ ", "dim")
        _add(graph, child, children, rest + branch, rest + Text("   " if last else "│  "), lines)


def _box(graph: Graph, node: Node) -> str:
    """Returns the corner of a region's box that precedes one of its nodes."""
    if node.region is None:
        return ""
    members = regions(graph)[node.region]
    return "╔ " if node == members[0] else "╚ " if node == members[-1] else "╠ "


def _split(notes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Returns the notes for the line of the node's name, and those for lines of their own."""
    short = ", ".join(notes)
    return (short, ()) if len(short) <= _NOTES_WIDTH else (notes[0], notes[1:])
