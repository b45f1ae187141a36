"""Plans over two kinds of devices: a part of the tasks on one, all others on the other.

All cuts of the tasks are looked at of which the first part reads nothing from the second one:
rollouts alone, with references, with a critic's values, even with updates. The two parts work at
once, in chunks, or the first one a step ahead where samples may be stale. Of these the best is
found exactly (`flowrl.plan.search.two_pools`), for the step's time or for device time. New weights
cross between the groups over the slower of their networks; as in plans over one group the search
takes one price of their ways inside a group, and its best steps are priced again with their own
layouts. Tasks on three groups, and parts that take turns (`plan.kind=temporal`), are not tried;
environments may be on a third group (`flowrl.plan.elsewhere`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flowrl.cluster.hardware import Machine
from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.elsewhere import Part, Seating, seatings
from flowrl.plan.many import (
    MARGIN,
    Chosen,
    Searched,
    distinct,
)
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.posed_search import fits_hosts, search_posed, stood
from flowrl.plan.problem_of import CHUNKS, Posed, kinds_wanted, may_run_ahead, pose, weight_ways
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import (
    Alike,
    CutBounds,
    Joined,
    Kind,
    Leaf,
    Option,
    Pair,
    Parts,
    Problem,
    Schedule,
    cuts,
    evaluate,
    kind_of,
    leaves,
    restricted,
)
from flowrl.plan.ways.plain_ways import PLAIN, plainer_options, with_option
from flowrl.plan.ways.tasks import tasks_of

ROUNDING = 1e-9
"""Of a limit, so that nothing is lost by it."""

MORE = (1.1, 1.5)
"""By which factors limits are larger where several steps are told, and fewer are within one."""

STEPS = (0.02, 0.1)
"""By how much limits lie above a lower bound, one after the other."""

KEEPS = (1, 8, 64)
"""Schedules of a part that must beat one for it to be left out: more where the hosts or pins do not
let the best ones stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairJob:
    """A job that is to be placed on two groups of equal devices.

    Attributes:
        parts: Groups for tasks.
        hosts: Groups for environments that ask for them.
    """

    graph: Graph
    request: PlanRequest
    cost: Cost
    pins: PinnedTasks
    parts: Sequence[Part]
    hosts: Sequence[Part] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTwo:
    """What a search over two groups gave.

    Attributes:
        best: The best plan of all pairs of groups, where it is as good as was asked for.
        others: One of each other pair. They are not as good; each pair may have better ones.
    """

    best: Searched | None
    others: tuple[Searched, ...]


def search_two_groups(job: PairJob, within: float) -> OverTwo:
    """The best plan over all ordered pairs of groups, and all ways to set devices aside for
    environments.

    Args:
        within: An objective that plans over one group reach: worse ones are of no use.
    """
    searches = sorted(pair_searches(job), key=lambda search: search.limit)
    best: Searched | None = None
    told: dict[tuple[str, str], Searched] = {}
    for search in searches:
        found = search.best(min(search.limit, within), within)
        if found and found[0].objective <= within:
            first, *more = found
            new = Searched(posed=first.posed, best=first, others=tuple(more), pins=job.pins)
            within, best, beaten = first.objective, new, best
            if beaten is not None:
                told.setdefault(_kinds(beaten), beaten)
        elif search.likely is not None:
            one = search.chosen(search.likely)
            alone = Searched(posed=one.posed, best=one, others=(), pins=job.pins)
            told.setdefault(search.kinds, alone)
    others = [one for kinds, one in told.items() if best is None or kinds != _kinds(best)]
    return OverTwo(best=best, others=tuple(others))


def pair_searches(job: PairJob) -> Iterator[PairSearch]:
    """One for each ordered pair of groups and each way to set devices aside for environments."""
    if job.request.options.kind == "temporal":
        return
    tasks = tasks_of(job.graph, job.request)
    seats = _Seats(job)
    for part in job.parts:
        try:
            ways = seatings(tasks, part, job.parts, job.hosts, job.pins)
        except PlanError:
            continue  # whoever looks at the part alone tells it
        for seating in ways:
            for other in seating.left:
                sides = (seats.posed(part, seating), seats.posed(other, seating))
                yield PairSearch(job.graph, job.request, sides, seating)


def _kinds(searched: Searched) -> tuple[str, str]:
    """Of the devices of the first part and the second."""
    schedule, posed = searched.best.schedule, searched.posed
    assert not isinstance(schedule, Leaf)
    first, second = (next(leaves(part)).task for part in (schedule.first, schedule.second))
    return posed.group_of(first).kind, posed.group_of(second).kind


class _Seats:
    """All tasks on one group of devices, each made once."""

    def __init__(self, job: PairJob) -> None:
        self._job = job
        self._made: dict[object, Posed] = {}

    def posed(self, part: Part, seating: Seating) -> Posed:
        """Those of one part, beside what is set aside."""
        aside = {name: group.addresses for name, group in seating.outside.items()}
        key = (part.numbering, tuple(aside.items()))
        if key not in self._made:
            self._made[key] = self._pose(part, seating.outside)
        return self._made[key]

    def _pose(self, part: Part, outside: Mapping[str, DeviceGroup]) -> Posed:
        """Tasks that pins put on other devices have no way to run here."""
        job, here, pins = self._job, set(part.numbering), self._job.pins
        tasks = tasks_of(job.graph, job.request)
        mine = frozenset[str](
            task.id
            for task in tasks
            if here.issuperset(pins.devices.get(task.id, ()))
            and (task.id in outside or here.issuperset(pins.environments.get(task.id, ())))
        )
        own = pins.of_tasks(mine)
        spatial = job.request.options.kind == "spatial"
        posed = pose(
            job.graph,
            job.request,
            part.group,
            job.cost,
            filters=own.filters,
            places=own.places(part.numbering),
            environments=own.environments_in(part.numbering, outside),
            kinds=frozenset({Kind.SPATIAL if spatial else Kind.HYBRID}),
            host=part.host,
            outside=outside,
        )
        possible = tuple(
            task if task.id in mine else replace(task, options=()) for task in posed.problem.tasks
        )
        return replace(posed, problem=replace(posed.problem, tasks=possible))


class PairSearch:
    """The best plans over two groups, of which the first one feeds the second one."""

    def __init__(
        self,
        graph: Graph,
        request: PlanRequest,
        sides: tuple[Posed, Posed],
        seating: Seating,
    ) -> None:
        self.graph = graph
        self.request = request
        self.sides = sides
        self.seating = seating
        self.pair = Pair(_whole(request, sides), sides[0].problem, sides[1].problem)
        names = frozenset(task.id for task in self.pair.whole.tasks)
        self.ways = [
            (first, names - first)
            for first in cuts(self.pair.whole)
            if self._may_hold(0, first) and self._may_hold(1, names - first)
        ]
        self.likely = self._likely()

    @cached_property
    def alike(self) -> tuple[Alike, Alike]:
        """The problems of both sides, with arrivals that are alike taken as one."""
        return Alike(self.sides[0].problem), Alike(self.sides[1].problem)

    @property
    def kinds(self) -> tuple[str, str]:
        """Of the devices of the first part and the second."""
        return self.sides[0].group.kind, self.sides[1].group.kind

    @property
    def limit(self) -> float:
        """An objective that can be reached; infinite where none is known."""
        return float("inf") if self.likely is None else self.likely.objective

    def best(self, limit: float, plain_within: float = math.inf) -> list[Chosen]:
        """Those that are told, best first, and nothing where none is within the limit.

        Args:
            plain_within: Plainer ways are taken only within this objective.
        """
        standing: list[Joined] = []
        for keep in KEEPS:
            found = self._joined(limit, keep)
            standing = [one for one in found if self._stands(one)]
            if not found or standing[:1] == found[:1]:
                break
        chosen = sorted(
            ((self.chosen(one), one) for one in standing), key=lambda both: both[0].objective
        )
        if not chosen:
            return []
        plain = self.chosen(self._plainer(chosen[0][1]))
        best = plain if plain.objective <= plain_within else chosen[0][0]
        others = distinct([one for one, _ in chosen], best, self.request.options.alternatives)
        return [best, *others]

    def _may_hold(self, side: int, tasks: frozenset[str]) -> bool:
        """Whether each of some tasks can run on a side."""
        return all(task.options for task in self.sides[side].problem.tasks if task.id in tasks)

    def _likely(self) -> Joined | None:
        """A good step that can stand: rollouts on the first side, with or without what may run
        ahead with them, and each side at its best by itself."""
        tasks = self.sides[0].tasks
        likely = (frozenset(task.id for task in tasks if task.generates), may_run_ahead(tasks))
        found: list[Joined] = []
        for first, second in self.ways:
            if first in likely:
                one, other = self._alone(0, first), self._alone(1, second)
                if one is not None and other is not None:
                    found += self.pair.best([one], [other])
        return min(found, key=lambda joined: joined.key, default=None)

    def _alone(self, side: int, tasks: frozenset[str]) -> Schedule | None:
        """The best schedule of some tasks on one side that can stand there."""
        posed = self.sides[side]
        part = replace(posed, problem=restricted(posed.problem, tasks))
        found = search_posed(part).best
        return next((one.schedule for one in found if fits_hosts(part, one.schedule)), None)

    def _joined(self, limit: float, keep: int) -> list[Joined]:
        """The best steps of all cuts within a limit, by the search's prices.

        Arrivals are parted until the best steps have their own (`flowrl.plan.search.alike`).
        """
        top = keep * MARGIN * (1 + self.request.options.alternatives)
        while True:
            own: list[Joined] = []
            late: list[Joined] = []
            for found in self._joined_alike(limit, keep, top):
                own.append(self._own(found))
                if own[-1].key > found.key:
                    late.append(own[-1])
            sides = zip(*map(_parts, late), strict=True)
            parted = [one.part(some) for one, some in zip(self.alike, sides, strict=False)]
            if not any(parted):
                return sorted(own, key=lambda joined: joined.key)

    def _own(self, found: Joined) -> Joined:
        """A step with its options' own arrivals."""
        one, other = self.alike
        first, second = one.own(found.schedule.first), other.own(found.schedule.second)
        own = self.pair.joined(replace(found.schedule, first=first, second=second))
        assert own is not None, "arrivals ask for no memory"
        return own

    def _joined_alike(self, limit: float, keep: int, top: int) -> list[Joined]:
        """The best steps with the arrivals of kinds.

        What a part may take grows with the limit, and how many schedules of it there are, much
        faster. So limits begin just above what no step can be below.
        """
        ahead = self.pair.whole.ahead if self.pair.runs_ahead else frozenset[str]()
        parts = (
            Parts(self.alike[0].problem, ahead=ahead, feeds=True),
            Parts(self.alike[1].problem),
        )
        one, other = (side.least(way[at] for way in self.ways) for at, side in enumerate(parts))
        first = self.alike[0].problem
        bounds = {
            way: self.pair.bounds(way, first, (one[way[0]], other[way[1]])) for way in self.ways
        }
        bound = min((self.pair.least(one) for one in bounds.values()), default=math.inf)
        for step in STEPS:
            if bound * (1 + step) >= limit:
                break
            found = self._joined_within(parts, bound * (1 + step), bounds, (keep, top))
            if len(found) == top:
                return found
        found = self._joined_within(parts, limit * (1 + ROUNDING), bounds, (keep, top))
        for more in MORE if found and self.request.options.alternatives else ():
            if len(found) < top:
                found = self._joined_within(parts, limit * more, bounds, (keep, top))
        return found

    def _joined_within(
        self,
        parts: tuple[Parts, Parts],
        limit: float,
        bounds: Mapping[tuple[frozenset[str], frozenset[str]], CutBounds],
        wanted: tuple[int, int],
    ) -> list[Joined]:
        """The best steps within a limit, of all that there are.

        Args:
            parts: Those of both sides.
            bounds: What steps of each cut take at least.
            wanted: How many must beat a part for it to be left out, and how many steps.
        """
        keep, top = wanted
        ways = {
            way: self.pair.most_seconds(own, limit)
            for way, own in bounds.items()
            if self.pair.least(own) <= limit
        }
        if not ways:
            return []
        one, other = (
            side.fronts(
                {way[at]: most[at] for way, most in ways.items()},
                by_devices=self.request.options.objective != "step_time",
                keep=keep,
            )
            for at, side in enumerate(parts)
        )
        found = [
            joined
            for first, second in ways
            for joined in self.pair.best(one[first], other[second], top, limit)
            if joined.objective <= limit
        ]
        return sorted(found, key=lambda joined: joined.key)[:top]

    def _stands(self, joined: Joined) -> bool:
        return all(
            fits_hosts(side, part) for side, part in zip(self.sides, _parts(joined), strict=True)
        )

    def _plainer(self, joined: Joined) -> Joined:
        """The same step with plainer ways, where it is hardly longer."""
        limit = joined.objective * (1 + PLAIN)
        for leaf in list(leaves(joined.schedule)):
            for option in plainer_options(self._side_of(joined, leaf.task), leaf):
                first, second = (with_option(part, leaf.task, option) for part in _parts(joined))
                found = self.pair.joined(replace(joined.schedule, first=first, second=second))
                if found is not None and found.objective <= limit and self._stands(found):
                    joined = found
                    break
        return joined

    def _side_of(self, joined: Joined, task: str) -> Posed:
        first = {leaf.task for leaf in leaves(joined.schedule.first)}
        return self.sides[0 if task in first else 1]

    def chosen(self, joined: Joined) -> Chosen:
        """A step on its devices, with the weights' ways priced for its own layouts."""
        posed = self._joint(joined)
        numbers: dict[str, tuple[int, ...]] = {}
        played: dict[str, tuple[int, ...]] = {}
        offset = 0
        for side, part in zip(self.sides, _parts(joined), strict=True):
            where = stood(side, part)
            assert where is not None, "only steps that can stand are chosen"
            for name, block in where[0].items():
                numbers[name] = tuple(offset + number for number in block)
            for name, block in where[1].items():
                played[name] = tuple(offset + number for number in block)
                if name in side.outside:
                    played[name] = posed.outside_numbers(name)
            offset += len(side.group.addresses)
        syncs = priced_syncs(self.graph, posed, numbers)
        evaluation = evaluate(posed.problem, joined.schedule)
        return Chosen(
            posed=posed,
            schedule=joined.schedule,
            kind=kind_of(joined.schedule),
            step_s=evaluation.step_s + sum(syncs.values()),
            syncs=syncs,
            ways={
                leaf.task: posed.parts[leaf.task].candidate(leaf.task, leaf.option)
                for leaf in leaves(joined.schedule)
            },
            numbers=numbers,
            played=played,
            peak=evaluation.peak,
        )

    def _joint(self, joined: Joined) -> Posed:
        """Both sides as one problem, in which each task has the one option that was chosen."""
        tasks = self.sides[0].tasks
        sides: dict[str, Posed] = {task.id: self._side_of(joined, task.id) for task in tasks}
        chosen = {leaf.task: leaf.option for leaf in leaves(joined.schedule)}
        problem = replace(
            self.pair.whole,
            tasks=tuple(
                replace(
                    task,
                    options=(chosen[task.id],),
                    weights=sides[task.id].problem.task(task.id).weights,
                )
                for task in self.pair.whole.tasks
            ),
        )
        first, second = (side.group for side in self.sides)
        return Posed(
            problem=problem,
            tasks=tasks,
            ways={task.id: sides[task.id].ways[task.id] for task in tasks},
            candidates=self.sides[1].candidates,
            group=replace(second, addresses=(*first.addresses, *second.addresses)),
            parts=sides,
            outside={
                name: group
                for name, group in self.seating.outside.items()
                if name in sides and _plays_elsewhere(sides[name], name, chosen[name])
            },
        )


def _plays_elsewhere(side: Posed, task: str, option: Option) -> bool:
    played = side.candidate(task, option).played
    return played is not None and played.split.elsewhere > 0


def _parts(joined: Joined) -> tuple[Schedule, Schedule]:
    return joined.schedule.first, joined.schedule.second


def _whole(request: PlanRequest, sides: tuple[Posed, Posed]) -> Problem:
    """All tasks with the options of both sides. What they hold is of no concern to it."""
    tasks = sides[0].tasks
    return Problem(
        tasks=tuple(
            replace(one, options=(*one.options, *other.options), weights=None)
            for one, other in zip(sides[0].problem.tasks, sides[1].problem.tasks, strict=True)
        ),
        num_devices=sum(len(side.group.addresses) for side in sides),
        memory_bytes=max(side.problem.memory_bytes for side in sides),
        chunks=CHUNKS,
        staleness=request.max_staleness,
        ahead=may_run_ahead(tasks) if request.max_staleness else frozenset(),
        kinds=kinds_wanted(request),
        objective=sides[0].problem.objective,
        beside=sides[0].problem.beside,
    )


def priced_syncs(
    graph: Graph,
    posed: Posed,
    numbers: Mapping[str, tuple[int, ...]],
) -> dict[tuple[str, str], float]:
    """Of each update and task that has its weights: their way, of a problem over groups."""
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
