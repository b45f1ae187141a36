"""Joins: nodes of the batch part that make one set of samples of several others.

The parts are laid end to end, and the rows of the new set are taken from there: samples that answer
one prompt become neighbours. Payloads are those of the parts, so that what a sample is known by in
the logs does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.graph import Node, Unit
from flowrl.graph.sample_sets import sample_edges
from flowrl.graph.signatures import PREFERRED
from flowrl.ids import GroupId
from flowrl.runtime.driver.batch_nodes import OF_SEQUENCES
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import SampleSet, StepBatch, sample_set

__all__ = ["make_pairs"]


def make_pairs(parts: GraphParts, node: Node, step: StepBatch) -> SampleSet:
    """Puts the pairs of two sets into the step, the preferred sample of each first."""
    preferred, other = _parts_of(parts, node, step)
    first, second = _rows_by_group(preferred), _rows_by_group(other)
    rows: list[int] = []
    for group in [group for group in first if group in second]:
        mine, theirs = first[group], second[group]
        sizes = len(mine), len(theirs)
        for number in range(max(sizes) if 1 in sizes else min(sizes)):
            rows.append(mine[number % len(mine)])
            rows.append(len(preferred) + theirs[number % len(theirs)])
    made = _put(parts, node, step, np.array(rows, np.int64))
    step.values[node.id, PREFERRED.name] = np.arange(len(rows)) % 2 == 0
    return made


def _rows_by_group(samples: SampleSet) -> Mapping[GroupId, Sequence[int]]:
    rows: dict[GroupId, list[int]] = {}
    for row, group in enumerate(samples.groups):
        rows.setdefault(group, []).append(row)
    return rows


def _parts_of(parts: GraphParts, node: Node, step: StepBatch) -> list[SampleSet]:
    """Returns the sets that a node joins; an empty one where a part of the step has no samples."""
    made = [parts.made[edge.src] for edge in sample_edges(parts.graph, node)]
    return [step.sets[name] if name in step.sets else sample_set(name, []) for name in made]


def _put(parts: GraphParts, node: Node, step: StepBatch, rows: Ints) -> SampleSet:
    """Puts the set of `rows` of the joined parts into the step, with the fields that it passes."""
    sets = _parts_of(parts, node, step)
    joined = SampleSet.joined(node.id, sets)
    made = step.sets[node.id] = joined.select(rows)
    places = joined.sequences.places(rows.tolist())
    edges = sample_edges(parts.graph, node)
    for field in node.outputs:
        if field.name in OF_SEQUENCES or any(field.name not in edge.fields for edge in edges):
            continue
        # A node that had no samples to work on has left no values either.
        given = [step.values.get((edge.src, field.name)) for edge in edges]
        values = np.concatenate([each for each in given if each is not None])
        step.values[node.id, field.name] = values[places if field.unit is Unit.TOKENS else rows]
    return made
