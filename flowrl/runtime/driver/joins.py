"""Joins: nodes of the batch part that make one set of samples of several others.

The parts are laid end to end, and the rows of the new set are taken from there: samples that answer
one prompt become neighbours. Payloads are those of the parts, so that what a sample is known by in
the logs does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.graph import Edge, Field, Node, Unit
from flowrl.graph.sample_sets import line_of_descent, sample_edges
from flowrl.graph.signatures import PART, PREFERRED, ROLLOUT_LOGPROBS
from flowrl.ids import GroupId, SampleId
from flowrl.runtime.driver.batch_nodes import OF_SEQUENCES
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import Array, SampleSet, StepBatch, sample_set, sequence_batch


def make_pairs(parts: GraphParts, node: Node, step: StepBatch) -> SampleSet:
    """Puts the pairs of two sets into the step, the preferred sample of each first."""
    preferred, other = _parts_of(parts, node, step)
    graph = parts.graph
    makers = [graph.node(parts.made[edge.src]) for edge in sample_edges(graph, node)]
    rows: list[int] = []
    if line_of_descent(graph, makers[0], makers[1]):
        preferred, other = _revisions(preferred, other)
    elif line_of_descent(graph, makers[1], makers[0]):
        other, preferred = _revisions(other, preferred)
    first, second = _rows_by_group(preferred), _rows_by_group(other)
    for group in [group for group in first if group in second]:
        mine, theirs = first[group], second[group]
        sizes = len(mine), len(theirs)
        for number in range(max(sizes) if 1 in sizes else min(sizes)):
            rows.append(mine[number % len(mine)])
            rows.append(len(preferred) + theirs[number % len(theirs)])
    made = _put(parts, node, step, [preferred, other], np.array(rows, np.int64))
    step.values[node.id, PREFERRED.name] = np.arange(len(rows)) % 2 == 0
    return made


def _revisions(revised: SampleSet, drafts: SampleSet) -> tuple[SampleSet, SampleSet]:
    """Returns revisions, as answers to the prompts of their drafts, and the draft of each.

    Those whose draft is not in the set are left out. Payloads stay: each sample has one end.
    """
    places = {sample: row for row, sample in enumerate(drafts.samples)}
    pairs: list[tuple[int, int]] = []
    for row, group in enumerate(revised.groups):
        name = str(group)
        while name and name not in places:
            name = name.rpartition("/")[0]
        if name:
            pairs.append((row, places[SampleId(name)]))
    of_drafts = drafts.select(np.array([place for _, place in pairs], np.int64))
    samples = [
        (revised.samples[row], replace(revised.payloads[row], item=draft.item))
        for (row, _), draft in zip(pairs, of_drafts.payloads, strict=True)
    ]
    answers = SampleSet.of(
        revised.origin,
        sequence_batch(samples, of_drafts.groups),
        of_drafts.groups,
        [revised.payloads[row] for row, _ in pairs],
    )
    return answers, of_drafts


def _rows_by_group(samples: SampleSet) -> Mapping[GroupId, Sequence[int]]:
    rows: dict[GroupId, list[int]] = {}
    for row, group in enumerate(samples.groups):
        rows.setdefault(group, []).append(row)
    return rows


def _parts_of(parts: GraphParts, node: Node, step: StepBatch) -> list[SampleSet]:
    """Returns the sets that a node joins; an empty one where a part of the step has no samples."""
    made = [parts.made[edge.src] for edge in sample_edges(parts.graph, node)]
    return [step.sets[name] if name in step.sets else sample_set(name, []) for name in made]


def make_whole(parts: GraphParts, node: Node, step: StepBatch) -> SampleSet:
    """Puts one set of all samples into the step, those of a prompt as one group."""
    sets = _parts_of(parts, node, step)
    place: dict[GroupId, int] = {}
    for group in (group for samples in sets for group in samples.groups):
        place.setdefault(group, len(place))
    groups = [place[group] for samples in sets for group in samples.groups]
    rows = np.argsort(np.array(groups, np.int64), kind="stable")
    made = _put(parts, node, step, sets, rows)
    number = np.repeat(np.arange(len(sets)), [len(samples) for samples in sets])
    step.values[node.id, PART.name] = number[rows]
    return made


def _put(
    parts: GraphParts, node: Node, step: StepBatch, sets: Sequence[SampleSet], rows: Ints
) -> SampleSet:
    """Puts the set of `rows` of the joined parts into the step, with the fields that it passes."""
    joined = SampleSet.joined(node.id, sets)
    made = step.sets[node.id] = joined.select(rows)
    places = joined.sequences.places(rows.tolist())
    for field in node.outputs:
        edges = [e for e in parts.graph.in_edges(node.id) if field.name in e.fields]
        if field.name in OF_SEQUENCES or not edges:
            continue
        pieces = []
        for samples, edge in zip(sets, sample_edges(parts.graph, node), strict=True):
            own = next((e for e in edges if _number(e) == _number(edge)), None)
            pieces.append(_piece(node, step, field, samples, own))
        values = np.concatenate(pieces)
        step.values[node.id, field.name] = values[places if field.unit is Unit.TOKENS else rows]
    return made


def _number(edge: Edge) -> str:
    """Returns what the arguments of one part have in common: `2` of `rollout_2` and `scores_2`."""
    return edge.argument.partition("_")[2] if edge.argument not in _OF_PAIRS else edge.argument


_OF_PAIRS = ("preferred", "other")


def _piece(
    node: Node, step: StepBatch, field: Field, samples: SampleSet, edge: Edge | None
) -> Array:
    """Returns the values of one part; those that the program says where the part has none."""
    # A node that had no samples to work on has left no values either.
    values = None if edge is None else step.values.find(edge.src, field.name)
    if values is not None:
        return values
    size = len(samples.sequences.tokens) if field.unit is Unit.TOKENS else len(samples)
    missing = node.attr("missing_logprob")
    assert not size or field == ROLLOUT_LOGPROBS  # the verifier of graphs proves it
    logprobs = np.full(size, missing if isinstance(missing, float) else 0.0, np.float32)
    if field == ROLLOUT_LOGPROBS:
        logprobs[~samples.sequences.response_mask] = 0.0
    return logprobs
