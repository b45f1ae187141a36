"""What a node reads of a step: arrays of its arguments' fields, and the samples they speak of."""

from __future__ import annotations

import numpy as np

from flowrl.backend.batch import Floats, SequenceBatch
from flowrl.graph import Edge, Node, Unit
from flowrl.ids import NodeId
from flowrl.runtime.rollout_parts import GraphParts
from flowrl.runtime.sample_set import Array, SampleSet, StepBatch

__all__ = ["NodeInputs", "over_tokens"]

_OF_SEQUENCES = ("tokens", "response_mask", "turn", "token_reward", "state")
"""Fields that a set's sequences hold, whichever node passed them on."""


class NodeInputs:
    """The inputs of one node in one step.

    Attributes:
        node: The node.
        samples: The set of samples that it speaks of.
    """

    __slots__ = ("_parts", "_step", "node", "samples")

    def __init__(self, parts: GraphParts, node: Node, step: StepBatch, samples: SampleSet) -> None:
        self._parts = parts
        self._step = step
        self.node = node
        self.samples = samples

    @property
    def sequences(self) -> SequenceBatch:
        """The node's samples as tokens."""
        return self.samples.sequences

    def edge(self, argument: str) -> Edge | None:
        """The edge that feeds an argument; None where nothing does."""
        return self._parts.graph.feeding(self.node.id, argument)

    def edges(self, argument: str) -> list[Edge]:
        """The edges of an argument that may come several times: `input`, `input_2`, ..."""
        return [
            edge
            for edge in self._parts.graph.in_edges(self.node.id)
            if edge.argument == argument or edge.argument.removeprefix(f"{argument}_").isdecimal()
        ]

    def read(self, source: NodeId, field: str) -> Array:
        """A field that a node gives, as an array of that node's set."""
        found = self._step.values.get((source, field))
        if found is None and field in _OF_SEQUENCES:
            sequences = self._step.sets[self._parts.made[source]].sequences
            found = getattr(sequences, field)
        if found is None:
            raise KeyError(f"{source} has not given {field!r} for {self.node.id}")
        return found

    def get(self, argument: str, field: str) -> Array | None:
        """A field of what feeds an argument; None where nothing does, or it does not carry it."""
        edge = self.edge(argument)
        if edge is None or field not in edge.fields:
            return None
        return self.read(edge.src, field)

    def floats(self, argument: str, field: str) -> Floats | None:
        """The same as float32."""
        found = self.get(argument, field)
        return None if found is None else np.asarray(found, np.float32)

    def samples_of(self, edge: Edge) -> SampleSet:
        """The set that an edge's values speak of."""
        return self._step.sets[self._parts.made[edge.src]]

    def is_per_token(self, edge: Edge, field: str) -> bool:
        """Whether a field of an edge has one value a token."""
        output = self._parts.graph.node(edge.src).output(field)
        return output is not None and output.unit is Unit.TOKENS

    def token_floats(self, edge: Edge, field: str) -> Floats:
        """float32 `[T]`: a field of tokens, or one of samples repeated, 0 off the responses."""
        values = self.read(edge.src, field)
        return over_tokens(values, self.sequences, per_token=self.is_per_token(edge, field))


def over_tokens(values: Array, sequences: SequenceBatch, *, per_token: bool) -> Floats:
    """float32 `[T]`: values of samples repeated over their tokens; 0 off the response mask."""
    spread = values if per_token else np.repeat(values, sequences.lengths)
    return np.where(sequences.response_mask, spread, np.float32(0)).astype(np.float32)
