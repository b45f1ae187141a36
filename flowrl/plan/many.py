"""Plans over many equal devices: poses the problem, has it searched, and chooses the schedule.

The search prices weight sync once for all layouts; the schedules that it finds are priced again
with their own layouts, searched again where that counts (`flowrl.plan.own_syncs`), and the best of
those is taken, in plainer ways where these cost hardly more
(`flowrl.plan.ways.plain_ways`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowrl.cluster.pool import DeviceGroup
from flowrl.cost.memory import format_bytes
from flowrl.cost.source import Cost
from flowrl.errors import PlanError
from flowrl.graph.ir import Graph
from flowrl.plan.assign import busy_seconds
from flowrl.plan.elsewhere import Part
from flowrl.plan.fit import DoesNotFit
from flowrl.plan.impossible.jobs import (
    MOST_DEVICES,
    fewest_left_out,
    nothing_fits,
    nothing_runs,
    nowhere_to_stand,
)
from flowrl.plan.impossible.pins import Elsewhere, Ground, misplaced, uneven
from flowrl.plan.impossible.ways_out import Fits, Trial, more_devices, more_host
from flowrl.plan.own_syncs import Standing, own_syncs, search_again
from flowrl.plan.pins import PinnedTasks
from flowrl.plan.posed_search import fits_hosts, picked, search_posed, stood
from flowrl.plan.problem_of import Posed, kinds_wanted, pose
from flowrl.plan.request import PlanRequest
from flowrl.plan.search import (
    EVERY_KIND,
    Found,
    Kind,
    Leaf,
    Schedule,
    SearchResult,
    Spatial,
    evaluate,
    kind_of,
    leaves,
    search,
)
from flowrl.plan.search.explain import can_fit
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.pin_filter import Filter
from flowrl.plan.ways.plain_ways import plainer, with_option
from flowrl.plan.within_hosts import host_bytes
from flowrl.wording import counted

MARGIN = 4
"""Schedules looked at for each that is told, since some differ in nothing that people care for."""

ENGINE_SHARE = 32
"""Rollouts, the longest work of most steps, are not tried on a smaller part of a pool than this,
where the step time is to be short."""

NEIGHBOURS = 2
"""Variants of the best schedule that are told where nobody asks for the next best ones."""

WORSE = 1.03
"""Times the worst best schedule of a kind: variants beyond that are not told."""

MOST_ROUNDS = 3
"""Searches with the syncs of the last answer's layouts, while each finds a better one."""

SIMPLE = 0.005
"""Of a step's time, given for a schedule in which all operations take turns on the same devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A schedule on devices.

    Attributes:
        step_s: With weight sync priced for its own layouts.
        syncs: Of `step_s`, by update and task.
        ways: Each task's candidate.
        numbers: Each task's devices, numbered in the group; of episodes, those of the policy.
        played: Devices of environments alone, by the task that they play with.
        thinned: The rule by which others were left out of the search, where it stands alone.
    """

    posed: Posed
    schedule: Schedule
    kind: Kind
    step_s: float
    syncs: Mapping[tuple[str, str], float]
    ways: Mapping[str, Candidate]
    numbers: Mapping[str, tuple[int, ...]]
    peak: int
    played: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    thinned: str | None = None

    @property
    def sync_s(self) -> float:
        """What new weights take on their way."""
        return sum(self.syncs.values(), 0.0)

    @property
    def used(self) -> int:
        """Devices that anything stands on."""
        every = (*self.numbers.values(), *self.played.values())
        return len({number for numbers in every for number in numbers})

    @property
    def idle_share(self) -> float:
        """Of the time of these devices, in which nothing is computed; 0 to 1."""
        played = {name: way.played for name, way in self.ways.items() if way.played is not None}
        busy, total = busy_seconds(self.posed.problem, self.schedule, played), self.device_step_s
        return max(0.0, 1 - busy / total) if total else 0.0

    @property
    def device_step_s(self) -> float:
        """Seconds of a step, of all these devices together."""
        return self.step_s * self.used

    @property
    def objective(self) -> float:
        """What the best plan has least of."""
        if self.posed.candidates.options.objective == "step_time":
            return self.step_s
        return self.device_step_s

    def shape(self) -> tuple[object, ...]:
        """What people see of a schedule: who stands where in which layout, in how many pieces."""
        places = sorted(
            (name, self.numbers[name], self.played.get(name, ()), way.layout, way.recompute)
            for name, way in self.ways.items()
        )
        return (self.kind, _chunks(self.schedule), *(repr(place) for place in places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search over a group gave.

    Attributes:
        best: The plan's schedule.
        others: The next ones that differ visibly, and the best of each kind that is not among them.
        thinned: The rule by which device counts or schedules were left out, if any.
        whole: The group that these devices are an equal share of, where they are one.
    """

    posed: Posed
    best: Chosen
    others: tuple[Chosen, ...]
    pins: PinnedTasks
    thinned: str | None = None
    whole: DeviceGroup | None = None

    @property
    def slowest_s(self) -> float:
        """Seconds of the longest step that is told."""
        return max(one.step_s for one in (self.best, *self.others))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """A job that is to be placed on one group of equal devices.

    Attributes:
        pins: What they leave of it.
        outside: Devices of another kind that environments have, by the task that they play with.
        suggests: Whether errors say what would help, which takes many searches.
    """

    graph: Graph
    request: PlanRequest
    cost: Cost
    part: Part
    pins: PinnedTasks
    outside: Mapping[str, DeviceGroup] = field(default_factory=dict)
    suggests: bool = True

    def places(self) -> Mapping[str, frozenset[int]]:
        """Devices that pins name, by task; counted in the group."""
        return self.pins.places(self.part.numbering)

    def posed(self, *, all_ways: bool = True) -> Posed:
        """The problem of the search.

        Args:
            all_ways: See `pose`.

        Raises:
            PlanError: a role without a model; devices without figures; a kind of schedule that the
                job cannot have.
        """
        group, request = self.part.group, self.request
        return pose(
            self.graph,
            request,
            group,
            self.cost,
            filters=self.pins.filters,
            places=self.places(),
            environments=self.pins.environments_in(self.part.numbering, self.outside),
            kinds=kinds_wanted(request),
            host=self.part.host,
            engine_least=engine_least(len(group.addresses), request),
            outside=self.outside,
            all_ways=all_ways,
        )

    def has_plan(self) -> bool:
        """Whether there is a plan of the job."""
        node_size = self.part.group.node_size
        if any(uneven(place, node_size) for place in self.places().values()):
            return False
        try:
            return _fits(self.posed())
        except PlanError:
            return False

    def changed(self, change: Trial) -> GroupJob:
        """The job with other pins or another batch, on a larger group or one with more of its
        hosts."""
        part, group = self.part, change.group or self.part.group
        after = max(part.numbering) + 1
        further = range(after, after + len(group.addresses) - len(part.numbering))
        return replace(
            self,
            part=Part(
                group=group,
                host=change.host or part.host,
                numbering=(*part.numbering, *further),
            ),
            pins=change.pins or self.pins,
            request=self.request if change.batch is None else change.batch.asked(self.request),
        )


def search_group(
    job: GroupJob, *, alternatives: int | None = None, pool: Elsewhere | None = None
) -> Searched:
    """The best schedule of a job.

    Args:
        alternatives: How many others; None takes what the request says.
        pool: What else the job may be placed on, where changes of pins are tried.

    Raises:
        PlanError: nothing fits, or pins that cannot be kept; says what would help.
    """
    options, pins = job.request.options, job.pins
    wanted = options.alternatives if alternatives is None else alternatives
    ground = _ground(job, pool)
    uneven_pins = misplaced(pins, job.places(), ground)
    if uneven_pins is not None:
        raise uneven_pins
    posed = job.posed(all_ways=wanted > 0)
    result = _result(posed, wanted)
    found = _schedules(job, posed, result, wanted)
    if found is None or found.slowest_s > posed.candidates.ceiling:
        if posed.candidates.ceiling < math.inf:
            posed = job.posed()
            result = _result(posed, wanted)
            found = _schedules(job, posed, result, wanted)
        if found is None:
            raise _why_none(posed, result, pins, ground)
    return found


def _result(posed: Posed, wanted: int) -> SearchResult | None:
    """The best schedules, for `wanted` others; None where some task has no way to run."""
    if not all(posed.ways.values()):
        return None
    return search_posed(posed, 1 + MARGIN * wanted if wanted else 1)


def _schedules(
    job: GroupJob, posed: Posed, result: SearchResult | None, wanted: int
) -> Searched | None:
    """The best schedule of a job, and `wanted` others; None where nothing fits."""
    if result is None or result.infeasible is not None:
        return None
    ways = posed.travels
    found: Sequence[Chosen] = _priced(posed, result.best, ways)
    posed, result, found = _with_own_syncs(posed, result, found, job.pins.filters)
    best = _plain(posed, found, ways)
    if best is None:
        return None
    every = [Kind.TEMPORAL, Kind.SPATIAL]
    if posed.problem.staleness:
        every += [Kind.HYBRID, Kind.ASYNCHRONOUS]
    kinds = _of_kinds(posed, result, ways, every) if len(posed.tasks) > 1 else []
    if job.request.options.kind == "auto" and best.kind is not Kind.TEMPORAL:
        best = _turns_if_alike(best, kinds)
    if wanted:
        others = distinct(found, best, wanted)
    else:
        # A variant that is worse than every kind of schedule tells nobody anything.
        worst = max(one.objective for one in kinds) if len(kinds) > 1 else math.inf
        worst *= WORSE
        near = [one for one in _neighbours(posed, best, ways) if one.objective <= worst]
        others = distinct(near, best, NEIGHBOURS)
    others += _of_other_kinds((best, *others), (*kinds, found[0]))
    return Searched(
        posed=posed, best=best, others=tuple(others), pins=job.pins, thinned=result.thinned
    )


def _with_own_syncs(
    posed: Posed,
    result: SearchResult,
    found: Sequence[Chosen],
    filters: Mapping[str, Filter],
) -> tuple[Posed, SearchResult, Sequence[Chosen]]:
    """What was found, or what is better once layouts have their own syncs."""
    for number in range(MOST_ROUNDS if found else 0):
        best, better = found[0], list[tuple[Posed, SearchResult, Sequence[Chosen]]]()
        apart = {(a, b): best.numbers[a] != best.numbers[b] for a, b in posed.travels}
        for flipped in (False, True):
            standing = Standing(
                step_s=best.step_s,
                syncs=best.syncs,
                layouts={name: way.layout for name, way in best.ways.items()},
                apart={pair: one != flipped for pair, one in apart.items()},
            )
            again = search_again(posed, standing, filters, len(result.best), first=number == 0)
            if again is not None and (other := _priced(again[0], again[1].best, posed.travels)):
                better.append((again[0], _best_first(again[1], other[0]), other))
        best_of = min(better, key=lambda one: one[2][0].objective, default=None)
        if best_of is None or best_of[2][0].objective >= best.objective * (1 - SIMPLE):
            break
        posed, result, found = best_of
    return posed, result, found


def _best_first(result: SearchResult, best: Chosen) -> SearchResult:
    """What was found, with the schedule first that is the best with its own syncs."""
    order = sorted(result.best, key=lambda one: one.schedule != best.schedule)
    return replace(result, best=tuple(order))


def _why_none(
    posed: Posed, result: SearchResult | None, pins: PinnedTasks, ground: Ground
) -> PlanError:
    """What is said where nothing fits: a task, all of them, their hosts, or where pins are."""
    if result is None:
        task = next(task for task in posed.tasks if not posed.ways[task.id])
        return nothing_runs(task, posed, pins, ground)
    if result.infeasible is not None:
        return nothing_fits(posed, result.infeasible, pins, ground)
    if any(stood(posed, one.schedule) for one in result.best):
        return hosts_full(posed, result.best, pins, ground.fits)
    return nowhere_to_stand(len(result.best), posed, pins, ground)


def best_of_group(
    request: PlanRequest, posed: Posed, filters: Mapping[str, Filter]
) -> Chosen | None:
    """The schedule that `search_group` takes, without all that it tells of others; None where
    nothing fits.

    Args:
        filters: What pins leave, by task.
    """
    result, ways = search_posed(posed), posed.travels
    found: Sequence[Chosen] = _priced(posed, result.best, ways)
    posed, result, found = _with_own_syncs(posed, result, found, filters)
    best = _plain(posed, found, ways)
    if best is not None and request.options.kind == "auto" and best.kind is not Kind.TEMPORAL:
        best = _turns_if_alike(best, _of_kinds(posed, result, ways, [Kind.TEMPORAL]))
    return None if best is None else replace(best, thinned=result.thinned)


def engine_least(devices: int, request: PlanRequest) -> int:
    """The fewest devices that rollouts are tried on, in a pool of so many."""
    # Where devices are dear rather than time, a small part of a pool may do.
    return devices // ENGINE_SHARE if request.options.objective == "step_time" else 1


def _plain(
    posed: Posed, found: Sequence[Chosen], ways: Mapping[tuple[str, str], int]
) -> Chosen | None:
    """The first schedule, in plainer ways where these cost hardly more."""
    if not found:
        return None
    # A plainer way may put more on the hosts than they hold.
    return (_priced(posed, [_plainer(posed, found[0].schedule, ways)], ways) or found)[0]


def _plainer(posed: Posed, schedule: Schedule, ways: Mapping[tuple[str, str], int]) -> Found:
    """A schedule in plainer ways, where with its own syncs it takes hardly longer."""
    where = stood(posed, schedule)
    if where is None or not ways:
        return plainer(posed, schedule)
    apart = {pair: where[0][pair[0]] != where[0][pair[1]] for pair in ways}

    def syncs_s(changed: Schedule) -> float:
        layouts = {name: way.layout for name, way in picked(posed, changed).items()}
        return sum(own_syncs(posed, ways, layouts, apart).values())

    return plainer(posed, schedule, syncs_s)


def _ground(job: GroupJob, pool: Elsewhere | None) -> Ground:
    """The devices of a search, and what there is with other pins, or on others, for messages."""

    def fits(change: Trial) -> bool:
        """Whether there is a plan with a change; asked only for messages."""
        if not job.suggests:
            return False
        if job.changed(change).has_plan():
            return True
        return pool is not None and pool.fits(change)

    def next_error(kept: PinnedTasks) -> PlanError | None:
        if not job.suggests:
            return None
        try:
            search_group(replace(job, pins=kept), alternatives=0, pool=pool)
        except PlanError as error:
            return error
        return None

    group = job.part.group
    return Ground(
        group=group,
        numbering=job.part.numbering,
        groups=(group,) if pool is None else pool.groups,
        fits=fits,
        next_error=next_error,
        parts=() if pool is None else pool.parts,
    )


def _fits(posed: Posed) -> bool:
    """Whether some schedule fits the devices, their hosts and what pins say."""
    if not all(posed.ways.values()) or not can_fit(posed.problem):
        return False
    result = search_posed(posed)
    return any(fits_hosts(posed, one.schedule) for one in result.best)


def _turns_if_alike(best: Chosen, kinds: Sequence[Chosen]) -> Chosen:
    """The best schedule that takes turns, which is simpler, where it loses next to nothing."""
    turns = next((one for one in kinds if one.kind is Kind.TEMPORAL), best)
    return best if turns.objective > best.objective * (1 + SIMPLE) else turns


def _of_other_kinds(told: Sequence[Chosen], more: Sequence[Chosen]) -> list[Chosen]:
    """The first of `more` of each kind that is not told."""
    firsts: dict[Kind, Chosen] = {}
    for one in more:
        firsts.setdefault(one.kind, one)
    here = {one.kind for one in told}
    return [one for kind, one in firsts.items() if kind not in here]


def _of_kinds(
    posed: Posed,
    result: SearchResult,
    ways: Mapping[tuple[str, str], int],
    kinds: Sequence[Kind],
) -> list[Chosen]:
    """The best schedule of each kind, in plain ways; `result` has that of all, so of its own."""
    known = {kind_of(one.schedule): one for one in (result.best[0], result.turns) if one}
    # The others are told even where only one kind is asked for.
    posed = replace(posed, problem=replace(posed.problem, kinds=EVERY_KIND))
    found = []
    for kind in kinds:
        best: Sequence[Found] = [known[kind]] if kind in known else []
        if not best:
            best = search(replace(posed.problem, kinds=frozenset({kind})), top=1).best
        plain = [_plainer(posed, one.schedule, ways) for one in best]
        found += _priced(posed, plain, ways)
    return found


def _neighbours(posed: Posed, best: Chosen, ways: Mapping[tuple[str, str], int]) -> list[Chosen]:
    """The best schedule with one task run in another way, best first."""
    found = []
    for leaf in leaves(best.schedule):
        for option in posed.problem.task(leaf.task).options:
            if option.devices != leaf.option.devices or option == leaf.option:
                continue
            changed = with_option(best.schedule, leaf.task, option)
            evaluation = evaluate(posed.problem, changed)
            if evaluation.fits:
                found.append(Found(schedule=changed, evaluation=evaluation))
    found.sort(key=lambda one: one.evaluation.key)
    return _priced(posed, found[: MARGIN * NEIGHBOURS], ways)


def _priced(
    posed: Posed, found: Sequence[Found], ways: Mapping[tuple[str, str], int]
) -> list[Chosen]:
    """Schedules on devices, best first.

    Left out are those that cannot stand where pins say, or that put more on a host than it holds.
    """
    chosen = []
    for one in found:
        where = stood(posed, one.schedule)
        if where is None:
            continue
        numbers, played = where
        chosen_ways = picked(posed, one.schedule)
        if host_bytes(numbers, chosen_ways) > (posed.candidates.host or math.inf):
            continue
        layouts = {name: way.layout for name, way in chosen_ways.items()}
        apart = {(update, task): numbers[update] != numbers[task] for update, task in ways}
        syncs = own_syncs(posed, ways, layouts, apart)
        chosen.append(
            Chosen(
                posed=posed,
                schedule=one.schedule,
                kind=kind_of(one.schedule),
                step_s=one.evaluation.step_s - one.evaluation.sync_s + sum(syncs.values()),
                syncs=syncs,
                ways=chosen_ways,
                numbers=numbers,
                played=played,
                peak=one.evaluation.peak,
            )
        )
    # sorted is stable: schedules of equal price keep the search's order, fewest moving parts first.
    return sorted(chosen, key=lambda one: one.objective)


def hosts_full(posed: Posed, found: Sequence[Found], pins: PinnedTasks, fits: Fits) -> PlanError:
    """Of schedules that fit the devices, and not their hosts.

    Args:
        found: The schedules.
        fits: Whether there is a plan with a change.
    """
    blocks = [(stood(posed, one.schedule), picked(posed, one.schedule)) for one in found]
    need = min((host_bytes(on[0], ways) for on, ways in blocks if on is not None), default=0)
    host, group = posed.candidates.host, posed.group
    every = list(dict.fromkeys(pin for own in pins.asked.values() for pin in own.values()))
    without = fewest_left_out(every, pins, fits)
    changes = [f"leave {' or '.join(without)} out"] if without else []
    changes.append(more_host(host, group, fits, need))
    wheres = dict.fromkeys(pin.where for pin in every if without)
    looked_at = f"; {counted(len(found), 'schedule')} looked at" if found else ""
    if (more := more_devices(group, MOST_DEVICES, fits, host)) is not None:
        changes.append(more)
    return DoesNotFit(
        "what fits the devices puts more into the memory of their hosts than these have",
        where=" and ".join(wheres) or "cluster",
        found=f"{format_bytes(posed.candidates.host or 0)} of its host for each device{looked_at}",
        hint=", or ".join(changes),
    ).by(1.0)


def distinct(found: Sequence[Chosen], best: Chosen, most: int) -> list[Chosen]:
    """The first ones that differ visibly from the best and from each other."""
    seen = {best.shape()}
    kept: list[Chosen] = []
    for one in found:
        if len(kept) == most:
            break
        if one.shape() not in seen:
            seen.add(one.shape())
            kept.append(one)
    return kept


def _chunks(schedule: Schedule) -> tuple[int, ...]:
    if isinstance(schedule, Leaf):
        return ()
    own = (schedule.chunks,) if isinstance(schedule, Spatial) else ()
    return own + _chunks(schedule.first) + _chunks(schedule.second)
