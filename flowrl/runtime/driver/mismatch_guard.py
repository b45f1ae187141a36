"""Stops a run whose engine reports other logprobs than its trainer computes for the same tokens.

An engine that serves other weights than were published, or computes logprobs in another way, has a
run learn from wrong ratios, and nothing fails. So before an update the trainer scores a few samples
of each engine, of the tokens that the weights of now have sampled: at the first step of a stage, of
a resumed run too, and after publications. Where all samples of a later step are of one engine and
of these weights, the update's own forward pass says the same, and nothing is computed for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from flowrl.algo.kl import mismatch
from flowrl.backend.batch import Floats, Ints
from flowrl.backend.protocols import OptimizerStep
from flowrl.config.schema import TrainConfig
from flowrl.errors import BackendError
from flowrl.ids import EngineId, RoleName
from flowrl.runtime.driver.payloads import SampleSet, behaviour_logprobs
from flowrl.runtime.workers import PolicyWorker

_GAP = "mismatch/abs_mean"
_SAMPLES = 4
"""Samples of each engine that are compared."""


class MismatchGuard:
    """See the module.

    Args:
        train: The schedule of a stage, with the limit.
    """

    def __init__(self, train: TrainConfig) -> None:
        self._limit = train.mismatch_limit
        self._every = train.mismatch_every
        self._checked: dict[RoleName, int] = {}  # the version, by role
        self._awaited: dict[RoleName, EngineId] = {}  # whose tokens the update is to measure

    def check(
        self,
        worker: PolicyWorker,
        samples: SampleSet,
        score: Callable[[SampleSet], Floats],
        *,
        is_measured: bool,
    ) -> None:
        """Compares logprobs, if that is due.

        Args:
            worker: The policy that is about to learn from the samples.
            samples: Those that its engines sampled, with the tokens of their payloads.
            score: Returns float32 `[T]`, the trainer's logprobs of the tokens of some samples.
            is_measured: The update reports the mismatch of its first mini-batch, to `check_update`.

        Raises:
            BackendError: The mean difference of an engine is past the limit.
        """
        if not any(payload.engine for payload in samples.payloads):
            return  # data, or samples of another process of the run
        version = worker.version
        last = self._checked.get(worker.role)
        if worker.stale or (last is not None and version - last < self._every):
            return
        if is_measured and last is not None and (engine := _only_engine(samples, version)):
            self._awaited[worker.role] = engine
            return
        rows = _rows_of_engines(samples, version)
        if not rows:
            return  # all of them are of earlier weights
        self._checked[worker.role] = version
        chosen = samples.select(np.array([row for each in rows.values() for row in each], np.int64))
        sequences = chosen.sequences
        mask = sequences.response_mask
        sampled = behaviour_logprobs(sequences, chosen.rows)[mask]
        scored = score(chosen)[mask]
        row_of: Ints = np.repeat(np.arange(len(chosen)), sequences.lengths)[mask]
        start = 0
        for engine, members in rows.items():
            own = (row_of >= start) & (row_of < start + len(members))
            start += len(members)
            found = mismatch(scored[own], sampled[own], row_of[own])
            self._require(engine, version, found, int(own.sum()))

    def check_update(self, worker: PolicyWorker, first: OptimizerStep) -> None:
        """Reads what the first mini-batch of an update has measured, where `check` left it to that.

        Raises:
            BackendError: The mean difference is past the limit.
        """
        if not self._awaited:
            return
        engine = self._awaited.pop(worker.role, None)
        # An update without tokens measures nothing, and one that is skipped nonsense.
        if engine is not None and not math.isnan(first.metrics.get(_GAP, math.nan)):
            self._checked[worker.role] = worker.version
            self._require(engine, worker.version, first.metrics, first.num_tokens)

    def _require(
        self, engine: EngineId, version: int, found: Mapping[str, float], num_tokens: int
    ) -> None:
        gap, largest = found[_GAP], found["mismatch/abs_max"]
        if gap <= self._limit:
            return
        raise BackendError(
            f"the logprobs that {engine} reports are not those that its trainer computes",
            where=f"{engine}, weights of version {version}",
            found=f"a mean difference of {gap:.3g}, at most {largest:.3g}, over {num_tokens} "
            "tokens that it sampled",
            expected=f"at most train.mismatch_limit={self._limit:g} in the mean",
            hint="the engine serves other weights, or its logprobs are not those of the "
            "temperature-scaled logits before truncation: `flowrl backends check NAME` proves "
            "which; where it only rounds otherwise, raise train.mismatch_limit",
        )


def _only_engine(samples: SampleSet, version: int) -> EngineId | None:
    """Returns the engine that has sampled everything with the weights of a version, if one has."""
    engines = {payload.engine for payload in samples.payloads}
    versions = {v for payload in samples.payloads for v, _ in payload.sampled_versions}
    return engines.pop() if len(engines) == 1 and versions == {version} else None


def _rows_of_engines(samples: SampleSet, version: int) -> dict[EngineId, list[int]]:
    """Returns the first samples of each engine whose tokens are all of one version."""
    rows: dict[EngineId, list[int]] = defaultdict(list)
    for row, payload in enumerate(samples.payloads):
        if payload.engine is None or {v for v, _ in payload.sampled_versions} != {version}:
            continue
        if len(rows[payload.engine]) < _SAMPLES:
            rows[payload.engine].append(row)
    return rows
