"""The samples that a step works on, and the values that its nodes have computed so far.

A workflow may have several sets of samples: one for each rollout and each source of data, and one
for each filter or selection, which makes a smaller set of a larger one. Every node works on
one set (`flowrl.graph.sample_sets`); its values are arrays of that set, `[N]` for sample units and
`[T]` for token units.

`receive_rollout` puts a rollout's payloads into a step as the set that its batch part reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flowrl.backend.batch import Floats, Ints, SequenceBatch
from flowrl.backend.protocols import OptimizerStep
from flowrl.graph import Node, Op
from flowrl.graph.signatures import ROLLOUT_LOGPROBS, SCORE
from flowrl.ids import GroupId, NodeId, RoleName, SampleId
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of, score_source
from flowrl.runtime.driver.payloads import Payload, behaviour_logprobs, sequence_batch

__all__ = [
    "Array",
    "GroupRows",
    "SampleSet",
    "StepBatch",
    "fill_fields",
    "receive_rollout",
    "sample_set",
    "scores_by",
]


Array = npt.NDArray[np.generic]

GroupRows = tuple[GroupId, Sequence[tuple[SampleId, Payload]]]
"""A group and its members in member order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleSet:
    """N samples.

    Attributes:
        origin: The rollout or the source that they come from.
        groups: N ids, the prompt that each one answers; equal ones are adjacent.
        payloads: N; what the driver knows of each.
    """

    origin: NodeId
    sequences: SequenceBatch
    groups: tuple[GroupId, ...]
    payloads: tuple[Payload, ...]

    def __len__(self) -> int:
        return len(self.groups)

    def select(self, rows: Ints) -> SampleSet:
        """Returns the samples `rows`, in that order."""
        chosen: list[int] = rows.tolist()
        return SampleSet(
            origin=self.origin,
            sequences=self.sequences.select(chosen),
            groups=tuple(self.groups[i] for i in chosen),
            payloads=tuple(self.payloads[i] for i in chosen),
        )


def sample_set(origin: NodeId, groups: Sequence[GroupRows]) -> SampleSet:
    """Makes the set of whole groups, in their order."""
    rows = [row for _, members in groups for row in members]
    names = [group for group, members in groups for _ in members]
    return SampleSet(
        origin=origin,
        sequences=sequence_batch(rows, names),
        groups=tuple(names),
        payloads=tuple(payload for _, payload in rows),
    )


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """A step's samples on their way through the graph.

    Attributes:
        number: Number of the step in its stage, from 1.
        sets: Sets of samples, by the node that made each.
        values: Arrays by (node, field).
        updates: The optimizer steps of each update node, in order.
        kl_coefficients: The coefficient that each update node's adaptive penalty had.
        logged: Numbers that the program logs, by name.
        skipped: Nodes that had no sample to work on.
        seconds: Wall time by operation.
    """

    number: int = 1
    sets: dict[NodeId, SampleSet] = field(default_factory=dict)
    values: dict[tuple[NodeId, str], Array] = field(default_factory=dict)
    updates: dict[NodeId, list[OptimizerStep]] = field(default_factory=dict)
    kl_coefficients: dict[NodeId, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    skipped: list[NodeId] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def receive_rollout(
    parts: GraphParts, part: RolloutPart, step: StepBatch, groups: Sequence[GroupRows]
) -> None:
    """Puts a rollout's samples into the step, as the set that its batch part reads.

    Args:
        groups: Delivered groups in offer order; with `part.whole` filtered ones too.
    """
    samples = step.sets[part.kept] = sample_set(part.node.id, groups)
    maker = parts.graph.node(part.kept)
    fill_fields(maker, step, samples)
    if maker.op is Op.FILTER:
        step.values[maker.id, SCORE.name] = _scores_read(parts, maker, samples)


def fill_fields(maker: Node, step: StepBatch, samples: SampleSet) -> None:
    """Fills in the fields of samples that a rollout, or a filter of it, passes on.

    Those of tokens, mask and turns are in the set's sequences.
    """
    if maker.output(ROLLOUT_LOGPROBS.name) is not None:
        rows = tuple(zip(samples.sequences.samples, samples.payloads, strict=True))
        values = behaviour_logprobs(samples.sequences, rows)
        step.values[maker.id, ROLLOUT_LOGPROBS.name] = values
    if maker.op is Op.INTERACT:
        step.values[maker.id, SCORE.name] = scores_by(role_of(maker), samples.payloads)


def _scores_read(parts: GraphParts, node: Node, samples: SampleSet) -> Floats:
    """Returns float32 `[N]`: the scores that a streaming filter read."""
    source = score_source(parts.graph, node.id)
    assert source is not None  # the verifier of graphs proves it
    if source.op is Op.MAP:
        return _scores_judged(node.id, samples.payloads)
    return scores_by(role_of(source), samples.payloads)


def scores_by(role: RoleName, payloads: Sequence[Payload]) -> Floats:
    """Returns float32 `[N]`: the scores of a reward or an environment."""
    return np.array([payload.scores[role] for payload in payloads], np.float32)


def _scores_judged(node: NodeId, payloads: Sequence[Payload]) -> Floats:
    """Returns float32 `[N]`: a map's scores, by which the filter `node` judged the groups."""
    return np.array([payload.judged[node] for payload in payloads], np.float32)
