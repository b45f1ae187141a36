"""Weights on their way, priced for the layouts that a schedule has.

The search takes one price of a sync for all layouts. Where that is a part of the step that counts,
it is asked once more around its answer: each way that sends or takes weights costs what its own
layout takes with the other end as the answer has it, and ways that it did without, because others
are as fast in as little memory, are there again where their weights travel otherwise. What is found
so is priced with its own layouts, like every schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from flowrl.cost.layout import Layout
from flowrl.plan.posed_search import search_posed
from flowrl.plan.problem_of import Posed, sync_seconds
from flowrl.plan.search import (
    Found,
    Leaf,
    Option,
    Schedule,
    SearchResult,
    Sync,
    Task,
    evaluate,
)
from flowrl.plan.search_options import option_tasks, shared_weights
from flowrl.plan.ways.candidate import Candidate, by_time
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.tasks import TaskWork

LEAST_GAIN = 0.01
"""Of a step's time: where other layouts could not save so much of it, nothing is searched again."""

MOST_DEVICES = 512
"""In larger pools a second search takes too long."""

LOOKED_AT = 8
"""Schedules that are priced with their own syncs: where both ends change, what each saves with the
other as it was is not what both save."""

FEW_DEVICES = 64
"""On no more than these, further ways are looked at on all numbers of devices."""

Travels: TypeAlias = Mapping[tuple[str, str], int]
"""Updates and the tasks that they send weights to, and every how many steps."""


def own_syncs(
    posed: Posed,
    travels: Travels,
    layouts: Mapping[str, Layout],
    apart: Mapping[tuple[str, str], bool],
) -> dict[tuple[str, str], float]:
    """Seconds of a step of each sync, for the layouts of its ends.

    Args:
        apart: Whether the ends are on different devices.
    """
    return {
        (update, task): sync_seconds(
            posed.task(task),
            layouts[update],
            layouts[task],
            posed.candidates,
            apart=apart[update, task],
            shard=posed.task(update).library.shard,
        )
        / every
        for (update, task), every in travels.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A schedule that was found, as far as syncs are about it.

    Attributes:
        step_s: Of it, with its own syncs.
        syncs: Of these.
        layouts: Of each task.
        apart: Whether the ends of each sync are on different devices, or are looked at as such.
    """

    step_s: float
    syncs: Mapping[tuple[str, str], float]
    layouts: Mapping[str, Layout]
    apart: Mapping[tuple[str, str], bool]

    def sync_s_of(self, task: str) -> float:
        """What a task's syncs take, of those that it sends and takes."""
        return sum(seconds for pair, seconds in self.syncs.items() if task in pair)


def search_again(
    posed: Posed,
    found: Standing,
    filters: Mapping[str, Filter],
    top: int,
    *,
    first: bool,
) -> tuple[Posed, SearchResult] | None:
    """The problem with further ways, and the best schedules around one that was found; None where
    other layouts could not save what counts.

    Args:
        filters: What pins leave, by task.
        top: Schedules.
        first: The search was never asked with syncs of layouts; else it is in any case, for those
            of the new answer may be others.
    """
    travels = posed.travels
    own, least_s = own_syncs(posed, travels, found.layouts, found.apart), 0.0
    if posed.parts or posed.problem.num_devices > MOST_DEVICES:
        return None
    if first:
        least_s = LEAST_GAIN * found.step_s
    if sum(found.syncs.values()) < least_s or not travels:
        return None
    prices = _Prices(posed, travels, found)
    ends = [task for task in posed.tasks if any(task.id in pair for pair in travels)]
    more: dict[str, tuple[Candidate, ...]] = {
        task.id: prices.other_ways(task, filters.get(task.id, Filter())) for task in ends
    }
    least: dict[str, float] = {
        task.id: prices.least(task.id, (*posed.ways[task.id], *more[task.id])) for task in ends
    }
    now = {name: prices.of(name, found.layouts[name]) for name in more}
    if sum(found.sync_s_of(name) - price for name, price in least.items()) < least_s:
        return None
    wider = _with_ways(posed, more)
    asked = replace(
        wider.problem,
        tasks=tuple(_priced(task, wider, prices, least) for task in wider.problem.tasks),
        syncs=tuple(_at_least(sync, own, found, now, least) for sync in wider.problem.syncs),
    )
    result = search_posed(replace(wider, problem=asked), max(top, LOOKED_AT))
    if result.infeasible is not None:
        return None
    return wider, replace(
        result,
        best=tuple(_as_it_is(one, wider) for one in result.best),
        turns=None if result.turns is None else _as_it_is(result.turns, wider),
    )


class _Prices:
    """What a task's syncs take in other layouts, with their other ends as they are."""

    def __init__(self, posed: Posed, travels: Travels, found: Standing) -> None:
        self._posed, self._travels, self._found = posed, travels, found
        self._known: dict[tuple[str, Layout], float] = {}

    def of(self, name: str, layout: Layout) -> float:
        """All that a task sends and takes."""
        if (name, layout) not in self._known:
            layouts = {**self._found.layouts, name: layout}
            own = {pair: every for pair, every in self._travels.items() if name in pair}
            syncs = own_syncs(self._posed, own, layouts, self._found.apart)
            self._known[name, layout] = sum(syncs.values())
        return self._known[name, layout]

    def least(self, name: str, ways: Sequence[Candidate]) -> float:
        """What they take in one of some ways, at least."""
        return min(self.of(name, way.layout) for way in ways)

    def other_ways(self, task: TaskWork, only: Filter) -> tuple[Candidate, ...]:
        """Ways that none beats whose weights travel in the same time, and that the search did
        without."""
        if task.region is not None:
            return ()
        posed = self._posed
        made, here, free = posed.made(task.id), set(posed.ways[task.id]), replace(only, layout=())
        counts = {self._found.layouts[task.id].num_devices}
        if posed.problem.num_devices <= FEW_DEVICES:
            counts |= {way.devices for way in here}
        alike: dict[tuple[int, float], list[Candidate]] = {}
        for count in counts:
            for layout in filter(only.takes, made.layouts(task, count).possible):
                key = (count, round(self.of(task.id, layout), 3))
                alike.setdefault(key, []).extend(made.of_layout(task, layout, free))
        shared = task.weights in shared_weights(self._posed.tasks)
        return tuple(
            way
            for ways in alike.values()
            for way in made.worth_having(ways, task, shared=shared)
            if way not in here
        )


def _with_ways(posed: Posed, more: Mapping[str, tuple[Candidate, ...]]) -> Posed:
    """The problem with further ways."""
    ways = {
        name: tuple(sorted((*own, *more.get(name, ())), key=_by_devices)) if more.get(name) else own
        for name, own in posed.ways.items()
    }
    here = {name: set(some) for name, some in ways.items()}
    beside = {
        name: tuple(one for one in some if one not in here[name])
        for name, some in posed.beside.items()
    }
    tasks = option_tasks(posed.tasks, ways, posed.candidates.request, beside)
    return replace(posed, ways=ways, beside=beside, problem=replace(posed.problem, tasks=tasks))


def _by_devices(way: Candidate) -> tuple[object, ...]:
    return (way.devices, by_time(way))


def _priced(task: Task, posed: Posed, prices: _Prices, least: Mapping[str, float]) -> Task:
    """A task whose ways have what their syncs take above the least."""
    if task.id not in least:
        return task

    def dearer(option: Option) -> Option:
        way = posed.candidate(task.id, option)
        more = prices.of(task.id, way.layout) - least[task.id]
        steady = None if option.steady_s is None else option.steady_s + more
        return replace(option, seconds=option.seconds + more, steady_s=steady)

    return replace(
        task,
        options=tuple(map(dearer, task.options)),
        beside=tuple(map(dearer, task.beside)),
    )


def _at_least(
    sync: Sync,
    own: Mapping[tuple[str, str], float],
    found: Standing,
    now: Mapping[str, float],
    least: Mapping[str, float],
) -> Sync:
    """A sync without what its ends have of it already."""
    pair = (sync.source, sync.destination)
    saved = sum(now[name] - least[name] for name in pair)
    price, apart_more = max(0.0, own[pair] - saved), sync.apart_s - sync.together_s
    if found.apart[pair]:
        return replace(sync, apart_s=price, together_s=max(0.0, price - apart_more))
    return replace(sync, together_s=price, apart_s=price + apart_more)


def _as_it_is(found: Found, posed: Posed) -> Found:
    """A schedule by the options of the problem itself."""
    schedule = _with_own(found.schedule, posed)
    return Found(schedule=schedule, evaluation=evaluate(posed.problem, schedule))


def _with_own(schedule: Schedule, posed: Posed) -> Schedule:
    if isinstance(schedule, Leaf):
        task = posed.problem.task(schedule.task)
        option = (*task.options, *task.beside)[schedule.option.label]
        return replace(schedule, option=option)
    first, second = (_with_own(part, posed) for part in (schedule.first, schedule.second))
    return replace(schedule, first=first, second=second)
