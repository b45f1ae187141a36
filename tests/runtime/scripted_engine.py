"""A plug-in whose engine does what the prompts say; its trainer's "weights" are one number.

Responses have as many tokens as the prompt's second number says, one more at each poll, and each
token is the number of the weights that drew it. A prompt that begins with one of the numbers below
is obeyed instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowrl.backend.plugin import BasePlugin
from flowrl.backend.protocols import (
    Capabilities,
    Finished,
    GenerateBackend,
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
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import FinishReason
from tests.policy_contexts import policy_context

__all__ = [
    "BLOCK",
    "DIE",
    "FAIL",
    "HANG",
    "PLUGIN",
    "RAISE",
    "ScriptedEngine",
    "context",
    "plugin",
    "weights",
]

PLUGIN = "tests.runtime.scripted_engine:plugin"

DIE = 901  # ends the process
RAISE = 902  # an exception that nobody expects
FAIL = 903  # an error of flowrl's own
HANG = 904  # goes on for ever
BLOCK = 905  # says nothing any more


def context(model: Path, *, num_slots: int = 4) -> PolicyContext:
    return policy_context(model, fresh=False, num_slots=num_slots, max_length=64)


def weights(folder: Path, number: int) -> Path:
    """A folder that the engine loads `number` from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "number.safetensors").write_text(str(number))
    return folder


class ScriptedEngine:
    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._number = 0
        self._version = 0
        self._runs: dict[SampleId, tuple[GenerateRequest, list[int], list[list[int]]]] = {}
        self._ended: list[Finished] = []
        self._loaded: list[Loaded] = []

    @property
    def num_slots(self) -> int:
        return self._context.num_slots

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self._runs[request.sample] = (request, [], [])

    def abort(self, samples: Sequence[SampleId]) -> None:
        for sample in samples:
            if sample in self._runs:
                self._end(sample, FinishReason.ABORT)

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        for sample in list(self._runs)[: self.num_slots]:
            request, tokens, spans = self._runs[sample]
            self._obey(int(request.prompt[0]))
            tokens.append(self._number)
            if spans and spans[-1][0] == self._version:
                spans[-1][1] += 1
            else:
                spans.append([self._version, 1])
            done = len(request.response) + len(tokens) >= _length(request)
            if done and request.prompt[0] != HANG:
                self._end(sample, FinishReason.LENGTH)
        ended, self._ended = self._ended, []
        loaded, self._loaded = self._loaded, []
        return [*loaded, *ended, *self._progress()]

    def _obey(self, word: int) -> None:
        match word:
            case 901:
                print("a last word", file=sys.stderr, flush=True)
                os._exit(3)
            case 902:
                raise RuntimeError("out of luck")
            case 903:
                raise BackendError("the prompt is not to its liking", hint="ask nicely")
            case 905:
                sys.stdin.close()
                os.read(os.pipe()[0], 1)

    def _progress(self) -> list[Progress]:
        return [
            Progress(
                sample=sample,
                attempt=request.attempt,
                num_tokens=len(request.response) + len(tokens),
            )
            for sample, (request, tokens, _) in self._runs.items()
        ]

    def _end(self, sample: SampleId, reason: FinishReason) -> None:
        request, tokens, spans = self._runs.pop(sample)
        self._ended.append(
            Finished(
                sample=sample,
                attempt=request.attempt,
                reason=reason,
                tokens=np.array(tokens, np.int64),
                logprobs=np.full(len(tokens), -0.5, np.float32),
                versions=tuple((version, count) for version, count in spans),
            )
        )

    def load(self, weights: Weights) -> None:
        for bucket in weights.handle:
            self._number = int(bucket.tobytes())
        self._version = weights.version
        checksum = "" if weights.kind is WeightsKind.IN_PLACE else checksum_of(weights.handle)
        self._loaded.append(Loaded(version=weights.version, checksum=checksum))

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._runs.clear()


def _length(request: GenerateRequest) -> int:
    return min(int(request.prompt[1]), request.sampling.max_tokens)


class ScriptedPlugin(BasePlugin):
    name = "scripted"
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu"}),
        abort=True,
        resume=True,
    )

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        if context.model.name == "missing":
            raise BackendError("no such model", where=f"roles.{context.role}.model")
        if context.model.name == "broken":
            raise ValueError("the library does not like it")
        return ScriptedEngine(context)


plugin = ScriptedPlugin()
