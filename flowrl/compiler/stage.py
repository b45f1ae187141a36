"""Compiles the stages of a configuration to plans, without a tensor library and without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cluster.load import load_cluster
from flowrl.cluster.pool import ResourcePool
from flowrl.compiler.lowering import LoweredStage, lower_stages
from flowrl.compiler.requests import plan_requests
from flowrl.compiler.reward_terms import check_score_bounds
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.roles import check_roles
from flowrl.compiler.sizes import check_sizes
from flowrl.compiler.warnings import warn
from flowrl.config.load import LoadedConfig
from flowrl.config.schema import RunConfig
from flowrl.cost.source import Cost
from flowrl.errors import ConfigError, PlanError, raise_all
from flowrl.graph import Graph
from flowrl.passes import RoleCost, annotate_cost
from flowrl.plan import PlacementPlan, PlanRequest, make_plan, place, workload
from flowrl.plan.host import plan_sizes
from flowrl.plan.names import device_names
from flowrl.program.workflow import Workflow

if TYPE_CHECKING:
    from flowrl.compiler.local_options import LocalOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage(LoweredStage):
    """A stage, ready to be executed; its graph has the cost of each node.

    Attributes:
        plan: Where and how it runs.
        placed: The lowered graph, with the placement of each node.
        local: What a plan for one device leaves open; None for a plan over many devices.
    """

    plan: PlacementPlan
    placed: Graph
    local: LocalOptions | None = None

    def with_plan(self, plan: PlacementPlan) -> CompiledStage:
        """Returns the stage with another plan of its graph.

        Raises:
            PlanError, GraphError: the plan is of another graph.
        """
        return replace(self, plan=plan, placed=place(self.graph, plan))


def compile_stages(
    loaded: LoadedConfig,
    *,
    workflow: Workflow | str | None = None,
    pool: ResourcePool | None = None,
    here: ResourcePool | None = None,
    cost_of: Callable[[PlanRequest], Cost] | None = None,
    given: PlacementPlan | None = None,
) -> tuple[CompiledStage, ...]:
    """Compiles every stage of a configuration.

    Args:
        workflow: Takes the place of the last stage's workflow.
        pool: The devices; by default what `cluster` says.
        here: The devices of `cluster=auto`; by default this machine's.
        cost_of: Where a stage's times come from; None takes estimates.
        given: A plan over many devices: only the stages of its graph are compiled, by this plan.

    Raises:
        ConfigError, TraceError, GraphError, PlanError, BackendError: whatever is wrong with the
            configuration, a program, its graph, a backend, or the fit on the devices; a given plan
            of other stages or sizes.
    """
    cluster = loaded.config.cluster
    on_one = cluster == "auto" and pool is None and given is None
    stages, requests = _asked(loaded, workflow, here=on_one)
    if given is not None:
        return _by_plan(stages, requests, given, cost_of)
    if pool is None:
        pool = pool_of(cluster) if here is None else here
    compiled, problems = list[CompiledStage](), list[PlanError]()
    for stage, request in zip(stages, requests, strict=True):
        if problems and not request.options.pins:
            continue
        # A single device takes no estimates.
        cost = cost_of(request) if cost_of is not None and not on_one else None
        try:
            compiled.append(_planned(loaded, stage, request, pool, cost))
        except PlanError as error:
            if not request.options.pins:
                raise
            problems.append(error)  # errors of other stages' pins are reported with it
    raise_all(problems)
    return tuple(compiled)


def pool_of(cluster: str) -> ResourcePool:
    """Returns the devices of a cluster file, or for `auto` those of this machine."""
    if cluster != "auto":
        return load_cluster(Path(cluster))
    from flowrl.cluster.discover import discover  # what asks the drivers of devices

    return discover()


def ask_last_stage(loaded: LoadedConfig) -> tuple[Graph, PlanRequest]:
    """Returns the last stage's lowered graph and its request for a plan for other machines.

    It raises what `compile_stages` does, but for the fit on devices.
    """
    stages, requests = _asked(loaded, None, here=False)
    return stages[-1].graph, requests[-1]


def trace_stages(loaded: LoadedConfig) -> dict[str, Graph]:
    """Returns the traced graph of every stage, checked as for other machines; plans nothing."""
    stages, _ = _asked(loaded, None, here=False)
    return {stage.name: stage.traced for stage in stages}


def _asked(
    loaded: LoadedConfig, workflow: Workflow | str | None, *, here: bool
) -> tuple[list[LoweredStage], list[PlanRequest]]:
    """Returns all stages, lowered and checked, with their requests to the planner.

    Args:
        here: The plan is for this very machine.
    """
    role_backends = RoleBackends(loaded, here=here)
    stages = lower_stages(loaded, role_backends, workflow)
    check_roles(stages, role_backends)
    check_sizes(stages, role_backends)
    check_score_bounds(loaded, [stage.graph for stage in stages])
    warn(stages, role_backends)
    return stages, plan_requests(stages, role_backends, here=here)


def _by_plan(
    stages: Sequence[LoweredStage],
    requests: Sequence[PlanRequest],
    plan: PlacementPlan,
    cost_of: Callable[[PlanRequest], Cost] | None,
) -> tuple[CompiledStage, ...]:
    """Returns the stages of a plan's graph with this plan, whose times are computed again."""
    compiled = []
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
        compiled.append(_with_plan(stage, request, _re_evaluated(stage, request, plan, cost_of)))
    if not compiled:
        raise of_no_stage(plan, stages, where=f"the plan of {plan.graph!r}: graph")
    return tuple(compiled)


def of_no_stage(plan: PlacementPlan, stages: Sequence[LoweredStage], *, where: str) -> ConfigError:
    """Returns the error of a plan whose graph no stage of the run has."""
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


def _re_evaluated(
    stage: LoweredStage,
    request: PlanRequest,
    plan: PlacementPlan,
    cost_of: Callable[[PlanRequest], Cost] | None,
) -> PlacementPlan:
    """Returns a plan with what follows from its decisions, which somebody may have edited."""
    if plan.schedule is None:
        return plan
    from flowrl.plan.groups import cost_of as estimates
    from flowrl.plan.priced.anew import priced  # with the search, its arrays

    cost = estimates(request) if cost_of is None else cost_of(request)
    return priced(stage.graph, request, plan, cost, where=f"the plan of {plan.graph!r}")


def _planned(
    loaded: LoadedConfig,
    stage: LoweredStage,
    request: PlanRequest,
    pool: ResourcePool,
    cost: Cost | None,
) -> CompiledStage:
    plan = make_plan(stage.graph, request, pool, cost)
    if plan.schedule is not None:
        return _with_plan(stage, request, plan)
    from flowrl.compiler.local_options import local_options  # for plans for one device alone

    local = local_options(loaded, stage, plan)
    return replace(_with_plan(stage, request, local.default(stage.graph)), local=local)


def _with_plan(stage: LoweredStage, request: PlanRequest, plan: PlacementPlan) -> CompiledStage:
    costs = {}
    for placement in plan.placements:
        role = request.role(placement.role)
        if (shape := request.shape_of(role)) is not None:
            # The plan chooses parameter types, on which numbers of bytes depend.
            work = workload(role, request, stage.graph, placement.dtype)
            costs[placement.role] = RoleCost(shape=shape, work=work)
    context = replace(stage.context, costs=costs)
    graph = annotate_cost(stage.graph, context)
    lowered = {field.name: getattr(stage, field.name) for field in fields(stage)}
    changed = {**lowered, "context": context, "graph": graph}
    return CompiledStage(**changed, plan=plan, placed=place(graph, plan))


def require_here(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    """Checks that the models of the stages can be opened on this machine.

    Raises:
        PlanError: the plan is for devices that are not here.
        ConfigError: a model without weights.
    """
    edited = config.cluster == "auto"  # the plan was made for this machine
    if edited:
        pools = [stage.local.base.pool for stage in stages if stage.local is not None]
        here = {device.address for pool in pools for device in pool.devices}
    else:
        here = {address for address, _, _ in pool_of("auto")}
    for stage in stages:
        for i, placement in enumerate(stage.plan.placements):
            missing = [device for device in placement.devices if device not in here]
            if missing:
                where = f"plan of {stage.name!r}: placements.{i}.devices"
                raise PlanError(
                    f"the plan places role {placement.role!r} on devices that are not here",
                    where=where if edited else f"cluster ({config.cluster})",
                    found=device_names(missing),
                    expected=f"devices of this machine: {', '.join(sorted(here))}",
                    hint="name one of them, or make the plan again: flowrl plan CONFIG -o FILE"
                    if edited
                    else "leave cluster=auto to run here; `flowrl plan` works for any cluster",
                )
    for name, role in config.roles.items():
        if isinstance(role.model, str) and role.model.endswith(".json"):
            raise ConfigError(
                f"{name} has the shape of a model, and no weights to run",
                where=f"roles.{name}.model",
                found=role.model,
                expected="a Hugging Face model folder, or the fields of a new model",
                hint="`flowrl plan` and `flowrl simulate` need no weights",
            )
