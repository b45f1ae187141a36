"""`flowrl simulate`: a plan on a virtual clock, with the scheduler that runs it for real."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.errors import ConfigError

if TYPE_CHECKING:
    from flowrl.api import Compiled
    from flowrl.compiler import CompiledStage
    from flowrl.sim.times import StageTimes
    from flowrl.sim.workload import Workload

__all__ = ["SimulateOptions", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What the command line asks for.

    Attributes:
        steps: Steps to simulate.
        faults: A file of faults.
        lengths: A distribution of lengths, or a file of them.
        engines: Engines of each generating role; None takes the plan's.
        profile: Measured times; None looks where `flowrl profile` writes them.
        stage: Which stage; None takes the last.
        trace: Where the trace goes; None is `RUNS/NAME.trace.json`.
        as_json: Print JSON and nothing else.
    """

    steps: int = 20
    faults: Path | None = None
    lengths: str | None = None
    engines: int | None = None
    profile: Path | None = None
    stage: str | None = None
    trace: Path | None = None
    as_json: bool = False


def run(config: Path, overrides: Sequence[str], options: SimulateOptions) -> None:
    """Compiles a configuration and simulates one of its stages.

    Raises:
        FlowError: anything wrong with the configuration or the files, a stage that cannot be
            simulated, or one in which nothing moves any more.
    """
    from flowrl import api
    from flowrl.sim.faults import Faults, read_faults
    from flowrl.sim.of_plan import model_of_stage
    from flowrl.sim.report import report_json, report_text
    from flowrl.sim.run import simulate
    from flowrl.sim.trace import Trace

    _check(options)
    compiled = api.compile(None, config, overrides=overrides)
    stage = _stage(compiled, options.stage)
    times = _times(compiled, stage, options.profile)
    engines = {
        role: options.engines or config_of.num_engines
        for role, config_of in compiled.config.roles.items()
    }
    model = model_of_stage(stage, times, num_engines=engines)
    faults = Faults()
    if options.faults is not None:
        faults = read_faults(options.faults, num_engines=len(model.engines))
    trace = Trace()
    seed = compiled.config.seed
    report = simulate(
        model,
        steps=options.steps,
        workloads=_workloads(stage, times, options.lengths, seed),
        faults=faults,
        seed=seed,
        trace=trace,
    )
    path = options.trace or compiled.config.runtime.runs / f"{compiled.config.name}.trace.json"
    try:
        trace.write(path)
    except OSError as error:
        raise ConfigError(
            f"the trace cannot be written: {error.strerror}", where=f"--trace {path}"
        ) from error
    if options.as_json:
        sys.stdout.write(report_json(report))
        return
    print(report_text(report), end="")
    left_out = f", {trace.num_left_out:,} events left out" if trace.num_left_out else ""
    print(f"trace: {path}{left_out} (open it at https://ui.perfetto.dev)")


def _check(options: SimulateOptions) -> None:
    for name, value in (("steps", options.steps), ("engines", options.engines)):
        if value is not None and value < 1:
            raise ConfigError(
                "too small a number", where=f"--{name}", found=str(value), expected="at least 1"
            )


def _stage(compiled: Compiled, name: str | None) -> CompiledStage:
    stages = {stage.name: stage for stage in compiled.stages}
    if name is None:
        return compiled.stages[-1]
    if name not in stages:
        raise ConfigError(
            "no such stage", where="--stage", found=name, expected=f"one of {', '.join(stages)}"
        )
    return stages[name]


def _times(compiled: Compiled, stage: CompiledStage, path: Path | None) -> StageTimes:
    from flowrl.cli.profile import profile_path
    from flowrl.sim.profile import load_profile, profile_times
    from flowrl.sim.times import assumed_times

    found = path or profile_path(compiled.config.runtime.runs, compiled.config.name)
    if path is not None or found.is_file():
        return profile_times(load_profile(found), stage, source=str(found))
    print(
        f"warning: there is no profile at {found}, so step times are assumed; `flowrl profile` "
        "measures them, --profile FILE names others",
        file=sys.stderr,
    )
    return assumed_times(stage)


def _workloads(
    stage: CompiledStage, times: StageTimes, lengths: str | None, seed: int
) -> dict[str, Workload]:
    from flowrl.sim.of_plan import longest_response, rollout_nodes
    from flowrl.sim.workload import open_workload

    found: dict[str, Workload] = {}
    for node in rollout_nodes(stage.graph):
        longest = longest_response(stage, node)
        text = lengths
        if text is None:
            text = f"constant:{longest}"
            print(
                f"warning: {node.id}: every response is assumed to have {longest} tokens, the most "
                "it may have; --lengths names a distribution, or a run to take them from",
                file=sys.stderr,
            )
        found[node.id] = open_workload(
            text,
            stage=stage.name,
            rollout=node.id,
            seed=seed,
            prompts=times.prompts,
            longest=longest,
        )
    return found
