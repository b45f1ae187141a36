"""An engine in the simplest form, with the faults that real engines had."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from flowrl.backend.plugin import BackendStatus, Capabilities, Service
from flowrl.backend.protocols import (
    Finished,
    FinishReason,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    Weights,
)
from flowrl.backend.weights import FileBuckets, checksum_of
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import SampleId
from flowrl.testing.reference_model import ReferenceModel


class Running:
    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.cached = 0


class PlainEngine:
    """Computes all sequences anew for every token."""

    def __init__(self, context: PolicyContext, fault: str) -> None:
        torch.set_num_threads(1)
        self.num_slots = context.num_slots
        self._context, self._fault = context, fault
        self._model = self._older = ReferenceModel(context.model)
        self._coming: ReferenceModel | None = None
        self._version = self._num_drawn = 0
        self._running: dict[SampleId, Running] = {}
        self._prompts: set[bytes] = set()
        self._ended: list[Finished] = []
        self._loaded: list[Loaded] = []

    def submit(self, requests: Any) -> None:
        for request in requests:
            known = all(token < self._model.model.config.vocab_size for token in request.prompt)
            if not known and self._fault == "takes unknown tokens":
                continue
            if not known or not 0 < len(request.prompt) < self._context.max_length:
                raise BackendError("the prompt is unusable", where=f"sample {request.sample}")
        for request in requests:
            running = self._running[request.sample] = Running(request)
            if request.prompt.tobytes() in self._prompts:
                running.cached = len(request.prompt) - 1
            if self._version <= 3:
                self._prompts.add(request.prompt.tobytes())

    def abort(self, samples: Any) -> None:
        for sample in samples:
            if sample in self._running:
                running = self._running.pop(sample)
                if self._fault == "drops tokens":
                    running = Running(running.request)
                self._end(running, FinishReason.ABORT)

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        if self._fault == "ends nothing":
            return []
        self._step(list(self._running.values()))
        events: list[Progress | Finished | Loaded] = [*self._loaded, *self._ended]
        self._loaded = []
        self._ended = []
        return events + [
            Progress(
                sample=sample,
                attempt=running.request.attempt,
                num_tokens=len(running.request.response) + len(running.tokens),
            )
            for sample, running in self._running.items()
        ]

    def _step(self, running: list[Running]) -> None:
        if self._coming is not None and any(each.tokens for each in running):
            self._model, self._coming = self._coming, None
        for each, logits in zip(running, self._logits(running), strict=True):
            self._draw(each, logits.double(), len(running))

    def _logits(self, running: list[Running]) -> list[Any]:
        """The logits after the last token of each."""
        rows = [
            np.concatenate([each.request.prompt, each.request.response, each.tokens])
            for each in running
        ]
        if self._fault == "unversioned cache" and self._version == 4:
            return [
                self._model.logits(row, older=self._older, kept=each.cached)[-1]
                for row, each in zip(rows, running, strict=True)
            ]
        # Padded on the right, where a causal model does not look.
        ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            logits = self._model.model(input_ids=ids, use_cache=False).logits if rows else ids
        return [logits[number, len(row) - 1] for number, row in enumerate(rows)]

    def _draw(self, running: Running, logits: Any, num_running: int) -> None:
        request, sampling = running.request, running.request.sampling
        position = len(request.response) + len(running.tokens)
        at_one, logits = logits, logits / (sampling.temperature or 1.0)
        left = logits.clone()
        if sampling.repetition_penalty != 1:
            seen = np.unique([*request.prompt, *request.response, *running.tokens])
            one = sampling.repetition_penalty
            left[seen] = torch.where(left[seen] > 0, left[seen] / one, left[seen] * one)
        if position < sampling.min_tokens and self._fault != "follows top-k alone":
            left[list(self._context.stop_token_ids)] = -torch.inf
        if sampling.top_k:
            left[left < left.topk(sampling.top_k).values[-1]] = -torch.inf
        if sampling.min_p:
            left[left < left.max() + np.log(sampling.min_p)] = -torch.inf
        if sampling.top_p < 1 and self._fault != "follows top-k alone":
            ordered, places = left.softmax(-1).sort(descending=True)
            left[places[ordered.cumsum(-1) - ordered >= sampling.top_p]] = -torch.inf
        seed = (request.seed, position)
        if self._fault == "seeds of the batch":
            seed = (num_running, position)
        if self._fault == "no seeds":
            self._num_drawn += 1
            seed = (self._num_drawn, position)
        noise = torch.from_numpy(np.random.default_rng(seed).gumbel(size=len(left)))
        token = int((left if sampling.temperature == 0 else left + noise).argmax())
        shown = left if self._fault == "logprobs after top-k" else logits
        if self._fault == "logprobs at 1":
            shown = at_one
        if self._fault == "logprobs of its own":
            shown = logits * 0.9
        running.tokens.append(token)
        running.logprobs.append(float(shown.log_softmax(-1)[token]))
        running.versions.append(self._version)
        if token in self._context.stop_token_ids:
            self._end(self._running.pop(request.sample), FinishReason.STOP)
        elif position + 1 == sampling.max_tokens:
            self._end(self._running.pop(request.sample), FinishReason.LENGTH)

    def _end(self, running: Running, reason: FinishReason) -> None:
        tokens, logprobs = running.tokens, running.logprobs
        if self._fault == "no stop token" and reason is FinishReason.STOP:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        spans: dict[int, int] = {}
        for version in running.versions[: len(tokens)]:
            spans[version] = spans.get(version, 0) + 1
        end = Finished(
            sample=running.request.sample,
            attempt=running.request.attempt,
            reason=reason,
            tokens=np.array(tokens, np.int64),
            logprobs=np.array(logprobs, np.float32),
            versions=tuple(spans.items()),
        )
        self._ended += [end, end] if self._fault == "ends twice" else [end]

    def load(self, weights: Weights) -> None:
        assert isinstance(weights.handle, FileBuckets)
        new = ReferenceModel(weights.handle.folder)
        if self._fault != "reports no weights":
            checksum = checksum_of(weights.handle)
            self._loaded.append(Loaded(version=weights.version, checksum=checksum))
        if self._fault == "tied embeddings" and new.model.config.tie_word_embeddings:
            new.model.lm_head.weight = torch.nn.Parameter(self._model.model.lm_head.weight)
        self._version = weights.version
        if self._fault == "version before weights":
            self._coming = new  # served from the second token of any response on
        else:
            self._model = new

    def wake(self) -> None:
        if self._fault == "wakes with its first weights":
            self._model = ReferenceModel(self._context.model)

    def nothing(self) -> None:
        pass

    sleep = close = nothing


class ServedEngine(PlainEngine):
    """A plain engine that has a process, and says what its fault makes of the death of it."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, context: PolicyContext, fault: str) -> None:
        super().__init__(context, fault)
        self._process = subprocess.Popen(["sleep", "600"])
        self.started.append(self._process)

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        if self._fault == "hides its death":
            return []
        if self._process.poll() is not None:
            error = BackendError if self._fault == "blames the user" else WorkerDied
            raise error("the server has ended", where="poll")
        return super().poll(timeout_s)

    def close(self) -> None:
        if self._fault != "leaves its process":
            self._process.kill()
            self._process.wait()


class PlainPlugin:
    """The plug-in of an engine with a fault; "" has none."""

    name = "plain"
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu"}),
        abort=True,
        resume=True,
        sleep=True,
    )

    def __init__(self, fault: str = "", engine: type[PlainEngine] = PlainEngine) -> None:
        self._fault, self._engine = fault, engine

    def check(self) -> BackendStatus:
        return BackendStatus(usable=True)

    def open_generate(self, context: PolicyContext, shared: Any) -> Any:
        return self._engine(context, self._fault)

    def refuse(self, context: Any) -> Any:
        raise BackendError("plain only generates")

    open_train = open_score = open_environment = refuse
