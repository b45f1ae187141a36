"""Makes the plan of a graph on a pool.

Over several devices of known speed it is searched for (`flowrl.plan.groups`). What runs on one
device, or on devices of which no time is known, is planned here. The rules, in order:
1. Models take turns on one device: an accelerator if there is one that their backends support, the
   CPU otherwise. Of several accelerators the one with most free memory; ties go to the first.
2. Scorers run in processes of their own on the CPU, so that a reward that hangs or breaks cannot
   take the models with it.
3. Environments run in the main process: their calls wait for others and hold no device.
4. The trainer and the engine of a role share one copy of the weights where the backend can.
5. What does not fit is refused with the numbers. The CPU is no silent replacement for an
   accelerator that is too small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flowrl.backend.plugin import Service
from flowrl.cluster.pool import Device, DeviceGroup, ResourcePool
from flowrl.cost.demand import phase_of
from flowrl.cost.layout import Layout
from flowrl.cost.memory import Phase, format_bytes
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph, Node, Op
from flowrl.plan.dtypes import role_dtype
from flowrl.plan.fit import DeviceFit, DoesNotFit, Tenant, fit_device
from flowrl.plan.host import MAIN_PROCESS, place_hosted, plan_sizes, pool_summary
from flowrl.plan.names import RATES
from flowrl.plan.one_pins import one_device_pins
from flowrl.plan.operations import place_channels, place_operations, place_residency, place_routes
from flowrl.plan.options import Pin, with_pin
from flowrl.plan.pin_errors import with_nearest
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import (
    PLAN_VERSION,
    Placement,
    PlacementPlan,
    PredictedMemory,
    Prediction,
    Reason,
    Rejection,
    check_plan,
)
from flowrl.plan.workload import phases_of, workload

_SERVICE_OF = {
    Op.GENERATE: Service.GENERATE,
    Op.INTERACT: Service.ENVIRONMENT,
    Op.SCORE: Service.SCORE,
}
"""Of the nodes of roles; every other one is a trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The device of all models, and why."""

    address: str
    device: Device
    reason: Reason


def make_plan(
    graph: Graph, request: PlanRequest, pool: ResourcePool, cost: Cost | None = None
) -> PlacementPlan:
    """Places `graph` on `pool`.

    Args:
        cost: Of tasks on many devices; None takes estimates.

    Raises:
        PlanError: a role that nothing plays, a backend that cannot do what its role does or has no
            device here, a job that does not fit, or pins that cannot be kept.
    """
    pool = pool.filled_to(request.options.memory_share)
    roles = [request.role(name) for name in graph.roles]
    for node in graph.nodes:
        _check_service(node, request)
    hosted = hosted_roles(graph, request)
    models = [role for role in roles if role not in hosted]
    groups: tuple[DeviceGroup, ...] = ()
    alone: tuple[DeviceGroup, ...] = ()
    if models and not request.options.single_device:
        from flowrl.plan.groups import groups_for, plan_over_groups  # with the search, its arrays
        from flowrl.plan.problem_of import with_policies_apart

        groups = groups_for(models, pool)
        alone = () if groups else groups_for(models, pool, least=1)
    try:
        if groups:
            for role in models:
                _check_ranks(role, "several devices")
            if groups[0].device.type == "cpu" and _all_reserved(pool):
                raise PlanError(
                    f"{len(groups[0].addresses)} hosts are no cluster",
                    where="cluster",
                    found="nodes without accelerators",
                    expected="one node, or nodes with accelerators",
                    hint="give the nodes devices, for example {name: H100-SXM-80GB, count: 8}",
                )
            apart = with_policies_apart(graph, request)
            return plan_over_groups(graph, apart, pool, groups, hosted, cost)
        try:
            return _on_one(graph, request, pool, hosted)
        except DoesNotFit:
            # With parts of it in the host's memory, and times, as on several devices.
            if not alone or alone[0].device.type == "cpu":
                raise
            return plan_over_groups(graph, request, pool, alone, hosted, cost)
    except PlanError as error:
        raise (_without_accelerators(error, pool) or error) from None


def hosted_roles(graph: Graph, request: PlanRequest) -> list[RoleRequest]:
    """The roles of a graph that run on hosts, without a model of flowrl's."""
    return [request.role(name) for name in graph.roles if not _uses_model(name, graph)]


def _on_one(
    graph: Graph, request: PlanRequest, pool: ResourcePool, hosted: list[RoleRequest]
) -> PlacementPlan:
    """All models on one device.

    Raises:
        PlanError: it does not fit, or pins that cannot be kept; with what they might say instead.
    """

    def fits(pin: Pin, value: str) -> bool:
        other = replace(request, options=with_pin(request.options, pin, value))
        try:
            _plan_for_one(graph, other, pool, hosted)
        except PlanError:
            return False
        return True

    try:
        return _plan_for_one(graph, request, pool, hosted)
    except PlanError as error:
        raise with_nearest(error, fits) from None


def _plan_for_one(
    graph: Graph, request: PlanRequest, pool: ResourcePool, hosted: list[RoleRequest]
) -> PlacementPlan:
    """All models on one device, in turn."""
    pins = one_device_pins(graph, request, pool)
    request = pins.request
    models = [request.role(name) for name in graph.roles if _uses_model(name, graph)]
    models += _copied(models, request)
    placements: list[Placement] = []
    reasons: list[Reason] = []
    prediction = Prediction()
    fit = DeviceFit(phases=())
    if models:
        choice = _choose_device(models, pool, pins.address)
        tenants = tuple(_tenant(role, request, graph, choice.device) for role in models)
        fit = _fit(tenants, choice, request, pool)
        prediction = Prediction(
            memory=tuple(
                PredictedMemory(device=choice.address, active=role, memory=memory)
                for role, memory in fit.phases
            )
        )
        reasons += [choice.reason, *_model_reasons(models, tenants, choice, fit)]
        placements += [
            _place_model(role, tenant, choice.address)
            for role, tenant in zip(models, tenants, strict=True)
        ]
    placed, why = place_hosted(hosted, graph, pool)
    placements += placed
    by_role = {placement.role: placement for placement in placements}
    plan = PlacementPlan(
        version=PLAN_VERSION,
        graph=graph.name,
        pool=pool_summary(pool),
        sizes=plan_sizes(request),
        placements=tuple(placements),
        operations=place_operations(graph, by_role, request),
        residency=place_residency(graph, by_role, fit.sleeping),
        weight_routes=place_routes(graph, by_role, request),
        channels=place_channels(graph, by_role),
        prediction=prediction,
        reasons=(*reasons, *why, *request.reasons),
        pins=pins.decisions,
    )
    return check_plan(plan)


def _fit(
    tenants: tuple[Tenant, ...], choice: _Choice, request: PlanRequest, pool: ResourcePool
) -> DeviceFit:
    try:
        return fit_device(
            tenants,
            address=choice.address,
            device_type=choice.device.type,
            name=choice.device.name,
            budget=choice.device.budget_bytes,
            train_key=request.train_key,
        )
    except PlanError as error:
        alike = _without_figures(pool, choice.device)
        if alike > 1 and not request.options.single_device:
            error.hint = (
                f"{error.hint}; or divide the models over all {alike} {choice.device.name}, for "
                f"which a plan needs their rates: {RATES}"
            )
        raise


def _without_figures(pool: ResourcePool, device: Device) -> int:
    """Devices like this one that are free, where nothing is known of their speed."""
    if not any(group.spec is None for group in pool.groups(device.type)):
        return 0
    return sum(
        one.name == device.name and one.type == device.type and not one.reserved
        for _, _, one in pool
    )


def _all_reserved(pool: ResourcePool) -> list[Device]:
    """The accelerators of a pool, where none is free; nothing elsewhere."""
    there = [device for _, _, device in pool if device.type != "cpu"]
    return there if all(device.reserved for device in there) else []


def _without_accelerators(error: PlanError, pool: ResourcePool) -> PlanError | None:
    """What is said where all accelerators are reserved, and the CPU cannot do it."""
    there = _all_reserved(pool)
    if not there:
        return None
    found = PlanError(
        f"all accelerators of the cluster are reserved ({len(there)} x {there[0].name}), and on "
        f"the CPU: {error.what}",
        where=error.where,
        found=error.found,
        expected=error.expected,
        hint="take `reserved: true` off some devices of the cluster file"
        + (f"; or {error.hint}" if error.hint else ""),
    )
    found.others = error.others
    return found


def _check_service(node: Node, request: PlanRequest) -> None:
    """The backend of a node's role must offer what the node does."""
    if node.role is None or node.op is Op.SYNC:
        return
    service = Service.TRAIN
    if phase_of(node) in (None, Phase.ROLLOUT):
        service = _SERVICE_OF[node.op]
    role = request.role(node.role)
    if service not in role.capabilities.services:
        raise PlanError(
            f"backend {role.backend!r} cannot do {node.op} ({node.id})",
            where=f"roles.{role.name}.backend",
            found=f"it offers {', '.join(sorted(role.capabilities.services))}",
            expected=f"a backend that offers {service}",
            hint="flowrl backends lists what is installed and what each offers",
        )


def _uses_model(role: str, graph: Graph) -> bool:
    return any(node.role == role and phase_of(node) is not None for node in graph.nodes)


def _copied(models: list[RoleRequest], request: PlanRequest) -> list[RoleRequest]:
    """Roles that do nothing themselves, and are held because a model begins as their copy."""
    names = {role.copy_of: None for role in models if role.copy_of is not None}
    here = {role.name for role in models}
    return [request.role(name) for name in names if name not in here]


def _choose_device(
    models: Iterable[RoleRequest], pool: ResourcePool, pinned: str | None
) -> _Choice:
    models = list(models)
    supported = frozenset.intersection(*(role.capabilities.devices for role in models))
    backends = ", ".join(sorted({role.backend for role in models}))
    candidates: list[tuple[str, Device]] = []
    rejected: list[Rejection] = []
    for address, _, device in pool:
        if device.reserved:
            rejected.append(Rejection(choice=address, constraint="it is reserved"))
        elif pinned not in (None, address):
            rejected.append(Rejection(choice=address, constraint=f"pins name {pinned}"))
        elif device.type not in supported:
            types = ", ".join(sorted(supported)) or "no device type in common"
            rejected.append(
                Rejection(
                    choice=address,
                    constraint=f"backend {backends} does not run on {device.type}",
                    found=device.type,
                    limit=types,
                )
            )
        else:
            candidates.append((address, device))
    if not candidates:
        raise PlanError(
            f"no device for {', '.join(role.name for role in models)} (backend {backends})",
            where="cluster",
            found="; ".join(f"{item.choice}: {item.constraint}" for item in rejected),
            expected=f"a device of type {', '.join(sorted(supported)) or 'common to all'}",
            hint="take a cluster with such a device, or another backend (roles.ROLE.backend)",
        )
    # sort is stable: equal devices keep the pool's order.
    candidates.sort(key=lambda item: (item[1].type == "cpu", -item[1].budget_bytes))
    address, device = candidates[0]
    for other, passed in candidates[1:]:
        rejected.append(_passed_over(other, passed, device, pool))
    why = (
        f"{device.name}, {format_bytes(device.free_bytes)} free"
        if device.type != "cpu"
        else f"{device.num_cores} cores, {format_bytes(device.budget_bytes)} free; no accelerator "
        f"that backend {backends} supports"
    )
    names = ", ".join(role.name for role in models)
    reason = Reason(subject=names, choice=address, why=why, rejected=tuple(rejected))
    return _Choice(address=address, device=device, reason=reason)


def _passed_over(address: str, device: Device, chosen: Device, pool: ResourcePool) -> Rejection:
    if device.type == "cpu" and chosen.type != "cpu":
        return Rejection(choice=address, constraint="slower than an accelerator")
    if device.type != "cpu" and _without_figures(pool, device) > 1:
        return Rejection(
            choice=address,
            constraint=f"no time is known of {device.name}, so nothing is divided over several; "
            f"that takes {RATES}",
        )
    return Rejection(
        choice=address,
        constraint="one device is enough, and it has no more free memory",
        found=format_bytes(device.free_bytes),
        limit=format_bytes(chosen.free_bytes),
    )


def _tenant(role: RoleRequest, request: PlanRequest, graph: Graph, device: Device) -> Tenant:
    shape = request.shape_of(role)
    if shape is None:
        raise PlanError(
            f"role {role.name!r} has no model",
            where=f"roles.{role.name}",
            hint="set model to a Hugging Face folder or a new model, or copy_of to another role",
        )
    phases = phases_of(role, graph)
    if role.recompute not in ("auto", "none", *role.capabilities.recompute):
        raise PlanError(
            f"backend {role.backend!r} has no {role.recompute} recompute",
            where=f"roles.{role.name}.recompute",
            found=role.recompute,
            expected=f"one of {', '.join(['none', *sorted(role.capabilities.recompute)])}",
            hint=f"set roles.{role.name}.recompute to one of them, or to auto",
        )
    _check_ranks(role, device.type)
    work = workload(role, request, graph, role_dtype(role, request, device))
    return Tenant(
        role=role.name,
        shape=shape,
        work=work,
        phases=tuple(phase for phase in Phase if phase in phases),
        can_sleep=role.capabilities.sleep and work.num_slots > 0,
        can_recompute=role.recompute == "auto"
        and work.trainable
        and "full" in role.capabilities.recompute,
        ranks=role.ranks,
    )


def _check_ranks(role: RoleRequest, device_type: str) -> None:
    """Several ranks need a backend that has them, and the cores of one machine.

    Raises:
        PlanError: they have not.
    """
    if role.ranks == 1:
        return
    if not role.capabilities.ranks:
        what, found = f"backend {role.backend!r} trains in one process", role.backend
        expected = "one rank, or a backend with several, such as torch"
    elif device_type != "cpu":
        what, found = "ranks are processes on the cores of one machine", device_type
        expected = "a plan for one machine without accelerators"
    else:
        return
    raise PlanError(
        what,
        where=f"roles.{role.name}.ranks",
        found=f"{role.ranks} ranks, {found}",
        expected=expected,
        hint=f"leave roles.{role.name}.ranks out",
    )


def _place_model(role: RoleRequest, tenant: Tenant, address: str) -> Placement:
    return Placement(
        role=role.name,
        backend=role.backend,
        devices=(address,),
        process=MAIN_PROCESS,
        dtype=tenant.work.dtype,
        layout=Layout(dp=role.ranks),
        num_slots=tenant.work.num_slots,
        trainable=tenant.work.trainable,
        copy_of=role.copy_of,
        head=role.head,
    )


def _model_reasons(
    models: list[RoleRequest], tenants: tuple[Tenant, ...], choice: _Choice, fit: DeviceFit
) -> list[Reason]:
    reasons = []
    for role, tenant in zip(models, tenants, strict=True):
        if role.dtype == "auto":
            why = _dtype_reason(role, tenant, choice.device)
            reasons.append(Reason(subject=f"{role.name}.dtype", choice=tenant.work.dtype, why=why))
        if role.ranks > 1:
            reasons.append(
                Reason(
                    subject=role.name,
                    choice=f"trained by {role.ranks} processes, each with its share of a batch",
                    why=f"roles.{role.name}.ranks={role.ranks}",
                )
            )
        if 0 < tenant.work.num_slots < role.num_slots:
            reasons.append(
                Reason(
                    subject=f"{role.name}.num_slots",
                    choice=str(tenant.work.num_slots),
                    why="a step has no more samples",
                    rejected=(
                        Rejection(
                            choice=str(role.num_slots),
                            constraint="slots beyond the samples of a step stay empty",
                            nearest=str(tenant.work.num_slots),
                        ),
                    ),
                )
            )
    for name in fit.sleeping:
        reasons.append(
            Reason(
                subject=f"{name}.kv cache",
                choice="given back outside of rollouts",
                why=f"all phases fit {format_bytes(choice.device.budget_bytes)} only so",
            )
        )
    return reasons


def _dtype_reason(role: RoleRequest, tenant: Tenant, device: Device) -> str:
    if role.copy_of is not None:
        return f"as {role.copy_of}, which it copies"
    if tenant.work.dtype == "bfloat16":
        return f"{device.name} has bfloat16 in hardware"
    if device.bfloat16:
        return f"backend {role.backend} has no bfloat16"
    return f"{device.type} computes in float32 faster than in bfloat16"
