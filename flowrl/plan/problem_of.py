"""A graph, what is asked of it and a group of equal devices, as a problem of the search.

    posed = pose(graph, request, group, cost, filters=filters)
    found = search(posed.problem, top=4)
    posed.candidate("actor.generate", option.label).layout

Device counts are node-aligned: parts of a node, and whole nodes. Of large pools not every number of
nodes is tried: all up to 8, then four sizes an octave, and what such blocks leave of a pool
(`device_counts`).

Only an engine's work may run ahead of the trainer, and what reads from it without the trainer's
weights: rewards and references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.layout import Layout
from flowrl.cost.role_memory import Shard
from flowrl.cost.source import Cost, LeastPasses
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph, Op
from flowrl.plan.options import KindName
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import Kind, Objective, Option, Problem, Sync
from flowrl.plan.search.problem import EVERY_KIND
from flowrl.plan.search_options import option_tasks, shared_weights
from flowrl.plan.step_ceiling import step_ceiling
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.region_ways import Drawn, ways_of
from flowrl.plan.ways.tasks import TaskWork, tasks_of

CHUNKS = (1, 2, 4, 8, 16)

SINGLE_ROLLOUT = "plans of many devices have a single rollout run ahead of the trainer"

_FINE_NODES = 8
_SIZES_AN_OCTAVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """A problem, and what its options are.

    Attributes:
        tasks: In the problem's order.
        ways: Of each task, by label.
        environments: Devices that pins name for environments, by the task that they play with.
        parts: Of a problem over several groups of devices, what each task's group was asked.
        outside: Devices of another kind that environments have, by the task that they play with.
        travels: Updates and the tasks that they send weights to, and every how many steps.
        beside: Of each update, faster ways in the layouts of `ways` that the search does without,
            for others are as fast in as little memory. Labels go on with them.
    """

    problem: Problem
    tasks: tuple[TaskWork, ...]
    ways: Mapping[str, tuple[Candidate, ...]]
    candidates: Candidates
    group: DeviceGroup
    environments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parts: Mapping[str, Posed] = field(default_factory=dict)
    outside: Mapping[str, DeviceGroup] = field(default_factory=dict)
    travels: Mapping[tuple[str, str], int] = field(default_factory=dict)
    beside: Mapping[str, tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All devices, by the numbers that a schedule on them gives."""
        beside = (address for group in self.outside.values() for address in group.addresses)
        return (*self.group.addresses, *beside)

    def outside_numbers(self, task: str) -> tuple[int, ...]:
        """The devices of another kind that a task's environment has."""
        start = len(self.group.addresses)
        for name, group in self.outside.items():
            if name == task:
                return tuple(range(start, start + len(group.addresses)))
            start += len(group.addresses)
        return ()

    def made(self, task: str) -> Candidates:
        """What makes the candidates of a task."""
        return self.parts[task].candidates if task in self.parts else self.candidates

    def group_of(self, task: str) -> DeviceGroup:
        """The devices that a task is on some of."""
        return self.parts[task].group if task in self.parts else self.group

    def task(self, id: str) -> TaskWork:  # noqa: A002
        """The task of this name; KeyError where there is none."""
        for task in self.tasks:
            if task.id == id:
                return task
        raise KeyError(id)

    def candidate(self, task: str, option: Option) -> Candidate:
        """What an option of a task is."""
        ways = self.ways[task]
        if option.label < len(ways):
            return ways[option.label]
        return self.beside[task][option.label - len(ways)]


def pose(
    graph: Graph,
    request: PlanRequest,
    group: DeviceGroup,
    cost: Cost,
    *,
    filters: Mapping[str, Filter] | None = None,
    places: Mapping[str, frozenset[int]] | None = None,
    environments: Mapping[str, tuple[int, ...]] | None = None,
    kinds: frozenset[Kind] = EVERY_KIND,
    only: frozenset[str] | None = None,
    host: int | None = None,
    engine_least: int = 1,
    outside: Mapping[str, DeviceGroup] | None = None,
    all_ways: bool = True,
) -> Posed:
    """The problem of placing a graph on a group of equal devices.

    Args:
        filters: What pins leave, by task.
        places: Devices of the group that pins name, by task.
        environments: Likewise of the environments that tasks play with.
        kinds: Families of schedules.
        only: Tasks to place; None takes all.
        host: Bytes of its host's memory that each device may fill.
        engine_least: Devices that a rollout is tried on at least.
        outside: Devices of another kind that environments have, by the task that they play with.
        all_ways: Also those that take longer than the schedules which a plan tells are likely to.

    Raises:
        PlanError: a role without a model; a device without figures; an asynchronous schedule is
            asked for, of several rollouts.
    """
    every = tasks_of(graph, request, group.device.type)
    if len(rollouts_of(every)) > 1 and request.max_staleness:
        request = _one_at_a_time(request, every)
    tasks = tuple(task for task in every if only is None or task.id in only)
    filters, made = filters or {}, Candidates(request, group, cost, host, outside)
    counts = possible_counts(group, filters)
    known = _Ways(made, tasks, filters, counts)

    def problem_with(
        ways: Mapping[str, tuple[Candidate, ...]],
        beside: Mapping[str, tuple[Candidate, ...]] | None = None,
    ) -> Problem:
        here = frozenset(ways)
        return Problem(
            tasks=option_tasks(tasks, ways, request, beside or {}),
            num_devices=len(group.addresses),
            counts=counts,
            memory_bytes=max(0, made.budget),
            chunks=CHUNKS,
            syncs=tuple(_syncs(graph, tasks, ways, made)),
            staleness=request.max_staleness,
            ahead=may_run_ahead(tasks) if request.max_staleness else frozenset(),
            pinned=_pinned(filters, here),
            places={name: one for name, one in (places or {}).items() if name in here},
            kinds=kinds,
            objective=_objective(request),
            beside=sum(len(one.addresses) for one in made.outside.values()),
        )

    if not all_ways and _has_ceiling(request, tasks, filters, group):
        made.ceiling = step_ceiling(tasks, known.on, problem_with, counts)
    ways = known.every(engine_least)
    beside = known.beside(ways)
    return Posed(
        problem=problem_with(ways, beside),
        tasks=tasks,
        ways=ways,
        candidates=made,
        group=group,
        environments=environments or {},
        outside=made.outside,
        travels=weight_ways(graph, tasks),
        beside=beside,
    )


def _has_ceiling(
    request: PlanRequest,
    tasks: Sequence[TaskWork],
    filters: Mapping[str, Filter],
    group: DeviceGroup,
) -> bool:
    """Whether no way is of use that takes longer alone than a step.

    On a single node it also matters how many devices stand idle, and what that leaves of the host.
    """
    return (
        request.options.objective == "step_time"
        and not request.max_staleness
        and group.num_nodes > 1
        and all(one == Filter() for one in filters.values())
        and all(task.region is None for task in tasks)
    )


def _pinned(filters: Mapping[str, Filter], here: frozenset[str]) -> dict[str, int]:
    """How many devices pins ask for, of the tasks that are placed."""
    return {
        name: one.devices
        for name, one in filters.items()
        if one.devices is not None and name in here
    }


def _objective(request: PlanRequest) -> Objective:
    step_time = request.options.objective == "step_time"
    return Objective.STEP_TIME if step_time else Objective.DEVICE_SECONDS


class _Ways:
    """The ways to run each task, on the counts that pins leave."""

    def __init__(
        self,
        made: Candidates,
        tasks: Sequence[TaskWork],
        filters: Mapping[str, Filter],
        counts: Sequence[int],
    ) -> None:
        self._made, self._tasks, self._filters, self._counts = made, tasks, filters, counts
        self._shares = shared_weights(tasks)
        self._drawn: Drawn = {}
        self._found: dict[tuple[str, int], tuple[Candidate, ...]] = {}

    def on(self, task: TaskWork, count: int) -> tuple[Candidate, ...]:
        """Those on so many devices."""
        key = (task.id, count)
        if key not in self._found:
            self._found[key] = ways_of(
                self._made,
                task,
                count,
                self._filters.get(task.id, Filter()),
                shared=task.weights in self._shares,
                counts=self._counts,
                drawn=self._drawn,
            )
        return self._found[key]

    def every(self, engine_least: int) -> dict[str, tuple[Candidate, ...]]:
        """All of each task, but for those above the ceiling."""
        ways: dict[str, tuple[Candidate, ...]] = {}
        for task in self._tasks:
            asked = self._filters.get(task.id, Filter()).devices
            least = engine_least if task.generates else 1
            counts = [
                one for one in self._counts if asked == one or (asked is None and one >= least)
            ]
            most = self._made.ceiling * task.every
            found = [
                way
                for count in counts
                if self._least_s(task, count) <= most
                for way in self.on(task, count)
            ]
            ways[task.id] = tuple(way for way in found if way.seconds <= most)
        return ways

    def beside(self, ways: Mapping[str, tuple[Candidate, ...]]) -> dict[str, tuple[Candidate, ...]]:
        """Of each update what `Posed.beside` has of it.

        Args:
            ways: Those that are worth having.
        """
        return {
            str(task.id): self._made.beside(
                task, ways[task.id], self._filters.get(task.id, Filter())
            )
            for task in self._tasks
            if task.updates
        }

    def _least_s(self, task: TaskWork, num_devices: int) -> float:
        """Seconds that a trainer's task takes at least on so many devices, whatever its layout; 0
        of others, and where nobody knows."""
        cost, options = self._made.cost, self._made.options
        if task.generates or not isinstance(cost, LeastPasses):
            return 0.0
        mean = task.prompt_tokens + options.lengths.mean
        samples = sum(one.samples for one in task.updated if one.rows) or task.samples
        return cost.least_passes_s(
            task.shape,
            self._made.machine,
            devices=num_devices,
            tokens=samples * mean,
            training=bool(task.updated),
        )


def _one_at_a_time(request: PlanRequest, tasks: Sequence[TaskWork]) -> PlanRequest:
    """The request where nothing is drawn ahead, because there are several rollouts."""
    rollouts = rollouts_of(tasks)
    if request.options.kind == "asynchronous":
        raise PlanError(
            SINGLE_ROLLOUT,
            where=request.options.kind_where,
            found=f"{len(rollouts)} rollouts, {' and '.join(rollouts)}",
            hint=f"set {request.train_key}.max_staleness=0, and ask for another kind",
        )
    return replace(request, max_staleness=0)


_KINDS: Mapping[KindName, frozenset[Kind]] = {
    "auto": EVERY_KIND,
    "temporal": frozenset({Kind.TEMPORAL}),
    "spatial": frozenset({Kind.SPATIAL}),
    "asynchronous": frozenset({Kind.ASYNCHRONOUS}),
}


def kinds_wanted(request: PlanRequest) -> frozenset[Kind]:
    """The kinds of schedules that are asked for.

    Raises:
        PlanError: asynchronous, where no sample may be stale.
    """
    kind = request.options.kind
    if kind == "asynchronous" and not request.max_staleness:
        raise PlanError(
            "no sample may be generated ahead of the trainer",
            where=request.options.kind_where,
            found="asynchronous, and max_staleness=0",
            hint=f"set {request.train_key}.max_staleness to 1 or more, or ask for another kind",
        )
    return _KINDS[kind]


def with_policies_apart(graph: Graph, request: PlanRequest) -> PlanRequest:
    """The request, of spatial schedules alone where policies take turns in an episode: they draw at
    the same time, so none has devices of another.

    Raises:
        PlanError: another kind is asked for.
    """
    several = [one for one in graph.of_op(Op.INTERACT) if len(graph.generators_of(one)) > 1]
    options = request.options
    if not several or options.kind == "spatial":
        return request
    if options.kind != "auto":
        raise PlanError(
            f"{several[0].id} has several policies that take turns, each on devices of its own",
            where=options.kind_where,
            found=options.kind,
            expected="spatial",
            hint=f"leave {options.kind_where} out",
        )
    where = f"{several[0].id}, in which policies take turns,"
    return replace(request, options=replace(options, kind="spatial", kind_where=where))


def device_counts(num_devices: int, node_size: int) -> tuple[int, ...]:
    """Sizes of blocks: parts of a node, then whole nodes, ascending.

    In pools of a few nodes any part counts, so that what a smaller pool could do with devices that
    it has by chance (7 of 8) a larger one can do too. Of many nodes those parts are looked at that
    divide a node, and powers of two.

    >>> device_counts(24, 8)
    (1, 2, 3, 4, 5, 6, 7, 8, 16, 24)
    """
    nodes = num_devices // node_size
    parts = {size for size in range(1, node_size + 1) if node_size % size == 0}
    parts |= {1 << power for power in range(node_size.bit_length())}
    if nodes <= _FINE_NODES:
        parts |= _fine_sizes(node_size)
    whole = _fine_sizes(nodes) | {nodes}
    whole |= {nodes - one for one in whole if one < nodes}
    sizes = parts | {one * node_size for one in whole}
    return tuple(sorted(size for size in sizes if 1 <= size <= num_devices))


def possible_counts(group: DeviceGroup, filters: Mapping[str, Filter]) -> tuple[int, ...]:
    """Sizes of blocks of a group, those that pins ask for among them."""
    counts = device_counts(len(group.addresses), group.node_size)
    asked = {
        one.devices
        for one in filters.values()
        if one.devices and aligned(one.devices, group.node_size)
    }
    return tuple(sorted({*counts, *asked}))


def aligned(count: int, node_size: int) -> bool:
    """Whether so many devices are part of a node, or whole nodes."""
    return count < node_size or count % node_size == 0


def _fine_sizes(most: int) -> set[int]:
    """All numbers up to eight, then four an octave."""
    found = set(range(1, min(most, _FINE_NODES) + 1))
    size, step = _FINE_NODES, _FINE_NODES // _SIZES_AN_OCTAVE
    while size < most:
        found.update(range(size, min(2 * size, most) + 1, step))
        size, step = 2 * size, 2 * step
    return found


def sync_seconds(
    task: TaskWork,
    source: Layout,
    destination: Layout,
    made: Candidates,
    *,
    apart: bool,
    shard: Shard,
) -> float:
    """Of new weights on their way to a task; none where a trainer's module has them already."""
    if not apart and (not task.generates or task.library.in_place):
        return 0.0
    estimate = made.cost.weight_sync(
        task.shape, source, destination, made.machine, apart=apart, shard=shard
    )
    return estimate.seconds


def rollouts_of(tasks: Sequence[TaskWork]) -> tuple[str, ...]:
    """The tasks that generate."""
    return tuple(task.id for task in tasks if task.generates)


def may_run_ahead(tasks: tuple[TaskWork, ...]) -> frozenset[str]:
    """A rollout, and what reads from it alone without weights that the step trains.

    Nothing where there are several rollouts: prompts can be offered ahead to a single one.
    """
    found: set[str] = set()
    if len(rollouts_of(tasks)) > 1:
        return frozenset()
    for task in tasks:
        free = task.generates or (not task.trains and not task.updates)
        if free and set(task.after) <= found:
            found.add(task.id)
    return frozenset(found)


def weight_ways(graph: Graph, tasks: tuple[TaskWork, ...]) -> dict[tuple[str, str], int]:
    """Which task's update feeds which other task with weights, and every how many steps."""
    last = {task.role.name: task.id for task in tasks if task.updates}
    steps_between = {task.id: task.every for task in tasks}
    found: dict[tuple[str, str], int] = {}
    for task in tasks:
        if task.role.name in last and not task.updates:
            trainer = last[task.role.name]
            found[trainer, task.id] = steps_between[trainer]
    for node in graph.of_op(Op.SYNC):
        edge = graph.feeding(node.id, "weights")
        source = None if edge is None else str(graph.node(edge.src).role)
        every = node.attr("every")
        for task in tasks:
            if source in last and task.role.name == node.role and not task.updates:
                steps = every if isinstance(every, int) else 1
                found.setdefault((last[str(source)], task.id), max(1, steps))
    return found


def _syncs(
    graph: Graph,
    tasks: tuple[TaskWork, ...],
    ways: Mapping[str, tuple[Candidate, ...]],
    made: Candidates,
) -> list[Sync]:
    """Priced at the fastest layouts: the search takes one price for all of them, and a plan is
    priced again with its own."""
    by_id: dict[str, TaskWork] = {task.id: task for task in tasks}
    found = []
    for (update, destination), every in weight_ways(graph, tasks).items():
        if not ways[update] or not ways[destination]:
            continue
        task = by_id[destination]
        source, target = _fastest(ways[update]).layout, _fastest(ways[destination]).layout
        together, apart = (
            sync_seconds(task, source, target, made, apart=apart, shard=by_id[update].library.shard)
            / every
            for apart in (False, True)
        )
        found.append(
            Sync(
                source=update,
                destination=destination,
                together_s=together,
                apart_s=max(together, apart),
            )
        )
    return found


def _fastest(ways: tuple[Candidate, ...]) -> Candidate:
    return min(ways, key=lambda way: way.seconds)
