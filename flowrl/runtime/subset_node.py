"""Runs filters and selections on a batch: a smaller set of samples, with what is passed on."""

from __future__ import annotations

import numpy as np

from flowrl.algo import resolve_select
from flowrl.backend.batch import Ints
from flowrl.graph import Node, Unit
from flowrl.graph.signatures import PREFERRED
from flowrl.runtime.judge import kept_groups
from flowrl.runtime.node_inputs import NodeInputs
from flowrl.runtime.sample_set import SampleSet, StepBatch
from flowrl.specs import FilterSpec, SelectSpec

__all__ = ["group_sizes", "make_subset", "rows_kept", "rows_selected"]


def rows_kept(inputs: NodeInputs) -> Ints:
    """int64, the rows of the groups that a filter keeps, in order."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, FilterSpec)
    scores = inputs.get("scores", "score")
    assert scores is not None  # the verifier of graphs proves it
    sizes = group_sizes(inputs.sequences.groups)
    return np.flatnonzero(
        np.repeat(kept_groups(spec, np.asarray(scores, np.float64), sizes), sizes)
    )


def rows_selected(inputs: NodeInputs) -> Ints:
    """int64, the rows that a selection takes, in its order."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, SelectSpec)
    scores = inputs.get("scores", "score")
    assert scores is not None  # the verifier of graphs proves it
    sequences = inputs.sequences
    return resolve_select(spec)(scores, sequences.groups, sequences.samples)


def group_sizes(groups: Ints) -> list[int]:
    """Members of each group, of adjacent equal numbers."""
    if not len(groups):
        return []
    starts = np.flatnonzero(np.concatenate([[True], np.diff(groups) != 0]))
    sizes: list[int] = np.diff([*starts, len(groups)]).tolist()
    return sizes


def make_subset(inputs: NodeInputs, step: StepBatch, rows: Ints) -> SampleSet:
    """Puts the set of `rows` into the step, with the fields that the node passes on of them."""
    node = inputs.node
    chosen = step.sets[node.id] = inputs.samples.select(rows)
    places = inputs.sequences.places(rows.tolist())
    for field in node.outputs:
        argument = _argument_of(inputs, node, field.name)
        if argument is not None:
            values = inputs.get(argument, field.name)
            assert values is not None
            step.values[node.id, field.name] = values[places if field.unit is Unit.TOKENS else rows]
        elif field.name == PREFERRED.name:
            # Of each pair that a selection makes, the first sample is the preferred one.
            step.values[node.id, field.name] = np.arange(len(rows)) % 2 == 0
    return chosen


def _argument_of(inputs: NodeInputs, node: Node, field: str) -> str | None:
    """The argument whose field of that name the node passes on."""
    for argument in node.inputs:
        edge = inputs.edge(argument)
        if edge is not None and field in edge.fields:
            return argument
    return None
