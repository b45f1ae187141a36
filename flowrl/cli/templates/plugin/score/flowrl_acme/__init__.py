"""The plug-in acme: a scorer. This module stays light; the scorer's may import a library."""

from __future__ import annotations

from flowrl.backend.protocols import BasePlugin, Capabilities, ScoreBackend, ScoreContext, Service


class AcmePlugin(BasePlugin):
    name = "acme"
    capabilities = Capabilities(services=frozenset({Service.SCORE}), devices=frozenset({"cpu"}))

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        from flowrl_acme.scorer import AcmeScorer

        return AcmeScorer(context)


plugin = AcmePlugin()
