"""A role's trainer as a run sees it: the calls of `TrainBackend`, made by a group of workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from flowrl.backend.batch import Floats, SequenceBatch, TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.runtime.checkpoint.store import FileEntries
from flowrl.runtime.groups import DataRef, WorkerGroup
from flowrl.specs import AdamW

Sequences = DataRef[SequenceBatch]


class Trainer:
    """Each method is that of `TrainBackend`, with references to batches and a future result.

    Attributes:
        kind: Trainers of one kind take each other's references.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._call = group.call
        self.kind = type(group)
        self.put = group.put
        self.put_samples = group.put_samples
        self.close = group.close

    def begin(self, optimizer: AdamW, num_updates: int) -> Future[None]:
        return self._call("begin", optimizer, num_updates)

    def logprobs(self, batch: Sequences, temperature: float) -> Future[Floats]:
        return self._call("logprobs", batch, temperature)

    def distributions(self, batch: Sequences, temperature: float) -> Future[Floats]:
        return self._call("distributions", batch, temperature)

    def squares(self, batch: Sequences, temperature: float) -> Future[Floats]:
        return self._call("squares", batch, temperature)

    def values(self, batch: Sequences) -> Future[Floats]:
        return self._call("values", batch)

    def scores(self, batch: Sequences) -> Future[Floats]:
        return self._call("scores", batch)

    def token_scores(self, batch: Sequences) -> Future[Floats]:
        return self._call("token_scores", batch)

    def update(self, batch: DataRef[TrainBatch], spec: UpdateSpec) -> Future[list[OptimizerStep]]:
        return self._call("update", batch, spec)

    def update_sum(
        self, terms: Sequence[tuple[DataRef[TrainBatch], UpdateSpec]]
    ) -> Future[list[list[OptimizerStep]]]:
        return self._call("update_sum", terms)

    def export(self, folder: Path) -> Future[None]:
        return self._call("export", folder)

    def load(self, folder: Path, decay: float = 0.0) -> Future[None]:
        return self._call("load", folder, *([decay] if decay else []))

    def reset_optimizer(self) -> Future[None]:
        return self._call("reset_optimizer")

    def save(self, folder: Path) -> Future[FileEntries]:
        return self._call("save", folder)

    def restore(self, folder: Path) -> Future[None]:
        return self._call("restore", folder)

    def offload(self) -> Future[None]:
        return self._call("offload")

    def reload(self) -> Future[None]:
        return self._call("reload")
