"""The messages between an engine process and its client.

Messages are framed by `flowrl.runtime.local.processes`. Requests and ends cross as plain tuples and
whole arrays of many samples, because hundreds of them cross at once and each object costs
microseconds.

    client -> engine    ("open", plugin, PolicyContext, core or None), once
                        ("submit", [request, ...])   ("abort", (sample, ...))
                        ("publish", version, folder or None)
                        ("sleep",)  ("wake",)
    engine -> client    ("ready",) or ("broken", FlowError), once
                        ("outputs", ends, progress, busy_s)
                        ("published", version)
                        ("raised", FlowError), or ("died", text), and then nothing more
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from flowrl.backend.batch import Floats, Ints, KeptTokens
from flowrl.backend.protocols import Finished, GenerateRequest, Progress
from flowrl.ids import SampleId
from flowrl.specs import FinishReason, Grammar, Sampling

__all__ = [
    "PackedEnds",
    "PackedProgress",
    "RequestFields",
    "pack_ends",
    "pack_progress",
    "pack_requests",
    "unpack_ends",
    "unpack_progress",
    "unpack_requests",
]


RequestFields: TypeAlias = tuple[
    str, int, Ints, Ints | None, Sampling, int, str, Grammar | None, int
]
"""The fields of a `GenerateRequest` in their order; None for an empty response."""

PackedEnds: TypeAlias = tuple[
    tuple[str, ...],
    tuple[int, ...],
    tuple[str, ...],
    tuple[int, ...],
    Ints,
    Floats,
    tuple[tuple[tuple[int, int], ...], ...],
    tuple[KeptTokens | None, ...],
]
"""Samples, attempts, reasons, numbers of tokens; tokens and logprobs of all; versions, kept."""

PackedProgress: TypeAlias = tuple[tuple[str, int, int], ...]

_NO_INTS: Ints = np.zeros(0, np.int64)


def pack_requests(requests: Sequence[GenerateRequest]) -> list[RequestFields]:
    """Requests as they cross. Objects that they share stay shared within one message."""
    return [
        (
            r.sample,
            r.attempt,
            r.prompt,
            r.response if len(r.response) else None,
            r.sampling,
            r.seed,
            r.shares_prompt,
            r.grammar,
            r.grammar_from,
        )
        for r in requests
    ]


def unpack_requests(
    packed: Sequence[RequestFields], samplings: dict[Sampling, Sampling]
) -> list[GenerateRequest]:
    """Unpacks the requests of `pack_requests`.

    Args:
        samplings: Options seen before, by themselves. Equal ones become one object again, by which
            engines see that rows have the same options.
    """
    return [
        GenerateRequest(
            sample=SampleId(sample),
            attempt=attempt,
            prompt=prompt,
            response=_NO_INTS if response is None else response,
            sampling=samplings.setdefault(sampling, sampling),
            seed=seed,
            shares_prompt=shares_prompt,
            grammar=grammar,
            grammar_from=grammar_from,
        )
        for (
            sample,
            attempt,
            prompt,
            response,
            sampling,
            seed,
            shares_prompt,
            grammar,
            grammar_from,
        ) in packed
    ]


def pack_ends(ends: Sequence[Finished]) -> PackedEnds:
    """Ends as they cross: two arrays for the tokens and logprobs of all of them."""
    return (
        tuple(end.sample for end in ends),
        tuple(end.attempt for end in ends),
        tuple(end.reason.value for end in ends),
        tuple(len(end.tokens) for end in ends),
        np.concatenate([_NO_INTS, *(end.tokens for end in ends)]),
        np.concatenate([np.zeros(0, np.float32), *(end.logprobs for end in ends)]),
        tuple(end.versions for end in ends),
        tuple(end.kept for end in ends),
    )


def unpack_ends(packed: PackedEnds) -> list[Finished]:
    """Unpacks the ends of `pack_ends`."""
    samples, attempts, reasons, counts, tokens, logprobs, versions, kept = packed
    ends, begin = [], 0
    for i, sample in enumerate(samples):
        end = begin + counts[i]
        ends.append(
            Finished(
                sample=SampleId(sample),
                attempt=attempts[i],
                reason=FinishReason(reasons[i]),
                # Copies, so that one sample does not hold those of all others in memory.
                tokens=tokens[begin:end].copy(),
                logprobs=logprobs[begin:end].copy(),
                versions=versions[i],
                kept=kept[i],
            )
        )
        begin = end
    return ends


def pack_progress(progress: Sequence[Progress]) -> PackedProgress:
    """Progress as it crosses."""
    return tuple((p.sample, p.attempt, p.num_tokens) for p in progress)


def unpack_progress(packed: PackedProgress) -> list[Progress]:
    """Unpacks the progress of `pack_progress`."""
    return [
        Progress(sample=SampleId(sample), attempt=attempt, num_tokens=num_tokens)
        for sample, attempt, num_tokens in packed
    ]
