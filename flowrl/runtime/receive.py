"""From payloads to values: what the streaming part of a graph gives to the batch part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowrl.backend.batch import Floats
from flowrl.graph import Node, Op
from flowrl.graph.signatures import ROLLOUT_LOGPROBS, SCORE
from flowrl.ids import NodeId, RoleName
from flowrl.runtime.payloads import Payload, behaviour_logprobs
from flowrl.runtime.rollout_parts import GraphParts, RolloutPart, role_of, score_source
from flowrl.runtime.sample_set import GroupRows, SampleSet, StepBatch, sample_set

__all__ = ["fill_fields", "receive_rollout", "scores_by"]


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
    """The fields of samples that a rollout gives, or that a filter of them passes on.

    Those of tokens, mask and turns are in the set's sequences.
    """
    if maker.output(ROLLOUT_LOGPROBS.name) is not None:
        rows = tuple(zip(samples.sequences.samples, samples.payloads, strict=True))
        values = behaviour_logprobs(samples.sequences, rows)
        step.values[maker.id, ROLLOUT_LOGPROBS.name] = values
    if maker.op is Op.INTERACT:
        step.values[maker.id, SCORE.name] = scores_by(role_of(maker), samples.payloads)


def _scores_read(parts: GraphParts, node: Node, samples: SampleSet) -> Floats:
    """float32 `[N]`: the scores that a streaming filter looked at."""
    source = score_source(parts.graph, node.id)
    assert source is not None  # the verifier of graphs proves it
    if source.op is Op.MAP:
        return _scores_judged(node.id, samples.payloads)
    return scores_by(role_of(source), samples.payloads)


def scores_by(role: RoleName, payloads: Sequence[Payload]) -> Floats:
    """float32 `[N]`: what a reward or an environment gave."""
    return np.array([payload.scores[role] for payload in payloads], np.float32)


def _scores_judged(node: NodeId, payloads: Sequence[Payload]) -> Floats:
    """float32 `[N]`: what a map made of scores, when the filter `node` judged the groups."""
    return np.array([payload.judged[node] for payload in payloads], np.float32)
