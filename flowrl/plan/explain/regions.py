"""Why an environment is together with its policy or apart, and what the other would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flowrl.cost.memory import format_bytes
from flowrl.plan.explain.beside import lost
from flowrl.plan.many import Chosen, Searched
from flowrl.plan.problem_of import device_counts
from flowrl.plan.schema import Reason, Rejection
from flowrl.plan.show.many import seconds_text
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.region_ways import region_ways
from flowrl.plan.ways.regions import Played
from flowrl.plan.ways.tasks import Region, TaskWork


def region_reason(task: TaskWork, best: Chosen, searched: Searched) -> Iterator[Reason]:
    """The place of a task's environment; nothing of a task without one, or on CPUs alone."""
    way, region = best.ways[task.id], task.region
    played = way.played
    made = best.posed.made(task.id)
    if region is None or played is None or made.group.device.type == "cpu":
        return
    only = searched.pins.filters.get(task.id, Filter())
    counts = device_counts(len(made.group.addresses), made.group.node_size)
    free = replace(only, environment=None, own=None)
    others = [
        one
        for one in region_ways(made, task, way.devices, free, shared=False, counts=counts, drawn={})
        if one.played is not None and one.played.split.mode != played.split.mode
    ]
    pinned = only.environment is not None or only.own is not None
    yield Reason(
        subject=region.node,
        choice=_where(way, played, region),
        why=f"{'pinned; ' * pinned}{_why(way, played)}",
        rejected=(_other(way, played, region, others, best, task, pinned=pinned),),
    )


def _where(way: Candidate, played: Played, region: Region) -> str:
    split = played.split
    if split.elsewhere:
        devices = f"{split.elsewhere} x {split.kind}, {split.at_once:,.0f} calls at once"
        return f"apart: on {devices}, besides the {way.layout.num_devices} devices of the policy"
    if split.own:
        return f"apart: on {split.own} devices, besides the {way.layout.num_devices} of the policy"
    calls = f"{split.at_once:,.0f} calls at once"
    if split.mode == "apart":
        return f"apart: on nodes without accelerators, {calls}"
    if region.environment.accelerated:
        return f"together: on all {way.layout.num_devices} devices, in turns with the policy"
    return f"together: on the cores of the hosts, {calls}"


def _why(way: Candidate, played: Played) -> str:
    return (
        f"{seconds_text(way.seconds)} a step: the policy's work takes "
        f"{seconds_text(played.policy_s)}, the environment's {seconds_text(played.environment_s)}; "
        f"bottleneck: {played.bound}"
    )


def _other(
    way: Candidate,
    played: Played,
    region: Region,
    others: list[Candidate],
    best: Chosen,
    task: TaskWork,
    *,
    pinned: bool,
) -> Rejection:
    mode = "apart" if played.split.mode == "together" else "together"
    if played.split.elsewhere:
        key = f"plan.environments.{region.role}.device"
        return Rejection(choice=mode, constraint=f"{key} says {played.split.kind}")
    if not others:
        return Rejection(choice=mode, constraint=_impossible(mode, way, region, best, task))
    other = min(others, key=lambda one: one.seconds)
    assert other.played is not None
    slower = other.seconds - way.seconds
    words = f"{seconds_text(abs(slower))} {'slower' if slower >= 0 else 'faster'} alone"
    if abs(slower) < 0.001 * way.seconds:
        words = "as fast"
    elif slower < 0 and not pinned:
        words += f", but {lost(task, other, best).words}"
    return Rejection(
        choice=f"{_where(other, other.played, region)} ({other.layout.describe()})",
        constraint=f"{words}: {_why(other, other.played)}",
    )


def _impossible(mode: str, way: Candidate, region: Region, best: Chosen, task: TaskWork) -> str:
    if not region.environment.accelerated:
        if mode == "apart":
            return (
                "it needs no accelerator, so devices of its own would idle, and the cluster has no "
                "nodes without"
            )
        return "the hosts of the devices do not hold it"
    if mode == "apart":
        return f"{way.devices} devices cannot be divided so that both fit"
    made = best.posed.made(task.id)
    return (
        f"both do not fit a device: the environment takes "
        f"{format_bytes(region.environment.nbytes)} of {format_bytes(made.budget)}"
    )


def region_notes(best: Chosen) -> Iterator[str]:
    """What is taken for granted of environments, and what cannot run here."""
    for task in best.posed.tasks:
        played, region = best.ways[task.id].played, task.region
        if played is None or region is None:
            continue
        if played.calls.source == "unknown":
            yield (
                f"assumed: environment {region.role} answers at once; "
                f"plan.environments.{region.role}.step_s says better"
            )
        elif best.posed.group_of(task.id).device.type != "cpu":
            yield (
                f"cannot run here: environments answer in the executor's own process, and the plan "
                f"has {region.role} serve {played.split.at_once:,.0f} calls at once; it needs a "
                "backend that serves them where the plan says"
            )
