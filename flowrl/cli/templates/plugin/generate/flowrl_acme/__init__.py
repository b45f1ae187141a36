"""The plug-in acme: an engine. This module stays light; the engine's imports its library."""

from __future__ import annotations

from flowrl.backend.protocols import (
    BasePlugin,
    Capabilities,
    GenerateBackend,
    PolicyContext,
    Service,
)


class AcmePlugin(BasePlugin):
    name = "acme"
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE}),
        devices=frozenset({"cpu"}),
        abort=True,
        resume=True,
        sampling=frozenset({"top_k"}),
    )

    def open_generate(self, context: PolicyContext, shared: object) -> GenerateBackend:
        from flowrl_acme.engine import AcmeEngine

        return AcmeEngine(context)


plugin = AcmePlugin()
