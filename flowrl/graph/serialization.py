"""Writes graphs as JSON and reads them; reads attributes from their canonical text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from flowrl.errors import GraphError
from flowrl.graph.ir import Attr, DType, Edge, Field, Graph, Level, Node, Op, Unit
from flowrl.specs import Scalar, Spec, spec_from_json
from flowrl.user_lines import SourceRef

_SPEC = re.compile(r"(?P<family>\w+):(?P<kind>\w+)\((?P<body>.*)\)")
_SPEC_FIELD = re.compile(r'(?P<name>\w+)=(?P<value>"(?:[^"\\]|\\.)*"|[^,]+)(?:, |$)')


def parse_attr(text: str) -> Attr:
    """Returns the attribute that `format_attr` wrote.

    Raises:
        ValueError, KeyError or TypeError: not an attribute.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        return _parse_scalar(text)
    values: dict[str, Scalar] = {"kind": match["kind"]}
    for item in _SPEC_FIELD.finditer(match["body"]):
        values[item["name"]] = _parse_scalar(item["value"])
    return spec_from_json(match["family"], values)


def _parse_scalar(text: str) -> Scalar:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    value = json.loads(text)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"not a scalar: {text}")
    return value


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
        "nodes": [
            asdict(replace(node, attrs=()))
            | {"attrs": {name: _attr_to_json(value) for name, value in node.attrs}}
            for node in graph.nodes
        ],
        "edges": [asdict(edge) for edge in graph.edges],
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


def graph_from_json(value: object) -> Graph:
    """Returns the graph that `graph_to_json` wrote.

    Raises:
        GraphError: another version, or a value that is not a graph.
    """
    version = value.get("version") if isinstance(value, Mapping) else None
    if version != GRAPH_VERSION:
        raise GraphError(
            "a graph of another version",
            found=f"version {version}",
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
    read = {
        "op": Op(node["op"]),
        "inputs": tuple(node["inputs"]),
        "outputs": tuple(
            Field(name=field["name"], dtype=DType(field["dtype"]), unit=Unit(field["unit"]))
            for field in node["outputs"]
        ),
        "attrs": tuple((name, _attr_from_json(attr)) for name, attr in node["attrs"].items()),
        "source": None if node["source"] is None else SourceRef(**node["source"]),
    }
    return Node(**{**node, **read})
