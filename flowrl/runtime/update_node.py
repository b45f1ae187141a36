"""Runs an update node: the batch that its loss reads, cut into mini-batches of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from flowrl.backend.batch import Floats, Mask, TrainBatch
from flowrl.backend.protocols import UpdateSpec
from flowrl.graph import Graph, Node
from flowrl.plan import PlacementPlan
from flowrl.runtime.node_inputs import NodeInputs
from flowrl.specs import KL, LossSpec

__all__ = ["DISTRIBUTIONS", "reads_distributions", "split_groups", "train_batch", "update_spec"]

DISTRIBUTIONS = "distributions"
"""What a logprobs node gives beside logprobs, where an update's penalty is the whole divergence."""


def reads_distributions(graph: Graph, node: Node) -> bool:
    """Whether an update reads whole distributions of a logprobs node."""
    return any(
        isinstance(kl := graph.node(edge.dst).attr("kl"), KL) and kl.estimator == "full"
        for edge in graph.edges
        if edge.src == node.id and edge.argument == "reference"
    )


def split_groups(groups: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Cuts rows into `parts` mini-batches of whole groups, as even as groups allow.

    Args:
        groups: Group number of each row; equal ones are adjacent.
        parts: Mini-batches asked for; fewer come back where there are fewer groups.

    Returns:
        Row numbers of each mini-batch, in order.

    >>> split_groups([0, 0, 1, 1, 2, 2], 2)
    ((0, 1, 2, 3), (4, 5))
    """
    starts = [row for row in range(len(groups)) if row == 0 or groups[row] != groups[row - 1]]
    parts = min(parts, len(starts))
    if not parts:
        return ()
    pieces = np.array_split(np.array(starts), parts)
    cuts = [int(piece[0]) for piece in pieces] + [len(groups)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


def train_batch(inputs: NodeInputs) -> TrainBatch:
    """What the update's loss and penalty read; nothing that they do not."""
    loss = inputs.node.attr("loss")
    assert isinstance(loss, LossSpec)
    needs = loss.needs
    return TrainBatch(
        sequences=inputs.sequences,
        behaviour_logprobs=_drawn(inputs) if "behaviour_logprobs" in needs else None,
        old_logprobs=_old_logprobs(inputs),
        reference_logprobs=inputs.floats("reference", "logprobs"),
        reference_distributions=_distributions(inputs),
        advantages=_advantages(inputs),
        returns=inputs.floats("returns", "returns"),
        old_values=inputs.floats("values", "values"),
        preferred=_preferred(inputs) if "preferred" in needs else None,
        extra={
            field: inputs.token_floats(edge, field)
            for edge in inputs.edges("extra")
            for field in edge.fields
        },
    )


def _drawn(inputs: NodeInputs) -> Floats | None:
    return inputs.floats("rollout", "rollout_logprobs")


def _old_logprobs(inputs: NodeInputs) -> Floats | None:
    """Of the policy at the start of the step; None where the update's own forward is that."""
    match inputs.node.attr("old_logprobs"):
        case "forward":
            return inputs.floats("old", "logprobs")
        case "rollout_logprobs":
            return _drawn(inputs)
        case _:
            return None


def _distributions(inputs: NodeInputs) -> Floats | None:
    """float32 `[R, V]`: the reference's, where the penalty is the whole divergence."""
    kl, edge = inputs.node.attr("kl"), inputs.edge("reference")
    if edge is None or not isinstance(kl, KL) or kl.estimator != "full":
        return None
    return np.asarray(inputs.read(edge.src, DISTRIBUTIONS), np.float32)


def _advantages(inputs: NodeInputs) -> Floats | None:
    edge = inputs.edge("advantages")
    return None if edge is None else inputs.token_floats(edge, "advantage")


def _preferred(inputs: NodeInputs) -> Mask | None:
    found = inputs.get("rollout", "preferred")
    return None if found is None else np.asarray(found, np.bool_)


def update_spec(
    inputs: NodeInputs,
    plan: PlacementPlan,
    *,
    kl: KL | None,
    temperature: float,
    max_tokens: int,
) -> UpdateSpec:
    """How the batch becomes optimizer updates, as the plan sizes them."""
    loss = inputs.node.attr("loss")
    assert isinstance(loss, LossSpec)
    operation = plan.operation(inputs.node.id)
    return UpdateSpec(
        loss=loss,
        kl=kl,
        temperature=temperature,
        mini_batches=split_groups(inputs.sequences.groups.tolist(), plan.sizes.mini_batches),
        micro_batch=operation.micro_batch,
        recompute=operation.recompute,
        max_tokens=max_tokens,
        old_policy="own" if inputs.node.attr("old_logprobs") == "own" else "given",
    )
