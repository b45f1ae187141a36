"""What an executor offers a run: it opens what a plan places, wherever it runs that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import PolicyContext, ScoreContext
from flowrl.compiler import CompiledStage
from flowrl.config.executors import EXECUTORS
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RunConfig
from flowrl.ids import EngineId
from flowrl.plan.schema import Placement
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.workers import PolicyWorker


class Executor(Protocol):
    """Made with the section `runtime` of a configuration, whose limits it keeps.

    It is opened with the first thing that it opens; `close` comes after all of them are closed.

    Everything that is opened raises BackendError where its plug-in is missing or cannot do it.
    """

    @property
    def description(self) -> str:
        """Its name and where it runs things, for people."""
        ...

    def require_runnable(self, config: RunConfig, stages: Sequence[CompiledStage]) -> None:
        """Checks, before anything is opened, that it can run the stages as they are planned.

        Raises:
            FlowError: it cannot; with what to do.
        """
        ...

    def reserve(self, config: RunConfig, stages: Sequence[CompiledStage]) -> None:
        """Reserves what the stages run on, before anything is opened.

        Raises:
            BackendError: it is not there; with what is missing.
        """
        ...

    def begin(self, folder: Path) -> None:
        """Writes what workers print into `logs/` of the run's folder from now on."""
        ...

    def open_policy(
        self, placement: Placement, context: PolicyContext, *, generates: bool
    ) -> PolicyWorker:
        """Opens a role's trainer, and its engine in the same process if it generates."""
        ...

    def open_fleet(
        self,
        names: Sequence[EngineId],
        plugin: str,
        context: PolicyContext,
        *,
        export: Callable[[Path], None],
        fallback: Path,
        cores: Sequence[int],
        most: int,
    ) -> EngineFleet:
        """Opens engines in processes of their own; see `EngineFleet`.

        Args:
            most: Engines that this machine has memory for.
        """
        ...

    def open_scorers(
        self, backend: str, context: ScoreContext, rewards: RewardsConfig, *, workers: int
    ) -> Scorers:
        """Opens what scores the samples of a role.

        Args:
            rewards: Limits of each sample and of each process.
            workers: Processes.

        Raises:
            RewardError: the reward cannot be loaded; with the user's own file and line.
        """
        ...

    def open_environment(self, backend: str, context: EnvironmentContext) -> EnvironmentPool:
        """Opens an environment.

        Raises:
            BackendError: the user's class cannot be loaded.
        """
        ...

    def close(self) -> None:
        """Ends what the executor itself has started; idempotent."""
        ...


def executor_of(config: RunConfig) -> Executor:
    """Returns the executor that a configuration names."""
    module, _, name = EXECUTORS[config.executor].target.partition(":")
    return cast(Executor, getattr(import_module(module), name)(config.runtime))
