"""Checks, before a run folder is made, that the local executor can run a plan exactly.

A plan may have been edited by hand, or made on another machine. This executor takes from it the
kind, devices, types, slots, scorer processes, and the processes that generate
(`flowrl.plan.local`). Everything else in the plan must be as the graph and the configuration have
it, because a plan is never run in another way than it is written.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from flowrl.compiler import CompiledStage
from flowrl.cost.layout import Layout
from flowrl.errors import PlanError
from flowrl.graph import Op
from flowrl.plan.host import MAIN_PROCESS
from flowrl.plan.local import ASYNCHRONOUS, LocalEngines, engines_of, over_budget
from flowrl.plan.schema import Operation, Placement, PlacementPlan, Transport
from flowrl.runtime.local.processes import core_id
from flowrl.wording import counted

_UNDO = (
    "undo the edit, or put it into the configuration and make the plan again: "
    "flowrl plan CONFIG -o FILE"
)

_KINDS = ("temporal", "spatial", ASYNCHRONOUS)


def require_local_plan(stage: CompiledStage) -> None:
    """Checks a stage's plan.

    Raises:
        PlanError: names what it cannot do, and what it would.
    """
    plan, where = stage.plan, f"plan of {stage.name!r}"
    require_plan_for_one(plan, where)
    assert stage.local is not None  # as of every plan for one device
    base = stage.local.base
    _require_kind(stage, where)
    _require_same(f"{where}: graph", plan.graph, base.graph)
    _require_fields(f"{where}: sizes", plan.sizes, base.sizes)
    _require_same(f"{where}: residency", plan.residency, base.residency)
    roles = [placement.role for placement in plan.placements]
    _require_same(f"{where}: placements", roles, [placement.role for placement in base.placements])
    for i, (placement, compiled) in enumerate(zip(plan.placements, base.placements, strict=True)):
        _require_placement(placement, compiled, f"{where}: placements.{i}")
    nodes = [operation.node for operation in plan.operations]
    _require_same(f"{where}: operations", nodes, [operation.node for operation in base.operations])
    for i, (operation, own) in enumerate(zip(plan.operations, base.operations, strict=True)):
        _require_operation(operation, own, plan, f"{where}: operations.{i}")
    request = stage.local.request
    for role in request.roles:
        _require_engines(plan, role, where, in_process=request.in_process)
    _require_routes(plan, base, where)
    if (lack := over_budget(plan)) is not None:
        raise PlanError(
            "this machine does not hold the plan",
            where=f"{where}: operations",
            found=lack,
            hint="take fewer replicas for what generates, or undo the edit",
        )


def require_plan_for_one(plan: PlacementPlan, where: str) -> None:
    """Raises PlanError for a plan over many devices."""
    if plan.schedule is not None:
        devices = [
            device for device in plan.pool.devices if device.type != "cpu"
        ] or plan.pool.devices
        raise PlanError(
            "the local executor runs plans for one device of its machine",
            where=where,
            found=f"a {plan.kind} plan over {counted(len(devices), 'device')}",
            hint="`flowrl run CONFIG` with cluster: auto plans for this machine; this plan can be "
            "simulated: flowrl simulate CONFIG --plan FILE",
        )


def _require_kind(stage: CompiledStage, where: str) -> None:
    assert stage.local is not None
    kind, request = stage.plan.kind, stage.local.request
    if kind not in _KINDS:
        raise PlanError(
            "this executor knows no such kind",
            where=f"{where}: kind",
            found=repr(kind),
            expected=f"one of {', '.join(_KINDS)}",
            hint="write one of them",
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
            "a policy of the scheduler is about generating ahead of the trainer",
            where=f"{where}: kind",
            found=kind,
            expected=ASYNCHRONOUS,
            hint=f"write kind: {ASYNCHRONOUS}, or take the policy out of the configuration",
        )


def _require_same(where: str, found: object, expected: object, hint: str = _UNDO) -> None:
    if found != expected:
        raise PlanError(
            "the plan is of another job, or changes what this executor does not take from it",
            where=where,
            found=_text(found),
            expected=_text(expected),
            hint=hint,
        )


def _require_fields(where: str, found: Any, expected: Any) -> None:
    for field in fields(expected):
        name = field.name
        _require_same(f"{where}.{name}", getattr(found, name), getattr(expected, name))


def _text(value: object) -> str:
    """Returns a part of a plan as text for people."""
    if isinstance(value, Layout):
        return value.describe()
    if isinstance(value, tuple | list) and any(is_dataclass(item) for item in value):
        return counted(len(value), "entry", "entries")
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _require_placement(placement: Placement, compiled: Placement, where: str) -> None:
    is_model = compiled.head != "none"
    if is_model:  # trained in the executor's own process, on one device
        _require_same(f"{where}.replicas", placement.replicas, 1)
        _require_same(f"{where}.devices", len(placement.devices), 1)
    least, most = min(1, compiled.num_slots), compiled.num_slots
    if placement.replicas < 1 or not least <= placement.num_slots <= most:
        raise PlanError(
            "memory is planned for another number of samples at once, or a role has no worker",
            where=f"{where}.{'replicas' if placement.replicas < 1 else 'num_slots'}",
            found=f"{placement.replicas} replicas, {placement.num_slots} slots",
            expected=f"at least 1 of each, and at most {most} slots, as the configuration has it",
            hint=f"for more slots, set roles.{placement.role}.num_slots and make the plan again: "
            "flowrl plan CONFIG -o FILE",
        )
    # What a run takes from the plan.
    masked = replace(
        placement,
        devices=compiled.devices,
        dtype=compiled.dtype,
        num_slots=compiled.num_slots,
        replicas=compiled.replicas,
    )
    _require_fields(where, masked, compiled)


def _require_operation(
    operation: Operation, compiled: Operation, plan: PlacementPlan, where: str
) -> None:
    masked = replace(
        operation, seconds=compiled.seconds, devices=compiled.devices, replicas=compiled.replicas
    )
    if operation.op == Op.GENERATE:
        slots = plan.placement(operation.role or "").num_slots
        hint = f"it is num_slots of placement {operation.role}: give both one value"
        _require_same(f"{where}.chunk", operation.chunk, slots, hint)
        masked = replace(
            masked, process=compiled.process, cores=compiled.cores, chunk=compiled.chunk
        )
    elif operation.role is not None:
        replicas = plan.placement(operation.role).replicas
        hint = f"it is replicas of placement {operation.role}: give both one value"
        _require_same(f"{where}.replicas", operation.replicas, replicas, hint)
    _require_fields(where, masked, compiled)


def _require_engines(plan: PlacementPlan, role: str, where: str, *, in_process: bool) -> None:
    engines = engines_of(plan, role)
    generating = [
        (i, operation)
        for i, operation in enumerate(plan.operations)
        if operation.op == Op.GENERATE and operation.role == role
    ]
    for i, operation in generating:
        _require_engines_of(plan, operation, engines, f"{where}: operations.{i}")
    if engines.processes and in_process:
        raise PlanError(
            "a program that runs line by line generates in the main process",
            where=where,
            found=f"{engines.processes} engine processes of {role}",
        )
    if not engines.processes and plan.kind == ASYNCHRONOUS and not in_process:
        raise PlanError(
            "generating ahead of the trainer needs an engine process",
            where=f"{where}: kind",
            found=f"{role} generates in {MAIN_PROCESS!r}",
            hint=_own_process(generating, "temporal"),
        )
    if generating and plan.kind == "spatial" and not engines.cores and not in_process:
        place = "in processes on any core" if engines.processes else f"in {MAIN_PROCESS!r}"
        raise PlanError(
            "a spatial plan generates on cores that the trainer leaves free",
            where=f"{where}: kind",
            found=f"{role} generates {place}",
            expected="processes with a core each",
            hint=_own_process(generating, "temporal", cores=True),
        )


def _require_engines_of(
    plan: PlacementPlan, operation: Operation, engines: LocalEngines, at: str
) -> None:
    """Checks the engines of an operation that generates, which are those of its role."""
    if operation.process in {p.process for p in plan.placements} - {MAIN_PROCESS}:
        raise PlanError(
            "engines have processes of their own",
            where=f"{at}.process",
            found=f"process {operation.process!r}, which another role has",
            expected=f"{MAIN_PROCESS!r}, or any other name",
            hint=f"name it {operation.node}",
        )
    num_engines = max(1, engines.processes)
    if (operation.replicas, operation.cores) != (num_engines, engines.cores):
        raise PlanError(
            f"{operation.role} generates with {counted(num_engines, 'engine')} in all its rollouts",
            where=f"{at}.replicas",
            found=f"{counted(operation.replicas, 'replica')}, cores {list(operation.cores)}",
            expected=f"{counted(num_engines, 'replica')}, cores {list(engines.cores)}",
            hint="several engines, or cores, need a process other than "
            f"{MAIN_PROCESS!r}, the same for all operations that generate with the role",
        )
    if len(operation.cores) not in (0, operation.replicas):
        raise PlanError(
            "each engine has one core, or none has",
            where=f"{at}.cores",
            found=f"{counted(operation.replicas, 'replica')}, cores {list(operation.cores)}",
            hint=f"name {counted(operation.replicas, 'core')}, or write cores: []",
        )
    for core in operation.cores:
        if core_id(core) is None:
            raise PlanError(
                "there is no such core here that a process could be bound to",
                where=f"{at}.cores",
                found=str(core),
                hint="take `cores` out to leave it to the operating system",
            )


def _own_process(
    generating: list[tuple[int, Operation]], kind: str, *, cores: bool = False
) -> str | None:
    """Returns what to write so that other processes than the main one generate."""
    if not generating:
        return None
    i, operation = generating[0]
    core = f" and operations.{i}.cores: [1]" if cores else ""
    return f"write operations.{i}.process: {operation.node}{core}, or kind: {kind}"


def _require_routes(plan: PlacementPlan, base: PlacementPlan, where: str) -> None:
    """Checks that weights travel as the generating processes need them."""
    key = f"{where}: weight_routes"
    _require_same(key, len(plan.weight_routes), len(base.weight_routes))
    for i, (route, compiled) in enumerate(zip(plan.weight_routes, base.weight_routes, strict=True)):
        apart = engines_of(plan, route.destination).processes > 0
        expected = Transport.FOLDER if apart else compiled.transport
        if route.transport != expected:
            raise PlanError(
                "an engine in a process of its own cannot read the trainer's weights in place"
                if apart
                else "an engine of the main process reads the trainer's own weights",
                where=f"{key}.{i}.transport",
                found=str(route.transport),
                expected=str(expected),
                hint=f"write transport: {expected}, or let another process generate",
            )
        masked = replace(route, transport=compiled.transport)
        _require_fields(f"{key}.{i}", masked, compiled)
