"""Reads graphs from their canonical text (`flowrl.graph.ir`); writes and reads their JSON form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from flowrl.errors import GraphError
from flowrl.graph.ir import Attr, DType, Edge, Field, Graph, Level, Node, Op, Unit
from flowrl.ids import NodeId, RoleName
from flowrl.specs import Scalar, Spec, spec_from_json
from flowrl.user_lines import SourceRef

_E = TypeVar("_E", Op, Unit, DType, Level)

_HEAD = re.compile(r"graph (?P<name>.+) (?P<level>\w+)")
_NODE = re.compile(r"(?P<id>\S+) = (?P<op>\w+)(?: by (?P<role>\S+))?(?: in (?P<region>\S+))?")
_IN = re.compile(r"in (?P<arg>\w+) = (?P<src>\S+)\{(?P<fields>[\w., -]*)\}(?P<carried> next step)?")
_ATTR = re.compile(r"attr (?P<name>\w+) = (?P<value>.+)")
_OUT = re.compile(r"out (?P<name>\w+): (?P<dtype>\w+)/(?P<unit>\w+)")
_SPEC = re.compile(r"(?P<family>\w+):(?P<kind>\w+)\((?P<body>.*)\)")
_SPEC_FIELD = re.compile(r'(?P<name>\w+)=(?P<value>"(?:[^"\\]|\\.)*"|[^,]+)(?:, |$)')


def parse(text: str) -> Graph:
    """Returns the graph that `format_graph` wrote.

    Raises:
        GraphError: a line that is not of the form; `where` is its number.
    """
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    head = _HEAD.fullmatch(lines[0][1]) if lines else None
    if head is None:
        raise _bad(1, lines[0][1] if lines else "", "graph NAME LEVEL")
    nodes: list[Node] = []
    edges: list[Edge] = []
    for number, line in lines[1:]:
        if not line.startswith("  "):
            nodes.append(_parse_node(number, line))
        elif not nodes:
            raise _bad(number, line, "a node, before what belongs to it")
        else:
            nodes[-1] = _parse_detail(number, line.strip(), nodes[-1], edges)
    level = _member(lines[0][0], Level, head["level"])
    return Graph(name=head["name"], level=level, nodes=tuple(nodes), edges=tuple(edges))


def _parse_node(number: int, line: str) -> Node:
    found = _NODE.fullmatch(line)
    if found is None:
        raise _bad(number, line, "NODE = OP [by ROLE] [in REGION]")
    return Node(
        id=NodeId(found["id"]),
        op=_member(number, Op, found["op"]),
        role=RoleName(found["role"]) if found["role"] else None,
        region=found["region"],
    )


def _parse_detail(number: int, line: str, node: Node, edges: list[Edge]) -> Node:
    if found := _IN.fullmatch(line):
        names = tuple(name for name in found["fields"].split(", ") if name)
        edges.append(
            Edge(
                src=NodeId(found["src"]),
                dst=node.id,
                argument=found["arg"],
                fields=names,
                carried=found["carried"] is not None,
            )
        )
        return replace(node, inputs=(*node.inputs, found["arg"]))
    if found := _ATTR.fullmatch(line):
        try:
            value = parse_attr(found["value"])
        except (ValueError, KeyError, TypeError) as error:
            raise _bad(number, line, "a JSON value or FAMILY:KIND(FIELD=VALUE, ...)") from error
        return replace(node, attrs=(*node.attrs, (found["name"], value)))
    if found := _OUT.fullmatch(line):
        field = Field(
            name=found["name"],
            dtype=_member(number, DType, found["dtype"]),
            unit=_member(number, Unit, found["unit"]),
        )
        return replace(node, outputs=(*node.outputs, field))
    raise _bad(
        number, line, "in ARGUMENT = NODE{FIELDS}, attr NAME = VALUE, or out NAME: DTYPE/UNIT"
    )


def parse_attr(text: str) -> Attr:
    """Returns the attribute that `format_attr` wrote.

    Raises:
        ValueError, KeyError or TypeError: not an attribute.
    """
    found = _SPEC.fullmatch(text)
    if found is None:
        return _parse_scalar(text)
    values: dict[str, Scalar] = {"kind": found["kind"]}
    for item in _SPEC_FIELD.finditer(found["body"]):
        values[item["name"]] = _parse_scalar(item["value"])
    return spec_from_json(found["family"], values)


def _parse_scalar(text: str) -> Scalar:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    value = json.loads(text)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"not a scalar: {text}")
    return value


def _member(number: int, kind: type[_E], text: str) -> _E:
    try:
        return kind(text)
    except ValueError:
        raise _bad(number, text, "one of " + ", ".join(kind)) from None


def _bad(number: int, line: str, expected: str) -> GraphError:
    return GraphError(
        "not a graph in the canonical text form",
        where=f"line {number}",
        found=line,
        expected=expected,
    )


# The JSON form: run folders and plans hold it, and `--json` prints it.

GRAPH_VERSION = 2

_FLOAT = "float"
"""Key of a number that JSON cannot hold, spelt out: `{"float": "inf"}`."""

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


def graph_to_json(graph: Graph) -> dict[str, Json]:
    """Returns the graph as JSON values, with sources; `graph_from_json` reads it back equal."""
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


def _scalar_from_json(value: Any) -> Any:
    return float(value[_FLOAT]) if isinstance(value, Mapping) else value


def _attr_from_json(value: Any) -> Any:
    if not isinstance(value, Mapping) or _FLOAT in value:
        return _scalar_from_json(value)
    fields = {name: _scalar_from_json(each) for name, each in value.items()}
    return spec_from_json(fields.pop("family"), fields)


def graph_from_json(value: Mapping[str, Json]) -> Graph:
    """Returns the graph that `graph_to_json` wrote.

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


def _read_graph(value: Any) -> Graph:
    edges = [{**edge, "fields": tuple(edge["fields"])} for edge in value["edges"]]
    return Graph(
        name=value["name"],
        level=Level(value["level"]),
        nodes=tuple(_read_node(node) for node in value["nodes"]),
        edges=tuple(Edge(**edge) for edge in edges),
    )


def _read_node(node: Any) -> Node:
    outputs = [
        Field(name=field["name"], dtype=DType(field["dtype"]), unit=Unit(field["unit"]))
        for field in node["outputs"]
    ]
    return Node(
        id=node["id"],
        op=Op(node["op"]),
        role=node["role"],
        inputs=tuple(node["inputs"]),
        outputs=tuple(outputs),
        attrs=tuple((name, _attr_from_json(attr)) for name, attr in node["attrs"].items()),
        region=node["region"],
        source=None if node["source"] is None else SourceRef(**node["source"]),
    )
