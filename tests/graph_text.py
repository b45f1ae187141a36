"""Reads the canonical text of graphs, so that tests prove that it says everything."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from flowrl.errors import GraphError
from flowrl.graph import DType, Edge, Field, Graph, Level, Node, Op, Unit
from flowrl.graph.serialization import parse_attr
from flowrl.ids import NodeId, RoleName

_E = TypeVar("_E", Op, Unit, DType, Level)

_HEAD = re.compile(r"graph (?P<name>.+) (?P<level>\w+)")
_NODE = re.compile(r"(?P<id>\S+) = (?P<op>\w+)(?: by (?P<role>\S+))?(?: in (?P<region>\S+))?")
_IN = re.compile(r"in (?P<arg>\w+) = (?P<src>\S+)\{(?P<fields>[\w., -]*)\}(?P<carried> next step)?")
_ATTR = re.compile(r"attr (?P<name>\w+) = (?P<value>.+)")
_OUT = re.compile(r"out (?P<name>\w+): (?P<dtype>\w+)/(?P<unit>\w+)")


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
