"""The plug-in of the entry point `verify`; it imports its terms when a scorer opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.backend.plugin import BasePlugin, Capabilities, Service

if TYPE_CHECKING:
    from flowrl.backend.protocols import ScoreBackend, ScoreContext


class VerifyPlugin(BasePlugin):
    """Scores samples by rules."""

    name = "verify"
    capabilities = Capabilities(
        services=frozenset({Service.SCORE}), devices=frozenset({"cpu"}), dtypes=frozenset()
    )

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """Opens a scorer with the terms in `context`."""
        from flowrl_backends.verify.scorer import Scorer

        return Scorer(context)


plugin = VerifyPlugin()
