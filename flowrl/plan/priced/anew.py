"""A plan's file with its configuration: what follows from its decisions is made anew.

People edit plans. Of each operation the file decides layout, devices, recomputation, offload,
micro-batches, slots and cache, and with them who is beside whom in which schedule. Times, memory of
every device in every phase, what engines are started with and the step itself follow, and are
computed here by what the planner itself computes them by; a file whose decisions do not fit is
refused, with the numbers. `flowrl.plan.priced.changes` tells what the file said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.cluster.pool import ClusterNode, Device, DeviceGroup, ResourcePool
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.check.held import check_held
from flowrl.plan.groups import host_parts
from flowrl.plan.many import Chosen
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.mixed import priced_syncs
from flowrl.plan.operations import place_operations
from flowrl.plan.priced.changes import is_changed
from flowrl.plan.priced.decided import decided_task, decided_way
from flowrl.plan.priced.write import with_prices
from flowrl.plan.problem_of import CHUNKS, Posed, may_run_ahead
from flowrl.plan.request import PlanRequest
from flowrl.plan.schema import Operation, PlacementPlan
from flowrl.plan.search import (
    Asynchronous,
    Leaf,
    Problem,
    Schedule,
    Spatial,
    Temporal,
    kind_of,
    seconds_of,
)
from flowrl.plan.search_options import option_tasks
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.regions import HOST_SHARE
from flowrl.plan.ways.tasks import TaskWork, tasks_of


def priced(
    graph: Graph,
    request: PlanRequest,
    plan: PlacementPlan,
    cost: Cost,
    where: str = "plan",
) -> PlacementPlan:
    """The plan with times, memory and engines by its decisions; itself where they are so already.

    Args:
        plan: Over many devices.
        cost: Where times come from.

    Raises:
        PlanError: a decision that its task cannot have, or that the devices do not hold.
    """
    if plan.schedule is None:
        return plan
    _check_program(graph, request, plan, where)
    _check_types(request, plan, where)
    reading = _Reading(graph, request, plan, cost, where)
    chosen = reading.chosen()

    def again(other: PlacementPlan) -> Chosen:
        return _Reading(graph, request, other, cost, where).chosen()

    check_held(chosen, plan, where, again)
    new = with_prices(plan, chosen, graph, reading.request, reading.pool)
    return new if is_changed(plan, new) else plan


_PROGRAM = ("op", "role", "after", "num_samples", "max_tokens", "max_turns", "every", "region")
"""Of an operation, what the program and its sizes say, and no planner decides."""


def _check_program(graph: Graph, request: PlanRequest, plan: PlacementPlan, where: str) -> None:
    """Raises PlanError where an operation is not the configuration's."""
    placements = {placement.role: placement for placement in plan.placements}
    if not set(graph.roles) <= set(placements):
        return  # what is made of the plan says which is missing
    known = {one.node: one for one in place_operations(graph, placements, request)}
    for i, operation in enumerate(plan.operations):
        if operation.node not in known:
            continue
        for key in _PROGRAM:
            said, found = getattr(known[operation.node], key), getattr(operation, key)
            if said != found:
                raise PlanError(
                    f"{operation.node} is another operation than the configuration has",
                    where=f"{where}: operations.{i}.{key}",
                    found=f"{key} {found}",
                    expected=f"{key} {said}",
                    hint="undo the edit, or make the plan again: flowrl plan CONFIG -o FILE",
                )


def _check_types(request: PlanRequest, plan: PlacementPlan, where: str) -> None:
    """Raises PlanError where parameters are of a type that their backend does not have, or does not
    train."""
    roles = {role.name: role for role in request.roles}
    for i, one in enumerate(plan.placements):
        if (role := roles.get(one.role)) is None:
            continue  # not kept, which is told
        untrained = role.capabilities.untrained_dtypes if one.trainable else frozenset()
        dtypes = role.capabilities.dtypes - untrained
        if one.dtype not in ("none", *dtypes):
            verb = "does not train" if one.dtype in untrained else "has no"
            raise PlanError(
                f"backend {role.backend!r} {verb} parameters of type {one.dtype}",
                where=f"{where}: placements.{i}.dtype",
                found=one.dtype,
                expected=f"one of {', '.join(sorted(dtypes))}",
                hint="write one of them, or undo the edit",
            )


class _Reading:
    """A file's decisions as the planner has its own."""

    def __init__(
        self, graph: Graph, request: PlanRequest, plan: PlacementPlan, cost: Cost, where: str
    ) -> None:
        self.graph, self.plan, self.cost, self.where = graph, plan, cost, where
        dtypes = {one.role: one.dtype for one in plan.placements if one.dtype != "none"}
        roles = tuple(replace(one, dtype=dtypes.get(one.name, one.dtype)) for one in request.roles)
        self.request = replace(request, roles=roles)
        self.operations = {one.node: (i, one) for i, one in enumerate(plan.operations)}
        placed = [one for one in plan.operations if one.seconds is not None and one.devices]
        device_type = plan.pool.device(placed[0].devices[0]).type if placed else "cuda"
        self.pool = pool_of(plan)
        self.tasks = tuple(
            decided_task(task, self.operation(task.id))
            for task in tasks_of(graph, self.request, device_type)
        )

    def operation(self, node: str) -> Operation:
        """That the plan has of a task.

        Raises:
            PlanError: it has none, or none on devices.
        """
        _, operation = self.operations.get(node, (0, None))
        if operation is None or not operation.devices:
            raise PlanError(
                f"the plan does not place {node}",
                where=self.where,
                hint="make the plan again: flowrl plan CONFIG -o FILE",
            )
        return operation

    def place(self, node: str) -> str:
        """Of an operation, in messages."""
        return f"{self.where}: operations.{self.operations[node][0]}"

    def chosen(self) -> Chosen:
        """The schedule of the file, with the ways that it decides."""
        groups, outside = self._groups(), self._outside()
        every = [*dict.fromkeys(a for group in groups.values() for a in group.addresses)]
        beside = [address for group in outside.values() for address in group.addresses]
        number = {address: i for i, address in enumerate((*every, *beside))}
        made = {
            name: Candidates(self.request, group, self.cost, self._host(group), outside)
            for name, group in groups.items()
        }
        ways: dict[str, tuple[Candidate, ...]] = {
            task.id: (self._way(task, made[task.id]),) for task in self.tasks
        }
        tasks = option_tasks(self.tasks, ways, self.request)
        problem = Problem(
            tasks=tasks,
            num_devices=len(every),
            memory_bytes=max([0, *(one.budget for one in made.values())]),
            chunks=CHUNKS,
            staleness=self.request.max_staleness,
            ahead=may_run_ahead(self.tasks) if self.request.max_staleness else frozenset(),
        )
        first = next(iter(groups.values()))
        posed = Posed(
            problem=problem,
            tasks=self.tasks,
            ways=ways,
            candidates=next(iter(made.values())),
            group=replace(first, addresses=tuple(every)),
            outside=outside,
        )
        parts = {
            name: replace(posed, candidates=made[name], group=group)
            for name, group in groups.items()
        }
        posed = replace(posed, parts=parts)
        assert self.plan.schedule is not None
        schedule = _schedule(
            self.plan.schedule,
            {task.id: task.options[0] for task in tasks},
            {task.operations: task.id for task in self.tasks},
        )
        numbers: dict[str, tuple[int, ...]] = {
            task.id: tuple(number[one] for one in self.operation(task.id).devices)
            for task in self.tasks
        }
        syncs = priced_syncs(self.graph, posed, numbers)
        return Chosen(
            posed=posed,
            schedule=schedule,
            kind=kind_of(schedule),
            step_s=seconds_of(problem, schedule) + sum(syncs.values()),
            syncs=syncs,
            ways={name: one for name, (one,) in ways.items()},
            numbers=numbers,
            peak=0,
            played=self._played(ways, number),
        )

    def _way(self, task: TaskWork, made: Candidates) -> Candidate:
        operation = self.operation(task.id)
        return decided_way(made, task, operation, self._plays(task), self.place(task.id))

    def _plays(self, task: TaskWork) -> Operation | None:
        """The operation of a task's environment."""
        return None if task.region is None else self.operation(task.region.node)

    def _groups(self) -> dict[str, DeviceGroup]:
        """The devices that each task is on some of, of one kind."""
        machines: dict[str, int | None] = {d.address: d.machine for d in self.plan.pool.devices}
        budgets = {d.address: d.budget_bytes for d in self.plan.pool.devices}
        node_of = {d.address: d.node for d in self.plan.pool.devices}
        kinds: dict[str, int] = {}
        on: dict[int, set[str]] = {}
        for task in self.tasks:
            operation = self.operation(task.id)
            found = {machines[one] for one in operation.devices}
            if len(found) > 1 or None in found:
                raise PlanError(
                    f"{task.id} cannot be on devices of several kinds, or of unknown speed",
                    where=f"{self.place(task.id)}.devices",
                    found=", ".join(
                        sorted({self.plan.pool.device(one).name for one in operation.devices})
                    ),
                    expected="devices of one kind, which pool.machines has figures of",
                    hint="undo the edit, or make the plan again: flowrl plan CONFIG -o FILE",
                )
            kinds[task.id] = int(found.pop() or 0)
            plays = self._plays(task)
            beside = () if plays is None else plays.devices
            on.setdefault(kinds[task.id], set()).update(operation.devices)
            same = [one for one in beside if machines[one] == kinds[task.id]]
            on[kinds[task.id]].update(same)
        ready = {group.addresses[0]: group for group in self.pool.groups()}
        by_address = {a: group for group in ready.values() for a in group.addresses}
        groups: dict[int, DeviceGroup] = {}
        for kind, used in on.items():
            nodes: dict[str, int] = {}
            for address in used:
                nodes[node_of[address]] = nodes.get(node_of[address], 0) + 1
            machine = self.plan.pool.machines[kind]
            # Of nodes that hold unequally many, plans use equal parts: those are the nodes. Of the
            # only node, those that idle leave its cores to the others.
            spares = self._is_only_node() and any(task.region for task in self.tasks)
            most = max(nodes.values())
            size = most if len(nodes) > 1 or spares else max(most, machine.node_size)
            groups[kind] = replace(
                by_address[next(iter(used))],
                spec=machine.spec,
                node_size=size,
                addresses=tuple(d.address for d in self.plan.pool.devices if d.machine == kind),
                budget_bytes=min(budgets[one] for one in used),
            )
        return {name: groups[kind] for name, kind in kinds.items()}

    def _is_only_node(self) -> bool:
        """Whether all devices that tasks can be divided over are in one node, as the planner asks
        (`flowrl.plan.groups`): others may hold a device alone, or none that this job can use."""
        kind = self.plan.pool.device(self.operation(self.tasks[0].id).devices[0]).type
        nodes: dict[int, list[str]] = {}
        for device in self.plan.pool.devices:
            if device.machine is not None and device.type == kind:
                nodes.setdefault(device.machine, []).append(device.node)
        several = [names for names in nodes.values() if len(names) > 1]
        return len(several) == 1 and len(set(several[0])) == 1

    def _outside(self) -> dict[str, DeviceGroup]:
        """Accelerators of another kind that environments have, by task."""
        found: dict[str, DeviceGroup] = {}
        for task in self.tasks:
            plays = self._plays(task)
            if plays is None:
                continue
            devices = [self.plan.pool.device(one) for one in plays.devices]
            mine = self.plan.pool.device(self.operation(task.id).devices[0])
            others = [d for d in devices if d.type != "cpu" and d.name != mine.name]
            if others:
                device = self.pool.device(others[0].address)
                spec = None
                if others[0].machine is not None:
                    spec = self.plan.pool.machines[others[0].machine].spec
                found[task.id] = DeviceGroup(
                    device=device,
                    spec=spec,
                    node_size=len(others),
                    addresses=tuple(one.address for one in others),
                    budget_bytes=min(one.budget_bytes for one in others),
                )
        return found

    def _played(
        self, ways: Mapping[str, tuple[Candidate, ...]], number: Mapping[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """Devices of environments alone."""
        found: dict[str, tuple[int, ...]] = {}
        for task in self.tasks:
            played, plays = ways[task.id][0].played, self._plays(task)
            if played is not None and plays is not None and played.split.mode == "apart":
                numbers = tuple(number[one] for one in plays.devices if one in number)
                if numbers:
                    found[task.id] = numbers
        return found

    def _host(self, group: DeviceGroup) -> int | None:
        """As the planner shares a host's memory; None of hosts that the plan does not describe."""
        mine = set(group.addresses)
        least = min(host_parts(self.pool, group), default=0.0)
        if self._is_only_node():  # what idles leaves its part to the others
            used = {one for task in self.tasks for one in self.operation(task.id).devices}
            least *= len(mine) / max(1, len(mine & used))
        return int(HOST_SHARE * least) if least else None


def pool_of(plan: PlacementPlan) -> ResourcePool:
    """The pool that a plan was made for, as far as the plan describes it."""
    nodes: dict[str, list[Device]] = {}
    for one in plan.pool.devices:
        spec = None
        if one.machine is not None and one.type != "cpu":
            spec = plan.pool.machines[one.machine].spec
        device = Device(
            id=one.address.rpartition("/")[2],
            type=one.type,
            name=one.name,
            memory_bytes=one.memory_bytes,
            available_bytes=one.budget_bytes if one.type == "cpu" else None,
            num_cores=one.num_cores,
            spec=spec,
        )
        nodes.setdefault(one.node, []).append(device)
    return ResourcePool(
        nodes=tuple(
            ClusterNode(
                name=name,
                devices=tuple(devices),
                memory_bytes=sum(one.memory_bytes for one in devices if one.type == "cpu"),
                num_cores=sum(one.num_cores for one in devices),
            )
            for name, devices in nodes.items()
        )
    )


def _schedule(
    step: ScheduleStep, options: Mapping[str, object], tasks: Mapping[tuple[str, ...], str]
) -> Schedule:
    """A step of the file as the planner has it.

    Args:
        tasks: By their operations: updates of a trainer follow each other (`check.trainers`).
    """
    task = tasks.get(step.nodes())
    if task is not None:
        return Leaf(task=task, option=options[task])  # type: ignore[arg-type]
    first, second = (_schedule(part, options, tasks) for part in step.parts)
    if step.kind == "temporal":
        return Temporal(first=first, second=second)
    if step.kind == "spatial":
        return Spatial(first=first, second=second, chunks=step.chunks)
    return Asynchronous(first=first, second=second)
