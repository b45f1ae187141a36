"""Filters and selections: on the groups of a rollout as they are scored, and on whole batches.

`GroupJudge` runs the filters of a rollout's streaming part. A group is kept if the filter whose
output is read keeps it and all filters before that one do; otherwise it is filtered, with the name
of the first filter that removes it as the reason. A filter sees each group by itself, so the result
does not depend on which groups are judged together.

`make_subset` runs a filter or a selection of the batch part: it makes a smaller set of samples with
the fields that the node passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.algo.resolve import resolve_filter, resolve_select
from flowrl.backend.batch import Ints
from flowrl.graph import Node, Op, Unit, score_source
from flowrl.graph.signatures import PREFERRED
from flowrl.ids import NodeId
from flowrl.runtime.driver.batch_nodes import OF_SEQUENCES, NodeInputs
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of
from flowrl.runtime.driver.payloads import (
    GroupRows,
    SampleSet,
    StepBatch,
    fill_fields,
    sample_set,
    scores_by,
)
from flowrl.specs import FilterSpec, SelectSpec
from flowrl.specs.filters import Turns

Kept: TypeAlias = npt.NDArray[np.bool_]

GroupJudge: TypeAlias = Callable[[Sequence[GroupRows]], list[str | None]]
"""Verdicts on scored groups: None keeps one, a reason filters it."""

RunNode: TypeAlias = Callable[[Node, StepBatch], None]
"""Puts what a node gives into a batch, whose samples it finds there."""


def kept_groups(spec: FilterSpec, scores: npt.ArrayLike, sizes: Sequence[int]) -> Kept:
    """Returns bool `[G]`: the groups that a filter keeps; one goes if a sample of it does.

    Args:
        scores: `[N]`, group after group.
        sizes: G sizes.
    """
    if not len(sizes):
        return np.zeros(0, np.bool_)
    stays = resolve_filter(spec)(scores, np.repeat(np.arange(len(sizes)), sizes))
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return np.asarray(np.logical_and.reduceat(stays, first), np.bool_)


def group_judge(parts: GraphParts, part: RolloutPart, run: RunNode) -> GroupJudge | None:
    """Makes the judge of a rollout; None if it has no filter.

    Args:
        run: Runs a map on a batch that holds the groups alone.
    """
    if not part.ends:
        return None
    specs = {node.id: _spec(node) for node in part.filters}
    chains = [parts.chain(node) for node in part.ends]
    sources = {node.id: _source(parts, node) for node in part.filters}
    maps = {source.id for source in sources.values() if source.op is Op.MAP}

    def judge(groups: Sequence[GroupRows]) -> list[str | None]:
        sizes = [len(members) for _, members in groups]
        payloads = [payload for _, members in groups for _, payload in members]
        step = _mapped(parts, part, groups, run) if maps else None
        verdicts: dict[NodeId, Kept] = {}
        for node, source in sources.items():
            if step is None or source.op is not Op.MAP:
                # Scores as they are: float32 could make different ones equal.
                role = role_of(source)
                scores = np.array([payload.scores[role] for payload in payloads], np.float64)
            else:
                scores = np.asarray(step.values[source.id, "score"], np.float64)
                for payload, score in zip(payloads, scores.tolist(), strict=True):
                    payload.judged[node] = score
            verdicts[node] = kept_groups(specs[node], scores, sizes)
        return _reasons(chains, verdicts, specs, len(groups))

    return judge


def _reasons(
    chains: Sequence[Sequence[NodeId]],
    verdicts: Mapping[NodeId, Kept],
    specs: Mapping[NodeId, FilterSpec],
    num_groups: int,
) -> list[str | None]:
    kept = np.zeros(num_groups, np.bool_)
    for chain in chains:
        kept |= np.logical_and.reduce([verdicts[node] for node in chain])
    reasons: list[str | None] = [None] * num_groups
    for group in np.flatnonzero(~kept):
        reasons[group] = next(spec.reason for n, spec in specs.items() if not verdicts[n][group])
    return reasons


def _mapped(
    parts: GraphParts, part: RolloutPart, groups: Sequence[GroupRows], run: RunNode
) -> StepBatch:
    """Returns the groups as a batch, with the results of the maps before the filters.

    The next filter still sees a group that one filter has removed; it is removed either way.
    """
    samples = sample_set(part.node.id, groups)
    wanted = {node.id for node in (*part.scorers, *part.filters, *part.maps)}
    step = StepBatch(sets={part.node.id: samples})
    fill_fields(parts.graph.node(part.node.id), step, samples)
    for node in parts.graph.nodes:
        if node.id not in wanted:
            continue
        if node.op is Op.MAP:
            run(node, step)
        elif node.op is Op.FILTER:
            step.sets[node.id] = samples
            fill_fields(node, step, samples)
            step.values[node.id, "score"] = step.values[_source(parts, node).id, "score"]
        else:
            step.values[node.id, "score"] = scores_by(role_of(node), samples.payloads)
    return step


def _spec(node: Node) -> FilterSpec:
    spec = node.attr("spec")
    assert isinstance(spec, FilterSpec)
    return spec


def _source(parts: GraphParts, node: Node) -> Node:
    source = score_source(parts.graph, node.id)
    assert source is not None  # the verifier of graphs proves it
    return source


def rows_kept(inputs: NodeInputs) -> Ints:
    """Returns int64, the rows of the groups that a filter keeps, in order."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, FilterSpec)
    scores = inputs.get("scores", "score")
    assert scores is not None  # the verifier of graphs proves it
    sizes = group_sizes(inputs.samples.numbers)
    return np.flatnonzero(
        np.repeat(kept_groups(spec, np.asarray(scores, np.float64), sizes), sizes)
    )


def rows_selected(inputs: NodeInputs) -> Ints:
    """Returns int64, the rows that a selection takes, in its order."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, SelectSpec)
    scores = inputs.get("scores", "score")
    assert scores is not None  # the verifier of graphs proves it
    samples = inputs.samples
    return resolve_select(spec)(scores, samples.numbers, samples.samples)


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
    for field in node.outputs:
        argument = _argument_of(inputs, node, field.name)
        if argument is not None:
            if inputs.are_sampled(argument, field.name):
                step.values.add_sampled(node.id, field.name, chosen)
                continue
            if field.name in OF_SEQUENCES and not chosen.has_episodes:
                continue  # the set's own sequences have it
            values = inputs.get(argument, field.name)
            assert values is not None
            if field.unit is Unit.TOKENS:
                values = values[inputs.sequences.places(rows.tolist())]
            else:
                values = values[rows]
            step.values[node.id, field.name] = values
        elif field.name == PREFERRED.name:
            # Of each pair that a selection makes, the first sample is the preferred one.
            step.values[node.id, field.name] = np.arange(len(rows)) % 2 == 0
    return chosen


def make_turns(inputs: NodeInputs, step: StepBatch, spec: Turns) -> None:
    """Puts the episodes into the step as they are for one policy: its turns and its rewards."""
    turn, reward = inputs.sequences.turn, inputs.sequences.token_reward
    assert turn is not None  # the verifier of graphs proves that these are episodes
    assert reward is not None
    own = inputs.sequences.response_mask & (turn % spec.of == spec.policy)
    starts = inputs.sequences.offsets[:-1]
    rows = np.flatnonzero(np.logical_or.reduceat(own, starts))
    made = make_subset(inputs, step, rows)
    mask = own[inputs.sequences.places(rows.tolist())]
    sequences = replace(made.sequences, response_mask=mask)
    step.sets[inputs.node.id] = replace(made, made=sequences)
    sums = np.add.reduceat(np.where(own, reward, 0.0).astype(np.float64), starts)
    step.values[inputs.node.id, "score"] = sums[rows].astype(np.float32)


def _argument_of(inputs: NodeInputs, node: Node, field: str) -> str | None:
    """Returns the argument whose field of that name the node passes on."""
    for argument in node.inputs:
        edge = inputs.edge(argument)
        if edge is not None and field in edge.fields:
            return argument
    return None
