"""The environments of episodes, written down as parts of a plan over many devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flowrl.cluster.pool import ResourcePool
from flowrl.plan.many import Chosen
from flowrl.plan.many_form import EnvironmentUse
from flowrl.plan.names import device_names
from flowrl.plan.prediction import CostSource
from flowrl.plan.request import PlanRequest
from flowrl.plan.schema import Operation, Placement, PredictedSpan
from flowrl.plan.ways.regions import Played
from flowrl.plan.ways.tasks import Region, TaskWork


def _played(chosen: Chosen) -> Iterator[tuple[TaskWork, Region, Played]]:
    """The environment of each region, as the first of its policies has it."""
    seen: set[str] = set()
    for task in chosen.posed.tasks:
        played = chosen.ways[task.id].played
        if task.region is not None and played is not None and task.region.node not in seen:
            seen.add(task.region.node)
            yield task, task.region, played


def environment_devices(task: TaskWork, chosen: Chosen, pool: ResourcePool) -> tuple[str, ...]:
    """The devices of a task's environment: accelerators, or CPUs of hosts."""
    played, group = chosen.ways[task.id].played, chosen.posed.group_of(task.id)
    assert played is not None
    addresses = chosen.posed.addresses
    if played.split.own or played.split.elsewhere:
        return tuple(addresses[number] for number in chosen.played[task.id])
    policy = tuple(addresses[number] for number in chosen.numbers[task.id])
    if played.split.takes_turns:
        return policy
    if played.split.mode == "apart":
        return group.spare
    nodes = {address.rpartition("/")[0] for address in policy}
    return tuple(
        address
        for address, _, device in pool
        if device.type == "cpu" and address.rpartition("/")[0] in nodes and not device.reserved
    )


def place_environments(
    chosen: Chosen, request: PlanRequest, pool: ResourcePool
) -> Iterator[Placement]:
    """Those that are placed with their policy; on CPUs alone the executor's process has them.

    One that several regions play with is wherever one of them has it.
    """
    where: dict[str, list[str]] = {}
    for task, region, _ in _played(chosen):
        if chosen.posed.group_of(task.id).device.type != "cpu":
            where.setdefault(region.role, []).extend(environment_devices(task, chosen, pool))
    order = {address: i for i, (address, _, _) in enumerate(pool)}
    for name, addresses in where.items():
        role = request.role(name)
        yield Placement(
            role=role.name,
            backend=role.backend,
            devices=tuple(sorted(dict.fromkeys(addresses), key=lambda one: order[one])),
            process=role.name,
            dtype="none",
            head="none",
        )


def with_environment(operation: Operation, chosen: Chosen, pool: ResourcePool) -> Operation:
    """An operation that plays episodes, with how and where it does."""
    for task, region, played in _played(chosen):
        if region.node == operation.node:
            tokens = chosen.posed.candidates.options.lengths.mean
            devices = operation.devices
            if chosen.posed.group_of(task.id).device.type != "cpu":
                devices = environment_devices(task, chosen, pool)
            return replace(
                operation, devices=devices, environment=environment_use(region, played, tokens)
            )
    return operation


def environment_use(region: Region, played: Played, tokens: float) -> EnvironmentUse:
    """In the plan's words.

    Args:
        tokens: Of an episode, what is said included.
    """
    calls, episodes = played.calls, region.episodes
    return EnvironmentUse(
        mode=played.split.mode,
        at_once=played.split.at_once,
        reset_s=calls.reset_s,
        step_s=calls.step_s,
        wait_s=calls.wait_s,
        turns=episodes.turns,
        drawn=tokens / episodes.turns - episodes.said,
        said=episodes.said,
        seconds=played.environment_s,
        source=calls.source,
    )


def environment_spans(
    chosen: Chosen, begun: Mapping[str, tuple[float, float]], pool: ResourcePool
) -> Iterator[PredictedSpan]:
    """The bars of environments that take time: as long as their policy's.

    Args:
        begun: When each task begins and ends.
    """
    for task, region, played in _played(chosen):
        if played.environment_s:
            begin_s, end_s = begun[task.id]
            yield PredictedSpan(
                node=region.node,
                device=device_names(environment_devices(task, chosen, pool)),
                begin_s=begin_s,
                end_s=end_s,
            )


def environment_costs(chosen: Chosen) -> Iterator[CostSource]:
    """Where the times of environments come from."""
    for task, region, played in _played(chosen):
        if not played.environment_s:
            continue
        calls, at_once = played.calls, played.split.at_once
        steps = task.samples * region.episodes.turns * calls.step_s / at_once
        parts = {"steps": steps, "resets": task.samples * calls.reset_s / at_once}
        yield CostSource(
            node=region.node,
            seconds=played.environment_s,
            source=calls.source,
            parts=tuple((name, seconds) for name, seconds in parts.items() if seconds),
        )
