"""How many devices a job needs, and what it takes on more of them.

Both pose the problem once, for the largest pool, and search it for smaller ones: what a task takes
on so many devices does not depend on how many others there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.cluster.hardware import DeviceSpec
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.assign import busy_seconds, schedule_step
from flowrl.plan.groups import host_share
from flowrl.plan.impossible import nothing_fits, nothing_runs
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.pins import read_pins
from flowrl.plan.problem_of import Posed, pose
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import Found, fewest_devices, kind_of, leaves, search
from flowrl.plan.tasks import tasks_of

__all__ = ["NODE_SIZE", "Size", "fewest", "pool_of_devices", "sizes"]

NODE_SIZE = 8
"""Devices of a node where nobody says: what servers of accelerators have."""

HOST_BYTES, HOST_CORES = 2 << 40, 192
"""Of a node that nobody describes: what the nodes of configs/clusters have."""

FIRST_POOL, LARGEST_POOL = 64, 4096
"""Devices of the pools that are searched for the fewest, rounded up to whole nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a job takes on so many devices.

    Attributes:
        used: Of them, those that anything runs on.
        device_s: Device seconds of a sample.
        idle_share: Of the time of all devices.
        layouts: Of each task, in words.
    """

    devices: int
    used: int
    step_s: float
    device_s: float
    idle_share: float
    kind: str
    layouts: tuple[tuple[str, str], ...]
    schedule: ScheduleStep


def pool_of_devices(
    spec: DeviceSpec, num_devices: int, *, node_size: int = NODE_SIZE, where: str = "--sweep"
) -> ResourcePool:
    """A pool of so many accelerators of the catalogue, in nodes of `node_size`.

    Args:
        where: The option that asks for so many; for messages.

    Raises:
        PlanError: more than a node and no whole nodes.
    """
    if num_devices > node_size and num_devices % node_size:
        low = num_devices // node_size * node_size
        raise PlanError(
            f"{num_devices} devices are no whole nodes of {node_size}",
            where=where,
            expected=f"{low} or {low + node_size}",
        )
    inside = min(num_devices, node_size)
    host = Device(id="cpu:0", type="cpu", name="CPU", memory_bytes=HOST_BYTES, num_cores=HOST_CORES)
    devices = tuple(
        Device(
            id=f"{spec.type}:{index}",
            type=spec.type,
            name=spec.name,
            memory_bytes=spec.memory_bytes,
            bfloat16=True,
            spec=spec,
        )
        for index in range(inside)
    )
    return ResourcePool(
        nodes=tuple(
            ClusterNode(
                name=f"node-{index}",
                devices=(host, *devices),
                memory_bytes=HOST_BYTES,
                num_cores=HOST_CORES,
            )
            for index in range(num_devices // inside)
        )
    )


def fewest(
    graph: Graph,
    request: PlanRequest,
    spec: DeviceSpec,
    cost: Cost,
    *,
    node_size: int = NODE_SIZE,
) -> Size:
    """The smallest number of devices on which the job fits, and what it takes there.

    Raises:
        PlanError: it does not fit on `LARGEST_POOL` devices either.
    """
    devices = math.ceil(FIRST_POOL / node_size) * node_size
    while True:
        posed = _posed(graph, request, spec, devices, cost, node_size, "--min-devices")
        lacking = [task for task in posed.tasks if not posed.ways[task.id]]
        number = None if lacking else fewest_devices(posed.problem)
        if number is not None:
            return _size(posed, number)
        if devices >= LARGEST_POOL:
            pins = read_pins(request.options.pins, posed.tasks, range(devices))
            if lacking:
                raise nothing_runs(lacking[0], posed, pins)
            why = search(posed.problem).infeasible
            assert why is not None
            raise nothing_fits(posed, why, pins)
        devices *= 4


def sizes(
    graph: Graph,
    request: PlanRequest,
    spec: DeviceSpec,
    numbers: Sequence[int],
    cost: Cost,
    *,
    node_size: int = NODE_SIZE,
) -> tuple[Size | int, ...]:
    """What the job takes on each number of devices; the number itself where it does not fit."""
    posed = _posed(graph, request, spec, max(numbers), cost, node_size, "--sweep")
    if any(not posed.ways[task.id] for task in posed.tasks):
        return tuple(numbers)
    least = fewest_devices(posed.problem)
    return tuple(
        number if least is None or number < least else _size(posed, number) for number in numbers
    )


def _posed(
    graph: Graph,
    request: PlanRequest,
    spec: DeviceSpec,
    devices: int,
    cost: Cost,
    node_size: int,
    where: str,
) -> Posed:
    pool = pool_of_devices(spec, devices, node_size=node_size, where=where)
    (group,) = pool.groups()
    pins = read_pins(request.options.pins, tasks_of(graph, request, spec.type), range(devices))
    host = host_share(pool, group)
    return pose(graph, request, group, cost, filters=pins.filters, host=host)


def _size(posed: Posed, devices: int) -> Size:
    problem = replace(posed.problem, num_devices=devices)
    found = search(problem).best[0]
    return _as_size(posed, found, devices)


def _as_size(posed: Posed, found: Found, devices: int) -> Size:
    schedule, step_s = found.schedule, found.evaluation.step_s
    samples = max(task.samples for task in posed.tasks)
    return Size(
        devices=devices,
        used=found.evaluation.devices,
        step_s=step_s,
        device_s=step_s * found.evaluation.devices / samples,
        idle_share=max(0.0, 1 - busy_seconds(schedule) / (step_s * devices)),
        kind=str(kind_of(schedule)),
        layouts=tuple(
            (leaf.task, posed.candidate(leaf.task, leaf.option).layout.describe())
            for leaf in leaves(schedule)
        ),
        schedule=schedule_step(schedule, posed.problem.block_sizes()),
    )
