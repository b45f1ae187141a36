"""Searches of a posed problem for schedules that can stand: on the devices that pins name, and with
what all tasks of a device put on its host within what that holds.

The search knows neither: it is asked for more schedules until one of them can, or, where hosts are
full, for such as put less there (`flowrl.plan.within_hosts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from flowrl.plan.assign import slots
from flowrl.plan.problem_of import Posed
from flowrl.plan.search import Schedule, SearchResult, leaves, search
from flowrl.plan.standing import stand
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.regions import split_numbers
from flowrl.plan.within_hosts import fullest_host, host_bytes, search_within_hosts

HOST_SCHEDULES = 200
"""Schedules looked through for one that the hosts hold, where the best ask too much of them."""

FEW_DEVICES = 8
"""On no more than these they are looked through at once; on more, ways that put less on a host are
tried first (`within_hosts`)."""

PLACED_SCHEDULES = 1000
"""Likewise, for one that can stand on the devices that pins name."""

LESS_ON_HOSTS = (
    "schedules that put less on hosts, one task after the other, for the fastest ones put more "
    "there than they hold; a faster one that they hold may be missed"
)
"""What a plan says of `flowrl.plan.within_hosts`."""


def search_posed(posed: Posed, top: int = 1) -> SearchResult:
    """The best schedules; more of them where none of so many can stand.

    The search knows what each task puts on its host, and not what all of them do together; and of
    pinned devices whether two parts need one, and not where nodes end.
    """
    most = PLACED_SCHEDULES if posed.problem.places else HOST_SCHEDULES
    while True:
        result = search(posed.problem, top=top)
        ended = len(result.best) < top or top >= most
        if ended or any(fits_hosts(posed, one.schedule) for one in result.best):
            return result
        pinned = posed.problem.places or posed.environments
        if not pinned and posed.problem.num_devices > FEW_DEVICES:
            within = search_within_hosts(posed, result, lambda one: _on_hosts(posed, one), top)
            if within is not None:
                return replace(within, thinned=LESS_ON_HOSTS)
        top = min(most, max(32, 8 * top))


def stood(
    posed: Posed, schedule: Schedule
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]] | None:
    """Each task's devices by number, and those of environments alone; None where pins forbid it."""
    problem, node_size = posed.problem, posed.group.node_size
    sizes = problem.block_sizes()
    numbers: Mapping[str, tuple[int, ...]] | None
    if problem.places:
        numbers = stand(schedule, sizes, node_size, problem.num_devices, problem.places)
    else:
        given = slots(schedule, sizes, node_size)
        numbers = {name: tuple(block) for name, block in given.items()}
    if numbers is None:
        return None
    own, played = _split_regions(numbers, picked(posed, schedule), posed.environments)
    played |= {name: posed.outside_numbers(name) for name in numbers if name in posed.outside}
    return (own, played) if all(own.values()) else None


def fits_hosts(posed: Posed, schedule: Schedule) -> bool:
    """Whether a schedule can stand, and the hosts hold what all its tasks together put on them."""
    where = stood(posed, schedule)
    if where is None:
        return False
    chosen = picked(posed, schedule)
    return host_bytes(where[0], chosen) <= (posed.candidates.host or math.inf)


def _on_hosts(posed: Posed, schedule: Schedule) -> dict[str, int] | None:
    """What tasks of the fullest device put on its host; None where the schedule cannot stand."""
    where = stood(posed, schedule)
    return None if where is None else fullest_host(where[0], picked(posed, schedule))


def picked(posed: Posed, schedule: Schedule) -> dict[str, Candidate]:
    """The way that each task of a schedule is run in."""
    return {leaf.task: posed.candidate(leaf.task, leaf.option) for leaf in leaves(schedule)}


def _split_regions(
    numbers: Mapping[str, tuple[int, ...]],
    ways: Mapping[str, Candidate],
    pinned: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Each task's devices without those that its environment has alone; and these.

    Args:
        pinned: Devices of environments, by task. Where a task's are none of its, it has none left.
    """
    own: dict[str, tuple[int, ...]] = {}
    played: dict[str, tuple[int, ...]] = {}
    for name, block in numbers.items():
        way = ways[name].played
        policy, alone = split_numbers(None if way is None else way.split, block)
        asked = pinned.get(name)
        if asked is not None and set(asked) != set(alone or policy):
            alone = asked if alone and set(asked) <= set(block) else ()
            policy = tuple(number for number in block if number not in alone) if alone else ()
        own[name] = policy
        if alone:
            played[name] = alone
    return own, played
