"""A trainer of one plug-in and an engine of another, as one plug-in: `torch+mine`.

`roles.NAME.engine` makes such a pair. Weights reach the engine as a folder that the trainer writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrl.backend.plugin import (
    NO_OPTIONS,
    BackendStatus,
    BasePlugin,
    Plugin,
    Service,
    not_offered,
    status_of,
)

if TYPE_CHECKING:
    from flowrl.backend.protocols import GenerateBackend, PolicyContext, TrainBackend

__all__ = ["Pair"]


class Pair(BasePlugin):
    """See the module; of each capability it has what both plug-ins need it for.

    Args:
        trains: The plug-in of the trainer.
        generates: The plug-in of the engine.
        where: The config key, for messages.

    Raises:
        BackendError: One of them does not offer its service.
    """

    def __init__(self, trains: Plugin, generates: Plugin, where: str | None = None) -> None:
        self.name = f"{trains.name}+{generates.name}"
        self._trains, self._generates = trains, generates
        for plugin, service in ((trains, Service.TRAIN), (generates, Service.GENERATE)):
            if service not in plugin.capabilities.services:
                expected = "a trainer in roles.NAME.backend, an engine in roles.NAME.engine"
                raise not_offered(plugin, service, where, expected)
        of_trainer, of_engine = trains.capabilities, generates.capabilities
        self.capabilities = replace(
            of_trainer,
            services=frozenset({Service.TRAIN, Service.GENERATE}),
            devices=of_trainer.devices & of_engine.devices,
            dtypes=of_trainer.dtypes & of_engine.dtypes,
            layouts=of_trainer.layouts & of_engine.layouts,
            abort=of_engine.abort,
            resume=of_engine.resume,
            sleep=of_engine.sleep,
            shares_weights=False,
            grammars=of_engine.grammars,
            seeds=of_engine.seeds,
            sampling=of_engine.sampling,
            repeats_truncation=of_trainer.repeats_truncation & of_engine.repeats_truncation,
        )

    def check(self, options: Mapping[str, object] = NO_OPTIONS) -> BackendStatus:
        """Returns the status of the first of both that cannot be used here.

        Args:
            options: Those of the trainer; see `require_usable` for the engine's.
        """
        first, second = status_of(self._trains, options), status_of(self._generates, NO_OPTIONS)
        return second if first.usable else first

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Opens the engine, with weights and options of its own."""
        own = replace(context, options=context.engine_options, engine_options={})
        return self._generates.open_generate(own, None)

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """Opens the trainer."""
        return self._trains.open_train(context)
