"""Which devices of a pool a plan is made for, where it has several kinds.

Each group of equal devices is tried for the whole job, and each ordered pair of groups with the
rollouts on the one and training on the other (`flowrl.plan.mixed`). The best is taken; the plan
says what the others would be.
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
from flowrl.plan.mixed import search_two_groups
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
    order = _numbers(pool)
    for group in groups:
        try:
            one = search_group(
                graph,
                request,
                group,
                cost,
                host=host_share(pool, group),
                numbering=[order[address] for address in group.addresses],
            )
            found.append(one)
        except PlanError as error:
            failed.append((group, error))
    if len(groups) > 1:
        hosts = {group: host_share(pool, group) for group in groups}
        found += search_two_groups(graph, request, hosts, cost)
    if not found:
        raise failed[0][1]
    best = min(found, key=lambda one: one.best.objective)
    plan = write_plan(graph, request, pool, best, hosted)
    if len(groups) == 1:
        return plan
    return replace(plan, reasons=(_group_reason(best, found, failed), *plan.reasons))


def _numbers(pool: ResourcePool) -> dict[str, int]:
    """The numbers by which pins name devices."""
    accelerators = [address for address, _, device in pool if device.type != "cpu"]
    addresses = accelerators or [address for address, _, _ in pool]
    return {address: number for number, address in enumerate(addresses)}


def _group_reason(
    best: Searched, found: Sequence[Searched], failed: Sequence[tuple[DeviceGroup, PlanError]]
) -> Reason:
    rejected = [
        Rejection(
            choice=_groups_name(one),
            constraint="its best step takes longer",
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
        choice=_groups_name(best),
        why="of all kinds of devices, and rollouts on one with training on another, the best",
        rejected=tuple(rejected),
    )


def _groups_name(one: Searched) -> str:
    if not one.posed.parts:
        return _group_name(one.posed.group)
    names: dict[str, list[str]] = {}
    for task in one.posed.tasks:
        names.setdefault(_group_name(one.posed.group_of(task.id)), []).append(task.id)
    return ", ".join(f"{' and '.join(tasks)} on {name}" for name, tasks in names.items())


def _group_name(group: DeviceGroup) -> str:
    return f"{len(group.addresses)} x {group.device.name} ({device_names(group.addresses)})"
