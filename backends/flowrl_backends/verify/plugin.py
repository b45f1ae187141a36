"""The plug-in of the entry point `verify`; it imports its terms when a scorer opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.backend.plugin import BackendStatus, Capabilities, Service
from flowrl.errors import BackendError

if TYPE_CHECKING:
    from flowrl.backend.environment import Environment, EnvironmentContext
    from flowrl.backend.protocols import (
        GenerateBackend,
        PolicyContext,
        ScoreBackend,
        ScoreContext,
        TrainBackend,
    )


class VerifyPlugin:
    """Scores samples by rules; it neither generates nor trains."""

    name = "verify"
    capabilities = Capabilities(
        services=frozenset({Service.SCORE}), devices=frozenset({"cpu"}), dtypes=frozenset()
    )

    def check(self) -> BackendStatus:
        """Returns that the plug-in is usable: it has no dependencies besides flowrl's."""
        return BackendStatus(usable=True)

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Raises an error: the plug-in does not provide this service."""
        raise _only_scores(context, "generate")

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """Raises an error: the plug-in does not provide this service."""
        raise _only_scores(context, "train")

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """Opens a scorer with the terms in `context`."""
        from flowrl_backends.verify.scorer import Scorer

        return Scorer(context)

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """Raises an error: the plug-in does not provide this service."""
        raise _only_scores(context, "be an environment")


def _only_scores(context: PolicyContext | EnvironmentContext, service: str) -> BackendError:
    return BackendError(
        f"backend 'verify' cannot {service}; it scores",
        where=f"roles.{context.role}.backend",
        found="verify",
        hint="use a backend that `flowrl backends` lists with that service, such as torch",
    )


plugin = VerifyPlugin()
