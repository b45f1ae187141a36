"""Whether something waits that need not, or goes on too soon: from a world's books alone.

The rules of batches and of admission are stated here a second time, in the plainest way, over
lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.ids import EngineId, GroupId
from flowrl.rollout.policies import DropStragglers, WeightedShares

if TYPE_CHECKING:
    from flowrl.testing.scheduler_books import Books

__all__ = ["check_nothing_waits", "is_there"]


def check_nothing_waits(books: Books) -> None:
    """After a step: no batch waits that is there, no sample waits that could run.

    And no more groups are under way than the age budget admits.
    """
    if books.stopped:
        return
    _check_budget(books)
    if books.asked:
        groups, _ = next(iter(books.asked.values()))
        books.check(6, not is_there(books, groups), f"{groups} groups are there, but wait")
    if books.version < books.horizon() - books.settings.max_staleness:
        return
    room = [name for name in books.engines if _room(books, name) > 0]
    if room:
        waiting = _startable(books)
        books.check(9, not waiting, f"{waiting[:3]} wait while {room} have room")


def _check_budget(books: Books) -> None:
    budget = books.settings.budget
    if budget is None:
        return
    begun = sum(_first_version(books, group) is not None for group in books.groups)
    most = budget.capacity(
        books.version, books.settings.max_staleness, books.horizon(), books.served
    )
    most += books.settings.over_sampling.prompts
    books.check(3, begun <= most, f"{begun} groups are under way, the age budget is {most}")


def _room(books: Books, name: EngineId) -> int:
    engine = books.engines[name]
    if not engine.is_open or engine.version < books.version:
        return 0
    running = sum(sample not in books.end for sample in engine.running)
    capacity = min(1, engine.capacity) if name in books.doubtful else engine.capacity
    return capacity - running


def _startable(books: Books) -> list[str]:
    """Samples that are in no engine and should be in one."""
    running = set(books.running())
    every = books.settings.budget is None
    return [
        sample
        for group in books.groups
        if every or any(member in books.attempts for member in books.members(group))
        for sample in books.live(group)
        if not (sample in running or sample in books.scoring or sample in books.scored)
    ]


def is_there(books: Books, num_groups: int, *, unknown: bool = False) -> bool:
    """Whether a batch of so many groups need not wait.

    Args:
        unknown: The answer where the books cannot tell.
    """
    settings = books.settings
    done = [*books.ready, *(() if settings.refill else books.dead)]
    if len(done) < num_groups:
        return False
    if settings.max_staleness == 0 and not settings.over_sampling.prompts:
        return _are_first(books, num_groups, unknown=unknown)
    if isinstance(settings.stragglers, DropStragglers):
        return True
    return not _some_would_age(books, num_groups, unknown=not unknown)


def _are_first(books: Books, num_groups: int, *, unknown: bool) -> bool:
    """Whether the first groups by order of admission are all settled."""
    if isinstance(books.settings.fairness, WeightedShares) and books.settings.budget:
        return unknown  # the order of admission cannot be seen from here
    taken = 0
    for group in books.groups:
        if group in books.ready or (group in books.dead and not books.settings.refill):
            taken += 1
        elif group not in books.dead and books.live(group):
            return False
        if taken == num_groups:
            return True
    return False


def _some_would_age(books: Books, num_groups: int, *, unknown: bool) -> bool:
    """Whether groups that are not there would be too old for every batch after this one."""
    settings = books.settings
    per_version = settings.budget.batches_per_version if settings.budget else 1
    horizon = books.horizon()
    version, batches = books.served
    if not settings.budget:
        further = 0
    elif version == horizon:
        further = per_version - batches - 1
    else:
        further = per_version - 1
    if not settings.refill and books.dead:
        return unknown  # when dead groups began cannot be seen from here
    begun = [
        (first, group in books.ready)
        for group in books.groups
        if (first := _first_version(books, group)) is not None
    ]
    for first, _ in begun:
        later = (first + settings.max_staleness - horizon) * per_version + max(0, further)
        due = [ready for other, ready in begun if other <= first]
        if sum(due) < min(num_groups, len(due) - later * num_groups):
            return True
    return False


def _first_version(books: Books, group: GroupId) -> int | None:
    firsts = [books.first_version(sample) for sample in books.live(group)]
    return min((first for first in firsts if first is not None), default=None)
