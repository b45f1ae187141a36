"""Graphs as SVG or PNG, which Graphviz lays out and draws, and as a page that holds the picture.

Graphviz comes as a program of the distribution `graphviz-pure`, without packages of the system. An
SVG has its texts as texts, and each node a title with its line of the program, which browsers
show under the mouse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from xml.etree import ElementTree

from flowrl.errors import ConfigError, GraphError
from flowrl.graph import Graph
from flowrl.viz.labels import cost_note, node_notes, read_text, role_colours
from flowrl.viz.page import render_page

_PROGRAM = "graphviz-pure"
_SVG = "http://www.w3.org/2000/svg"
_LIMIT_S = 120


def render_svg(graph: Graph, dot: str) -> str:
    """Returns the picture.

    Args:
        dot: The graph in the DOT language.

    Raises:
        ConfigError: Graphviz is not installed.
        GraphError: Graphviz cannot draw the graph.
    """
    root = ElementTree.fromstring(_drawn(graph, dot, "svg"))  # without comments, which have names
    for group in root.iter(f"{{{_SVG}}}g"):
        title = group.find(f"{{{_SVG}}}title")
        if title is not None and group.get("class") == "node":
            node = graph.nodes[int(str(group.get("id")).removeprefix("n"))]
            title.text = f"{node.id}\n{node.source}" if node.source is not None else node.id
    name = ElementTree.Element(f"{{{_SVG}}}title")
    name.text = f"{graph.name} ({graph.level})"
    root.insert(0, name)
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def render_html(graph: Graph, dot: str) -> str:
    """Returns a page with the picture and a table of the nodes; see `render_svg`."""
    from markupsafe import Markup

    nodes = []
    for node in graph.nodes:
        cost = cost_note(node)
        notes = [*node_notes(graph, node), *([] if cost is None else [cost])]
        reads = [read_text(graph, edge) for edge in graph.in_edges(node.id)]
        source = "" if node.source is None else str(node.source)
        nodes.append(
            {"id": node.id, "op": node.op, "notes": notes, "reads": reads, "source": source}
        )
    values = {
        "title": f"{graph.name} ({graph.level})",
        "roles": list(role_colours(graph).items()),
        "picture": Markup(render_svg(graph, dot)),
        "nodes": nodes,
    }
    return render_page("graph.html", values, styles=("page.css",))


def render_png(graph: Graph, dot: str) -> bytes:
    """Returns the picture in pixels, twice as many as a screen needs; see `render_svg`."""
    return _drawn(graph, dot, "png", "-Gdpi=192")


def _drawn(graph: Graph, dot: str, form: str, *options: str) -> bytes:
    # The folder of this Python's programs need not be in PATH.
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    program = shutil.which(_PROGRAM, path=folders)
    if program is None:
        raise ConfigError(
            f"drawing pictures needs {_PROGRAM}, which is not installed",
            hint="pip install 'flowrl[viz]'; --format mermaid and dot need nothing",
        )
    ended = subprocess.run(
        [program, f"-T{form}", *options],
        input=dot.encode(),
        capture_output=True,
        timeout=_LIMIT_S,
    )
    if ended.returncode or not ended.stdout:
        raise GraphError(
            "Graphviz cannot draw this graph",
            where=graph.name,
            found=ended.stderr.decode(errors="replace").strip()
            or f"exit status {ended.returncode}",
            hint="--format dot shows what it is given",
        )
    return ended.stdout
