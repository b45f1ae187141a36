"""Runs a map node: its fields by key, and what it gives."""

from __future__ import annotations

import numpy as np

from flowrl.algo import resolve_map
from flowrl.algo.maps import MapBatch, MapResult
from flowrl.backend.batch import Mask
from flowrl.errors import GraphError
from flowrl.runtime.node_inputs import NodeInputs
from flowrl.runtime.sample_set import Array, SampleSet
from flowrl.specs import FinishReason, MapSpec
from flowrl.specs.maps import split_key

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
    return resolve_map(spec)(batch)


def _field(inputs: NodeInputs, key: str) -> Array:
    """The field of a key: of the n-th argument that has one of that name.

    Raises:
        GraphError: tokens of other samples than the map's own, which have other places.
    """
    name, place = split_key(key)
    edges = [edge for edge in inputs.edges("input") if name in edge.fields]
    edge = edges[place]
    others = inputs.samples_of(edge)
    if others is not inputs.samples and inputs.is_per_token(edge, name):
        raise GraphError(
            f"{inputs.node.id} reads {key!r}, one a token, of other samples than the first",
            where=str(inputs.node.source or inputs.node.id),
            found=f"tokens of {others.origin} beside those of {inputs.samples.origin}",
            hint="make one number a sample of it, with a map of that rollout alone",
        )
    return inputs.read(edge.src, name)


def _truncated(samples: SampleSet) -> Mask | None:
    """bool `[N]`, whether a response was cut off; None for samples that nobody drew."""
    finishes = [payload.finish for payload in samples.payloads]
    if None in finishes:
        return None
    return np.array([finish is FinishReason.LENGTH for finish in finishes], np.bool_)
