"""A policy's engine in the process of its trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flowrl.backend.plugin import Plugin
from flowrl.backend.protocols import GenerateBackend, PolicyContext, TrainBackend
from flowrl.runtime.local.engine_restarts import RestartableEngine
from flowrl.runtime.transfer.weight_folders import WeightFolders

__all__ = ["EngineInPlace"]


class EngineInPlace(RestartableEngine):
    """It reads the trainer's parameters, where its plug-in can, or else a copy of each version."""

    def __init__(self, plugin: Plugin, context: PolicyContext, train: TrainBackend) -> None:
        self._train = train
        self._shares = plugin.capabilities.shares_weights
        self._version: int | None = None
        shared = train if self._shares else None
        super().__init__(lambda: plugin.open_generate(context, shared), self._give_weights)

    def publish(self, version: int, weights: Path | None) -> None:
        """Serves the trainer's weights as they are now; there are no others."""
        assert weights is None
        self._version = version
        self._give_weights(self.engine)

    def _give_weights(self, engine: GenerateBackend) -> None:
        if self._version is None:
            return  # never published: it serves what it was opened with
        if self._shares:
            engine.publish(self._version, None)
            return
        folders = WeightFolders(Path(tempfile.gettempdir()))
        try:
            folder = folders.new(self._version)
            self._train.export(folder)
            engine.publish(self._version, folder)
        finally:
            folders.close()
