"""A policy's engine in the process of its trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from flowrl.backend.plugin import Plugin, Service
from flowrl.backend.protocols import (
    Finished,
    Loaded,
    PolicyContext,
    Progress,
    TrainBackend,
    Weights,
    WeightsKind,
)
from flowrl.ids import engine_id
from flowrl.runtime.local.engine_restarts import RestartableEngine
from flowrl.runtime.local.ranks import num_ranks
from flowrl.runtime.transfer.weight_folders import WeightFolders


class EngineInPlace(RestartableEngine):
    """It reads the trainer's parameters, where its plug-in can, or else a copy of each version."""

    def __init__(self, plugin: Plugin, context: PolicyContext, train: TrainBackend) -> None:
        self._train = train
        self._kept: list[Progress | Finished | Loaded] = []
        can = plugin.capabilities
        # Ranks have the parameters in processes of their own, and some roles have no trainer.
        alone = num_ranks(context) > 1 or Service.TRAIN not in can.services
        in_place = can.shares_weights and not alone
        shared = train if in_place else None
        self._copies = None if shared else WeightFolders(Path(tempfile.gettempdir()))
        super().__init__(
            engine_id(context.role, 0),
            lambda: plugin.open_generate(context, shared),
            folders=self._copies,
        )
        if self._copies is not None and context.fresh:
            # The model's folder has no weights that it could have loaded.
            self.load(Weights(version=0, kind=WeightsKind.IN_PLACE))

    def load(self, weights: Weights) -> None:
        """Serves the trainer's weights as they are now; there are no others."""
        assert weights.kind is WeightsKind.IN_PLACE
        if self._copies is not None:
            weights = self._copies.written(weights.version, self._train.export)
            self._copies.add(weights)
        self._send(weights)
        if self._copies is not None:
            # Where other engines generate nobody may poll this one, and its copies would pile up.
            self._kept += super().poll(0.0)

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        kept, self._kept = self._kept, []
        return kept or super().poll(timeout_s)

    def close(self) -> None:
        super().close()
        if self._copies is not None:
            self._copies.close()
