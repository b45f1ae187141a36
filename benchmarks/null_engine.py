"""A plug-in whose engines hold no model: every request ends at the next poll with zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowrl.backend.plugin import BasePlugin
from flowrl.backend.protocols import (
    Capabilities,
    Finished,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    Service,
    TrainBackend,
    Weights,
    WeightsKind,
)
from flowrl.backend.weights import checksum_of
from flowrl.ids import SampleId
from flowrl.specs import FinishReason

__all__ = ["plugin"]


class _Engine:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._version = 0
        self._loaded: list[Loaded] = []
        self._requests: list[GenerateRequest] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._requests += requests

    def abort(self, samples: Sequence[SampleId]) -> None:
        pass  # everything ends at the next poll

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        requests, self._requests = self._requests, []
        loaded, self._loaded = self._loaded, []
        ends = [self._end(request, request.sampling.max_tokens or 1) for request in requests]
        return [*loaded, *ends]

    def _end(self, request: GenerateRequest, num_tokens: int) -> Finished:
        return Finished(
            sample=request.sample,
            attempt=request.attempt,
            reason=FinishReason.LENGTH,
            tokens=np.zeros(num_tokens, np.int64),
            logprobs=np.zeros(num_tokens, np.float32),
            versions=((self._version, num_tokens),),
        )

    def load(self, weights: Weights) -> None:
        self._version = weights.version
        checksum = "" if weights.kind is WeightsKind.IN_PLACE else checksum_of(weights.handle)
        self._loaded.append(Loaded(version=weights.version, checksum=checksum))

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Plugin(BasePlugin):
    name = "null"
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu"}),
        abort=True,
        resume=True,
    )

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> _Engine:
        return _Engine(context.num_slots)


plugin = _Plugin()
