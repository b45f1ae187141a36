"""The plug-in of the entry point `environment`."""

from __future__ import annotations

from flowrl.backend.environment import Environment, EnvironmentContext
from flowrl.backend.plugin import BasePlugin, Capabilities, Service


class EnvironmentPlugin(BasePlugin):
    """Runs environments that the user wrote."""

    name = "environment"
    capabilities = Capabilities(
        services=frozenset({Service.ENVIRONMENT}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset(),
        user_environment=True,
    )

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """Opens the environment that `context.environment` names."""
        # Listing the backends should not import asyncio.
        from flowrl_backends.environment.user_environment import UserEnvironment

        return UserEnvironment(context)


plugin = EnvironmentPlugin()
