"""The `Plugin` protocol: the object that an entry point of the group `flowrl.backends` names.

It imports no arrays, so that finding plug-ins and reading their capabilities stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flowrl.backend.capabilities import BackendStatus, Capabilities

if TYPE_CHECKING:
    from flowrl.backend.environment import Environment, EnvironmentContext
    from flowrl.backend.protocols import (
        GenerateBackend,
        PolicyContext,
        ScoreBackend,
        ScoreContext,
        TrainBackend,
    )

__all__ = ["Plugin"]


@runtime_checkable
class Plugin(Protocol):
    """The object that an entry point of `flowrl.backends` names. Importing it is cheap."""

    @property
    def name(self) -> str:
        """The name that `roles.<name>.backend` gives."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the plug-in, on whatever machine it is installed."""
        ...

    def check(self) -> BackendStatus:
        """Returns whether it can be used here; imports nothing heavy and never raises."""
        ...

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """An engine; with `shared`, one that reads the trainer's parameters in place."""
        ...

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """A trainer."""
        ...

    def open_score(self, context: ScoreContext) -> ScoreBackend:
        """A scorer."""
        ...

    def open_environment(self, context: EnvironmentContext) -> Environment:
        """An environment."""
        ...
