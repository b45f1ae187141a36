"""The public calls: `compile`, `run` and `eager`.

    import flowrl as fl

    compiled = fl.compile(my_workflow, "config.yaml")
    print(compiled.graph, compiled.plan.to_yaml())
    result = compiled.run()
    print(result.summary.headline)

The executor and the simulator are imported by the calls that need them; compiling needs neither.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from flowrl.compiler import CompiledStage, ask_last_stage, compile_stages, trace_stages
from flowrl.compiler.stage import of_no_stage
from flowrl.config.check import check_config
from flowrl.config.check_files import names_ray
from flowrl.config.executors import EXECUTORS
from flowrl.config.load import LoadedConfig, load_config, locating
from flowrl.config.schema import RunConfig
from flowrl.config.user_functions import reward_reference, with_reward_references
from flowrl.errors import ConfigError, FlowError
from flowrl.files import encode_json
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, Reason, load_plan
from flowrl.plan.check.file_lines import at_line, lines_of
from flowrl.program.workflow import Workflow
from flowrl.user_lines import breakpoints_left_out
from flowrl.wording import listing

if TYPE_CHECKING:
    from flowrl.cluster.pool import ResourcePool
    from flowrl.cost.source import Cost
    from flowrl.observe.display import Display
    from flowrl.observe.rows import Summary
    from flowrl.runtime.eager.session import EagerSession

__all__ = [
    "Compiled",
    "ConfigLike",
    "RunResult",
    "ask_for_plan",
    "by_file",
    "compile",
    "eager",
    "priced_here",
    "resume",
    "run",
    "trace",
]

_log = logging.getLogger(__name__)

ConfigLike: TypeAlias = "str | Path | Mapping[str, object] | RunConfig | LoadedConfig"
"""A path to a YAML file, nested mappings and values, or a configuration that was already read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        folder: The run folder.
        summary: The content of its summary.json.
    """

    folder: Path
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled run: one graph and one plan for each stage.

    Attributes:
        config: The validated configuration.
        stages: The stages in the order of execution.
    """

    config: RunConfig
    stages: tuple[CompiledStage, ...]

    @property
    def graph(self) -> Graph:
        """The lowered graph of the last stage."""
        return self.stages[-1].graph

    @property
    def plan(self) -> PlacementPlan:
        """The plan of the last stage."""
        return self.stages[-1].plan

    def with_plan(self, plan: PlacementPlan | Path) -> Compiled:
        """Returns the run with another plan, or a plan's file, for the stages of its graph.

        Raises:
            ConfigError: The file is not a plan, or no stage has its graph.
            PlanError: The parts of the plan contradict each other.
        """
        # The executor does not read the predictions of an edited plan for this machine.
        given = plan if isinstance(plan, PlacementPlan) else load_plan(plan, alone=False)
        if given.schedule is not None and isinstance(plan, Path):
            given = load_plan(plan)
        if given.graph not in [stage.graph.name for stage in self.stages]:
            where = "the given plan" if isinstance(plan, PlacementPlan) else at_line(plan, "graph")
            raise of_no_stage(given, self.stages, where=where)
        stages = tuple(
            stage.with_plan(given) if stage.graph.name == given.graph else stage
            for stage in self.stages
        )
        return replace(self, stages=stages)

    def run(self, *, display: Display | None = None) -> RunResult:
        """Executes the plan in a new run folder.

        Args:
            display: The display of progress; by default lines on standard output, live on a
                terminal.

        Raises:
            FlowError: An error ended the run early. (KeyboardInterrupt after a clean Ctrl-C.)
        """
        from flowrl.runtime.run import run_local

        folder, summary = run_local(self.config, self.stages, display=display)
        return RunResult(folder=folder, summary=summary)


def compile(  # noqa: A001  (its name as `fl.compile`)
    workflow: Workflow | str | None,
    config: ConfigLike,
    *,
    overrides: Sequence[str] = (),
    pool: ResourcePool | None = None,
    measured: bool = True,
    runs: bool = True,
    plan: PlacementPlan | None = None,
) -> Compiled:
    """Traces, lowers and places every stage of a configuration.

    Args:
        workflow: The last stage's workflow, or a reference to one (`grpo`, `mine.py:NAME`); None
            for the configuration's.
        config: The configuration; see `ConfigLike`.
        overrides: Overrides as `key=value` strings.
        pool: The devices to plan for; by default those of `cluster`, which is this machine.
        measured: True to choose plans for this machine by the times that `flowrl profile` measured,
            if there are any.
        runs: True if the result will be executed; otherwise its data need not exist.
        plan: An existing plan for other machines: only the stages with its graph are compiled, and
            nothing is planned. (`Compiled.with_plan` takes a plan for this machine.)

    Raises:
        FlowError: The configuration or a program is invalid; raised before a tensor library is
            imported or data is read.
    """
    loaded = _load(config, overrides)
    return _compile(workflow, loaded, pool, chooses=measured, runs=runs, given=plan)


def _compile(
    workflow: Workflow | str | None,
    loaded: LoadedConfig,
    pool: ResourcePool | None = None,
    *,
    chooses: bool = True,
    runs: bool = True,
    given: PlacementPlan | None = None,
) -> Compiled:
    check_config(loaded, other_machines=given is not None or not runs)
    if pool is None and given is None and names_ray(loaded.config.cluster):
        from flowrl.runtime.ray_pool import ray_pool

        pool = ray_pool(loaded.config.cluster)
    here: ResourcePool | None = None
    if pool is None and given is None and loaded.config.cluster == "auto":
        here = pool_here(loaded.config.executor)
    # In a program that runs line by line, breakpoints are for the execution, not the trace.
    is_eager = loaded.config.executor == "eager"
    with locating(loaded), breakpoints_left_out() if is_eager else nullcontext():
        stages = compile_stages(
            loaded,
            workflow=workflow,
            pool=pool,
            here=here,
            cost_of=measured_costs(loaded),
            given=given,
        )
    if chooses and given is None and not is_eager and pool is None:
        stages = _fastest(loaded, stages)
    reference, config = _reference(workflow), loaded.config
    if reference is not None:
        # So that the run folder's config names it, and `flowrl run --resume` finds it.
        config = config.model_copy(update={"workflow": reference})
    return Compiled(config=config, stages=stages)


def pool_here(executor: str) -> ResourcePool | None:
    """Returns the devices of `cluster: auto` where an executor does not mean this machine's."""
    if executor != "ray":
        return None
    from flowrl.runtime.ray_pool import joined_pool

    return joined_pool()


def profile_path(runs: Path, name: str) -> Path:
    """Returns the default path of a config's profile."""
    return runs / f"{name}.profile.json"


def profile_of(config: RunConfig) -> Path:
    """Returns the path of a config's profile: `plan.profile`, or the default path."""
    return config.plan.profile or profile_path(config.runtime.runs, config.name)


def _fastest(loaded: LoadedConfig, stages: tuple[CompiledStage, ...]) -> tuple[CompiledStage, ...]:
    """Returns the stages with the plans that are fastest by a profile of this machine.

    A profile measures a config's last stage and is used for that stage only. Without a profile, and
    for a machine that a file describes, plans are ranked by assumed times.
    """
    config, stage = loaded.config, stages[-1]
    path = profile_of(config)
    if stage.local is None:
        return stages
    if loaded.config.cluster != "auto" or not path.is_file():
        stage = _estimated(config, stage)
        left_behind = _left_behind(loaded, path)
        if left_behind is not None:
            stage = _with_reason(stage, left_behind)
        return (*stages[:-1], stage)
    from flowrl.sim.choose_plan import choose_plan
    from flowrl.sim.profile import load_profile, profile_times

    try:
        times = profile_times(load_profile(path), stage, source=str(path))
        chosen = choose_plan(stage, times, config.plan, config.seed)
    except FlowError as reason:
        if config.plan.profile is not None:
            raise
        # An outdated file at the default path; the plan's reasons say that it is not used.
        why = f"{path} cannot be used: {reason.what}"
        left = Reason(subject="profile", choice="none", why=why)
        chosen = _with_reason(_estimated(config, stage), left)
    return (*stages[:-1], chosen)


def priced_here(config: RunConfig, stage: CompiledStage, plan: PlacementPlan) -> PlacementPlan:
    """Returns a plan for this machine with its step time, reasons and alternatives re-evaluated.

    They are computed from a profile if there is one, otherwise from assumed times.

    Args:
        config: The configuration.
        stage: The stage with the planner's own plan.
        plan: A plan that the executor can run.

    Raises:
        FlowError: The profile that `plan.profile` names cannot be used.
    """
    if stage.local is None or not stage.local.request.roles or stage.local.request.in_process:
        return plan
    from flowrl.sim.price_local import price_local
    from flowrl.sim.profile import load_profile, profile_times

    path = profile_of(config)
    if config.cluster == "auto" and path.is_file():
        try:
            times = profile_times(load_profile(path), stage, source=str(path))
            return price_local(stage, plan, config.plan, config.seed, times)
        except FlowError:
            if config.plan.profile is not None:
                raise
            # The reasons of the planner's own plan say why the profile is not used.
    try:
        return price_local(stage, plan, config.plan, config.seed, None)
    except FlowError as reason:
        left = Reason(subject="estimates", choice="none", why=reason.what)
        unpriced = replace(plan.prediction, step_s=None, confidence=())
        return replace(plan, prediction=unpriced, reasons=(left,), alternatives=())


def by_file(
    config: RunConfig,
    stages: Sequence[CompiledStage],
    given: PlacementPlan,
    path: Path,
    *,
    timed: bool,
) -> PlacementPlan:
    """Returns the plan of a file for this machine, checked and re-evaluated from its decisions.

    The decisions may have been edited by hand.

    Args:
        config: The configuration.
        stages: The stages that run by the plan.
        given: The plan in the file.
        path: The file, for messages.
        timed: True if the last of the stages is the run's last, the only one with known times.

    Raises:
        ConfigError, PlanError: The executor cannot run the plan; with line and key.
    """
    from flowrl.plan.settle_local import settled
    from flowrl.runtime.local.plan_checks import require_local_plan

    last = stages[-1]
    assert last.local is not None
    plan = settled(given, last.local.base, last.graph)
    with lines_of(path):
        for stage in stages:
            require_local_plan(stage.with_plan(plan))
    return priced_here(config, last, plan) if timed else plan


def _left_behind(loaded: LoadedConfig, path: Path) -> Reason | None:
    """Returns the reason for ignoring a profile whose name differs from that of the run."""
    config = loaded.config
    if config.cluster != "auto" or config.plan.profile is not None or not loaded.is_changed("name"):
        return None
    there = sorted(config.runtime.runs.glob("*.profile.json"))
    if not there:
        return None
    names = listing([str(profile) for profile in there[:3]])
    return Reason(
        subject="profile",
        choice="none",
        why=f"there is no {path}, the profile of this run's name (there is {names}); "
        "plan.profile=FILE takes another",
    )


def _estimated(config: RunConfig, stage: CompiledStage) -> CompiledStage:
    """Returns the stage with the best plan by assumed times; unchanged without such times."""
    from flowrl.sim.estimate_plans import estimated_plan

    try:
        return estimated_plan(stage, config.plan, config.seed)
    except FlowError as reason:
        left = Reason(subject="estimates", choice="none", why=reason.what)
        return _with_reason(stage, left)


def _with_reason(stage: CompiledStage, reason: Reason) -> CompiledStage:
    return stage.with_plan(replace(stage.plan, reasons=(*stage.plan.reasons, reason)))


def measured_costs(loaded: LoadedConfig) -> Callable[[PlanRequest], Cost] | None:
    """Returns the cost model of measured times (`plan.profile`); None without a profile.

    Raises:
        ConfigError: The profile cannot be read, or no catalogue has its device.
    """
    path = loaded.config.plan.profile
    if path is None:
        return None
    from flowrl.sim.profile import load_profile
    from flowrl.sim.profiled_cost import profiled_cost

    where = loaded.where("plan.profile")
    profile = load_profile(path, named_by=where)
    if profile.machine.doubt is not None:
        _log.warning("%s: the profile's times were %s", where, profile.machine.doubt)
    return lambda request: profiled_cost(profile, request, where=where)


def trace(config: ConfigLike, *, overrides: Sequence[str] = ()) -> dict[str, Graph]:
    """Traces the program of each stage and returns the graphs by the stage's name.

    Nothing is planned, so neither the data nor suitable devices need to exist.

    Raises:
        FlowError: The configuration or a program is invalid.
    """
    loaded = _load(config, overrides)
    check_config(loaded, other_machines=True)
    is_eager = loaded.config.executor == "eager"
    with locating(loaded), breakpoints_left_out() if is_eager else nullcontext():
        return trace_stages(loaded)


def ask_for_plan(
    config: ConfigLike, *, overrides: Sequence[str] = ()
) -> tuple[Graph, PlanRequest, Cost | None]:
    """Returns the last stage's lowered graph, its plan request for other machines, and its cost.

    The cost is that of measured times; None without any.

    Raises:
        FlowError: The configuration is invalid.
    """
    loaded = _load(config, overrides)
    check_config(loaded, other_machines=True)
    with locating(loaded):
        graph, request = ask_last_stage(loaded)
        cost_of = measured_costs(loaded)
        return graph, request, None if cost_of is None else cost_of(request)


def run(
    workflow: Workflow | str | None,
    config: ConfigLike,
    *,
    overrides: Sequence[str] = (),
    rewards: Sequence[Callable[..., object]] = (),
    display: Display | None = None,
    executor: str | None = None,
) -> RunResult:
    """Compiles and executes a workflow; see `compile` and `Compiled.run`.

    Args:
        workflow: The workflow, as for `compile`.
        config: The configuration, as for `compile`.
        overrides: Overrides as `key=value` strings.
        rewards: Reward functions, in place of the configuration's `rewards.terms`; each is at the
            top level of a file, which scorer processes run. A term's `use` may be a function too.
        display: The display of progress, as for `Compiled.run`.
        executor: The executor, in place of the configuration's: `eager` runs the program line by
            line.
    """
    if sys.modules["__main__"].__spec__ is not None and (
        sys.modules["__main__"].__spec__.name == "flowrl.runtime.scoring.worker"
    ):
        raise ConfigError(
            "a scorer process runs the file of a reward, and the file starts a run",
            where="fl.run",
            hint='put the call under `if __name__ == "__main__":`, or the reward into its own file',
        )
    if rewards:
        terms = encode_json([{"use": reward_reference(function)} for function in rewards])
        overrides = [*overrides, f"rewards.terms={terms}"]
    loaded = _load(config, overrides)
    if executor is not None:
        loaded = _with_executor(loaded, executor)
    return _compile(workflow, loaded).run(display=display)


def eager(
    workflow: Workflow | str | None,
    config: ConfigLike,
    *,
    overrides: Sequence[str] = (),
    display: Display | None = None,
) -> EagerSession:
    """Opens a run that executes step by step and line by line, in a notebook or at a prompt.

        with fl.eager(mine, "config.yaml") as session:
            made = session.step()
            print(made.metrics.reward_mean, made["verifier.score"])

    Args:
        workflow: The workflow, as for `compile`.
        config: The configuration, as for `compile`.
        overrides: Overrides as `key=value` strings.
        display: The display of progress; by default lines on standard output.

    Raises:
        FlowError: The configuration or the program is invalid; raised before the first step.
    """
    from flowrl.runtime.eager.session import EagerSession

    compiled = _compile(workflow, _with_executor(_load(config, overrides), "eager"))
    return EagerSession(compiled.config, compiled.stages, display=display)


def _with_executor(loaded: LoadedConfig, executor: str) -> LoadedConfig:
    if executor not in EXECUTORS:
        raise ConfigError(
            "no such executor",
            where="executor",
            found=repr(executor),
            expected=f"one of {listing(EXECUTORS)}",
            hint="use one of them, or omit executor to use the configuration's",
        )
    config = loaded.config.model_copy(update={"executor": executor})
    return replace(loaded, config=config)


def resume(
    compiled: Compiled,
    folder: str | Path,
    *,
    display: Display | None = None,
    accept_changes: bool = False,
) -> RunResult:
    """Continues the run in `folder` from its latest checkpoint.

        compiled = fl.compile(None, "runs/mine/config.yaml")
        fl.resume(compiled, "runs/mine")

    Args:
        compiled: The compiled configuration of the folder.
        folder: The run folder.
        display: The display of progress, as for `Compiled.run`.
        accept_changes: True to continue although files that the run reads (rewards, environments,
            data, models, programs) have changed since it began.

    Raises:
        CheckpointError: The folder has no run, its checkpoint is damaged or belongs to another run,
            or a file has changed; the message names each changed file.
    """
    from flowrl.runtime.checkpoint.resume import resume_local

    path = Path(folder)
    stages = tuple(_as_begun(compiled, stage, path) for stage in compiled.stages)
    path, summary = resume_local(
        compiled.config, stages, path, display=display, accept_changes=accept_changes
    )
    return RunResult(folder=path, summary=summary)


def _as_begun(compiled: Compiled, stage: CompiledStage, folder: Path) -> CompiledStage:
    """Returns a stage with the plan of a run folder, so that a run continues with its first plan.

    The plan may have been edited; then its derived parts are recomputed, and each is logged.
    """
    from flowrl.plan.priced.changes import local_changes

    written = folder / f"plan.{stage.name}.json"
    if stage.local is None or stage.local.request.in_process or not written.is_file():
        return stage
    given = load_plan(written, alone=False)
    if given.kind == "":
        return stage  # from a version without this choice, or from an eager run
    nodes = [operation.node for operation in given.operations]
    if nodes != [operation.node for operation in stage.plan.operations]:
        return stage  # from another workflow, which the executor reports
    began, now = (
        {one.role: one.layout.dp for one in plan.placements} for plan in (given, stage.plan)
    )
    if now != began:
        ranks = (
            f"{role}: {began[role]} -> {now[role]}" for role in now if now[role] != began[role]
        )
        _log.warning("%s: made again, for another number of ranks (%s)", written, ", ".join(ranks))
        return stage
    timed = stage is compiled.stages[-1]
    plan = by_file(compiled.config, [stage], given, written, timed=timed)
    changes = list(local_changes(given, plan, written))
    for line in changes:
        _log.warning("%s", line)
    return stage.with_plan(plan if changes else given)


def _reference(workflow: Workflow | str | None) -> str | None:
    """Returns the workflow's reference for a config; None if there is none (a local function)."""
    if workflow is None or isinstance(workflow, str):
        return workflow
    name, module = workflow.name, sys.modules.get(workflow.__module__)
    file: str | None = getattr(module, "__file__", None)
    value: object = getattr(module, name, None)
    if file is None or not file.endswith(".py") or value is not workflow:
        return None
    return f"{Path(file).resolve()}:{name}"


def _load(config: ConfigLike, overrides: Sequence[str]) -> LoadedConfig:
    match config:
        case str() | Path():
            return load_config(Path(config), overrides)
        case RunConfig():
            written = config.model_dump(mode="json", exclude_unset=True)
            return load_config(None, overrides, base=written)
        case LoadedConfig():
            if overrides:
                raise ConfigError(
                    "overrides belong to the call that reads the configuration",
                    where="overrides",
                    found=", ".join(overrides),
                    hint="pass them to load_config, or pass a path instead of a read configuration",
                )
            return config
        case Mapping():
            return load_config(None, overrides, base=with_reward_references(config))
    raise ConfigError(
        "this is not a configuration",
        where="config",
        found=repr(config),
        expected="a path to a YAML file, nested values, or a configuration that was already read",
        hint='for example fl.compile(None, "configs/quickstart.yaml")',
    )
