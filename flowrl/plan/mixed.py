"""Plans over two kinds of devices: rollouts on one, training on the other.

Tasks are cut in two as an asynchronous schedule would cut them: rollouts, with or without what
reads from them alone and without the trainer's weights, on one group; all others on the other. Each
side is searched by itself; the two work at once, in chunks, or one a step ahead where samples may
be stale. New weights cross between the groups over the slower of their networks. More than two
groups, and other cuts, are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from flowrl.cluster.hardware import Machine
from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.many import (
    Chosen,
    Searched,
    fits_hosts,
    plainer,
    search_posed,
    stood,
)
from flowrl.plan.options import KindName
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.problem_of import CHUNKS, Posed, may_run_ahead, pose, weight_ways
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import (
    EVERY_KIND,
    Asynchronous,
    Found,
    Kind,
    Problem,
    Schedule,
    Spatial,
    evaluate,
    kind_of,
    leaves,
)
from flowrl.plan.tasks import TaskWork, tasks_of

__all__ = ["Part", "search_two_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group of devices that may hold one half of the tasks.

    Attributes:
        host: Bytes of its host's memory that each device may fill.
        numbering: Of each device, its number in the cluster.
    """

    group: DeviceGroup
    host: int
    numbering: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One half of the tasks on one group of devices."""

    posed: Posed
    found: Found


def search_two_groups(
    graph: Graph,
    request: PlanRequest,
    parts: Sequence[Part],
    cost: Cost,
    pins: PinnedTasks,
) -> Iterator[Searched]:
    """The best plan of each cut over each ordered pair of groups, where there is one."""
    tasks = tasks_of(graph, request)
    if request.options.objective != "step_time" or request.options.kind == "temporal":
        return
    for ahead in _cuts(tasks):
        rest = frozenset(task.id for task in tasks) - ahead
        first = [_side(graph, request, part, cost, pins, ahead) for part in parts]
        second = [_side(graph, request, part, cost, pins, rest) for part in parts]
        for i, j in permutations(range(len(parts)), 2):
            one, other = first[i], second[j]
            if one is not None and other is not None:
                yield _joined(graph, request, one, other, pins)


def _cuts(tasks: tuple[TaskWork, ...]) -> list[frozenset[str]]:
    """Rollouts alone, and with what may run ahead with them; nothing where nothing is left."""
    draws = frozenset(task.id for task in tasks if task.generates)
    cuts = {draws, may_run_ahead(tasks)}
    return [cut for cut in sorted(cuts, key=len) if cut and len(cut) < len(tasks)]


def _side(
    graph: Graph,
    request: PlanRequest,
    part: Part,
    cost: Cost,
    pins: PinnedTasks,
    only: frozenset[str],
) -> _Side | None:
    """The best schedule of some tasks on one group; None where they do not fit there."""
    own = pins.of_tasks(only)
    strict = replace(request, max_staleness=0)
    spatial = request.options.kind == "spatial" and len(only) > 1
    try:
        posed = pose(
            graph,
            strict,
            part.group,
            cost,
            filters=own.filters,
            places=own.places(part.numbering),
            environments=own.environments_in(part.numbering),
            kinds=frozenset({Kind.SPATIAL}) if spatial else EVERY_KIND,
            only=only,
            host=part.host,
        )
    except (PlanError, KeyError):
        return None  # a device without figures, or pins that name another group's
    if any(not posed.ways[task.id] for task in posed.tasks):
        return None
    best = next((one for one in search_posed(posed).best if fits_hosts(posed, one)), None)
    if best is None:
        return None
    plain = plainer(posed, best.schedule)
    return _Side(posed=posed, found=plain if fits_hosts(posed, plain) else best)


def _joined(
    graph: Graph, request: PlanRequest, one: _Side, other: _Side, pins: PinnedTasks
) -> Searched:
    posed = _joint(graph, request, one, other)
    schedule = _together(
        posed.problem, one.found.schedule, other.found.schedule, kind=request.options.kind
    )
    numbers: dict[str, tuple[int, ...]] = {}
    played: dict[str, tuple[int, ...]] = {}
    for side, offset in ((one, 0), (other, len(one.posed.group.addresses))):
        blocks, beside = stood(side.posed, side.found.schedule) or ({}, {})
        for name, block in blocks.items():
            numbers[name] = tuple(offset + number for number in block)
        for name, block in beside.items():
            played[name] = tuple(offset + number for number in block)
    ways = {
        leaf.task: posed.parts[leaf.task].candidate(leaf.task, leaf.option)
        for leaf in leaves(schedule)
    }
    syncs = _syncs(graph, posed, numbers)
    evaluation = evaluate(posed.problem, schedule)
    best = Chosen(
        posed=posed,
        schedule=schedule,
        kind=kind_of(schedule),
        step_s=evaluation.step_s + sum(syncs.values()),
        syncs=syncs,
        ways=ways,
        numbers=numbers,
        played=played,
        peak=evaluation.peak,
    )
    return Searched(posed=posed, best=best, others=(), pins=pins)


def _joint(graph: Graph, request: PlanRequest, one: _Side, other: _Side) -> Posed:
    """Both sides as one problem, in which each task has the one option that was chosen."""
    tasks = tasks_of(graph, request)
    sides: dict[str, Posed] = {
        task.id: side.posed for side in (one, other) for task in side.posed.tasks
    }
    chosen = {
        leaf.task: leaf.option for side in (one, other) for leaf in leaves(side.found.schedule)
    }
    after = {task.id: task.after for task in tasks}
    problem = Problem(
        tasks=tuple(
            replace(
                sides[task.id].problem.task(task.id),
                options=(chosen[task.id],),
                after=tuple(after[task.id]),
            )
            for task in tasks
        ),
        num_devices=sum(len(side.posed.group.addresses) for side in (one, other)),
        memory_bytes=max(side.posed.problem.memory_bytes for side in (one, other)),
        chunks=CHUNKS,
        staleness=request.max_staleness,
        ahead=frozenset(task.id for task in one.posed.tasks)
        if request.max_staleness
        else frozenset(),
    )
    first, second = one.posed.group, other.posed.group
    return Posed(
        problem=problem,
        tasks=tasks,
        ways={task.id: sides[task.id].ways[task.id] for task in tasks},
        candidates=other.posed.candidates,
        group=replace(second, addresses=(*first.addresses, *second.addresses)),
        parts=sides,
    )


def _together(problem: Problem, first: Schedule, second: Schedule, *, kind: KindName) -> Schedule:
    """The faster of both at once in chunks, and one ahead of the other where it may be."""
    here = {leaf.task for leaf in leaves(first)}
    readers = [
        problem.task(leaf.task)
        for leaf in leaves(second)
        if here & set(problem.task(leaf.task).after)
    ]
    most = min((task.max_chunks for task in readers), default=1)
    found: list[Schedule] = [
        Spatial(first=first, second=second, chunks=chunks)
        for chunks in (problem.chunks if readers else (1,))
        if chunks <= most
    ]
    if problem.staleness and kind == "asynchronous":
        found = []
    if problem.staleness and kind != "spatial":
        found.append(Asynchronous(first=first, second=second))
    return min(found, key=lambda one: evaluate(problem, one).step_s)


def _syncs(
    graph: Graph,
    posed: Posed,
    numbers: Mapping[str, tuple[int, ...]],
) -> dict[tuple[str, str], float]:
    found = {}
    for (update, name), every in weight_ways(graph, posed.tasks).items():
        task, trained = posed.task(name), posed.task(update)
        apart = numbers[update] != numbers[name]
        if not apart and (not task.generates or task.library.in_place):
            found[update, name] = 0.0
            continue
        source = posed.parts[update].candidate(update, posed.problem.task(update).options[0])
        target = posed.parts[name].candidate(name, posed.problem.task(name).options[0])
        machine = _slower(posed.group_of(update).machine, posed.group_of(name).machine)
        estimate = posed.made(name).cost.weight_sync(
            task.shape,
            source.layout,
            target.layout,
            machine,
            apart=apart,
            shard=trained.library.shard,
        )
        found[update, name] = estimate.seconds / every
    return found


def _slower(one: Machine, other: Machine) -> Machine:
    """The first machine, with the slower network of the two."""
    slow = min(one.spec.inter_bytes_per_s, other.spec.inter_bytes_per_s)
    return replace(one, spec=replace(one.spec, inter_bytes_per_s=slow))
