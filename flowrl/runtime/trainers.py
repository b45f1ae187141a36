"""A role's trainer as a run sees it: the calls of `TrainBackend`, made by a group of workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from flowrl.backend.batch import Floats, SequenceBatch, TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.runtime.checkpoint.store import FileEntries
from flowrl.runtime.groups import DataRef, Dispatch, WorkerGroup
from flowrl.specs import AdamW

Sequences = DataRef[SequenceBatch]


class Trainer:
    """Each method is that of `TrainBackend`, with references to batches and a future result.

    Attributes:
        kind: Trainers of one kind take each other's references.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.kind = type(group)
        self.put = group.put
        self.put_samples = group.put_samples
        self.close = group.close

    def _all(self, method: str, *arguments: object) -> Future[Any]:
        return self._group.call(method, *arguments, dispatch=Dispatch.ALL)

    def _rows(self, method: str, *arguments: object) -> Future[Any]:
        return self._group.call(method, *arguments, dispatch=Dispatch.ROWS)

    def begin(self, optimizer: AdamW, num_updates: int) -> Future[None]:
        return self._all("begin", optimizer, num_updates)

    def logprobs(self, batch: Sequences, temperature: float) -> Future[Floats]:
        return self._rows("logprobs", batch, temperature)

    def distributions(self, batch: Sequences, temperature: float) -> Future[Floats]:
        return self._rows("distributions", batch, temperature)

    def squares(self, batch: Sequences, temperature: float) -> Future[Floats]:
        return self._rows("squares", batch, temperature)

    def values(self, batch: Sequences) -> Future[Floats]:
        return self._rows("values", batch)

    def scores(self, batch: Sequences) -> Future[Floats]:
        return self._rows("scores", batch)

    def token_scores(self, batch: Sequences) -> Future[Floats]:
        return self._rows("token_scores", batch)

    def update(self, batch: DataRef[TrainBatch], spec: UpdateSpec) -> Future[list[OptimizerStep]]:
        return self._all("update", batch, spec)

    def update_sum(
        self, terms: Sequence[tuple[DataRef[TrainBatch], UpdateSpec]]
    ) -> Future[list[list[OptimizerStep]]]:
        return self._all("update_sum", terms)

    def export(self, folder: Path) -> Future[None]:
        return self._all("export", folder)

    def load(self, folder: Path, decay: float = 0.0) -> Future[None]:
        return self._all("load", folder, *([decay] if decay else []))

    def reset_optimizer(self) -> Future[None]:
        return self._all("reset_optimizer")

    def save(self, folder: Path) -> Future[FileEntries]:
        return self._all("save", folder)

    def restore(self, folder: Path) -> Future[None]:
        return self._all("restore", folder)

    def offload(self) -> Future[None]:
        return self._all("offload")

    def reload(self) -> Future[None]:
        return self._all("reload")
