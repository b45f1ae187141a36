"""The picture of a graph: what is in it, that it can be read, and that no name is markup."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flowrl import api
from flowrl.errors import ConfigError, GraphError
from flowrl.graph import Edge, Graph, Level, Node, Op
from flowrl.ids import NodeId, RoleName
from flowrl.passes import Context, run_passes
from flowrl.user_lines import SourceRef
from flowrl.viz import render
from flowrl_graphs.grpo import grpo
from flowrl_graphs.multi_environment import multi_environment
from flowrl_graphs.self_refine import self_refine

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def placed() -> Graph:
    graph = run_passes(grpo.trace({"kl": 0.01}), Context())
    devices = {"actor": "cuda:[0-7]", "reference": "cuda:[0-7]", "verifier": "cpu:0", None: None}
    nodes = [node.with_attrs(devices=devices[node.role]) for node in graph.nodes]
    return replace(graph, level=Level.PLACED, nodes=tuple(nodes))


GRAPHS = {
    "grpo": lambda: run_passes(grpo.trace(), Context()),
    "regions": multi_environment.trace,
    "wide": self_refine.trace,
    "placed": placed,
}


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> Graph:
    return GRAPHS[request.param]()


def groups(graph: Graph, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(render(graph, "svg"))
    return [each for each in root.iter(f"{SVG}g") if each.get("class") == kind]


def points(text: str | None) -> list[tuple[float, float]]:
    """The coordinates of a path or a polygon."""
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", str(text))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def box(group: ElementTree.Element) -> Box:
    """Left, top, right and bottom of the largest shape of a group."""
    boxes = []
    for shape in group.iter():
        if shape.tag == f"{SVG}ellipse":
            cx, cy, rx, ry = (float(str(shape.get(name))) for name in ("cx", "cy", "rx", "ry"))
            boxes.append((cx - rx, cy - ry, cx + rx, cy + ry))
        elif text := shape.get("points") or shape.get("d"):
            xs, ys = zip(*points(text), strict=True)
            boxes.append((min(xs), min(ys), max(xs), max(ys)))
    return max(boxes, key=lambda b: (b[2] - b[0]) * (b[3] - b[1]))


def texts(group: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in group.iter(f"{SVG}text")]


def test_each_node_is_drawn_once_with_its_line_as_title(graph):
    titles = [str(group.findtext(f"{SVG}title")) for group in groups(graph, "node")]
    assert sorted(titles) == sorted(f"{node.id}\n{node.source}" for node in graph.nodes)


def test_no_node_lies_over_another_one(graph):
    for a, b in combinations(map(box, groups(graph, "node")), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_each_edge_goes_from_its_source_to_the_border_of_its_target(graph):
    boxes = {
        str(group.findtext(f"{SVG}title")).split("\n")[0]: box(group)
        for group in groups(graph, "node")
    }
    edges = groups(graph, "edge")
    assert len(edges) == len(graph.edges)
    for group in edges:
        src, dst = str(group.findtext(f"{SVG}title")).split("->")
        begin = points(next(group.iter(f"{SVG}path")).get("d"))[:1]
        head = points(next(group.iter(f"{SVG}polygon")).get("points"))
        for ends, name in ((begin, src), (head, dst)):
            left, top, right, bottom = boxes[name]
            assert any(left - 5 <= x <= right + 5 and top - 5 <= y <= bottom + 5 for x, y in ends)


def test_edges_say_their_fields_and_all_texts_are_texts_of_at_most_forty_characters(graph):
    shown = [" ".join(texts(group)) for group in groups(graph, "edge")]
    for edge in graph.edges:
        assert any(text.startswith(", ".join(edge.fields)) for text in shown)
    for group in groups(graph, "graph"):
        assert all(len(text) <= 40 for text in texts(group))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_texts_have_a_contrast_of_at_least_four_and_a_half(graph):
    for kind in ("node", "edge"):
        for group in groups(graph, kind):
            fills = {str(each.get("fill")) for each in group.iter() if each.tag != f"{SVG}text"}
            grounds = fills - {"None", "none"} if kind == "node" else {"#ffffff"}
            for text in group.iter(f"{SVG}text"):
                for ground in grounds:
                    ink = luminance(text.get("fill", "#000000"))
                    assert (luminance(ground) + 0.05) / (ink + 0.05) >= 4.5


def test_a_placed_graph_has_a_box_for_each_set_of_devices():
    clusters = groups(placed(), "cluster")
    assert sorted(texts(group)[0] for group in clusters) == ["cpu:0", "cuda:[0-7]"]


def test_names_of_the_user_are_no_markup():
    name = '<script>alert(1)</script>&lt;"\\N'
    file = "<img src=x onerror=alert(1)>.py"
    node = Node(
        id=NodeId(name), op=Op.SOURCE, attrs=(("data", name),), source=SourceRef(file=file, line=1)
    )
    svg = render(Graph(name=name, level=Level.TRACED, nodes=(node,), edges=()), "svg")
    root = ElementTree.fromstring(svg)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags == {"svg", "g", "title", "path", "polygon", "text"}
    assert root.findtext(f"{SVG}title") == f"{name} (traced)"
    (group,) = (g for g in root.iter(f"{SVG}g") if g.get("class") == "node")
    assert group.findtext(f"{SVG}title") == f"{name}\n{file}:1"
    assert texts(group)[0] == name


def test_the_page_has_the_picture_and_a_row_for_each_node(graph):
    text = render(graph, "html")
    for role in graph.roles:
        assert f'">{role}</span>' in text
    for node in graph.nodes:
        assert f"<b>{node.id}</b>" in text
        assert f"<code>{node.source}</code>" in text
    assert text.count('class="node"') == len(graph.nodes)
    assert "<script" not in text


def test_names_of_the_user_are_no_markup_in_the_page():
    name = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    node = Node(id=NodeId(name), op=Op.SOURCE, role=RoleName(name), attrs=(("data", name),))
    text = render(Graph(name=name, level=Level.TRACED, nodes=(node,), edges=()), "html")
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 4


def test_the_picture_in_the_documents_is_of_the_present_program(repository: Path):
    """docs/seeing.md says which command draws it."""
    config = repository / "configs" / "quickstart.yaml"
    graph = api.compile(None, config, runs=False).stages[-1].graph
    shown = ElementTree.parse(repository / "docs" / "pictures" / "grpo.svg").getroot()
    assert texts(shown) == texts(ElementTree.fromstring(render(graph, "svg")))


def test_two_hundred_nodes_are_drawn():
    nodes = tuple(Node(id=NodeId(f"map.{i}"), op=Op.MAP) for i in range(200))
    edges = tuple(
        Edge(src=nodes[i].id, dst=nodes[j].id, argument=f"of_{i}", fields=("score",))
        for i in range(200)
        for j in (i + 1, i + 7)
        if j < 200
    )
    graph = Graph(name="many", level=Level.TRACED, nodes=nodes, edges=edges)
    assert len(groups(graph, "node")) == 200


def test_a_picture_without_graphviz_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="pip install 'flowrl\\[viz\\]'"):
        render(grpo.trace(), "svg")


def test_a_graph_that_graphviz_refuses_is_an_error(tmp_path: Path, monkeypatch):
    program = tmp_path / "fails"
    program.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(program))
    with pytest.raises(GraphError, match="found: no memory"):
        render(grpo.trace(), "svg")
