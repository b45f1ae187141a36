"""The recorder behind a workflow while it runs on symbolic handles.

Lifecycle: `Workflow.trace` makes a `Tracer`, makes it the active one, calls the user's function,
and takes the graph with `finish`; from then on handles of that trace refuse to be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from flowrl.errors import TraceError
from flowrl.graph.ir import Attr, Edge, Field, Graph, Level, Node, Op
from flowrl.graph.sample_sets import results
from flowrl.graph.signatures import SIGNATURES
from flowrl.ids import NodeId, RoleName
from flowrl.specs.filters import Turns
from flowrl.user_lines import SourceRef, trace_error, user_line

if TYPE_CHECKING:
    from flowrl.program.workflow import Workflow

_ACTIVE: ContextVar[Tracer | None] = ContextVar("flowrl_tracer", default=None)

_SINKS = (Op.UPDATE, Op.SYNC, Op.LOG)
"""Operations whose outputs need no reader."""


class Read(NamedTuple):
    """Outputs of a node, as an argument of another one reads them."""

    node: NodeId
    fields: tuple[Field, ...]


class Tracer:
    """Collects nodes and edges in the order of the program.

    A tracer may also carry out what it records (`flowrl.runtime.eager.stage`): it is notified of
    each node that is complete, and knows values of handles.

    Attributes:
        closed: The trace is over; handles of it are no longer usable.
        outer: The trace inside which this one runs.
        calls: The workflows being called, outermost first.
    """

    executes: ClassVar[bool] = False
    """True if operations are carried out when they are called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.outer: Tracer | None = None
        self.calls: list[Workflow] = []
        self._nodes: dict[NodeId, Node] = {}
        self._edges: list[Edge] = []
        self._numbers: dict[str, int] = {}

    @property
    def stack(self) -> tuple[Workflow, ...]:
        """The calls that lead here, those of outer traces first."""
        return (*(self.outer.stack if self.outer is not None else ()), *self.calls)

    @property
    def nodes(self) -> Collection[Node]:
        """The nodes recorded so far, in order."""
        return self._nodes.values()

    def add(
        self,
        op: Op,
        *,
        name: str,
        role: RoleName | None = None,
        reads: Mapping[str, Read] | None = None,
        outputs: tuple[Field, ...] | None = None,
        attrs: Mapping[str, Attr] | None = None,
        region: str | None = None,
        source: SourceRef | None = None,
    ) -> NodeId:
        """Adds a node and the edges that feed it.

        Args:
            name: The id, made unique by a number where it is taken.
            reads: The outputs that feed each argument; an edge carries those fields that the
                signature takes.
            outputs: The outputs; by default those of the signature.
        """
        signature = SIGNATURES[op]
        reads = reads or {}
        source = source or user_line()
        node_id = self._unique(name)
        self._nodes[node_id] = Node(
            id=node_id,
            op=op,
            role=role,
            inputs=tuple(reads),
            outputs=signature.outputs or () if outputs is None else outputs,
            attrs=tuple((attrs or {}).items()),
            region=region,
            source=source,
        )
        for argument, read in reads.items():
            self._connect(node_id, argument, read)
        if region is None:
            self.completed((self._nodes[node_id],))
        return node_id

    def feed(self, node_id: NodeId, reads: Mapping[str, Read]) -> None:
        """Adds arguments to an existing node: the edges that close a region's cycles."""
        node = self._nodes[node_id]
        self._nodes[node_id] = replace(node, inputs=(*node.inputs, *reads))
        for argument, read in reads.items():
            self._connect(node_id, argument, read)
        self.completed(tuple(n for n in self._nodes.values() if n.region == node.region))

    def completed(self, nodes: tuple[Node, ...]) -> None:
        """Called when all nodes and edges of an operation are recorded."""

    def edges_into(self, node_id: NodeId) -> tuple[Edge, ...]:
        """Returns the edges that feed a node."""
        return tuple(edge for edge in self._edges if edge.dst == node_id)

    def value_of(self, node_id: NodeId, fields: tuple[Field, ...]) -> object:
        """Returns the value of `Handle.value` for fields of a node.

        Raises:
            TraceError: there are no values while a workflow is traced.
        """
        raise trace_error(
            f"what '{node_id}' gives has no value while the workflow is traced",
            found=f"fields {', '.join(field.name for field in fields)}",
            hint="values are there when the program runs with executor=eager; "
            "write `if fl.is_eager():` before lines that read them",
        )

    def described_values(self, node_id: NodeId, fields: tuple[Field, ...]) -> str | None:
        """Returns the text of `repr(handle)` for the values; None where there are none."""
        return None

    def _connect(self, node_id: NodeId, argument: str, read: Read) -> None:
        takes = SIGNATURES[self._nodes[node_id].op].argument(argument)
        names = [
            f.name for f in read.fields if takes is None or takes.any_fields or takes.field(f.name)
        ]
        self._edges.append(Edge(src=read.node, dst=node_id, argument=argument, fields=tuple(names)))

    def last_update(self, role: RoleName) -> Node | None:
        """Returns the latest update of `role` so far."""
        updates = [n for n in self._nodes.values() if n.op is Op.UPDATE and n.role == role]
        return updates[-1] if updates else None

    def region(self) -> str:
        """Returns a name for another region."""
        number = len({node.region for node in self.nodes if node.region is not None}) + 1
        return "interact" if number == 1 else f"interact.{number}"

    def unused_sum(self) -> str:
        """Returns a name for another sum of losses."""
        number = len({name for node in self.nodes if (name := node.attr("sum"))}) + 1
        return "sum" if number == 1 else f"sum.{number}"

    def _unique(self, name: str) -> NodeId:
        number, candidate = self._numbers.get(name, 1), name
        while candidate in self._nodes:
            number += 1
            candidate = f"{name}.{number}"
        self._numbers[name] = number
        return NodeId(candidate)

    def finish(self) -> Graph:
        """Returns the traced graph.

        Raises:
            TraceError: Nothing uses an output.
        """
        self.closed = True
        graph = self.graph()
        self._refuse_unused({node.id for node in results(graph)})
        return graph

    def graph(self) -> Graph:
        """Returns the graph recorded so far."""
        return Graph(
            name=self.name,
            level=Level.TRACED,
            nodes=tuple(self._nodes.values()),
            edges=tuple(self._edges),
        )

    def _refuse_unused(self, results: Collection[NodeId]) -> None:
        # Within a region all read each other, which is no use of what the region makes.
        regions = {node.id: node.region for node in self.nodes}
        read = {
            edge.src
            for edge in self._edges
            if regions[edge.dst] is None or regions[edge.src] != regions[edge.dst]
        }
        asked = {node.role for node in self.nodes if node.op is not Op.SYNC}
        other_turns = self._turns_of_others(read)
        for node in self.nodes:
            inside = node.region is not None and node.op is not Op.INTERACT
            if node.op is Op.SYNC and node.role not in asked:
                raise TraceError(
                    f"nothing uses the weights that {node.role} takes over",
                    where=str(node.source),
                    expected=f"{node.role}.logprobs(rollout) or {node.role}.generate(prompts)",
                    hint=f"use {node.role}, or leave {node.id} out "
                    "(inside `if kl:` where only some settings need it)",
                )
            is_known = node.op in _SINKS or node.id in results or node.id in other_turns
            if is_known or node.id in read or inside:
                continue
            if node.op is Op.SOURCE and not node.inputs:
                raise TraceError(
                    f"workflow '{self.name}' does not use its parameter '{node.id}'",
                    where=str(node.source),
                    hint="pass it to actor.generate or actor.update, or remove it",
                )
            raise TraceError(
                f"nothing uses what {node.id} makes",
                where=str(node.source),
                found=", ".join(field.name for field in node.outputs),
                hint="pass it to another operation, or remove the call "
                "(inside `if kl:` where only some settings need it)",
            )

    def _turns_of_others(self, read: Collection[NodeId]) -> set[NodeId]:
        """Returns the turns of policies in episodes of which another policy's turns are read."""
        turns = [n for n in self.nodes if isinstance(n.attr("spec"), Turns)]
        episodes = {n.id: self.edges_into(n.id)[0].src for n in turns}
        used = {episodes[n.id] for n in turns if n.id in read}
        return {n.id for n in turns if episodes[n.id] in used}


@contextmanager
def tracing(tracer: Tracer) -> Iterator[Tracer]:
    """Makes `tracer` the active one inside the block, and closes it at the end."""
    tracer.outer = _ACTIVE.get()
    token = _ACTIVE.set(tracer)
    try:
        yield tracer
    finally:
        tracer.closed = True
        _ACTIVE.reset(token)


def active_tracer() -> Tracer | None:
    """Returns the tracer of the workflow that is being traced now."""
    return _ACTIVE.get()


def is_eager() -> bool:
    """Returns True while the workflow runs on real tensors, so that handles have values.

    False while it is traced, also before an eager run. For lines that look at values; operations
    must not depend on it, for the graph would lack them.
    """
    tracer = active_tracer()
    return tracer is not None and tracer.executes
