"""A graph as JSON: what run folders and plans hold, and what `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from flowrl.errors import GraphError
from flowrl.graph.ir import Attr, Edge, Graph, Node
from flowrl.graph.types import DType, Field, Level, Op, SourceRef, Unit
from flowrl.ids import NodeId, RoleName
from flowrl.specs import Scalar, Spec, spec_from_json

__all__ = ["GRAPH_VERSION", "Json", "graph_from_json", "graph_to_json"]

GRAPH_VERSION = 2

_FLOAT = "float"
"""Key of a number that JSON cannot hold, spelt out: `{"float": "inf"}`."""

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


def graph_to_json(graph: Graph) -> dict[str, Json]:
    """The graph as JSON values, sources included; `graph_from_json` reads it back equal."""
    return {
        "version": GRAPH_VERSION,
        "name": graph.name,
        "level": str(graph.level),
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "edges": [
            {
                "src": edge.src,
                "dst": edge.dst,
                "argument": edge.argument,
                "fields": list(edge.fields),
                "carried": edge.carried,
            }
            for edge in graph.edges
        ],
    }


def _node_to_json(node: Node) -> dict[str, Json]:
    source: Json = None
    if node.source is not None:
        source = {"file": node.source.file, "line": node.source.line}
    return {
        "id": node.id,
        "op": str(node.op),
        "role": node.role,
        "inputs": list(node.inputs),
        "outputs": [
            {"name": f.name, "dtype": str(f.dtype), "unit": str(f.unit)} for f in node.outputs
        ],
        "attrs": {name: _attr_to_json(value) for name, value in node.attrs},
        "region": node.region,
        "source": source,
    }


def _attr_to_json(value: Attr) -> Json:
    if not isinstance(value, Spec):
        return _scalar_to_json(value)
    fields = {name: _scalar_to_json(each) for name, each in value.to_json().items()}
    return {"family": value.family, **fields}


def _scalar_to_json(value: Scalar) -> Json:
    # JSON has no infinity; Python would write a word that other readers do not know.
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    return value


def _attr_from_json(value: Json) -> Attr:
    if not isinstance(value, Mapping) or _FLOAT in value:
        return _scalar_from_json(value)
    fields = {name: _scalar_from_json(each) for name, each in value.items()}
    return spec_from_json(str(fields.pop("family")), fields)


def _scalar_from_json(value: Json) -> Scalar:
    if isinstance(value, Mapping):
        return float(str(value[_FLOAT]))
    return cast(Scalar, value)


def graph_from_json(value: Mapping[str, Json]) -> Graph:
    """The graph that `graph_to_json` wrote.

    Raises:
        GraphError: another version, or a value that is not a graph.
    """
    if value.get("version") != GRAPH_VERSION:
        raise GraphError(
            "a graph of another version",
            found=f"version {value.get('version')}",
            expected=f"version {GRAPH_VERSION}",
            hint="compile the workflow again",
        )
    try:
        return _read_graph(value)
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError("not the JSON form of a graph", found=f"{error!r}") from error


def _read_graph(value: Mapping[str, Json]) -> Graph:
    nodes = cast(Sequence[Mapping[str, Json]], value["nodes"])
    edges = cast(Sequence[Mapping[str, Json]], value["edges"])
    return Graph(
        name=str(value["name"]),
        level=Level(str(value["level"])),
        nodes=tuple(_read_node(node) for node in nodes),
        edges=tuple(
            Edge(
                src=NodeId(str(edge["src"])),
                dst=NodeId(str(edge["dst"])),
                argument=str(edge["argument"]),
                fields=tuple(cast(Sequence[str], edge["fields"])),
                carried=bool(edge["carried"]),
            )
            for edge in edges
        ),
    )


def _read_node(node: Mapping[str, Json]) -> Node:
    source = cast("Mapping[str, Json] | None", node["source"])
    outputs = cast(Sequence[Mapping[str, str]], node["outputs"])
    attrs = cast(Mapping[str, Json], node["attrs"])
    return Node(
        id=NodeId(str(node["id"])),
        op=Op(str(node["op"])),
        role=None if node["role"] is None else RoleName(str(node["role"])),
        inputs=tuple(cast(Sequence[str], node["inputs"])),
        outputs=tuple(
            Field(name=f["name"], dtype=DType(f["dtype"]), unit=Unit(f["unit"])) for f in outputs
        ),
        attrs=tuple((name, _attr_from_json(attr)) for name, attr in attrs.items()),
        region=None if node["region"] is None else str(node["region"]),
        source=None
        if source is None
        else SourceRef(file=str(source["file"]), line=int(cast(int, source["line"]))),
    )
