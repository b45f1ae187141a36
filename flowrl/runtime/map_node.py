"""Runs a map node: its fields by key, and what it gives."""

from __future__ import annotations

from collections import Counter

import numpy as np

from flowrl.algo import resolve_map
from flowrl.algo.maps import MapBatch, MapResult, check_alone
from flowrl.backend.batch import Mask
from flowrl.runtime.node_inputs import NodeInputs
from flowrl.runtime.sample_set import Array, SampleSet
from flowrl.specs import FinishReason, MapSpec
from flowrl.specs.maps import OwnMap, split_key

__all__ = ["run_map"]


def run_map(inputs: NodeInputs) -> MapResult:
    """The fields that the map's specification declares."""
    spec = inputs.node.attr("spec")
    assert isinstance(spec, MapSpec)
    sequences = inputs.sequences
    batch = MapBatch(
        fields={key: _field(inputs, key) for key in spec.reads},
        groups=sequences.groups,
        offsets=sequences.offsets,
        lengths=sequences.response_lengths,
        truncated=_truncated(inputs.samples) if spec.reads_truncated else None,
    )
    given = resolve_map(spec)(batch)
    if isinstance(spec, OwnMap) and spec.alone and len(batch.groups) > 1 and _seen[spec] < _LOOKS:
        _seen[spec] += 1
        check_alone(batch, spec, given)
    return given


_LOOKS = 8
_seen: Counter[OwnMap] = Counter()
"""Batches at which a map was seen to keep `per_sample`. A few are enough for a mean over the batch
to show; at all of them, the map would cost one and a half times as much."""


def _field(inputs: NodeInputs, key: str) -> Array:
    """The field of a key: of the n-th argument that has one of that name.

    An argument of other samples gives numbers of samples, in the places of the map's own; the
    verifier of graphs proves it.
    """
    name, place = split_key(key)
    edges = [edge for edge in inputs.edges("input") if name in edge.fields]
    return inputs.read(edges[place].src, name)


def _truncated(samples: SampleSet) -> Mask | None:
    """bool `[N]`, whether a response was cut off; None for samples that nobody drew."""
    finishes = [payload.finish for payload in samples.payloads]
    if None in finishes:
        return None
    return np.array([finish is FinishReason.LENGTH for finish in finishes], np.bool_)
