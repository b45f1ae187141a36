"""The Ray executor: trainers (on CPUs), engines, scorers and environments in actors.

A plan is one for this machine, as the local executor runs it; what it places in processes of their
own is in actors of the cluster, wherever Ray has room. Actors get models and weights as objects,
so nodes share no files for them. Files of rewards, environments, losses and maps go to each node by
Ray's runtime environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import PolicyContext, ScoreContext, Service
from flowrl.backend.registry import find
from flowrl.compiler import CompiledStage
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RunConfig, RuntimeConfig
from flowrl.errors import ConfigError, PlanError
from flowrl.ids import EngineId, engine_id
from flowrl.plan.local import engines_of
from flowrl.plan.schema import Placement
from flowrl.runtime.checkpoint.run_files import worker_files
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.local.engine_fleet import EngineFleet
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.trainers import Trainer
from flowrl.runtime.workers import PolicyWorker, require

if TYPE_CHECKING:  # Ray is imported by a run, and not by a check that it can begin
    from flowrl.runtime.ray.cluster import RayCluster


class RayExecutor(LocalExecutor):
    """See the module and `flowrl.runtime.executor.Executor`."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        super().__init__(runtime)
        self._own_devices: dict[str, str] = {}
        self._files: Sequence[Path] = ()

    def require_runnable(self, config: RunConfig, stages: Sequence[CompiledStage]) -> None:
        super().require_runnable(config, stages)
        if find_spec("ray") is None:
            raise ConfigError(
                "Ray is not installed",
                where="executor",
                found="ray",
                hint="pip install 'flowrl[ray]', or take executor=local",
            )
        for stage in stages:
            _require_plan(stage)

    @property
    def description(self) -> str:
        return f"ray, {self._cluster.description}"

    @cached_property
    def _cluster(self) -> RayCluster:
        from flowrl.runtime.ray.cluster import RayCluster

        return RayCluster(self._runtime, self._logs, self._files)

    def reserve(self, config: RunConfig, stages: Sequence[CompiledStage]) -> None:
        """See `Executor`: reserves the places of all engines, for the whole run."""
        self._files = worker_files(config, stages)
        used = {device for stage in stages for p in stage.plan.placements for device in p.devices}
        for device in sorted(device for device in used if _type_of(device) in _KINDS):
            own = self._cluster.own_device(_KINDS[_type_of(device)], device)
            self._own_devices[device] = own
        for stage in stages:
            for placement in stage.plan.placements:
                self._cluster.places.reserve(
                    [
                        engine_id(placement.role, number)
                        for number in range(engines_of(stage.plan, placement.role).processes)
                    ],
                    _engine_resources(placement.devices[0], config.runtime.num_threads),
                )

    def open_policy(
        self, placement: Placement, context: PolicyContext, *, generates: bool
    ) -> PolicyWorker:
        """See `Executor`: an actor of this node; on the accelerator that Ray keeps, this process.

        What is wrong with the model of an actor is raised by its first call.
        """
        if context.device != "cpu":
            device = self._own_devices.get(context.device, context.device)
            context = replace(context, device=device)
            return super().open_policy(placement, context, generates=generates)
        if Service.TRAIN not in find(placement.backend).capabilities.services:
            return super().open_policy(placement, context, generates=generates)
        from flowrl.runtime.ray.policies import ActorGroup

        for service in (Service.TRAIN, *([Service.GENERATE] if generates else [])):
            require(placement.backend, service, context)
        start = partial(
            self._cluster.start,
            f"{context.role}.train",
            "flowrl.runtime.ray.workers:run_policy",
            here=True,
        )
        opening = ("open", placement.backend, context)
        group = ActorGroup(context.role, self._cluster.node.put, start, opening, self._runtime)
        return PolicyWorker(
            role=context.role,
            context=context,
            train=Trainer(group),
            generate=group.open_engine(placement.backend, context) if generates else None,
        )

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
        """See `Executor`; the places of the cluster limit the number of engines."""
        places = self._cluster.places
        each = _engine_resources(context.device, context.num_threads)
        if (device := _type_of(context.device)) in _KINDS:
            context = replace(context, device=f"{device}:0")  # it sees no other
        return EngineFleet(
            names,
            plugin,
            context,
            export=export,
            fallback=fallback,
            start_timeout_s=self._runtime.start_timeout_s,
            silence_s=self._runtime.silence_s,
            open_channel=lambda name: self._cluster.start(
                name, "flowrl.runtime.local.engine_worker:run_engine", placed=True
            ),
            # The run has reserved those of its plan; one that joins later keeps nobody waiting.
            reserve=lambda names: places.reserve(names, each, patience_s=_JOIN_S),
            release=places.give_back,
            share=self._cluster.share,
        )

    def open_scorers(
        self, backend: str, context: ScoreContext, rewards: RewardsConfig, *, workers: int
    ) -> Scorers:
        from flowrl.runtime.ray.clients import ActorScorers

        require(backend, Service.SCORE, context)
        return ActorScorers(
            partial(
                self._cluster.start,
                f"{context.role}.score",
                "flowrl.runtime.ray.workers:run_scorers",
            ),
            ("open", backend, context, rewards, workers, self._runtime.start_timeout_s),
            self._runtime.start_timeout_s,
        )

    def open_environment(self, backend: str, context: EnvironmentContext) -> EnvironmentPool:
        from flowrl.runtime.ray.clients import ActorLoop

        plugin = require(backend, Service.ENVIRONMENT, context)
        return EnvironmentPool(
            plugin.open_environment,
            context,
            open_loop=lambda _, context, concurrency, replies: ActorLoop(
                partial(
                    self._cluster.start, context.role, "flowrl.runtime.ray.workers:run_environment"
                ),
                ("open", backend, context, concurrency),
                replies,
                self._runtime.start_timeout_s,
            ),
        )

    def close(self) -> None:
        if "_cluster" in self.__dict__:
            self._cluster.close()
        super().close()


_JOIN_S = 1.0
"""Seconds in which a place that a worker has just left comes back."""

_KINDS = {"cuda": "GPU", "npu": "NPU"}
"""Ray's names of accelerators, by the type of a plan's devices."""


def _type_of(device: str) -> str:
    return device.partition(":")[0]


def _engine_resources(device: str, num_threads: int) -> Mapping[str, float]:
    """Returns what an engine reserves: its threads' CPUs, and one accelerator if it uses any."""
    cpus = {"CPU": max(1, num_threads)}
    kind = _KINDS.get(_type_of(device))
    return cpus if kind is None else {**cpus, kind: 1}


def _require_plan(stage: CompiledStage) -> None:
    """Checks that a plan promises nothing that Ray decides."""
    plan, where = stage.plan, f"plan of {stage.name!r}"
    for placement in plan.placements:
        if placement.layout.dp > 1:
            raise PlanError(
                "the Ray executor trains a model in one process",
                where=f"roles.{placement.role}.ranks",
                found=f"{placement.layout.dp} ranks",
                expected="1",
                hint="take executor=local, or leave ranks out",
            )
    for operation in plan.operations:
        if operation.cores:
            raise PlanError(
                "the Ray executor binds no engine to a core",
                where=f"{where}: {operation.node}",
                found=f"cores {list(operation.cores)}",
                hint="take plan.kind=temporal or asynchronous, or executor=local",
            )
