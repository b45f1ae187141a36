"""The payload store: tokens, logprobs and scores of the samples that the scheduler only names.

A payload is made when its group is offered, grows when an attempt ends, and is taken out when the
sample is delivered or dropped. It is plain data, so that it can be written into a checkpoint
beside the scheduler's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowrl.backend.batch import Floats, Ints, SequenceBatch
from flowrl.backend.protocols import Finished
from flowrl.data import PromptItem
from flowrl.errors import SchedulerError
from flowrl.ids import GroupId, NodeId, RoleName, SampleId
from flowrl.specs import FinishReason

__all__ = ["Payload", "PayloadStore", "behaviour_logprobs", "sequence_batch"]

_NO_INTS: Ints = np.zeros(0, np.int64)
_NO_FLOATS: Floats = np.zeros(0, np.float32)


@dataclass(slots=True, kw_only=True)
class Payload:
    """What is known of one sample.

    Attributes:
        item: Its prompt and data row.
        attempt: The running attempt, or the last one; ends of others are not joined.
        tokens: int64 `[R]` response tokens of all attempts so far.
        logprobs: float32 `[R]`, of the policy that produced each token.
        versions: `((version, count), ...)` over the R tokens.
        finish: How the last attempt ended; None while it runs.
        text: The decoded response, set when it is sent to the scorer.
        score: What is told of the sample, set when all scorers answered; `terms` are its parts.
        scores: What each scoring role gave.
        judged: The score that each filter looked at, by the filter's node.
        failure: What the reward did instead of giving a score; empty where it did not fail.
    """

    item: PromptItem
    attempt: int = 0
    tokens: Ints = field(default_factory=lambda: _NO_INTS)
    logprobs: Floats = field(default_factory=lambda: _NO_FLOATS)
    versions: tuple[tuple[int, int], ...] = ()
    finish: FinishReason | None = None
    text: str = ""
    score: float | None = None
    scores: dict[RoleName, float] = field(default_factory=dict)
    judged: dict[NodeId, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    def extend(self, end: Finished) -> None:
        """Joins what an attempt produced to what the sample already had."""
        if len(self.tokens):
            self.tokens = np.concatenate([self.tokens, end.tokens])
            self.logprobs = np.concatenate([self.logprobs, end.logprobs])
        else:
            self.tokens, self.logprobs = end.tokens, end.logprobs
        self.versions += end.versions
        self.finish = end.reason


class PayloadStore:
    """Payloads by sample id."""

    def __init__(self) -> None:
        self._payloads: dict[SampleId, Payload] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def __getitem__(self, sample: SampleId) -> Payload:
        try:
            return self._payloads[sample]
        except KeyError:
            raise SchedulerError(f"no payload is stored for sample {sample}") from None

    def get(self, sample: SampleId) -> Payload | None:
        """The payload, or None where the sample is unknown or already taken out."""
        return self._payloads.get(sample)

    def add(self, sample: SampleId, item: PromptItem) -> None:
        """Opens an empty payload."""
        self._payloads[sample] = Payload(item=item)

    def take(self, samples: Iterable[SampleId]) -> list[tuple[SampleId, Payload]]:
        """Takes payloads out, in the order asked for."""
        return [(sample, self._payloads.pop(sample)) for sample in samples]

    def discard(self, samples: Iterable[SampleId]) -> None:
        """Forgets payloads; unknown ones are ignored."""
        for sample in samples:
            self._payloads.pop(sample, None)


def sequence_batch(
    payloads: Sequence[tuple[SampleId, Payload]], groups: Sequence[GroupId]
) -> SequenceBatch:
    """The ragged batch of finished payloads.

    Args:
        payloads: N samples, the members of a group adjacent.
        groups: N ids, one for each sample.
    """
    pieces: list[Ints] = []
    lengths = np.empty(2 * len(payloads), np.int64)
    for i, (_, payload) in enumerate(payloads):
        pieces += (payload.item.prompt_ids, payload.tokens)
        lengths[2 * i], lengths[2 * i + 1] = len(payload.item.prompt_ids), len(payload.tokens)
    numbers: dict[GroupId, int] = {}
    return SequenceBatch(
        samples=tuple(sample for sample, _ in payloads),
        tokens=np.concatenate(pieces) if pieces else _NO_INTS,
        offsets=np.concatenate([[0], np.cumsum(lengths)[1::2]]).astype(np.int64),
        response_mask=np.repeat(np.tile([False, True], len(payloads)), lengths),
        groups=np.array([numbers.setdefault(g, len(numbers)) for g in groups], np.int64),
    )


def behaviour_logprobs(
    batch: SequenceBatch, payloads: Sequence[tuple[SampleId, Payload]]
) -> Floats:
    """float32 `[T]`, the rollout's logprobs at response tokens and 0 elsewhere."""
    flat = np.zeros(len(batch.tokens), np.float32)
    if payloads:
        flat[batch.response_mask] = np.concatenate([p.logprobs for _, p in payloads])
    return flat
