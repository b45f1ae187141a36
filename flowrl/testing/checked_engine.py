"""An engine under test: its requests, their ends, and what the reference says of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np

from flowrl.backend.plugin import Capabilities, Plugin
from flowrl.backend.protocols import (
    Finished,
    FinishReason,
    GenerateBackend,
    GenerateRequest,
    Loaded,
    PolicyContext,
    Progress,
    TrainBackend,
    Weights,
    WeightsKind,
)
from flowrl.backend.weights import weights_of
from flowrl.ids import RoleName, SampleId
from flowrl.specs import Sampling
from flowrl.testing.reference_model import change_weights, make_model, reference_of


class CheckFailed(Exception):
    """A promise that is not kept.

    Args:
        found: What was seen, with figures.
        meaning: What this does to a run.
    """

    def __init__(self, found: str, meaning: str) -> None:
        super().__init__(found)
        self.found = found
        self.meaning = meaning


class CheckSettings(TypedDict, total=False):
    """What a plug-in is checked with.

    Attributes:
        model: A model folder with weights; a small random Qwen2 model by default.
        device: Where its workers run: `cpu`, `cuda:0`, `npu:0`.
        dtype: The parameter type.
        tolerance: The largest difference of a logprob from the reference; by default 0.001 in
            float32 and 0.1 in other types.
        timeout_s: The time limit of one check's generation; 120 by default.
        options: Its options, as `roles.NAME.options` has them.
    """

    model: Path | None
    device: str
    dtype: str
    tolerance: float | None
    timeout_s: float
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The folders and the limits of a series of checks.

    Attributes:
        first: The model that is opened.
        second: The same model with other weights.
        tied: A model with tied embeddings and one with other weights; None if the user named the
            model.
        context: What workers are opened with.
        tolerance: The largest difference of a logprob from the reference.
        timeout_s: The time limit of one check's generation.
    """

    first: Path
    second: Path
    tied: tuple[Path, Path] | None
    context: PolicyContext
    tolerance: float
    timeout_s: float

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        model: Path | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        tolerance: float | None = None,
        timeout_s: float = 120.0,
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> Models:
        """Makes what is missing in `folder`; see `CheckSettings`."""
        tied = None
        if model is None:
            own = make_model(folder / "tied", tied=True)
            tied = (own, change_weights(own, folder / "tied-changed"))
        first = make_model(folder / "first") if model is None else model
        return cls(
            first=first,
            second=change_weights(first, folder / "second"),
            tied=tied,
            context=cls.context_of(first, device=device, dtype=dtype, options=options),
            tolerance=tolerance or (1e-3 if dtype == "float32" else 0.1),
            timeout_s=timeout_s,
        )

    @staticmethod
    def context_of(
        model: Path, *, device: str, dtype: str, options: Mapping[str, object]
    ) -> PolicyContext:
        """Returns what a worker of `model` is opened with."""
        return PolicyContext(
            role=RoleName("checked"),
            model=model,
            fresh=False,
            device=device,
            dtype=dtype,
            seed=0,
            num_slots=16,
            max_length=256,
            trainable=False,
            stop_token_ids=(5, 9),
            options=options,
        )


class CheckedEngine:
    """An engine with the requests that checks make of it.

    Args:
        plugin: The plug-in that opens it.
        models: The folders and limits.
        folder: The model that it serves, unless it is the first one.
        shared: The trainer whose parameters it reads in place.
    """

    def __init__(
        self,
        plugin: Plugin,
        models: Models,
        folder: Path | None = None,
        shared: TrainBackend | None = None,
    ) -> None:
        self.models = models
        self.capabilities: Capabilities = plugin.capabilities
        context = replace(models.context, model=folder or models.first)
        self.engine: GenerateBackend = plugin.open_generate(context, shared)
        self._loading: list[Loaded] = []
        self.vocab_size = int(reference_of(context.model).model.config.vocab_size)

    def request(self, number: int, **sampling: Any) -> GenerateRequest:
        """Returns a request whose prompt, of 4 to 19 tokens, and seed depend on `number` alone.

        Options of sampling that the engine does not declare are left out.
        """
        rng = np.random.default_rng(number)
        prompt = rng.integers(16, self.vocab_size, rng.integers(4, 20))
        kept = {"max_tokens", "temperature", "logprobs"} | self.capabilities.sampling
        options = {"max_tokens": 24, **{k: v for k, v in sampling.items() if k in kept}}
        return GenerateRequest(
            sample=SampleId(f"0/{number}/0"),
            attempt=0,
            prompt=prompt.astype(np.int64),
            response=np.zeros(0, np.int64),
            sampling=Sampling(**options),
            seed=1000 + number,
            shares_prompt=f"0/{number}",
        )

    def load(self, version: int, folder: Path | None) -> None:
        """Has the engine load weights, in place or of a folder, and report them by the next end."""
        weights = Weights(version=version, kind=WeightsKind.IN_PLACE)
        if folder is not None:
            weights = weights_of(folder, version)
        self._loading.append(Loaded(version=version, checksum=weights.checksum))
        self.engine.load(weights)

    def finish(
        self,
        requests: Sequence[GenerateRequest],
        *,
        during: Callable[[dict[SampleId, int]], None] | None = None,
    ) -> dict[SampleId, Finished]:
        """Submits requests and polls until all have ended.

        Args:
            requests: New requests.
            during: Called after each poll with the tokens of running requests.
        """
        self.engine.submit(requests)
        wanted = {request.sample: request for request in requests}
        ended: dict[SampleId, Finished] = {}
        progress: dict[SampleId, int] = {}
        end = time.monotonic() + self.models.timeout_s
        while len(ended) < len(wanted):
            if time.monotonic() > end:
                missing = sorted(set(wanted) - set(ended))
                raise CheckFailed(
                    f"{len(missing)} of {len(wanted)} requests had no end after "
                    f"{self.models.timeout_s:g} s: {', '.join(missing[:3])}",
                    "a run waits for these samples until its stall limit, and ends",
                )
            for event in self.engine.poll(0.0 if during else 1.0):
                if isinstance(event, Progress):
                    progress[event.sample] = event.num_tokens
                    continue
                if isinstance(event, Loaded):
                    self._check_loaded(event)
                    continue
                self._check_end(event, wanted, ended)
                ended[event.sample] = event
                progress.pop(event.sample, None)
            if during is not None:
                during(progress)
        if self._loading:
            raise CheckFailed(
                f"weights {self._loading[0].version} were not reported by `poll` as `Loaded`",
                "a run keeps each version in memory for ever",
            )
        return ended

    def _check_loaded(self, loaded: Loaded) -> None:
        expected = self._loading.pop(0) if self._loading else None
        if loaded != expected:
            raise CheckFailed(
                f"{loaded} was reported, where {expected or 'nothing'} was to be loaded",
                "the run ends: the engine samples from other weights than were published",
            )

    def _check_end(
        self,
        end: Finished,
        wanted: dict[SampleId, GenerateRequest],
        ended: dict[SampleId, Finished],
    ) -> None:
        request = wanted.get(end.sample)
        twice = "the scheduler ends the run: a sample is accounted for exactly once"
        if request is None or end.sample in ended:
            raise CheckFailed(f"an end of {end.sample}, which no running request has", twice)
        if end.attempt != request.attempt:
            raise CheckFailed(
                f"{end.sample} ended with attempt {end.attempt}, not {request.attempt}",
                "the scheduler takes the end for one of an earlier attempt and drops it",
            )
        counts = len(end.tokens), len(end.logprobs), sum(count for _, count in end.versions)
        if len(set(counts)) > 1:
            raise CheckFailed(
                "{} has {} tokens, {} logprobs and versions of {} tokens".format(
                    end.sample, *counts
                ),
                "tokens would be trained with the logprobs of others",
            )
        total = len(request.response) + len(end.tokens)
        if end.reason is FinishReason.LENGTH and total != request.sampling.max_tokens:
            raise CheckFailed(
                f"{end.sample} ended for its length with {total} tokens of "
                f"{request.sampling.max_tokens}",
                "responses are shorter or longer than the workflow says",
            )

    def difference(
        self,
        request: GenerateRequest,
        end: Finished,
        folder: Path,
        *,
        older: Path | None = None,
        kept: int = 0,
    ) -> float:
        """Returns the largest difference of an end's logprobs from the reference in `folder`."""
        if not len(end.tokens):
            return 0.0
        before = np.concatenate([request.prompt, request.response])
        tokens = np.concatenate([before, end.tokens])
        expected = reference_of(folder).logprobs(
            tokens,
            len(before),
            request.sampling.temperature,
            older=None if older is None else reference_of(older),
            kept=kept,
        )
        return float(np.abs(expected - end.logprobs).max())

    def require_served(
        self,
        requests: Sequence[GenerateRequest],
        ends: dict[SampleId, Finished],
        folder: Path,
        meaning: str,
        *,
        instead: dict[str, Path] | None = None,
    ) -> float:
        """Returns the largest difference of all ends.

        Args:
            meaning: What a difference does to a run.
            instead: Other weights that may have been served, by what to call them.

        Raises:
            CheckFailed: It exceeds the tolerance.
        """
        worst = max(self.difference(r, ends[r.sample], folder) for r in requests)
        if worst <= self.models.tolerance:
            return worst
        found = f"logprobs differ by up to {worst:.2g} from a plain forward pass"
        for name, other in (instead or {}).items():
            same = max(self.difference(r, ends[r.sample], other) for r in requests)
            if same <= self.models.tolerance:
                found += f", and are those of {name}"
        raise CheckFailed(f"{found} (at most {self.models.tolerance:g} expected)", meaning)
