"""The local executor: one process with the models, and processes of this machine around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import PolicyContext, ScoreContext, Service, TrainBackend
from flowrl.backend.registry import find
from flowrl.compiler import CompiledStage
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RunConfig, RuntimeConfig
from flowrl.ids import EngineId
from flowrl.plan.schema import Placement
from flowrl.runtime.channels import Channel
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.groups import LocalGroup
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.local.engine_in_place import EngineInPlace
from flowrl.runtime.local.engine_process import open_engine_worker
from flowrl.runtime.local.folder_model import FolderModel
from flowrl.runtime.local.ranks import RankProcesses, num_ranks
from flowrl.runtime.local.run_checks import require_runnable
from flowrl.runtime.scoring.pool import ScoringPool
from flowrl.runtime.trainers import Trainer
from flowrl.runtime.worker_logs import WorkerLogs
from flowrl.runtime.workers import PolicyWorker, require


class LocalExecutor:
    """Opens everything on this machine; see `flowrl.runtime.executor.Executor`."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self._runtime = runtime
        self._logs = WorkerLogs()

    @property
    def description(self) -> str:
        return "local, in processes of this machine"

    def require_runnable(self, config: RunConfig, stages: Sequence[CompiledStage]) -> None:
        require_runnable(config, stages)

    def reserve(self, config: RunConfig, stages: Sequence[CompiledStage]) -> None:
        """See `Executor`; there is nothing to reserve."""

    def begin(self, folder: Path) -> None:
        self._logs.begin(folder)

    def open_policy(
        self, placement: Placement, context: PolicyContext, *, generates: bool
    ) -> PolicyWorker:
        plugin = find(placement.backend)
        only_generates = generates and Service.TRAIN not in plugin.capabilities.services
        if not only_generates:
            require(placement.backend, Service.TRAIN, context)
        if generates:
            require(placement.backend, Service.GENERATE, context)
        if only_generates:
            train = cast(TrainBackend, FolderModel(context))
        elif num_ranks(context) > 1:
            train = self._ranks(placement, context)
        else:
            train = plugin.open_train(context)
        return PolicyWorker(
            role=context.role,
            context=context,
            train=Trainer(LocalGroup(f"{context.role}.train", train)),
            generate=EngineInPlace(plugin, context, train) if generates else None,
        )

    def _ranks(self, placement: Placement, context: PolicyContext) -> TrainBackend:
        with self._logs.output(f"{context.role}.train") as output:
            ranks = RankProcesses(
                placement.backend,
                context,
                start_timeout_s=self._runtime.start_timeout_s,
                timeout_s=self._runtime.stall_timeout_s,
                output=output,
            )
        return cast(TrainBackend, ranks)  # it passes every method on

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
        return EngineFleet(
            names,
            plugin,
            context,
            export=export,
            fallback=fallback,
            start_timeout_s=self._runtime.start_timeout_s,
            silence_s=self._runtime.silence_s,
            cores=cores,
            open_channel=self._open_engine,
            most=most,
        )

    def _open_engine(self, name: EngineId) -> Channel:
        with self._logs.output(name) as output:
            return open_engine_worker(output)

    def open_scorers(
        self, backend: str, context: ScoreContext, rewards: RewardsConfig, *, workers: int
    ) -> Scorers:
        require(backend, Service.SCORE, context)
        return ScoringPool(
            backend,
            context,
            timeout_s=rewards.timeout_s,
            workers=workers,
            memory_gb=rewards.memory_gb,
            start_timeout_s=self._runtime.start_timeout_s,
            output=self._logs.output,
        )

    def open_environment(self, backend: str, context: EnvironmentContext) -> EnvironmentPool:
        plugin = require(backend, Service.ENVIRONMENT, context)
        return EnvironmentPool(plugin.open_environment, context)

    def close(self) -> None:
        """See `Executor`; what it has opened is closed by those who have it."""
        self._logs.close()
