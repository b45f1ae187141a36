"""Whether the local executor can run a plan as it says; asked before a run folder is made.

A plan may have been edited by hand, or made elsewhere. What this executor takes from it: kind,
devices, types, slots, scorers' processes, and who draws (`flowrl.plan.local`). What it takes from
the graph and the configuration must be in the plan as these say, for nothing is run in some other
way than the plan says.
"""

from __future__ import annotations

from dataclasses import fields, replace

from flowrl.compiler import CompiledStage
from flowrl.errors import PlanError
from flowrl.graph import Op
from flowrl.plan.host import MAIN_PROCESS
from flowrl.plan.local import ASYNCHRONOUS, engines_of
from flowrl.plan.schema import Operation, Placement, PlacementPlan, Transport
from flowrl.runtime.child_process import core_id
from flowrl.wording import counted

__all__ = ["require_local_plan"]

_KINDS = ("temporal", "spatial", ASYNCHRONOUS)


def require_local_plan(stage: CompiledStage, *, in_process: bool = False) -> None:
    """Checks a stage's plan.

    Args:
        in_process: The executor draws in its own process only.

    Raises:
        PlanError: names what it cannot do, and what it would.
    """
    plan, where = stage.plan, f"plan of {stage.name!r}"
    if stage.local is None or plan.schedule is not None:
        raise PlanError(
            "the local executor runs plans for one device of its machine",
            where=where,
            found=f"a {plan.kind} plan over {counted(len(plan.pool.devices), 'device')}",
            hint="leave cluster=auto to run here; other plans can be simulated",
        )
    base = stage.local.base
    _require_kind(stage, where)
    _require_same("graph", plan.graph, base.graph, where)
    for name in (field.name for field in fields(plan.sizes)):
        hint = "change the configuration, or make the plan again"
        _require_same(
            f"sizes.{name}", getattr(plan.sizes, name), getattr(base.sizes, name), where, hint
        )
    _require_same("residency", plan.residency, base.residency, where)
    roles = [placement.role for placement in plan.placements]
    _require_same("placements", roles, [placement.role for placement in base.placements], where)
    for placement, mine in zip(plan.placements, base.placements, strict=True):
        _require_placement(placement, mine, f"{where}: placements of {placement.role}")
    nodes = [operation.node for operation in plan.operations]
    _require_same("operations", nodes, [operation.node for operation in base.operations], where)
    for operation, own in zip(plan.operations, base.operations, strict=True):
        _require_operation(operation, own, plan, f"{where}: operations of {operation.node}")
    for role in stage.local.request.roles:
        _require_engines(plan, role, where, in_process=in_process)


def _require_kind(stage: CompiledStage, where: str) -> None:
    assert stage.local is not None
    kind, request = stage.plan.kind, stage.local.request
    if kind not in _KINDS:
        raise PlanError(
            "this executor knows no such kind",
            where=f"{where}: kind",
            found=repr(kind),
            expected=f"one of {', '.join(_KINDS)}",
        )
    if kind == ASYNCHRONOUS and not (request.may_run_ahead or request.must_run_ahead):
        raise PlanError(
            "the workflow learns from samples of its newest weights only",
            where=f"{where}: kind",
            found=kind,
            expected="temporal or spatial",
            hint="set train.max_staleness to let samples be older",
        )
    if kind != ASYNCHRONOUS and request.must_run_ahead:
        raise PlanError(
            "a policy of the scheduler is about drawing ahead of the trainer",
            where=f"{where}: kind",
            found=kind,
            expected=ASYNCHRONOUS,
        )


def _require_same(
    key: str, found: object, expected: object, where: str, hint: str | None = None
) -> None:
    if found != expected:
        raise PlanError(
            "the plan is of another job, or changes what this executor does not take from it",
            where=f"{where}: {key}",
            found=str(found),
            expected=str(expected),
            hint=hint,
        )


def _require_placement(placement: Placement, mine: Placement, where: str) -> None:
    is_model = mine.head != "none"
    if is_model and (placement.process != MAIN_PROCESS or placement.replicas != 1):
        raise PlanError(
            "models are trained in the executor's own process",
            where=where,
            found=f"process {placement.process!r}, {counted(placement.replicas, 'replica')}",
            expected=f"process {MAIN_PROCESS!r}, 1 replica",
            hint="drawing can be in other processes: see the operation that generates",
        )
    if is_model and len(placement.devices) != 1:
        raise PlanError(
            "a model has one device here",
            where=where,
            found=", ".join(placement.devices) or "none",
            expected=", ".join(mine.devices),
        )
    if placement.replicas < 1 or (placement.num_slots < 1 <= mine.num_slots):
        raise PlanError(
            "too small a number",
            where=where,
            found=f"{placement.replicas} replicas, {placement.num_slots} slots",
            expected="at least 1 of each",
        )
    # What a run takes from the plan.
    masked = replace(
        placement,
        devices=mine.devices,
        dtype=mine.dtype,
        num_slots=mine.num_slots,
        replicas=mine.replicas,
    )
    for field in fields(masked):
        _require_same(field.name, getattr(masked, field.name), getattr(mine, field.name), where)


def _require_operation(
    operation: Operation, mine: Operation, plan: PlacementPlan, where: str
) -> None:
    masked = replace(operation, seconds=mine.seconds, devices=mine.devices, replicas=mine.replicas)
    if operation.op == Op.GENERATE:
        slots = plan.placement(operation.role or "").num_slots
        _require_same("chunk", operation.chunk, slots, where, "it is the placement's num_slots")
        masked = replace(masked, process=mine.process, cores=mine.cores, chunk=mine.chunk)
    elif operation.role is not None:
        replicas = plan.placement(operation.role).replicas
        _require_same("replicas", operation.replicas, replicas, where)
    for field in fields(masked):
        _require_same(field.name, getattr(masked, field.name), getattr(mine, field.name), where)


def _require_engines(plan: PlacementPlan, role: str, where: str, *, in_process: bool) -> None:
    engines = engines_of(plan, role)
    drawing = [one for one in plan.operations if one.op == Op.GENERATE and one.role == role]
    for one in drawing:
        at = f"{where}: operations of {one.node}"
        if one.process in {p.process for p in plan.placements} - {MAIN_PROCESS}:
            raise PlanError(
                "engines have processes of their own",
                where=at,
                found=f"process {one.process!r}, which another role has",
                expected=f"{MAIN_PROCESS!r}, or any other name",
            )
        if engines.processes == 0 and (one.replicas != 1 or one.cores):
            raise PlanError(
                "the main process draws with one engine, on whatever core it is",
                where=at,
                found=f"{counted(one.replicas, 'replica')}, cores {list(one.cores)}",
                hint=f"give the operation a process of its own, such as {one.node!r}",
            )
        if (one.replicas, one.cores) != (max(1, engines.processes), engines.cores):
            raise PlanError("the rollouts of one role have the same engines", where=at)
        if len(one.cores) not in (0, one.replicas):
            raise PlanError(
                "each engine has one core, or none has",
                where=at,
                found=f"{counted(one.replicas, 'replica')}, cores {list(one.cores)}",
            )
        for core in one.cores:
            if core_id(core) is None:
                raise PlanError(
                    "there is no such core here that a process could be bound to",
                    where=at,
                    found=str(core),
                    hint="take `cores` out to leave it to the operating system",
                )
    if engines.processes and in_process:
        raise PlanError(
            "a program that runs line by line draws in its own process",
            where=where,
            found=f"{engines.processes} engine processes of {role}",
        )
    if not engines.processes and plan.kind == ASYNCHRONOUS and not in_process:
        raise PlanError(
            "whoever draws ahead of the trainer needs a process of its own",
            where=where,
            found=f"{role} draws in {MAIN_PROCESS!r}",
            hint="give the operation that generates a process, or make the plan temporal",
        )
    for route in plan.weight_routes:
        if (
            route.destination == role
            and engines.processes
            and route.transport == Transport.IN_PLACE
        ):
            raise PlanError(
                "an engine in a process of its own cannot read the trainer's weights in place",
                where=f"{where}: weight_routes after {route.after}",
                found=str(route.transport),
                expected=str(Transport.FOLDER),
            )
