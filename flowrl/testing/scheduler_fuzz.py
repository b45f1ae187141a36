"""Fuzzes the rollout scheduler with a seed of one's own.

    python -m flowrl.testing.scheduler_fuzz --seed 7 --events 1000000

Episodes of a few hundred events each run until so many events have happened; every episode has its
own settings, engines and faults, all drawn from the seed and the episode's number. Prints a table
of events, faults and ends. At a violation it looks for a shorter episode that breaks too, prints
the settings, the last events and what went wrong, and exits with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

from flowrl.errors import SchedulerError
from flowrl.rollout import RolloutScheduler, SchedulerSettings
from flowrl.testing.scheduler_books import Violation
from flowrl.testing.scheduler_world import CALM, STORMY, World

__all__ = ["Failure", "draw_world", "fuzz", "main", "run_episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An episode that broke."""

    seed: int
    episode: int
    size: int
    error: Exception
    world: World

    def __str__(self) -> str:
        lines = [
            f"VIOLATION in episode {self.episode} of seed {self.seed}, size {self.size}:",
            f"  {type(self.error).__name__}: {self.error}",
            f"  {self.world.settings}",
            f"  the last of {len(self.world.events)} events:",
            *(f"    {event}" for event in self.world.events[-15:]),
            f"  again: --seed {self.seed} --episode {self.episode} --size {self.size}",
        ]
        return "\n".join(lines)


def draw_world(rng: random.Random, *, validate: bool = True) -> World:
    """A world with settings drawn from the whole range of rules."""
    settings = SchedulerSettings(
        group_size=rng.choice([1, 2, 3, 4, 8]),
        max_staleness=rng.choice([0, 0, 1, 2, 4]),
        max_attempts=rng.choice([1, 2, 3, 50]),
        judges_groups=rng.random() < 0.6,
        refill=rng.random() < 0.5,
    )
    return World(
        settings,
        rng,
        weights=rng.choice([CALM, STORMY, STORMY, STORMY]),
        batch_groups=rng.randint(1, 4),
        max_live=rng.choice([8, 24, 48]),
        lag_rate=rng.choice([0.0, 0.2]),
        validate=validate,
    )


def run_episode(world: World, num_events: int) -> None:
    """Runs, drains, and replays the event log where there was no crash.

    Raises:
        Violation: by the world's books.
        SchedulerError: by the scheduler's own checks.
    """
    world.run(num_events)
    world.drain()
    if not world.seen["crash"]:
        again = RolloutScheduler(world.settings)
        for event in world.events:
            again.step(event)
        if again.to_json() != world.scheduler.to_json():
            raise Violation("the event log replays to another state")


def fuzz(
    seed: int, num_events: int, size: int, seen: Counter[str], *, validate: bool = True
) -> Failure | None:
    """Runs episodes until so many events have happened, and counts them in `seen`."""
    episode = 0
    while seen.total() < num_events:
        failure = _try(seed, episode, size, seen, validate=validate)
        if failure is not None:
            return _shorter(failure)
        episode += 1
    return None


def _try(
    seed: int, episode: int, size: int, seen: Counter[str], *, validate: bool = True
) -> Failure | None:
    world = draw_world(random.Random(f"{seed}/{episode}"), validate=validate)
    try:
        run_episode(world, size)
    except (Violation, SchedulerError) as error:
        return Failure(seed=seed, episode=episode, size=size, error=error, world=world)
    finally:
        seen.update(world.seen)
    return None


def _shorter(failure: Failure) -> Failure:
    """The shortest failing episode among many short ones, or the one that was found."""
    for size in (10, 20, 40, 80, 160):
        if size >= failure.size:
            break
        for episode in range(150):
            found = _try(failure.seed, episode, size, Counter())
            if found is not None:
                return found
    return failure


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="fuzz the rollout scheduler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=300, help="events of an episode")
    parser.add_argument("--episode", type=int, help="run only this one")
    parser.add_argument(
        "--books-only", action="store_true", help="skip the scheduler's own validator; faster"
    )
    options = parser.parse_args(arguments)
    seen: Counter[str] = Counter()
    began = time.perf_counter()
    if options.episode is not None:
        failure = _try(options.seed, options.episode, options.size, seen)
    else:
        failure = fuzz(
            options.seed, options.events, options.size, seen, validate=not options.books_only
        )
    for name, number in sorted(seen.items()):
        print(f"{name:24} {number:>10,}")
    seconds = time.perf_counter() - began
    print(f"{'total':24} {seen.total():>10,}   {seconds:.1f} s   violations {int(bool(failure))}")
    if failure is not None:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
