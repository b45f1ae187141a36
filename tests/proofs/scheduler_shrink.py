"""Shortens an episode that fails, as long as it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from flowrl.errors import SchedulerError
from flowrl.rollout.settings import SchedulerSettings
from tests.proofs.reference_model import Violation
from tests.proofs.scheduler_episodes import Episode, play

__all__ = ["kind_of", "shrink"]


def kind_of(error: Exception) -> object:
    """Returns what two errors of the same fault share: the invariant, or the type of error."""
    return error.invariant if isinstance(error, Violation) else type(error)


def shrink(episode: Episode, error: Exception, *, plays: int = 1500) -> Episode:
    """Returns the shortest episode found that fails in the same way.

    It removes moves in ever smaller pieces (delta debugging, Zeller and Hildebrandt, 2002), then
    gives each setting its default, and repeats both until nothing helps or `plays` is used up.
    """
    wanted = kind_of(error)
    budget = plays

    def breaks(candidate: Episode) -> bool:
        nonlocal budget
        budget -= 1
        found = play(candidate)[1]
        return found is not None and kind_of(found) == wanted

    while budget > 0:
        before = episode
        for candidates in (_shorter, _plainer):
            episode = _reduce(episode, candidates, breaks, lambda: budget > 0)
        if episode == before:
            break
    return episode


def _reduce(
    episode: Episode,
    candidates: Callable[[Episode], Iterator[Episode]],
    breaks: Callable[[Episode], bool],
    goes_on: Callable[[], bool],
) -> Episode:
    found = True
    while found:
        found = False
        for candidate in candidates(episode):
            if not goes_on():
                return episode
            if breaks(candidate):
                episode, found = candidate, True
                break
    return episode


def _shorter(episode: Episode) -> Iterator[Episode]:
    """Yields episodes without a piece of the script, the largest pieces first."""
    script = episode.script
    size = len(script)
    while size >= 1:
        for start in range(0, len(script), size):
            yield replace(episode, script=script[:start] + script[start + size :])
        size //= 2


def _plainer(episode: Episode) -> Iterator[Episode]:
    """Yields episodes with one setting at its default."""
    plain = SchedulerSettings(group_size=1)
    for of in fields(SchedulerSettings):
        value = getattr(plain, of.name)
        if getattr(episode.settings, of.name) == value:
            continue
        try:
            settings = replace(episode.settings, **{of.name: value})
        except SchedulerError:
            continue  # another setting needs this one
        yield replace(episode, settings=settings)
