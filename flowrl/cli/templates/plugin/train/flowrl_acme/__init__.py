"""The plug-in acme: a trainer. This module stays light; the trainer's imports its library."""

from __future__ import annotations

from flowrl.backend.protocols import BasePlugin, Capabilities, PolicyContext, Service, TrainBackend


class AcmePlugin(BasePlugin):
    name = "acme"
    capabilities = Capabilities(
        services=frozenset({Service.TRAIN}),
        devices=frozenset({"cpu"}),
        updates=frozenset({"reset"}),
    )

    def open_train(self, context: PolicyContext) -> TrainBackend:
        from flowrl_acme.trainer import AcmeTrainer

        return AcmeTrainer(context)


plugin = AcmePlugin()
