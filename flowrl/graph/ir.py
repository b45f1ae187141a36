"""The graph: what a workflow does, as frozen data, and its canonical text.

Invariants that every level keeps (the verifier proves them):

- ids are unique; each node comes after every node that it reads, except
  through a carried edge, which brings a value of one step into the next, or an edge within a
  region, whose nodes exchange data in a cycle;
- each argument in `Node.inputs` is fed by exactly one edge, and each edge feeds such an argument;
- an edge carries fields that its source produces.

Nothing here depends on the names of the user's Python variables: ids are made from roles,
operations and order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from flowrl.errors import GraphError
from flowrl.ids import NodeId, RoleName
from flowrl.specs import Scalar, Spec
from flowrl.specs.base import format_scalar
from flowrl.specs.maps import HELD_TEXTS, ROW_PREFIX
from flowrl.user_lines import SourceRef

if TYPE_CHECKING:
    import networkx


class Op(StrEnum):
    """The operation of a node."""

    SOURCE = "source"
    GENERATE = "generate"
    INTERACT = "interact"
    SCORE = "score"
    LOGPROBS = "logprobs"
    VALUES = "values"
    ADVANTAGE = "advantage"
    FILTER = "filter"
    SELECT = "select"
    WHERE = "where"
    PAIR = "pair"
    REPLAY = "replay"
    CONCAT = "concat"
    UPDATE = "update"
    SYNC = "sync"
    LOG = "log"
    MAP = "map"
    PROMPTS_OF = "prompts_of"
    PARENT = "parent"
    MEAN_OF_CHILDREN = "mean_of_children"


class Unit(StrEnum):
    """The unit for which a field holds one value.

    A step has `prompts`; each is answered by a group; a group has samples; a sample has tokens. A
    prompt may be made of a sample (`fl.prompts_of`), whose children answer it.
    `roles` is for the parameters of a model, of which a role has one set.
    """

    PROMPTS = "prompts"
    GROUPS = "groups"
    SAMPLES = "samples"
    TOKENS = "tokens"
    ROLES = "roles"


class DType(StrEnum):
    """The type of a field's values.

    `model` is the role's parameter type. `object` is a text or a value of a data row: the driver
    holds it, it never becomes a tensor, and it is in no node's outputs (`held_field`).
    """

    INT64 = "int64"
    FLOAT32 = "float32"
    BOOL = "bool"
    MODEL = "model"
    OBJECT = "object"


class Level(StrEnum):
    """The level of a compiled graph; each has a stricter specification than the one before.

    - `traced`: what the program says; sizes, sampling and loss may still be left to the config.
    - `lowered`: nothing is left open, weight sync is explicit, edges carry only what is read.
    - `placed`: belongs to a plan that says where every node runs.
    """

    TRACED = "traced"
    LOWERED = "lowered"
    PLACED = "placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A named array that a node produces: one value of `dtype` for each `unit`."""

    name: str
    dtype: DType
    unit: Unit

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}/{self.unit}"


def held_field(name: str) -> Field | None:
    """Returns the field of samples that the driver holds under a name; None for other names.

    Every set of samples has them: `text` (the response), `prompt_text`, `row.topic` (a field of
    the data row).
    """
    if name not in HELD_TEXTS and not name.startswith(ROW_PREFIX):
        return None
    return Field(name=name, dtype=DType.OBJECT, unit=Unit.SAMPLES)


Attr: TypeAlias = Scalar | Spec
"""The value of a node's attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation of a workflow.

    Attributes:
        id: Unique in the graph: `actor.generate`, `advantage`; repeated ones `actor.generate.2`.
        op: What it does.
        role: Who does it; None where no model is involved.
        inputs: Names of its arguments, in order; an `Edge` feeds each.
        outputs: Fields that it produces, or passes on.
        attrs: `(name, value)` in order. None is a value that a pass still has to fill.
        region: Nodes with one region (`interact`) work on each sample together, turn by turn, and
            may read each other in a cycle; None for all others.
        source: The line of the user's program that made it.
    """

    id: NodeId
    op: Op
    role: RoleName | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[Field, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    region: str | None = None
    source: SourceRef | None = None

    def attr(self, name: str) -> Attr:
        """Returns the value of attribute `name`; None if it is missing or not filled."""
        return next((value for key, value in self.attrs if key == name), None)

    def with_attrs(self, **values: Attr) -> Node:
        """Returns the node with attributes set: known ones keep their place, new ones are last."""
        known = [(key, values.pop(key, value)) for key, value in self.attrs]
        return replace(self, attrs=(*known, *values.items()))

    def without_attrs(self, *names: str) -> Node:
        """Returns the node without these attributes."""
        return replace(self, attrs=tuple(item for item in self.attrs if item[0] not in names))

    def error(self, what: str, **more: str | None) -> GraphError:
        """Returns an error at the line that made the node."""
        where = str(self.source) if self.source is not None else f"node {self.id}"
        return GraphError(what, where=where, **more)

    def output(self, name: str) -> Field | None:
        """Returns the output field of that name; of a node that gives samples, held ones too."""
        named = next((field for field in self.outputs if field.name == name), None)
        if named is None and any(field.name == "tokens" for field in self.outputs):
            return held_field(name)
        return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Fields of `src` that `dst` reads as its argument `argument`.

    Attributes:
        carried: The value is of the step before: weights that an update made are used by the
            generation of the next step.
    """

    src: NodeId
    dst: NodeId
    argument: str
    fields: tuple[str, ...]
    carried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A workflow at one level.

    >>> import flowrl as fl
    >>> graph = fl.load_workflow("examples/three_lines.py").trace()  # doctest: +SKIP
    >>> [node.id for node in graph.nodes]  # doctest: +SKIP
    ['prompts', 'actor.generate', 'reward.score', 'actor.update']
    """

    name: str
    level: Level
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    # Indices: a verifier that looked through all nodes for each would make compiling quadratic.
    _by_id: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    _into: Mapping[str, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # One order of edges, so that graphs that say the same compare equal.
        place = {node.id: (i, node.inputs) for i, node in enumerate(self.nodes)}

        def order(edge: Edge) -> tuple[int, int, str, str]:
            i, inputs = place.get(edge.dst, (len(place), ()))
            argument = inputs.index(edge.argument) if edge.argument in inputs else len(inputs)
            return (i, argument, edge.argument, edge.src)

        edges = tuple(sorted(self.edges, key=order))
        into: dict[str, tuple[Edge, ...]] = {}
        for edge in edges:
            into[edge.dst] = (*into.get(edge.dst, ()), edge)
        # Of nodes with one id (the verifier refuses them) the first.
        by_id: dict[str, Node] = {node.id: node for node in reversed(self.nodes)}
        for name, value in (("edges", edges), ("_by_id", by_id), ("_into", into)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return format_graph(self)

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """The roles that the graph uses, in order of first use."""
        return tuple(dict.fromkeys(node.role for node in self.nodes if node.role is not None))

    def node(self, node_id: str) -> Node:
        """Returns the node of that id.

        Raises:
            KeyError: no such node.
        """
        return self._by_id[node_id]

    def is_inner(self, edge: Edge) -> bool:
        """True if an edge stays within one region."""
        source, target = self.node(edge.src), self.node(edge.dst)
        return source.region is not None and source.region == target.region

    def of_op(self, *ops: Op) -> tuple[Node, ...]:
        """Returns the nodes of these operations, in order."""
        return tuple(node for node in self.nodes if node.op in ops)

    def in_edges(self, node_id: str) -> tuple[Edge, ...]:
        """Returns the edges that a node reads, in the order of the graph's edges."""
        return self._into.get(node_id, ())

    def feeding(self, node_id: str, argument: str) -> Edge | None:
        """Returns the edge that feeds an argument; None if nothing does."""
        return next((e for e in self.in_edges(node_id) if e.argument == argument), None)

    def generator_of(self, node: Node) -> Node | None:
        """Returns the `generate` node that a node is, or the first of its region."""
        return next(iter(self.generators_of(node)), None)

    def generators_of(self, node: Node) -> tuple[Node, ...]:
        """Returns the `generate` node that a node is, or those of its region in order of turns."""
        if node.op is Op.GENERATE:
            return (node,)
        generates = self.of_op(Op.GENERATE) if node.region is not None else ()
        return tuple(g for g in generates if g.region == node.region)

    def with_nodes(self, nodes: Iterable[Node]) -> Graph:
        """Returns the graph with other nodes."""
        return replace(self, nodes=tuple(nodes))

    def replacing(self, *nodes: Node) -> Graph:
        """Returns the graph with these nodes in the place of those with the same ids."""
        by_id = {node.id: node for node in nodes}
        return self.with_nodes(by_id.get(node.id, node) for node in self.nodes)

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """Returns a networkx graph: nodes by id with `node=`, edges by argument with `edge=`."""
        import networkx

        result: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(
            name=self.name, level=str(self.level)
        )
        for node in self.nodes:
            result.add_node(node.id, node=node)
        for edge in self.edges:
            result.add_edge(edge.src, edge.dst, key=edge.argument, edge=edge)
        return result


def format_attr(value: Attr) -> str:
    """Returns the text of an attribute; that of a spec is `family:kind(field=value, ...)`."""
    if isinstance(value, Spec):
        return f"{value.family}:{value}"
    # Strings are JSON strings, so that no value can break a line.
    return json.dumps(value) if isinstance(value, str) else format_scalar(value)


def format_graph(graph: Graph) -> str:
    """Returns the canonical text of a graph, without the lines of the user's program.

        graph grpo traced

        prompts = source
          attr data = "prompts"
          out prompt: int64/prompts

        actor.generate = generate by actor
          in prompts = prompts{prompt}
          attr n = 8
          attr sampling = null
          out tokens: int64/tokens

    `parse(format_graph(g)) == g` for every graph whose nodes have no `source`. A carried edge ends
    in ` next step`; a node of a region names it: `game.interact = interact by game in interact`.
    """
    blocks = [f"graph {graph.name} {graph.level}"]
    for node in graph.nodes:
        head = f"{node.id} = {node.op}"
        if node.role is not None:
            head += f" by {node.role}"
        if node.region is not None:
            head += f" in {node.region}"
        lines = [head]
        for edge in graph.in_edges(node.id):
            fields = ", ".join(edge.fields)
            carried = " next step" if edge.carried else ""
            lines.append(f"  in {edge.argument} = {edge.src}{{{fields}}}{carried}")
        lines += [f"  attr {name} = {format_attr(value)}" for name, value in node.attrs]
        lines += [f"  out {field}" for field in node.outputs]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def sums_of(graph: Graph) -> dict[str, tuple[Node, ...]]:
    """Returns the terms of each sum of losses, which are one optimizer update, in order."""
    terms: dict[str, tuple[Node, ...]] = {}
    for node in graph.of_op(Op.UPDATE):
        if (name := node.attr("sum")) is not None:
            terms[str(name)] = (*terms.get(str(name), ()), node)
    return terms


def per(field: Field) -> str:
    """Returns `per token` for a field of tokens."""
    return f"per {field.unit.removesuffix('s')}"


def names_of(fields: Sequence[Field]) -> str:
    """Returns the names of fields for messages."""
    return ", ".join(field.name for field in fields) or "nothing"


def called(spec: Spec) -> str:
    """Returns the name of a specification: its kind, or the name of the user's own function."""
    function = getattr(spec, "function", None)
    return str(function).rpartition(":")[2] if function else spec.kind
