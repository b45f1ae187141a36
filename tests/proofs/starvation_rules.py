"""When a batch must wait and when a sample may start, from the reference model alone.

This states the scheduler's rules of batches and of admission a second time, in the plainest way,
over lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.ids import EngineId, GroupId
from flowrl.rollout.policies.limits import DropStragglers
from flowrl.rollout.policies.prompts import WeightedShares

if TYPE_CHECKING:
    from tests.proofs.reference_model import ReferenceModel

__all__ = ["check_nothing_waits", "is_there"]


def check_nothing_waits(reference: ReferenceModel) -> None:
    """Checks after a step that no complete batch waits and no sample waits that could run.

    It also checks that no more groups are in flight than the age budget admits.
    """
    if reference.stopped:
        return
    _check_budget(reference)
    if reference.asked:
        groups, _ = next(iter(reference.asked.values()))
        reference.check(6, not is_there(reference, groups), f"{groups} groups are there, but wait")
    if reference.version < reference.horizon() - reference.settings.max_staleness:
        return
    room = [name for name in reference.engines if _room(reference, name) > 0]
    if room:
        waiting = _startable(reference)
        reference.check(9, not waiting, f"{waiting[:3]} wait while {room} have room")


def _check_budget(reference: ReferenceModel) -> None:
    budget = reference.settings.budget
    if budget is None:
        return
    begun = sum(_first_version(reference, group) is not None for group in reference.groups)
    most = budget.capacity(
        reference.version, reference.settings.max_staleness, reference.horizon(), reference.served
    )
    most += reference.settings.over_sampling.prompts
    reference.check(3, begun <= most, f"{begun} groups are in flight, the age budget is {most}")


def _room(reference: ReferenceModel, name: EngineId) -> int:
    engine = reference.engines[name]
    if not engine.is_open or engine.version < reference.version:
        return 0
    running = sum(sample not in reference.end for sample in engine.running)
    capacity = min(1, engine.capacity) if name in reference.doubtful else engine.capacity
    return capacity - running


def _startable(reference: ReferenceModel) -> list[str]:
    """Returns the samples that are in no engine and should be in one."""
    running = set(reference.running())
    every = reference.settings.budget is None
    return [
        sample
        for group in reference.groups
        if every or any(member in reference.attempts for member in reference.members(group))
        for sample in reference.live(group)
        if not (sample in running or sample in reference.scoring or sample in reference.scored)
    ]


def is_there(reference: ReferenceModel, num_groups: int, *, unknown: bool = False) -> bool:
    """Whether a batch of `num_groups` groups can be delivered.

    Args:
        reference: The reference model.
        num_groups: Groups of the batch.
        unknown: The answer where the reference model cannot decide.
    """
    settings = reference.settings
    done = [*reference.ready, *(() if settings.refill else reference.dead)]
    if len(done) < num_groups:
        return False
    if settings.max_staleness == 0 and not settings.over_sampling.prompts:
        return _are_first(reference, num_groups, unknown=unknown)
    if isinstance(settings.stragglers, DropStragglers):
        return True
    return not _some_would_age(reference, num_groups, unknown=not unknown)


def _are_first(reference: ReferenceModel, num_groups: int, *, unknown: bool) -> bool:
    """Whether the first `num_groups` groups in order of admission are complete or dead."""
    if isinstance(reference.settings.fairness, WeightedShares) and reference.settings.budget:
        return unknown  # the order of admission is not known here
    taken = 0
    for group in reference.groups:
        if group in reference.ready or (group in reference.dead and not reference.settings.refill):
            taken += 1
        elif group not in reference.dead and reference.live(group):
            return False
        if taken == num_groups:
            return True
    return False


def _some_would_age(reference: ReferenceModel, num_groups: int, *, unknown: bool) -> bool:
    """Whether incomplete groups would be too stale for every batch after this one."""
    settings = reference.settings
    per_version = settings.budget.batches_per_version if settings.budget else 1
    horizon = reference.horizon()
    version, batches = reference.served
    if not settings.budget:
        further = 0
    elif version == horizon:
        further = per_version - batches - 1
    else:
        further = per_version - 1
    if not settings.refill and reference.dead:
        return unknown  # the versions at which dead groups began are not known here
    begun = [
        (first, group in reference.ready)
        for group in reference.groups
        if (first := _first_version(reference, group)) is not None
    ]
    for first, _ in begun:
        later = (first + settings.max_staleness - horizon) * per_version + max(0, further)
        due = [ready for other, ready in begun if other <= first]
        if sum(due) < min(num_groups, len(due) - later * num_groups):
            return True
    return False


def _first_version(reference: ReferenceModel, group: GroupId) -> int | None:
    firsts = [reference.first_version(sample) for sample in reference.live(group)]
    return min((first for first in firsts if first is not None), default=None)
