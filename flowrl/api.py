"""The public calls: `compile`, `run` and `eager`.

    import flowrl as fl

    compiled = fl.compile(my_workflow, "config.yaml")
    print(compiled.graph, compiled.plan.to_yaml())
    result = compiled.run()
    print(result.summary.headline)

Each call imports the executor or the simulator when it needs it: compiling needs neither.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from flowrl.compiler import CompiledStage, ask_last_stage, compile_stages, trace_stages
from flowrl.compiler.stage import of_no_stage
from flowrl.config.check import check_config
from flowrl.config.check_files import names_ray
from flowrl.config.load import LoadedConfig, load_config, locating
from flowrl.config.nearest import listing
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError, FlowError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, Reason, load_plan
from flowrl.plan.check.file_lines import at_line, lines_of
from flowrl.program import Workflow
from flowrl.program.source import breakpoints_left_out

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
"""A path to a YAML file, plain nested values, or a configuration that was already read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run left behind.

    Attributes:
        folder: The run folder.
        summary: What its summary.json holds.
    """

    folder: Path
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled run: one graph and one plan for each stage.

    Attributes:
        config: The validated configuration.
        stages: In the order they run.
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
        """The run with another plan, or a plan's file, for the stages of its graph.

        Raises:
            ConfigError: the file is no plan, or of no stage's graph.
            PlanError: the parts of the plan contradict each other.
        """
        # What an edited one for this machine predicts is of no matter to the executor.
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
            display: Shows progress; by default lines on standard output, live on a terminal.

        Raises:
            FlowError: whatever ends the run early; KeyboardInterrupt after a clean Ctrl-C.
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
            takes the one that the configuration names.
        config: See `ConfigLike`.
        overrides: `key=value` texts.
        pool: Devices to plan for; by default what `cluster` says, which is this machine.
        measured: Plans for this machine are chosen by the times that `flowrl profile` measured, if
            it did.
        runs: It is to be run; if it is only looked at, its data need not be there.
        plan: One that was made before, for other machines: only the stages that it is of are
            compiled, and nothing is planned. (`Compiled.with_plan` takes one for this machine.)

    Raises:
        FlowError: anything that is wrong, before a tensor library is imported or data is read.
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
    # A breakpoint in a program that runs line by line is meant for lines that have values.
    is_eager = loaded.config.executor == "eager"
    with locating(loaded), breakpoints_left_out() if is_eager else nullcontext():
        stages = compile_stages(
            loaded, workflow=workflow, pool=pool, cost_of=measured_costs(loaded), given=given
        )
    if chooses and given is None and not is_eager and pool is None:
        stages = _fastest(loaded, stages)
    reference, config = _reference(workflow), loaded.config
    if reference is not None:
        # So that the run folder's config names it, and `flowrl run --resume` finds it.
        config = config.model_copy(update={"workflow": reference})
    return Compiled(config=config, stages=stages)


def profile_path(runs: Path, name: str) -> Path:
    """Where a config's profile is, if nobody says otherwise."""
    return runs / f"{name}.profile.json"


def profile_of(config: RunConfig) -> Path:
    """Where a config's profile is: where `plan.profile` says, or `flowrl profile` writes it."""
    return config.plan.profile or profile_path(config.runtime.runs, config.name)


def _fastest(loaded: LoadedConfig, stages: tuple[CompiledStage, ...]) -> tuple[CompiledStage, ...]:
    """The stages by the plans that are fastest by a profile of this machine, where there is one.

    A profile is of a config's last stage; it is used for it alone. Without one, and for a machine
    that a file describes, plans are ranked by assumed times.
    """
    config, stage = loaded.config, stages[-1]
    path = profile_of(config)
    if stage.local is None:
        return stages
    if loaded.config.cluster != "auto" or not path.is_file():
        stage = _estimated(config, stage)
        left_behind = _left_behind(loaded, path)
        if left_behind is not None:
            reasons = (*stage.plan.reasons, left_behind)
            stage = stage.with_plan(replace(stage.plan, reasons=reasons))
        return (*stages[:-1], stage)
    from flowrl.sim.choose_plan import choose_plan
    from flowrl.sim.profile import load_profile, profile_times

    try:
        times = profile_times(load_profile(path), stage, source=str(path))
        chosen = choose_plan(stage, times, config.plan, config.seed)
    except FlowError as reason:
        if config.plan.profile is not None:
            raise
        # It lies there from another time; that it is not used is told with the plan.
        why = f"{path} cannot be used: {reason.what}"
        left = Reason(subject="profile", choice="none", why=why)
        chosen = _estimated(config, stage)
        chosen = chosen.with_plan(replace(chosen.plan, reasons=(*chosen.plan.reasons, left)))
    return (*stages[:-1], chosen)


def priced_here(config: RunConfig, stage: CompiledStage, plan: PlacementPlan) -> PlacementPlan:
    """A plan's file for this machine, with the step, the reasons and the alternatives that its
    decisions have: by a profile where there is one, by assumed times otherwise.

    Args:
        stage: By the planner's own plan.
        plan: That the executor can run.

    Raises:
        FlowError: the profile that `plan.profile` names cannot be used.
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
            # Why it is not used is told with the planner's own plan, and so with this one.
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
    """A plan's file for this machine, with what follows from its decisions, which a hand may have
    edited: checked, and priced by them.

    Args:
        stages: That run by it.
        given: What the file says.
        timed: The last of them is the last of the run, of which alone times are known.

    Raises:
        ConfigError, PlanError: the executor cannot run it; with line and key.
    """
    from flowrl.plan.settle_local import settled
    from flowrl.runtime.local.plan_checks import require_local_plan

    last = stages[-1]
    assert last.local is not None
    plan = settled(given, last.local.base, last.graph)
    with lines_of(path):
        for stage in stages:
            require_local_plan(stage.with_plan(plan), in_process=config.executor == "eager")
    return priced_here(config, last, plan) if timed else plan


def _left_behind(loaded: LoadedConfig, path: Path) -> Reason | None:
    """Of a profile that has another name than the command line gives the run."""
    config = loaded.config
    if config.cluster != "auto" or config.plan.profile is not None or not loaded.is_changed("name"):
        return None
    there = sorted(config.runtime.runs.glob("*.profile.json"))
    if not there:
        return None
    names = listing([str(one) for one in there[:3]])
    return Reason(
        subject="profile",
        choice="none",
        why=f"there is no {path}, and the name of a run says which is taken (there is {names}); "
        "plan.profile=FILE takes another",
    )


def _estimated(config: RunConfig, stage: CompiledStage) -> CompiledStage:
    """The stage by a plan that is ranked by assumed times; as it is where none can be assumed."""
    from flowrl.sim.estimate_plans import estimated_plan

    try:
        return estimated_plan(stage, config.plan, config.seed)
    except FlowError as reason:
        left = Reason(subject="estimates", choice="none", why=reason.what)
        return stage.with_plan(replace(stage.plan, reasons=(*stage.plan.reasons, left)))


def measured_costs(loaded: LoadedConfig) -> Callable[[PlanRequest], Cost] | None:
    """Times that were measured (`plan.profile`) in the place of estimates; None without any.

    Raises:
        ConfigError: a profile that cannot be read, or of a device that no catalogue has.
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
    """What the program of each stage says, by the stage's name. Nothing is planned, so neither its
    data nor devices that it fits need be there.

    Raises:
        FlowError: anything else that is wrong with the configuration or a program.
    """
    loaded = _load(config, overrides)
    check_config(loaded, other_machines=True)
    is_eager = loaded.config.executor == "eager"
    with locating(loaded), breakpoints_left_out() if is_eager else nullcontext():
        return trace_stages(loaded)


def ask_for_plan(
    config: ConfigLike, *, overrides: Sequence[str] = ()
) -> tuple[Graph, PlanRequest, Cost | None]:
    """The last stage's lowered graph, what it asks of a planner for other machines, and measured
    times if there are any.

    Raises:
        FlowError: anything that is wrong with the configuration.
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
    display: Display | None = None,
    executor: Literal["local", "eager"] | None = None,
) -> RunResult:
    """Compiles and executes; see `compile` and `Compiled.run`.

    Args:
        executor: Takes the place of the configuration's: `eager` runs the program line by line.
    """
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
    """Opens a run that is made step by step and line by line, in a notebook or at a prompt.

        with fl.eager(mine, "config.yaml") as session:
            made = session.step()
            print(made.metrics.reward_mean, made["verifier.score"])

    Args:
        workflow: As for `compile`; likewise the configuration.
        display: Is told of the run; by default lines on standard output.

    Raises:
        FlowError: whatever is wrong, before the first step.
    """
    from flowrl.runtime.eager.session import EagerSession

    compiled = _compile(workflow, _with_executor(_load(config, overrides), "eager"))
    return EagerSession(compiled.config, compiled.stages, display=display)


def _with_executor(loaded: LoadedConfig, executor: Literal["local", "eager"]) -> LoadedConfig:
    if executor not in ("local", "eager"):
        raise ConfigError(
            "no such executor",
            where="executor",
            found=repr(executor),
            expected="local or eager",
            hint="take one of them, or leave it out to take the configuration's",
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
    """Goes on with the run in `folder` from its latest checkpoint.

        compiled = fl.compile(None, "runs/mine/config.yaml")
        fl.resume(compiled, "runs/mine")

    Args:
        compiled: Of the configuration that the folder holds.
        accept_changes: Goes on although files that the run reads (rewards, environments, data,
            models, programs) are not what it began with.

    Raises:
        CheckpointError: no run is there, its checkpoint is damaged or of another run, or a file
            has changed; each changed file is named.
    """
    from flowrl.runtime.checkpoint.resume import resume_local

    path = Path(folder)
    stages = tuple(_as_begun(compiled, stage, path) for stage in compiled.stages)
    path, summary = resume_local(
        compiled.config, stages, path, display=display, accept_changes=accept_changes
    )
    return RunResult(folder=path, summary=summary)


def _as_begun(compiled: Compiled, stage: CompiledStage, folder: Path) -> CompiledStage:
    """A stage by the plan that a run folder holds; a run goes on as it began, or as an edit of that
    plan says. What follows from an edit is made anew, and logged."""
    from flowrl.plan.priced.changes import local_changes

    written = folder / f"plan.{stage.name}.json"
    if stage.local is None or stage.local.request.in_process or not written.is_file():
        return stage
    given = load_plan(written, alone=False)
    if given.kind == "":
        return stage  # older than this choice, or of a line by line run, which knows none
    nodes = [operation.node for operation in given.operations]
    if nodes != [operation.node for operation in stage.plan.operations]:
        return stage  # of another workflow, which the executor tells of
    timed = stage is compiled.stages[-1]
    plan = by_file(compiled.config, [stage], given, written, timed=timed)
    told = list(local_changes(given, plan, written))
    for line in told:
        _log.warning("%s", line)
    return stage.with_plan(plan if told else given)


def _reference(workflow: Workflow | str | None) -> str | None:
    """What names the workflow in a config; None where nothing can (one defined in a function)."""
    if workflow is None or isinstance(workflow, str):
        return workflow
    name, module = workflow.name, sys.modules.get(workflow.__module__)
    file: str | None = getattr(module, "__file__", None)
    found: object = getattr(module, name, None)
    if file is None or not file.endswith(".py") or found is not workflow:
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
                    hint="give them to load_config, or a path in the place of what was read",
                )
            return config
        case Mapping():
            return load_config(None, overrides, base=config)
    raise ConfigError(
        "this is no configuration",
        where="config",
        found=repr(config),
        expected="a path to a YAML file, nested values, or a configuration that was read before",
        hint='for example fl.compile(None, "configs/quickstart.yaml")',
    )
