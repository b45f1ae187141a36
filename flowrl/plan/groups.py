"""Which devices of a pool a plan is made for, where it has several kinds.

Each group of equal devices is tried for the whole job, and each ordered pair of groups with a part
of the step on the one and the rest on the other (`flowrl.plan.mixed`). The best is taken; the plan
says what the others would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flowrl.cluster.pool import DeviceGroup, ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.batches import Batch
from flowrl.plan.elsewhere import Part, Seating, check_environment_kinds, seatings
from flowrl.plan.explain.batches import idle_for_batch, uneven_note
from flowrl.plan.explain.took import by_step_time, took_apart
from flowrl.plan.fit import DoesNotFit
from flowrl.plan.impossible.pins import Elsewhere
from flowrl.plan.impossible.ways_out import Trial, changed_alike, without_pins
from flowrl.plan.many import Chosen, GroupJob, Searched, best_of_group, search_group
from flowrl.plan.mixed import PairJob, pair_searches, search_two_groups
from flowrl.plan.names import RATES, device_names
from flowrl.plan.node_parts import even_parts, idle_part, is_better, minds_hosts, with_whole_host
from flowrl.plan.one_pins import device_numbers
from flowrl.plan.options import Pin, PlanOptions, pins_text, with_pin
from flowrl.plan.pin_errors import Near, PinError, with_nearest
from flowrl.plan.pinned_kinds import check_kinds, no_two_kinds, of_one_kind
from flowrl.plan.pins import PinnedTasks, check_environments, read_pins
from flowrl.plan.request import PlanRequest, RoleRequest
from flowrl.plan.schema import PlacementPlan, Reason, Rejection
from flowrl.plan.ways.regions import HOST_SHARE
from flowrl.plan.ways.tasks import TaskWork, tasks_of
from flowrl.plan.write.many import write_plan


def groups_for(
    models: Sequence[RoleRequest], pool: ResourcePool, *, least: int = 2
) -> tuple[DeviceGroup, ...]:
    """The groups of at least so many known devices that all models' backends run on.

    None of two means that one device takes all: there is no second one, or nothing is known of it
    but its memory.
    """
    supported = frozenset.intersection(*(role.capabilities.devices for role in models))
    return tuple(
        group
        for group in pool.groups()
        if len(group.addresses) >= least
        and group.spec is not None
        and group.device.type in supported
    )


def host_share(pool: ResourcePool, group: DeviceGroup) -> int:
    """Bytes of its host's memory that each device of a group may fill."""
    return int(HOST_SHARE * min(host_parts(pool, group)))


def host_parts(pool: ResourcePool, group: DeviceGroup) -> list[float]:
    """Bytes of each host's memory that are a device's part, of the hosts of a group.

    All accelerators of a host share it evenly, the reserved ones and those of other kinds too.
    """
    mine = set(group.addresses)
    return [
        node.memory_bytes
        / sum((one.type == "cpu") == (group.device.type == "cpu") for one in node.devices)
        for node in pool.nodes
        if any(pool.address(node, device) in mine for device in node.devices)
    ]


def cost_of(request: PlanRequest) -> Cost:
    """Where times come from when nothing was measured.

    Raises:
        BackendError: the package that is asked for is not installed.
    """
    if request.options.engine_times == "aiconfigurator":
        from flowrl.cost.aiconfigurator import AIConfiguratorCost  # a library that few have

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
    order = device_numbers(pool)
    tasks = tasks_of(graph, request, groups[0].device.type)
    parts = [_part(pool, group, order) for group in groups]
    hosts = _hosts(pool, order, tasks, parts)
    check_environment_kinds(tasks, [one.kind for one in (*parts, *hosts)])
    tried = [*parts, *(_part(pool, group, order) for group in even_parts(groups))]
    job = _Job(graph=graph, request=request, cost=cost, parts=parts, tried=tried, hosts=hosts)
    pins = _pins_that_can_be(job)
    # What would help one group is of no use where another one does.
    found, failed, errors = _alone(replace(job, suggests=len(tried) == 1), pins)
    beaten: tuple[Searched, ...] = ()
    if len(parts) > 1:
        within = min((one.best.objective for one in found), default=math.inf)
        over_two = search_two_groups(job.on_two(pins), within)
        beaten = over_two.others
        found += [over_two.best] if over_two.best is not None else []
    best = min(found, key=lambda one: one.best.objective, default=None)
    spared = _with_idle(job, pins, best)
    if spared is None and best is None:
        errors = errors if len(tried) == 1 else _alone(job, pins)[2]
        raise _refusal(job, pins, errors)
    told = spared or best
    assert told is not None
    told = replace(told, whole=_whole(told, parts))
    plan = write_plan(graph, request, pool, told, hosted)
    notes = (*_not_looked_at(pool, (*parts, *hosts)), *_batch_notes(job, pins, told))
    plan = replace(plan, notes=(*plan.notes, *notes))
    if spared is not None:
        reason = _idle_reason(spared, best, failed)
        return replace(plan, reasons=(reason, *plan.reasons))
    if len(tried) == 1:
        return plan
    return replace(plan, reasons=(_group_reason(told, found, beaten, failed), *plan.reasons))


def _pins_that_can_be(job: _Job) -> PinnedTasks:
    """What pins mean.

    Raises:
        PlanError: one says what cannot be; with what it might say instead.
    """
    try:
        return job.pins(job.request.options)
    except PlanError as error:
        raise with_nearest(error, job.fits_with, job.shares()) from None


def _elsewhere(job: _Job, pins: PinnedTasks) -> PlanError | None:
    """Of pinned devices that are none of those that the job fits on; None where it fits on none."""
    placed = tuple(dict.fromkeys(own["devices"] for own in pins.asked.values() if "devices" in own))
    if not placed or not job.has_plan(without_pins(pins, placed)):
        return None
    said = pins_text(placed)
    error = PinError(
        f"no devices on which the job fits are {said}",
        where=" and ".join(dict.fromkeys(pin.where for pin in placed)),
        hint=f"leave {said} out",
    ).offering(*(Near(pin=pin, values=()) for pin in placed))
    return with_nearest(error, job.fits_with, job.shares())


def _whole(told: Searched, parts: Sequence[Part]) -> DeviceGroup | None:
    """The group of which a plan's devices are some, of each node as many; None where they are
    all of it, or of several groups."""
    mine = set(told.posed.group.addresses)
    groups = (part.group for part in parts if not told.posed.parts)
    return next((one for one in groups if mine < set(one.addresses)), None)


def _batch_notes(job: _Job, pins: PinnedTasks, told: Searched) -> Iterator[str]:
    """Of each group that the plan is on, what idles there for the batch alone."""
    for part in job.parts:
        uneven = idle_for_batch(told, job.request, part.group)
        if uneven:
            tries = job.request.options.try_batches
            tried = partial(_with_batch, job, pins, told, part) if tries else None
            yield from uneven_note(told, uneven, job.request, tried)


def _with_batch(
    job: _Job, pins: PinnedTasks, told: Searched, part: Part, batch: Batch
) -> Chosen | None:
    """The best plan with another batch: on the whole of a part, or on two groups again."""
    other = replace(job, request=batch.asked(job.request))
    if told.posed.parts:
        over_two = search_two_groups(other.on_two(pins), math.inf).best
        return None if over_two is None else over_two.best
    found = []
    for seating in seatings(other.tasks(), part, (), job.hosts, pins):
        if _names_only(part, pins, seating):
            posed = other.on(part, seating, pins).posed()
            if all(posed.ways.values()):
                found.append(best_of_group(other.request, posed, pins.filters))
    return min(filter(None, found), key=lambda one: one.objective, default=None)


def _not_looked_at(pool: ResourcePool, parts: Sequence[Part]) -> Iterator[str]:
    """Accelerators of the cluster that no plan is made for, and why."""
    known = {address for part in parts for address in part.group.addresses}
    for group in pool.groups():
        if group.device.type == "cpu" or known.issuperset(group.addresses):
            continue
        if group.spec is None:
            why = f"no time is known of them, which takes {RATES}"
        elif len(group.addresses) == 1:
            why = "one device alone is not divided over"
        else:
            why = f"a backend of this job does not run on {group.device.type}"
        yield f"{_group_name(group)}: left idle, for {why}"
    reserved: dict[str, list[str]] = {}
    for node in pool.nodes:
        for device in node.devices:
            if device.reserved and device.type != "cpu":
                reserved.setdefault(device.name, []).append(pool.address(node, device))
    for name, addresses in reserved.items():
        where = f"{len(addresses)} x {name} ({device_names(addresses)})"
        yield f"{where}: left idle, for the cluster reserves them"


def _hosts(
    pool: ResourcePool, order: Mapping[str, int], tasks: Sequence[TaskWork], parts: Sequence[Part]
) -> list[Part]:
    """The groups of devices that environments ask for by name; of them no figures are needed."""
    asked = {task.region.environment.kind for task in tasks if task.region is not None}
    known = {one.numbering: one for one in parts}
    made = [_part(pool, group, order) for group in pool.groups() if group.kind in asked]
    return [known.get(one.numbering, one) for one in made]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A job and all that it may be placed on.

    Attributes:
        parts: Groups for tasks, of equal devices.
        tried: These, and shares of their nodes.
        hosts: Groups for environments that ask for them.
        suggests: Whether errors say what would help.
    """

    graph: Graph
    request: PlanRequest
    cost: Cost
    parts: Sequence[Part]
    tried: Sequence[Part]
    hosts: Sequence[Part]
    suggests: bool = True

    def tasks(self) -> tuple[TaskWork, ...]:
        """Of the graph, on such devices."""
        return tasks_of(self.graph, self.request, self.parts[0].group.device.type)

    def pins(self, options: PlanOptions) -> PinnedTasks:
        """What pins mean.

        Raises:
            PlanError: one says what cannot be.
        """
        usable = {number for one in (*self.parts, *self.hosts) for number in one.numbering}
        roles = [role.name for role in self.request.roles]
        found = read_pins(options, self.tasks(), sorted(usable), roles)
        self._check(found)
        return found

    def fits_with(self, pin: Pin, value: str) -> bool:
        """Whether there is a plan with another value of a pin."""
        try:
            return self.has_plan(self.pins(with_pin(self.request.options, pin, value)))
        except PlanError:
            return False

    def shares(self) -> list[Sequence[int]]:
        """The numbers of the devices that are tried besides the first group."""
        return [part.numbering for part in self.tried[1:]]

    def _check(self, pins: PinnedTasks) -> None:
        check_kinds(pins, self.parts)
        mine = [task for task in self.tasks() if of_one_kind(task, pins, self.parts)]
        check_environments(pins, mine)

    def search(self, part: Part, pins: PinnedTasks) -> Searched | None:
        """The best plan of one group; None where pins name devices that it does not have.

        Raises:
            PlanError: nothing fits, or pins that cannot be kept; says what would help.
        """
        by_time = self.request.options.objective == "step_time"
        # Where time counts, none of their devices is better left to nobody.
        ways = seatings(self.tasks(), part, (), self.hosts, pins)[: 1 if by_time else None]
        every: list[Searched] = []
        for seating in ways:
            if not _names_only(part, pins, seating):
                return min(every, key=lambda one: one.best.objective, default=None)
            every.append(search_group(self.on(part, seating, pins), pool=self.beside(part, pins)))
        return min(every, key=lambda one: one.best.objective, default=None)

    def on(self, part: Part, seating: Seating, pins: PinnedTasks) -> GroupJob:
        """The job on one group."""
        return GroupJob(
            graph=self.graph,
            request=self.request,
            cost=self.cost,
            part=part,
            pins=pins,
            outside=seating.outside,
            suggests=self.suggests,
        )

    def on_two(self, pins: PinnedTasks) -> PairJob:
        """The job on two groups."""
        return PairJob(
            graph=self.graph,
            request=self.request,
            cost=self.cost,
            pins=pins,
            parts=self.parts,
            hosts=self.hosts,
        )

    def beside(self, part: Part, pins: PinnedTasks) -> Elsewhere:
        """What there is besides one of the groups that are tried."""
        return Elsewhere(
            groups=tuple(one.group for one in self.parts),
            fits=lambda change: self._fits_beside(part, pins, change),
            parts=tuple(one for one in self.tried if one is not part),
        )

    def _fits_beside(self, part: Part, kept: PinnedTasks, change: Trial) -> bool:
        if change.pins is None:
            return any(
                self.holds(one, kept, alike)
                for one in self.tried
                if one is not part and (alike := _alike(one, part, change)) is not None
            )
        try:
            self._check(change.pins)
        except PlanError:
            return False
        return self.has_plan(change.pins, without=part)

    def has_plan(self, pins: PinnedTasks, without: Part | None = None) -> bool:
        """Whether there is a plan on any group, or on two of them.

        Args:
            without: Not on this one alone.
        """
        others = (one for one in self.tried if one is not without)
        if any(self.holds(one, pins) for one in others):
            return True
        return len(self.parts) > 1 and any(
            pair.likely is not None or pair.best(math.inf)
            for pair in pair_searches(self.on_two(pins))
        )

    def holds(self, part: Part, pins: PinnedTasks, change: Trial | None = None) -> bool:
        """Whether there is a plan on one group, or on it with a change."""
        return any(
            _names_only(part, pins, seating)
            and self.on(part, seating, pins).changed(change or Trial()).has_plan()
            for seating in seatings(self.tasks(), part, (), self.hosts, pins)
        )


def _alike(part: Part, before: Part, change: Trial) -> Trial | None:
    """What a change of one group is for another one of the same devices; None where nothing."""
    if change.group is None:
        same = part.group.kind == before.group.kind and change.host is not None
        return Trial(host=part.host * (change.host or 0) // before.host) if same else None
    group = changed_alike(part.group, before.group, change.group)
    return None if group is None else Trial(group=group)


def _names_only(part: Part, pins: PinnedTasks, seating: Seating) -> bool:
    """Whether pins name no devices but those of a part, and what is set aside beside it."""
    own = [some for name, some in pins.environments.items() if name not in seating.outside]
    named = {number for some in (*pins.devices.values(), *own) for number in some}
    return named <= set(part.numbering)


def _alone(
    job: _Job, pins: PinnedTasks
) -> tuple[list[Searched], list[tuple[DeviceGroup, str]], list[tuple[DeviceGroup, PlanError]]]:
    """The best plan of each group alone; why others have none; and their errors."""
    found: list[Searched] = []
    failed: list[tuple[DeviceGroup, str]] = []
    errors: list[tuple[DeviceGroup, PlanError]] = []
    for part in job.tried:
        try:
            one = job.search(part, pins)
        except PlanError as error:
            failed.append((part.group, error.what))
            errors.append((part.group, error))
            continue
        if one is None:
            failed.append((part.group, "pins name other devices"))
        else:
            found.append(one)
    return found, failed, errors


def _with_idle(job: _Job, pins: PinnedTasks, best: Searched | None) -> Searched | None:
    """A plan that leaves some devices of the only node idle, where it is better: then those that
    are used have all cores and all memory of the host. None where none is.

    So a larger node is never slower than a smaller one with the same host.

    Args:
        best: The best plan without; None where there is none.
    """
    (part, *others), found = job.parts, best
    if others or part.group.num_nodes != 1 or not _minds_hosts(job, part, pins, best):
        return None
    for size in range(part.group.node_size - 1, 0, -1):
        share = idle_part(part, size)
        if not job.holds(share, pins):
            continue
        one = job.search(share, pins)
        assert one is not None, "what has a plan names no devices but those"
        if found is None or is_better(one.best, found.best, spares=size if found is best else 0):
            found = one
    return None if found is best else found


def _minds_hosts(job: _Job, part: Part, pins: PinnedTasks, best: Searched | None) -> bool:
    """Whether the part of a host that each device has may bind a plan."""
    if best is None:  # then it does where there is one with more of it
        return job.holds(with_whole_host(part), pins)
    return minds_hosts(best.posed)


def _idle_reason(
    spared: Searched, best: Searched | None, failed: Sequence[tuple[DeviceGroup, str]]
) -> Reason:
    rejected = _without_plan(failed)
    if best is not None:
        why = "its best step takes no less"
        if not by_step_time(spared.best):
            why = "it takes no less device time"
        rejected = [_no_better(best, spared, why)]
    return Reason(
        subject="devices",
        choice=_groups_name(spared),
        why="the others idle, so that all cores and all memory of the host are for these",
        rejected=tuple(rejected),
    )


def _refusal(
    job: _Job, pins: PinnedTasks, errors: Sequence[tuple[DeviceGroup, PlanError]]
) -> PlanError:
    """What is said where there is no plan.

    Args:
        errors: Of the groups that have the pinned devices.
    """
    if not errors:
        return no_two_kinds(pins, job.parts)
    told = _telling(errors, pins)
    wheres = [pin.where for own in pins.asked.values() for pin in own.values()]
    of_pins = any(where in (told.where or "") for where in wheres)
    return told if of_pins or len(job.tried) == 1 else _elsewhere(job, pins) or told


def _telling(errors: Sequence[tuple[DeviceGroup, PlanError]], pins: PinnedTasks) -> PlanError:
    """The error of the first group that has as many devices as pinned layouts need, or of the
    largest one; where memory is short, of the group that lacks least of it."""
    need = max(
        (
            math.prod(size for name, size in one.layout if name != "ep")
            for one in pins.filters.values()
        ),
        default=1,
    )
    enough = [error for group, error in errors if len(group.addresses) >= need]
    if not enough:
        return max(errors, key=lambda item: len(item[0].addresses))[1]
    short = [error for error in enough if isinstance(error, DoesNotFit)]
    return min(short, key=lambda error: error.over) if enough[0] in short else enough[0]


def _part(pool: ResourcePool, group: DeviceGroup, order: Mapping[str, int]) -> Part:
    return Part(
        group=group,
        host=host_share(pool, group),
        numbering=tuple(order[address] for address in group.addresses),
    )


def _group_reason(
    best: Searched,
    found: Sequence[Searched],
    beaten: Sequence[Searched],
    failed: Sequence[tuple[DeviceGroup, str]],
) -> Reason:
    longer = "its best step takes longer"
    if not by_step_time(best.best):
        longer = "it takes more device time"
    over_two = "whatever of a step is on which of these two, it is no better"
    rejected = [
        *(_no_better(one, best, longer) for one in found if one is not best),
        *(_no_better(one, best, over_two) for one in beaten),
        *_without_plan(failed),
    ]
    return Reason(
        subject="devices",
        choice=_groups_name(best),
        why="of all kinds of devices, and a part of the step on one with the rest on another, the "
        "best",
        rejected=tuple(rejected),
    )


def _no_better(one: Searched, best: Searched, why: str) -> Rejection:
    """Of a plan that takes as much as the best one, or more."""
    constraint = f"{why}: {took_apart(one.best, best.best)}"
    return Rejection(choice=_groups_name(one), constraint=constraint)


def _without_plan(failed: Sequence[tuple[DeviceGroup, str]]) -> list[Rejection]:
    """Of groups on which there is no plan."""
    return [Rejection(choice=_group_name(group), constraint=why) for group, why in failed]


def _groups_name(one: Searched) -> str:
    posed = one.posed
    names: dict[str, list[str]] = {}
    if posed.parts or posed.outside:
        for task in posed.tasks:
            names.setdefault(_group_name(posed.group_of(task.id)), []).append(task.title)
        for name, group in posed.outside.items():
            region = posed.task(name).region
            assert region is not None
            names.setdefault(_group_name(group), []).append(region.node)
        return ", ".join(f"{' and '.join(tasks)} on {name}" for name, tasks in names.items())
    return _group_name(posed.group)


def _group_name(group: DeviceGroup) -> str:
    return f"{len(group.addresses)} x {group.device.name} ({device_names(group.addresses)})"
