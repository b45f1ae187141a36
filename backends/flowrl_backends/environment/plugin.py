"""The plug-in of the entry point `environment`."""

from __future__ import annotations

from typing import NoReturn

from flowrl.backend.environment import Environment, EnvironmentContext
from flowrl.backend.protocols import (
    BackendStatus,
    Capabilities,
    GenerateBackend,
    PolicyContext,
    ScoreBackend,
    ScoreContext,
    Service,
    TrainBackend,
)
from flowrl.errors import BackendError


class EnvironmentPlugin:
    """Runs environments that the user wrote; it neither generates nor trains nor scores."""

    name = "environment"
    capabilities = Capabilities(
        services=frozenset({Service.ENVIRONMENT}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset(),
        user_environment=True,
    )

    def check(self) -> BackendStatus:
        """Returns that the plug-in is usable: it has no dependencies besides flowrl's."""
        return BackendStatus(usable=True)

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Raises an error: the plug-in does not provide this service."""
        _refuse(context.role, "generate")

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """Raises an error: the plug-in does not provide this service."""
        _refuse(context.role, "train")

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """Raises an error: the plug-in does not provide this service."""
        _refuse(context.role, "score")

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """Opens the environment that `context.environment` names."""
        # Listing the backends should not import asyncio.
        from flowrl_backends.environment.user_environment import UserEnvironment

        return UserEnvironment(context)


def _refuse(role: str, service: str) -> NoReturn:
    raise BackendError(
        f"backend 'environment' cannot {service}; it answers the turns of a policy",
        where=f"roles.{role}.backend",
        found="environment",
        hint="use a backend that `flowrl backends` lists with that service, such as torch",
    )


plugin = EnvironmentPlugin()
