"""How many devices a job needs, and what it takes on more of them.

    job = Job(graph=graph, request=request, spec=spec, cost=cost, node_size=8)
    fewest(job).devices
    sizes(job, [8, 16, 32])

Each size is searched for itself, on a pool of equal devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowrl.cluster.hardware import DeviceSpec
from flowrl.cluster.pool import ClusterNode, Device, ResourcePool
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.assign import busy_seconds, schedule_step
from flowrl.plan.explain_host import host_words
from flowrl.plan.impossible import nothing_fits, nothing_runs
from flowrl.plan.impossible_pins import Ground
from flowrl.plan.many import (
    Chosen,
    best_of_group,
    engine_least,
    hosts_full,
)
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.names import way_words
from flowrl.plan.pins import PinnedTasks, read_pins
from flowrl.plan.posed_search import fits_hosts, search_posed
from flowrl.plan.problem_of import Posed, kinds_wanted, pose
from flowrl.plan.regions import HOST_SHARE
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import fewest_devices, search
from flowrl.plan.tasks import TaskWork, tasks_of
from flowrl.plan.trainers import nodes_in_turn
from flowrl.plan.ways_out import Trial
from flowrl.wording import counted

__all__ = ["NODE_SIZE", "Job", "Size", "fewest", "pool_of_devices", "sizes"]

NODE_SIZE = 8
"""Devices of a node where nobody says: what servers of accelerators have."""

HOST_BYTES, HOST_CORES = 2 << 40, 192
"""Of a node that nobody describes: what the nodes of configs/clusters have."""

FIRST_POOL, LARGEST_POOL = 64, 4096
"""Devices of the pools that are searched for the fewest, rounded up to whole nodes."""


MOST_DEVICES, MOST_NUMBERS = 16384, 64
"""What a sweep looks at: on the largest pool a search takes some ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a job takes on so many devices.

    Attributes:
        used: Of them, those that anything runs on.
        device_s: Device seconds of a sample, of the devices that are used.
        idle_share: Of the time of these.
        layouts: Of each task, in words.
        ways: Likewise, with what is computed again and what is on the host.
        host: What a device fills of its host's memory, in words; empty where it is nothing.
        thinned: The rule by which schedules were left out of the search, if any.
    """

    devices: int
    used: int
    step_s: float
    device_s: float
    idle_share: float
    kind: str
    layouts: tuple[tuple[str, str], ...]
    ways: tuple[tuple[str, str], ...]
    host: str
    schedule: ScheduleStep
    thinned: str | None = None


def pool_of_devices(
    spec: DeviceSpec, num_devices: int, *, node_size: int = NODE_SIZE, where: str | None = None
) -> ResourcePool:
    """A pool of so many accelerators of the catalogue, in nodes of `node_size`.

    Args:
        where: Who asks for so many; for messages.

    Raises:
        PlanError: more than a node and no whole nodes.
    """
    if num_devices > node_size and num_devices % node_size:
        low = num_devices // node_size * node_size
        raise PlanError(
            f"{num_devices} devices are no whole nodes of {node_size}",
            where=where,
            expected=f"{low} or {low + node_size}",
            found=str(num_devices),
            hint=f"ask for {low} or {low + node_size}" if low else f"ask for {node_size}",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to run, and on devices of which kind.

    Attributes:
        node_size: Devices of a node.
        host: Bytes of its host's memory that each device may fill; None takes those of a node that
            nobody describes.
        cores: CPU cores of a node; None takes those of a node that nobody describes.
        where: Who asks; for messages.
    """

    graph: Graph
    request: PlanRequest
    spec: DeviceSpec
    cost: Cost
    node_size: int = NODE_SIZE
    host: int | None = None
    cores: int | None = None
    where: str | None = None

    def pins(self, numbered: int) -> PinnedTasks:
        """What pins say.

        Args:
            numbered: Devices that they may name.
        """
        tasks = tasks_of(self.graph, self.request, self.spec.type)
        return read_pins(
            self.request.options,
            tasks,
            range(numbered),
            [role.name for role in self.request.roles],
        )

    def posed(
        self,
        devices: int,
        *,
        numbered: int,
        pins: PinnedTasks | None = None,
        engine_least: int = 1,
    ) -> Posed:
        """The problem of so many devices alone.

        Args:
            numbered: Devices that pins may name.
            pins: What they say; None reads those of the request.
            engine_least: The fewest devices that rollouts are tried on.
        """
        pool = pool_of_devices(self.spec, devices, node_size=self.node_size, where=self.where)
        (group,) = pool.filled_to(self.request.options.memory_share).groups()
        cores = HOST_CORES if self.cores is None else self.cores
        group = replace(group, host_cores=cores * group.node_size // self.node_size)
        pins = self.pins(numbered) if pins is None else pins
        # Part of a node has its part of the host, so that more devices never have less each.
        host = int(HOST_SHARE * HOST_BYTES / self.node_size) if self.host is None else self.host
        return pose(
            self.graph,
            self.request,
            group,
            self.cost,
            filters=pins.filters,
            places=pins.places(range(numbered)),
            environments=pins.environments_in(range(numbered)),
            kinds=kinds_wanted(self.request),
            host=host,
            engine_least=engine_least,
        )

    def size(self, devices: int, *, numbered: int) -> Size | None:
        """What the plan of so many devices takes; None where it does not fit."""
        least = engine_least(devices, self.request)
        posed = self.posed(devices, numbered=numbered, engine_least=least)
        if _lacking(posed):
            return None
        best = best_of_group(self.graph, self.request, posed)
        return None if best is None else _as_size(best, devices)


def fewest(job: Job) -> Size:
    """The smallest number of devices on which the job fits, and what it takes there.

    Raises:
        PlanError: it does not fit on `LARGEST_POOL` devices either.
    """
    node_size = job.node_size
    devices = math.ceil(FIRST_POOL / node_size) * node_size
    while True:
        posed = job.posed(devices, numbered=devices)
        lacking = _lacking(posed)
        number = None if lacking else fewest_devices(posed.problem)
        if number is not None:
            # Among many devices not every part of a node is looked at, and of many nodes not
            # every number. Alone, any part of a node is a machine.
            whole = [one for one in posed.problem.block_sizes() if one > node_size]
            small = number <= node_size
            numbers = [*range(1, node_size + 1), *whole] if small else whole[whole.index(number) :]
            alone = (job.size(one, numbered=devices) for one in numbers)
            size = next((size for size in alone if size is not None), None)
            if size is not None:
                return size
        if devices >= LARGEST_POOL:
            raise _too_much(job, posed, job.pins(devices))
        devices *= 4


def _too_much(job: Job, posed: Posed, pins: PinnedTasks) -> PlanError:
    """What is said of a job that does not fit on the largest pool."""
    devices = len(posed.group.addresses)

    def with_pins(kept: PinnedTasks) -> Posed:
        return job.posed(devices, numbered=devices, pins=kept)

    def fits(change: Trial) -> bool:
        """Whether it fits there with other pins; no more devices or memory are tried."""
        if change.pins is None:
            return False
        other = with_pins(change.pins)
        if _lacking(other):
            return False
        return any(fits_hosts(other, one.schedule) for one in search_posed(other).best)

    def next_error(kept: PinnedTasks) -> PlanError | None:
        return _too_much(job, with_pins(kept), kept)

    if lacking := _lacking(posed):
        ground = Ground(
            group=posed.group,
            numbering=range(devices),
            groups=(posed.group,),
            fits=fits,
            next_error=next_error,
        )
        return nothing_runs(lacking[0], posed, pins, ground)
    why = search(posed.problem).infeasible
    return (
        hosts_full(posed, (), pins, fits) if why is None else nothing_fits(posed, why, pins, fits)
    )


def sizes(
    job: Job, numbers: Sequence[int], tell: Callable[[int], None] | None = None
) -> tuple[Size | int, ...]:
    """What the job takes on each number of devices; the number itself where it does not fit.

    Each number is looked at alone: what it takes does not depend on the others.

    Args:
        tell: Is called with each number before it is looked at.

    Raises:
        PlanError: more than `MOST_DEVICES` or `MOST_NUMBERS`.
    """
    last = max(numbers)
    if last > MOST_DEVICES or len(numbers) > MOST_NUMBERS:
        raise PlanError(
            "so many are not planned for",
            where=job.where,
            found=f"{counted(len(numbers), 'number', 'numbers')} of devices, up to {last}",
            expected=f"at most {MOST_NUMBERS} numbers, up to {MOST_DEVICES} devices",
            hint="ask for fewer or smaller numbers",
        )
    found: list[Size | int] = []
    for one in numbers:
        if tell is not None:
            tell(one)
        found.append(job.size(one, numbered=last) or one)
    return tuple(found)


def _lacking(posed: Posed) -> list[TaskWork]:
    """The tasks that cannot run in any way, alone."""
    return [task for task in posed.tasks if not posed.ways[task.id]]


def _as_size(best: Chosen, devices: int) -> Size:
    posed, schedule = best.posed, best.schedule
    samples = max(task.samples for task in posed.tasks)
    played = {name: way.played for name, way in best.ways.items() if way.played is not None}
    busy = busy_seconds(posed.problem, schedule, played)
    total = best.step_s * best.used
    return Size(
        devices=devices,
        used=best.used,
        step_s=best.step_s,
        device_s=total / samples,
        idle_share=max(0.0, 1 - busy / total) if total else 0.0,
        kind=str(best.kind),
        layouts=tuple(
            (node, way.layout.describe())
            for name, way in best.ways.items()
            for node in posed.task(name).operations
        ),
        ways=tuple(
            (node, way_words(way.layout, way.recompute, way.offload))
            for name, way in best.ways.items()
            for node in posed.task(name).operations
        ),
        host=host_words(best, list(best.ways)),
        schedule=schedule_step(posed.problem, schedule, nodes_in_turn(posed.tasks)),
        thinned=best.thinned,
    )
