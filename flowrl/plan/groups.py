"""Which devices of a pool a plan is made for, where it has several kinds.

One group of equal devices takes the whole job: each is tried, and the one with the best plan is
taken. Devices of other kinds stay idle, and the plan says what it would be on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowrl.cluster.pool import DeviceGroup, ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.many import Searched, search_group
from flowrl.plan.names import device_names
from flowrl.plan.render_many import seconds_text
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import PlacementPlan, Reason, Rejection
from flowrl.plan.write_many import write_plan

__all__ = ["cost_of", "groups_for", "host_share", "plan_over_groups"]


def groups_for(models: Sequence[RoleRequest], pool: ResourcePool) -> tuple[DeviceGroup, ...]:
    """The groups of more than one known device that all models' backends run on.

    None means that one device takes all: there is no second one, or nothing is known of it but
    its memory.
    """
    supported = frozenset.intersection(*(role.capabilities.devices for role in models))
    return tuple(
        group
        for group in pool.groups()
        if len(group.addresses) > 1 and group.spec is not None and group.device.type in supported
    )


HOST_SHARE = 0.8
"""Of a host's memory, for what devices put there; the rest is the programs' own."""


def host_share(pool: ResourcePool, group: DeviceGroup) -> int:
    """Bytes of its host's memory that each device of a group may fill."""
    mine = set(group.addresses)
    least = min(
        node.memory_bytes
        for node in pool.nodes
        if any(pool.address(node, device) in mine for device in node.devices)
    )
    return int(HOST_SHARE * least / group.node_size)


def cost_of(request: PlanRequest) -> Cost:
    """Where times come from when nothing was measured.

    Raises:
        BackendError: the package that is asked for is not installed.
    """
    if request.options.engine_times == "aiconfigurator":
        from flowrl.cost.aiconfigurator import AIConfiguratorCost

        return AIConfiguratorCost(AnalyticCost(), backend=request.options.engine)
    return AnalyticCost()


def plan_over_groups(
    graph: Graph,
    request: PlanRequest,
    pool: ResourcePool,
    groups: Sequence[DeviceGroup],
    hosted: list[RoleRequest],
    cost: Cost | None = None,
) -> PlacementPlan:
    """The best plan of all groups.

    Args:
        cost: Of tasks; None takes estimates.

    Raises:
        PlanError: it fits on none; of the first one, with what would help.
    """
    cost = cost_of(request) if cost is None else cost
    found: list[Searched] = []
    failed: list[tuple[DeviceGroup, PlanError]] = []
    for group in groups:
        try:
            found.append(search_group(graph, request, group, cost, host=host_share(pool, group)))
        except PlanError as error:
            failed.append((group, error))
    if not found:
        raise failed[0][1]
    best = min(found, key=lambda one: one.best.objective)
    plan = write_plan(graph, request, pool, best, hosted)
    if len(groups) == 1:
        return plan
    return replace(plan, reasons=(_group_reason(best, found, failed), *plan.reasons))


def _group_reason(
    best: Searched, found: Sequence[Searched], failed: Sequence[tuple[DeviceGroup, PlanError]]
) -> Reason:
    rejected = [
        Rejection(
            choice=_group_name(one.posed.group),
            constraint="alone its best step takes longer",
            found=seconds_text(one.best.step_s),
            limit=seconds_text(best.best.step_s),
        )
        for one in found
        if one is not best
    ]
    rejected += [
        Rejection(choice=_group_name(group), constraint=error.what) for group, error in failed
    ]
    return Reason(
        subject="devices",
        choice=_group_name(best.posed.group),
        why="all models are on devices of one kind, and these give the best plan",
        rejected=tuple(rejected),
    )


def _group_name(group: DeviceGroup) -> str:
    return f"{len(group.addresses)} x {group.device.name} ({device_names(group.addresses)})"
