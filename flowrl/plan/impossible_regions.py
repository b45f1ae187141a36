"""Why a policy that fits has no place for its environment, and what would help."""

from __future__ import annotations

from flowrl.cost.memory import format_bytes
from flowrl.errors import PlanError
from flowrl.plan.candidates import Filter
from flowrl.plan.problem_of import Posed
from flowrl.plan.region_ways import Drawn, ways_of
from flowrl.plan.regions import HOST_SHARE, room
from flowrl.plan.tasks import Region, TaskWork

__all__ = ["no_place_for_environment"]


def no_place_for_environment(task: TaskWork, posed: Posed, only: Filter) -> PlanError | None:
    """Of a task of episodes that has no way to run; None where its policy alone has none.

    Args:
        only: What pins leave of the task.
    """
    region, counts = task.region, posed.problem.block_sizes()
    if region is None or not any(
        posed.candidates.of_task(task, count, only, shared=False) for count in counts
    ):
        return None
    where = f"plan.environments.{region.role}"
    if region.environment.accelerated:
        return _of_accelerators(task, region, posed, only, where)
    return _of_hosts(task, region, posed, only, where)


def _of_accelerators(
    task: TaskWork, region: Region, posed: Posed, only: Filter, where: str
) -> PlanError:
    made, needs = posed.candidates, region.environment.nbytes
    if region.environment.kind not in (None, posed.group.kind):
        return _of_another_kind(task, region, posed, only, where)
    if needs > made.budget:
        return PlanError(
            f"environment {region.role} does not fit on {posed.group.device.name}",
            where=f"{where}.memory_gib",
            found=format_bytes(needs),
            expected=f"at most {format_bytes(made.budget)}, what plans may fill of a device",
            hint="take devices with more memory, or an environment that needs less",
        )
    free = Filter(layout=only.layout, devices=only.devices)
    elsewhere = _has_way(task, posed, free)
    if only.environment == "together" and elsewhere:
        return PlanError(
            f"environment {region.role} does not fit beside {task.id} on its devices",
            where="plan.pins",
            found=f"environment=together, and {format_bytes(needs)} of {format_bytes(made.budget)}",
            hint="leave the pin out, or say apart",
        )
    return PlanError(
        f"devices cannot be shared out between {task.id} and environment {region.role}",
        where="plan.pins" if elsewhere else "cluster",
        found=_said(only),
        hint="leave a pin out" if elsewhere else "take more devices, or devices with more memory",
    )


def _of_another_kind(
    task: TaskWork, region: Region, posed: Posed, only: Filter, where: str
) -> PlanError:
    kind, outside = region.environment.kind, posed.outside.get(task.id)
    if outside is None:
        return PlanError(
            f"environment {region.role} is to be on {kind}, and all devices here are "
            f"{posed.group.device.name}",
            where=f"{where}.device",
            hint="plan for a cluster that has both (--cluster), or say accelerator",
        )
    if region.environment.nbytes > room(outside):
        return PlanError(
            f"environment {region.role} does not fit on {kind}",
            where=f"{where}.memory_gib",
            found=format_bytes(region.environment.nbytes),
            expected=f"at most {format_bytes(room(outside))}, what plans may fill of a device",
            hint="take devices with more memory, or an environment that needs less",
        )
    return PlanError(
        f"environment {region.role} is on {kind}, so it is apart from a policy on "
        f"{posed.group.device.name}",
        where="plan.pins",
        found=_said(only),
        hint="leave the pin out",
    )


def _of_hosts(task: TaskWork, region: Region, posed: Posed, only: Filter, where: str) -> PlanError:
    made, needs = posed.candidates, region.environment.nbytes
    way_out = f"leave the pin out, or set {where}.device=accelerator"
    if only.own is not None:
        return PlanError(
            f"environment {region.role} is on the CPUs of hosts, and has no accelerators to pin",
            where="plan.pins",
            found=_said(only),
            hint=way_out,
        )
    spare = posed.group.spare_bytes
    if only.environment == "apart" and posed.group.spare_cores:
        return PlanError(
            f"nodes without accelerators do not hold environment {region.role}",
            where=f"{where}.memory_gib",
            found=f"{format_bytes(needs)} for each of {region.sharers} regions",
            expected=f"at most {format_bytes(int(HOST_SHARE * spare))} in all, what plans may fill",
            hint="take nodes with more memory (memory_gib), or an environment that needs less",
        )
    if only.environment == "apart":
        return PlanError(
            f"environment {region.role} needs no accelerator, so it is apart only on nodes without",
            where="plan.pins",
            found="environment=apart, and a cluster that has no such nodes",
            hint=way_out,
        )
    host = (made.host or 0) * posed.group.node_size
    return PlanError(
        f"the hosts do not hold environment {region.role} beside what {task.id} puts there",
        where=f"{where}.memory_gib",
        found=format_bytes(needs),
        expected=f"less than {format_bytes(host)}, what plans may fill of a host",
        hint="take hosts with more memory (memory_gib), or an environment that needs less",
    )


def _has_way(task: TaskWork, posed: Posed, only: Filter) -> bool:
    drawn: Drawn = {}
    counts = posed.problem.block_sizes()
    return any(
        ways_of(posed.candidates, task, count, only, shared=False, counts=counts, drawn=drawn)
        for count in counts
        if only.devices in (None, count)
    )


def _said(only: Filter) -> str | None:
    """What pins ask of an environment."""
    words = []
    if only.devices is not None:
        words.append(f"{only.devices} devices for both")
    if only.own is not None:
        words.append(f"{only.own} of them for the environment")
    if only.environment is not None:
        words.append(f"environment={only.environment}")
    return ", ".join(words) or None
