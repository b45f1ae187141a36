"""`flowrl run CONFIG --dry-run`: all that can be known of a run before anything is opened.

It compiles, checks this machine as `flowrl doctor` does, asks the plug-ins with the options of
their roles, and reads the data. No engine, trainer, scorer or environment is opened, and no run
folder is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import cast

import typer

from flowrl.api import Compiled
from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import ScoreContext, Service
from flowrl.backend.registry import require_usable
from flowrl.cli.doctor import Check, Status, check_machine, report_lines
from flowrl.compiler import CompiledStage
from flowrl.config.rewards import RewardsConfig
from flowrl.config.schema import RunConfig
from flowrl.cost.memory import format_bytes
from flowrl.errors import FlowError, raise_all
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.executor import executor_of
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.setup.user_inputs import RunInputs
from flowrl.runtime.workers import require
from flowrl.wording import counted


class _Unopened:
    """Stands for scorers and environments."""

    def close(self) -> None:
        """Does nothing."""


class _NothingOpened(LocalExecutor):
    """Checks that a plug-in can open what it is asked for, and opens nothing."""

    def open_scorers(
        self, backend: str, context: ScoreContext, rewards: RewardsConfig, *, workers: int
    ) -> Scorers:
        require(backend, Service.SCORE, context)
        return cast(Scorers, _Unopened())

    def open_environment(self, backend: str, context: EnvironmentContext) -> EnvironmentPool:
        require(backend, Service.ENVIRONMENT, context)
        return cast(EnvironmentPool, _Unopened())


def check_run(compiled: Compiled, missing: Sequence[FlowError] = ()) -> None:
    """Prints what was checked.

    Args:
        missing: What the configuration names and is not there, such as data; nothing is read then.

    Raises:
        FlowError: One error for all that would end the run.
        typer.Exit: The machine cannot run flowrl, as the report says.
    """
    config, stages = compiled.config, compiled.stages
    checks = [*check_machine(runs=config.runtime.runs), *_plans(stages)]
    problems = list(missing)
    with noted(problems):
        executor_of(config).require_runnable(config, stages)
    used = {role for stage in stages for role in stage.graph.roles} & set(config.roles)
    for name in sorted(used):
        role = config.roles[name]
        with noted(problems):
            versions = require_usable(role.plugin, name, role.options, role.engine_options)
            checks.append(Check(name=f"role {name}", status=Status.OK, found=versions))
    if not missing:
        executor = _NothingOpened(config.runtime)
        with noted(problems), closing(RunInputs(config, stages, executor=executor)) as inputs:
            checks += _inputs(inputs, config)
    print("\n".join(report_lines(checks)))
    raise_all(problems)
    if stopping := [check.name for check in checks if check.stops]:
        print(f"\nflowrl cannot run here: {', '.join(stopping)}")
        raise typer.Exit(2)
    print(f"\n{config.name} can run here; nothing was opened")


@contextmanager
def noted(problems: list[FlowError]) -> Iterator[None]:
    """Keeps the error of a check, so that the others are made too."""
    try:
        yield
    except FlowError as problem:
        problems.append(problem)


def _plans(stages: Sequence[CompiledStage]) -> Iterator[Check]:
    for stage in stages:
        plan = stage.plan
        devices = dict.fromkeys(d for placed in plan.placements for d in placed.devices)
        peaks = {device: plan.prediction.peak(device) for device in devices}
        memory = [
            f"up to {format_bytes(peak.memory.total)} on {device}"
            for device, peak in peaks.items()
            if peak is not None
        ]
        steps = counted(stage.config.train.steps, "step")
        found = f"{steps}; {', '.join(memory) or ', '.join(devices)}"
        yield Check(name=f"stage {stage.name}", status=Status.OK, found=found)


def _inputs(inputs: RunInputs, config: RunConfig) -> Iterator[Check]:
    prepared = inputs.prepared_inputs
    for role, model in prepared.models.items():
        found = "a new one" if model.fresh else str(model.folder)
        yield Check(name=f"model {role}", status=Status.OK, found=found)
    longest = max((len(prompt.prompt_ids) for prompt in prepared.train.prompts), default=0)
    found = f"{counted(len(prepared.train.prompts), 'prompt')} of up to {longest} tokens"
    yield Check(name="data", status=Status.OK, found=f"{found}, of {prepared.train.source}")
    for name, items in prepared.held_out.items():
        found = counted(len(items), "prompt")
        yield Check(name=f"held out {name}".strip(), status=Status.OK, found=found)
    for note in prepared.notes:
        yield Check(name="data", status=Status.PROBLEM, found=note)
    for role in inputs.scorers.pools:
        terms, key = config.terms_of(role)
        found = ", ".join(term.name for term in terms)
        yield Check(name=f"rewards {role}", status=Status.OK, found=f"{found} ({key})")
