"""Program to plan: trace, lower, place. No tensor library is imported, no data is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ResourcePool
from flowrl.compiler.requests import StageRequest, plan_requests, sampling_of
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.roles import StageRoles, check_roles
from flowrl.compiler.score_bounds import check_score_bounds
from flowrl.compiler.sizes import SizedStage, check_sizes
from flowrl.compiler.warnings import warn_of, warn_of_run
from flowrl.config.load import LoadedConfig
from flowrl.config.schema import StageConfig, TrainConfig
from flowrl.cost.source import Cost
from flowrl.errors import ConfigError, PlanError, combine
from flowrl.graph import Graph, Op
from flowrl.passes import Context, PassRecord, RoleCost, annotate_cost, run_passes
from flowrl.passes.context import Decision
from flowrl.passes.logprobs import decisions_on_old_logprobs
from flowrl.passes.simplify import decisions_on_merging, merge_logprobs
from flowrl.plan import PlacementPlan, PlanRequest, make_plan, place, workload
from flowrl.plan.host import plan_sizes
from flowrl.program import Workflow, load_workflow
from flowrl.specs import GroupRelative, PolicyClip
from flowrl.specs.function import definition_of

if TYPE_CHECKING:
    from flowrl.compiler.local_options import LocalOptions

__all__ = [
    "CompiledStage",
    "ask_last_stage",
    "compile_stages",
    "lower",
    "of_no_stage",
    "sampling_of",
    "trace_stages",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage:
    """A stage, ready to be executed.

    Attributes:
        traced: What the program says.
        context: What it is lowered with.
        graph: The lowered graph, with the cost of each node.
        plan: Where and how it runs.
        placed: The same graph, with what the plan says of each node.
        local: What the plan left open on one device; None where it is over many.
    """

    name: str
    config: StageConfig
    workflow: Workflow
    traced: Graph
    context: Context
    graph: Graph
    plan: PlacementPlan
    placed: Graph
    local: LocalOptions | None = None

    def with_plan(self, plan: PlacementPlan) -> CompiledStage:
        """The stage by another plan of its graph.

        Raises:
            PlanError, GraphError: the plan is of another graph.
        """
        return replace(self, plan=plan, placed=place(self.graph, plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A stage's program, bound to its roles, and what it says."""

    name: str
    workflow: Workflow
    traced: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowered:
    """A stage's program, and what the passes made of it."""

    name: str
    workflow: Workflow
    traced: Graph
    context: Context
    graph: Graph
    decisions: tuple[Decision, ...]


def compile_stages(
    loaded: LoadedConfig,
    *,
    workflow: Workflow | str | None = None,
    pool: ResourcePool | None = None,
    cost_of: Callable[[PlanRequest], Cost] | None = None,
    given: PlacementPlan | None = None,
) -> tuple[CompiledStage, ...]:
    """Compiles every stage of a configuration.

    Args:
        workflow: Takes the place of the last stage's workflow.
        pool: The devices; by default what `cluster` says.
        cost_of: Where a stage's times come from; None takes estimates.
        given: A plan over many devices: only the stages of its graph are compiled, by this plan.

    Raises:
        ConfigError, TraceError, GraphError, PlanError, BackendError: whatever is wrong with the
            configuration, a program, its graph, a backend, or the fit on the devices; a given plan
            of other stages or sizes.
    """
    config = loaded.config
    here = config.cluster == "auto" and pool is None and given is None
    stages, requests = _asked(loaded, workflow, here=here)
    if given is not None:
        return _by_plan(loaded, stages, requests, given, cost_of)
    if pool is None:
        pool = _pool_of(config.cluster)
    placed, problems = list[CompiledStage](), list[PlanError]()
    for stage, request in zip(stages, requests, strict=True):
        if problems and not request.options.pins:
            continue
        # A single device takes no estimates.
        cost = cost_of(request) if cost_of is not None and not here else None
        of_stage = config.stage_config(stage.name)
        try:
            placed.append(_placed(loaded, stage, of_stage, request, pool, cost))
        except PlanError as error:
            if not request.options.pins:
                raise
            problems.append(error)  # those of other stages' pins are told with it
    if problems:
        raise combine(problems)
    return tuple(placed)


def _pool_of(cluster: str) -> ResourcePool:
    if cluster != "auto":
        return load_cluster(Path(cluster))
    from flowrl.cluster.discover import discover  # what asks the drivers of devices

    return discover()


def ask_last_stage(
    loaded: LoadedConfig, *, workflow: Workflow | str | None = None
) -> tuple[Graph, PlanRequest]:
    """The lowered graph of the last stage, and what is asked of a plan for other machines.

    Raises:
        ConfigError, TraceError, GraphError, PlanError, BackendError: as `compile_stages` does, but
            for the fit on devices.
    """
    stages, requests = _asked(loaded, workflow, here=False)
    return stages[-1].graph, requests[-1]


def trace_stages(loaded: LoadedConfig) -> dict[str, Graph]:
    """What the program of every stage says, checked as for other machines; nothing is planned.

    Raises:
        ConfigError, TraceError, GraphError, BackendError: as `compile_stages` does.
    """
    stages, _ = _asked(loaded, None, here=False)
    return {stage.name: stage.traced for stage in stages}


def _asked(
    loaded: LoadedConfig, workflow: Workflow | str | None, *, here: bool
) -> tuple[list[_Lowered], list[PlanRequest]]:
    """All stages, lowered and checked, with what is asked of the planner.

    Args:
        here: The plan is for this very machine.
    """
    config = loaded.config
    workflows = [
        _workflow_of(loaded, name, workflow if name == config.stages[-1] else None)
        for name in config.stages
    ]
    role_backends = RoleBackends(loaded, here=here)
    programs = [
        _traced(loaded, name, program)
        for name, program in zip(config.stages, workflows, strict=True)
    ]
    copies = _exact_copies(loaded, [program.traced for program in programs])
    stages = [_lowered(loaded, program, copies, role_backends) for program in programs]
    roles = [StageRoles(name=s.name, workflow=s.workflow, graph=s.graph) for s in stages]
    check_roles(roles, role_backends)
    sized = _sized(loaded, stages, role_backends)
    check_sizes(loaded, sized)
    check_score_bounds(loaded, sized)
    for stage in stages:
        warn_of(stage.graph, stage.context)
    warn_of_run(loaded, roles, sized, role_backends)
    asked = [
        StageRequest(
            name=s.name,
            graph=s.graph,
            decisions=s.decisions,
            max_staleness=s.context.max_staleness,
        )
        for s in stages
    ]
    kinds = {name: kind for stage in roles for name, kind in stage.kinds.items()}
    return stages, plan_requests(loaded, asked, kinds, role_backends, here=here)


def lower(workflow: Workflow) -> Graph:
    """The lowered graph of a workflow without a configuration: every default is the engine's."""
    return run_passes(workflow.trace(), Context(max_staleness=workflow.max_staleness or 0))


def _workflow_of(loaded: LoadedConfig, name: str, given: Workflow | str | None) -> Workflow:
    if isinstance(given, Workflow):
        return given
    if given is not None and not isinstance(given, str):
        raise ConfigError(
            "this is no workflow to compile",
            where=_definition(given) or "workflow",
            found=repr(given),
            expected="a function marked @fl.workflow, or a reference to one, such as mine.py:NAME",
            hint="write @fl.workflow above its `def`" if inspect.isfunction(given) else None,
        )
    last = name == loaded.config.stages[-1]
    key = "workflow" if last else f"stage.{name}.workflow"
    own = loaded.config.stage_config(name).workflow
    if given is not None:
        return load_workflow(given)
    if own is not None:
        return load_workflow(own, where=loaded.where(key))
    return load_workflow(name, where=loaded.where("stages"))


def _definition(given: object) -> str | None:
    return definition_of(given) if inspect.isfunction(given) else None


def _traced(loaded: LoadedConfig, name: str, workflow: Workflow) -> _Traced:
    """Binds and traces a stage's program."""
    stage = loaded.config.stage_config(name)
    try:
        workflow = workflow.bind(stage.bind)
        return _Traced(name=name, workflow=workflow, traced=workflow.trace(stage.args))
    except ConfigError as error:
        if error.where is not None and error.where.startswith(("args.", "bind.")):
            prefix = "" if name == loaded.config.stages[-1] else f"stage.{name}."
            error.where = loaded.where(f"{prefix}{error.where}")
        raise


def _lowered(
    loaded: LoadedConfig, program: _Traced, copies: Mapping[str, str], role_backends: RoleBackends
) -> _Lowered:
    """Lowers a stage's program."""
    context = _context(loaded, program, copies, role_backends)
    decisions: list[Decision] = []

    def note(record: PassRecord) -> None:
        if record.name == merge_logprobs.__name__:
            decisions.extend(decisions_on_merging(record.before, context))

    graph = run_passes(program.traced, context, observer=note)
    decisions += decisions_on_old_logprobs(graph, context)
    return _Lowered(
        name=program.name,
        workflow=program.workflow,
        traced=program.traced,
        context=context,
        graph=graph,
        decisions=tuple(decisions),
    )


def _context(
    loaded: LoadedConfig, program: _Traced, copies: Mapping[str, str], role_backends: RoleBackends
) -> Context:
    """What a stage is lowered with."""
    config, name = loaded.config, program.name
    stage, algorithm = config.stage_config(name), config.algorithm
    train = stage.train
    # One that the config does not name is refused after lowering, if it is still there then.
    named = [role for role in program.traced.roles if role in config.roles]
    capabilities = {role: role_backends.plugin(role).capabilities for role in named}
    return Context(
        group_size=train.group_size,
        prompts_per_step=train.prompts_per_step,
        mini_batches=train.mini_batches,
        sampling=sampling_of(stage),
        advantage=GroupRelative(std=algorithm.advantage.std),
        loss=PolicyClip(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            aggregation=algorithm.aggregation,
        ),
        max_staleness=_staleness(loaded, program, train),
        truncated=train.truncated,
        trust_rollout_logprobs=algorithm.trust_rollout_logprobs,
        shares_weights={role: capabilities[role].shares_weights for role in named},
        repeats_truncation={role: capabilities[role].repeats_truncation for role in named},
        copies={role: copies[role] for role in named if role in copies},
        train_key="train" if name == config.stages[-1] else f"stage.{name}.train",
    )


def _staleness(loaded: LoadedConfig, program: _Traced, train: TrainConfig) -> int:
    """What the program declares; what the config says, where it leaves that open."""
    declared = program.workflow.max_staleness
    if declared is None:
        return train.max_staleness
    # A 0 in the config may be its default, as in the resolved config of a run folder.
    if train.max_staleness not in (0, declared):
        prefix = "" if program.name == loaded.config.stages[-1] else f"stage.{program.name}."
        key = f"{prefix}train.max_staleness"
        raise ConfigError(
            f"workflow '{program.workflow.name}' declares max_staleness={declared}, and the config "
            f"asks for {train.max_staleness}",
            where=f"{program.workflow.source} and {loaded.where(key)}",
            expected="one bound on the age of samples",
            hint=f"leave {key} out, or max_staleness at @fl.workflow",
        )
    return declared


def _exact_copies(loaded: LoadedConfig, programs: Iterable[Graph]) -> dict[str, str]:
    """Roles that begin every stage as a copy of another one, played alike.

    A copy that some stage trains is made once, and keeps what it learnt.
    """
    known, found = loaded.config.roles, {}
    trained = {node.role for graph in programs for node in graph.of_op(Op.UPDATE)}
    for role, config in known.items():
        other = config.copy_of
        if other is None or other not in known or known[other].backend != config.backend:
            continue
        if role not in trained and config.dtype in ("auto", known[other].dtype):
            found[role] = other
    return found


def _sized(
    loaded: LoadedConfig, stages: list[_Lowered], role_backends: RoleBackends
) -> list[SizedStage]:
    sized = []
    for stage, (name, prefix) in zip(stages, loaded.stage_prefixes(), strict=True):
        own = [role for role in stage.graph.roles if loaded.config.roles[role].model is not None]
        limits = {role: role_backends.longest(role) for role in own}
        sized.append(
            SizedStage(
                name=name,
                prefix=prefix,
                traced=stage.traced,
                lowered=stage.graph,
                limits={role: limit for role, limit in limits.items() if limit is not None},
            )
        )
    return sized


def _by_plan(
    loaded: LoadedConfig,
    stages: list[_Lowered],
    requests: list[PlanRequest],
    plan: PlacementPlan,
    cost_of: Callable[[PlanRequest], Cost] | None,
) -> tuple[CompiledStage, ...]:
    """The stages of a plan's graph, by this plan, which is priced anew."""
    found = []
    for stage, request in zip(stages, requests, strict=True):
        if stage.graph.name != plan.graph:
            continue
        asked, planned = plan_sizes(request), plan.sizes
        differ = [
            f.name for f in fields(asked) if getattr(asked, f.name) != getattr(planned, f.name)
        ]
        if differ:
            raise PlanError(
                "the plan was made for other sizes",
                where=f"the plan of {plan.graph!r}: sizes.{differ[0]}",
                found=", ".join(f"{name} {getattr(planned, name)}" for name in differ),
                expected=", ".join(f"{name} {getattr(asked, name)}" for name in differ),
                hint="undo the edit, change the configuration, or make the plan again: "
                "flowrl plan CONFIG -o FILE",
            )
        config = loaded.config.stage_config(stage.name)
        found.append(
            _with_plan(stage, config, request, _priced(stage, request, plan, cost_of), None)
        )
    if not found:
        raise of_no_stage(plan, stages, where=f"the plan of {plan.graph!r}: graph")
    return tuple(found)


def of_no_stage(
    plan: PlacementPlan, stages: Sequence[CompiledStage | _Lowered], *, where: str
) -> ConfigError:
    """What is told of a plan whose graph no stage of the run has."""
    graphs = [repr(name) for name in dict.fromkeys(stage.graph.name for stage in stages)]
    are = "the stage" if len(graphs) == 1 else "one of the stages"
    return ConfigError(
        "the plan is of no stage of this run",
        where=where,
        found=f"a plan of {plan.graph!r}",
        expected=f"a plan of {' or '.join(graphs)}, {are} of this run",
        hint=f"give the configuration that has a stage {plan.graph!r}, or make a plan of this one: "
        "flowrl plan CONFIG -o FILE",
    )


def _priced(
    stage: _Lowered,
    request: PlanRequest,
    plan: PlacementPlan,
    cost_of: Callable[[PlanRequest], Cost] | None,
) -> PlacementPlan:
    """A plan with what follows from its decisions, which somebody may have edited."""
    if plan.schedule is None:
        return plan
    from flowrl.plan.groups import cost_of as estimates
    from flowrl.plan.priced.anew import priced  # with the search, its arrays

    cost = estimates(request) if cost_of is None else cost_of(request)
    return priced(stage.graph, request, plan, cost, where=f"the plan of {plan.graph!r}")


def _placed(
    loaded: LoadedConfig,
    stage: _Lowered,
    config: StageConfig,
    request: PlanRequest,
    pool: ResourcePool,
    cost: Cost | None,
) -> CompiledStage:
    plan = make_plan(stage.graph, request, pool, cost)
    local = None
    if plan.schedule is None:
        from flowrl.compiler.local_options import local_options  # of plans for one device alone

        local = local_options(loaded, config, stage.graph, plan, stage.context)
        plan = local.default(stage.graph)
    return _with_plan(stage, config, request, plan, local)


def _with_plan(
    stage: _Lowered,
    config: StageConfig,
    request: PlanRequest,
    plan: PlacementPlan,
    local: LocalOptions | None,
) -> CompiledStage:
    # The plan chooses parameter types, which bytes follow from.
    context = replace(stage.context, costs=_costs(request, stage.graph, plan))
    graph = annotate_cost(stage.graph, context)
    return CompiledStage(
        name=stage.name,
        config=config,
        workflow=stage.workflow,
        traced=stage.traced,
        context=context,
        graph=graph,
        plan=plan,
        placed=place(graph, plan),
        local=local,
    )


def _costs(request: PlanRequest, graph: Graph, plan: PlacementPlan) -> dict[str, RoleCost]:
    """Of the roles with a model, as the plan places them."""
    costs = {}
    for placement in plan.placements:
        role = request.role(placement.role)
        shape = request.shape_of(role)
        if shape is not None:
            work = workload(role, request, graph, placement.dtype)
            costs[placement.role] = RoleCost(shape=shape, work=work)
    return costs
