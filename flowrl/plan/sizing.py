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
from flowrl.plan.assign import schedule_step
from flowrl.plan.elsewhere import Part
from flowrl.plan.explain.batches import even_sizes, idle_for_batch, uneven_words
from flowrl.plan.explain.efficiencies import assumed_efficiencies
from flowrl.plan.explain.host import host_words
from flowrl.plan.impossible.jobs import nothing_fits, nothing_runs
from flowrl.plan.impossible.pins import Ground
from flowrl.plan.impossible.ways_out import Trial
from flowrl.plan.many import (
    Chosen,
    Searched,
    best_of_group,
    engine_least,
    hosts_full,
)
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.names import way_words
from flowrl.plan.node_parts import even_parts, idle_part, is_better, minds_hosts, with_whole_host
from flowrl.plan.pins import PinnedTasks, read_pins
from flowrl.plan.posed_search import fits_hosts, search_posed
from flowrl.plan.problem_of import Posed, kinds_wanted, pose
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import fewest_devices, search
from flowrl.plan.ways.regions import HOST_SHARE
from flowrl.plan.ways.tasks import TaskWork, tasks_of
from flowrl.plan.ways.trainers import nodes_in_turn
from flowrl.wording import counted

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
        uneven: What idles for the size of the batch alone, and which sizes can be shared evenly;
            empty where it is nothing.
        assumed: What is taken for granted of the devices, such as `hopper's efficiencies`; else
            empty.
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
    uneven: str = ""
    assumed: str = ""


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
        part: Part,
        *,
        pins: PinnedTasks,
        engine_least: int = 1,
    ) -> Posed:
        """The problem of some devices alone.

        Args:
            engine_least: The fewest devices that rollouts are tried on.
        """
        return pose(
            self.graph,
            self.request,
            part.group,
            self.cost,
            filters=pins.filters,
            places=pins.places(part.numbering),
            environments=pins.environments_in(part.numbering),
            kinds=kinds_wanted(self.request),
            host=part.host,
            engine_least=engine_least,
        )

    def parts(self, devices: int, pins: PinnedTasks) -> list[Part]:
        """So many devices, and equal shares of their nodes, that have all which pins name."""
        pool = pool_of_devices(self.spec, devices, node_size=self.node_size, where=self.where)
        (group,) = pool.filled_to(self.request.options.memory_share).groups()
        cores = HOST_CORES if self.cores is None else self.cores
        # Part of a node has its part of the host, so that more devices never have less each.
        group = replace(group, host_cores=cores * group.node_size // self.node_size)
        host = int(HOST_SHARE * HOST_BYTES / self.node_size) if self.host is None else self.host
        number = {address: i for i, address in enumerate(group.addresses)}
        every = (
            Part(group=one, host=host, numbering=tuple(number[a] for a in one.addresses))
            for one in (group, *even_parts([group]))
        )
        return [one for one in every if _has_named(one, pins)]

    def size(self, devices: int, *, numbered: int, only_fits: bool = False) -> Size | None:
        """What the plan of so many devices takes; None where it does not fit.

        Args:
            only_fits: No faster plan is looked for that leaves devices of the only node idle.
        """
        pins = self.pins(numbered)
        parts = self.parts(devices, pins)
        alone = (one for part in parts if (one := self._best(part, pins)) is not None)
        best = min(alone, key=lambda one: one.objective, default=None)
        if parts and parts[0].group.num_nodes == 1 and not (best and only_fits):
            best = self._with_idle(parts[0], pins, best)
        if best is None:
            return None
        return replace(_as_size(best, devices), uneven=self._uneven(best, parts[0], pins))

    def _uneven(self, best: Chosen, part: Part, pins: PinnedTasks) -> str:
        """What idles of so many devices for the size of the batch alone; empty where nothing does.

        Args:
            part: All of them.
        """
        searched = Searched(posed=best.posed, best=best, others=(), pins=pins)
        uneven = idle_for_batch(searched, self.request, part.group)
        near = even_sizes(uneven, self.request) if uneven else ""
        return (
            f"{uneven_words(uneven)}; {near} can be shared evenly, which may gain nothing"
            if near
            else ""
        )

    def _best(self, part: Part, pins: PinnedTasks) -> Chosen | None:
        """The best plan of some devices; None where it does not fit."""
        least = engine_least(len(part.numbering), self.request)
        posed = self.posed(part, pins=pins, engine_least=least)
        return None if _lacking(posed) else best_of_group(self.request, posed, pins.filters)

    def _with_idle(self, part: Part, pins: PinnedTasks, best: Chosen | None) -> Chosen | None:
        """The best plan of the only node where devices that idle leave its host to the others, as
        `flowrl.plan.groups` has it."""
        if best is not None and not minds_hosts(best.posed):
            return best
        if best is None and (
            part.group.node_size == 1 or self._best(with_whole_host(part), pins) is None
        ):
            return None
        found = best
        for size in range(part.group.node_size - 1, 0, -1):
            share = idle_part(part, size)
            if not _has_named(share, pins):
                continue
            one = self._best(share, pins)
            spares = size if found is best else 0
            if one is not None and (found is None or is_better(one, found, spares=spares)):
                found = one
        return found


def _has_named(part: Part, pins: PinnedTasks) -> bool:
    """Whether some devices have all which pins name."""
    named = (*pins.devices.values(), *pins.environments.values())
    return all(set(some) <= set(part.numbering) for some in named)


def fewest(job: Job) -> Size:
    """The smallest number of devices on which the job fits, and what it takes there.

    Raises:
        PlanError: it does not fit on `LARGEST_POOL` devices either.
    """
    node_size = job.node_size
    devices = math.ceil(FIRST_POOL / node_size) * node_size
    while True:
        pins = job.pins(devices)
        tried = [(part, job.posed(part, pins=pins)) for part in job.parts(devices, pins)]
        posed = tried[0][1]
        nodes = [_fewest_nodes(one) for _, one in tried if not _lacking(one)]
        number = min((one for one in nodes if one is not None), default=None)
        if number is not None:
            # Among many devices not every part of a node is looked at, and of many nodes not
            # every number. Alone, any part of a node is a machine.
            whole = [one for one in posed.problem.block_sizes() if one > node_size]
            numbers = [one for one in whole if one >= number * node_size]
            if number <= 1:
                numbers = [*range(1, node_size + 1), *numbers]
            alone = (job.size(one, numbered=devices, only_fits=True) for one in numbers)
            size = next((size for size in alone if size is not None), None)
            if size is not None:
                return size
        if devices >= LARGEST_POOL:
            raise _too_much(job, tried[0][0], pins)
        devices *= 4


def _fewest_nodes(posed: Posed) -> int | None:
    """The fewest nodes on which a job fits, where it has a plan at all."""
    number = fewest_devices(posed.problem)
    return None if number is None else math.ceil(number / posed.group.node_size)


def _too_much(job: Job, part: Part, pins: PinnedTasks) -> PlanError:
    """What is said of a job that does not fit on the largest pool."""
    devices = len(part.numbering)
    posed = job.posed(part, pins=pins)

    def fits(change: Trial) -> bool:
        """Whether it fits there with other pins or another batch; no more devices or memory are
        tried."""
        asked = job
        if change.batch is not None:
            asked = replace(job, request=change.batch.asked(job.request))
        elif change.pins is None:
            return False
        other = asked.posed(part, pins=change.pins or pins)
        if _lacking(other):
            return False
        return any(fits_hosts(other, one.schedule) for one in search_posed(other).best)

    def next_error(kept: PinnedTasks) -> PlanError | None:
        return _too_much(job, part, kept)

    ground = Ground(
        group=posed.group,
        numbering=range(devices),
        groups=(posed.group,),
        fits=fits,
        next_error=next_error,
    )
    if lacking := _lacking(posed):
        return nothing_runs(lacking[0], posed, pins, ground)
    why = search(posed.problem).infeasible
    if why is None:
        return hosts_full(posed, (), pins, fits)
    return nothing_fits(posed, why, pins, ground)


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
    return Size(
        devices=devices,
        used=best.used,
        step_s=best.step_s,
        device_s=best.device_step_s / samples,
        idle_share=best.idle_share,
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
        assumed=assumed_efficiencies(posed.group.machine.spec),
    )
