"""The samples that a step works on, and what its nodes have said of them so far.

A workflow may have several sets of samples: one for each rollout and each source of data, and one
for each filter or selection, which makes a smaller set of a larger one. Every node speaks of one
set (`flowrl.graph.sample_sets`); its values are arrays of that set, `[N]` for sample units and
`[T]` for token units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flowrl.backend.batch import Ints, SequenceBatch
from flowrl.backend.protocols import OptimizerStep
from flowrl.ids import GroupId, NodeId, SampleId
from flowrl.runtime.payloads import Payload, sequence_batch

__all__ = ["Array", "GroupRows", "SampleSet", "StepBatch", "sample_set"]

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
        """The samples `rows`, in that order."""
        chosen: list[int] = rows.tolist()
        return SampleSet(
            origin=self.origin,
            sequences=self.sequences.select(chosen),
            groups=tuple(self.groups[i] for i in chosen),
            payloads=tuple(self.payloads[i] for i in chosen),
        )


def sample_set(origin: NodeId, groups: Sequence[GroupRows]) -> SampleSet:
    """The set of whole groups, in their order."""
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
        number: Of the step in its stage, from 1.
        sets: By the node that made each set.
        values: Arrays by (node, field).
        updates: What each update node's optimizer did, in order.
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
