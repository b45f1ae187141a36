"""The recorder of a program that runs line by line: what it records, it has carried out.

Every operation must be the one that the program was compiled with: weights, plan and results are
those of the compiled graph. A program that takes another way is stopped at its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from flowrl.errors import TraceError
from flowrl.graph import Edge, Field, Graph, Node
from flowrl.ids import NodeId
from flowrl.program.tracer import Tracer
from flowrl.runtime.eager_step import EagerStep

__all__ = ["EagerTracer"]

_HINT = (
    "let no operation hang on what changes between calls (random numbers, the clock, .value); "
    "decide on data with fl.filter, fl.select or fl.map"
)


class EagerTracer(Tracer):
    """See the module. Handles keep their values when the step is over.

    Args:
        traced: The graph that the program was compiled to.
        step: Carries operations out.
    """

    executes: ClassVar[bool] = True

    def __init__(self, traced: Graph, step: EagerStep) -> None:
        super().__init__(traced.name)
        self._expected = traced
        self._step = step
        self._num_called = 0

    def completed(self, nodes: tuple[Node, ...]) -> None:
        """Carries an operation out.

        Raises:
            TraceError: it is not the one that the compiled program has here.
        """
        for node in nodes:
            self._check(node)
        for node in nodes:
            self._step.run(node.id)

    def ended(self) -> None:
        """The function has returned.

        Raises:
            TraceError: the compiled program goes on.
        """
        left = self._expected.nodes[self._num_called :]
        if left:
            last = self._expected.nodes[self._num_called - 1]
            raise _other_way(last, "the end of the program", f"{left[0].id} ({left[0].source})")

    def value_of(self, node_id: NodeId, fields: tuple[Field, ...]) -> object:
        """See `Tracer`."""
        return self._step.value(node_id, fields)

    def described_values(self, node_id: NodeId, fields: tuple[Field, ...]) -> str | None:
        """See `Tracer`."""
        return self._step.told(node_id, fields)

    def _check(self, node: Node) -> None:
        if self._num_called == len(self._expected.nodes):
            raise _other_way(node, node.id, "the end of the program")
        expected = self._expected.nodes[self._num_called]
        at = f" ({expected.source})" if expected.source is not None else ""
        if (node.id, node.op, node.role) != (expected.id, expected.op, expected.role):
            raise _other_way(node, node.id, f"{expected.id}{at}")
        mine, theirs = _said_of(node, self.edges_into(node.id)), self._said_of_expected(expected)
        if mine != theirs:
            changed = [key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)]
            shown = dict.fromkeys(changed)
            found, wanted = (
                ", ".join(f"{key}={said.get(key, 'nothing')}" for key in shown)
                for said in (mine, theirs)
            )
            raise _other_way(node, f"{node.id} with {found}", f"{wanted}{at}")
        self._num_called += 1

    def _said_of_expected(self, expected: Node) -> dict[str, str]:
        return _said_of(expected, self._expected.in_edges(expected.id))


def _said_of(node: Node, edges: Sequence[Edge]) -> dict[str, str]:
    """What a node reads and is told, by name."""
    reads = {edge.argument: f"{edge.src}{{{','.join(edge.fields)}}}" for edge in edges}
    outputs = ",".join(map(str, node.outputs))
    return {**reads, **{key: repr(value) for key, value in node.attrs}, "outputs": outputs}


def _other_way(node: Node, found: str, expected: str) -> TraceError:
    return TraceError(
        "the program goes another way than it was compiled with",
        where=str(node.source) if node.source is not None else None,
        found=found,
        expected=expected,
        hint=_HINT,
    )
