"""Fuzzes the rollout scheduler against a reference model.

    python -m tests.proofs.scheduler_fuzz --seed 7 --events 1000000 --jobs 8

It plays episodes of a few hundred moves each until the number of events is reached. Every episode
has its own settings, engines and faults, all sampled from the seed and the episode's number. It
prints a table of events, faults, restarts and checks. At a violation it looks for the shortest
episode that fails in the same way, prints its settings, moves, events and error, and exits with 1.
Every 100,000 events use the next seed, so that several processes (`--jobs`) can play them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from multiprocessing import get_context

from benchmarks.arguments import at_least_one
from flowrl.rollout.settings import SchedulerSettings
from tests.proofs.reference_model import INVARIANTS
from tests.proofs.scheduler_episodes import Episode, draw_episode, play, without_validator
from tests.proofs.scheduler_faults import FAULTS
from tests.proofs.scheduler_shrink import shrink

__all__ = ["Failure", "Tally", "fuzz", "main"]

RESTARTS = ("crash", "rewrite")

PIECE = 100_000
"""Number of events of one seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An episode that failed."""

    seed: int
    number: int
    size: int
    episode: Episode
    error: Exception

    def __str__(self) -> str:
        world, error = play(self.episode)
        plain = SchedulerSettings(group_size=1)
        changed = [
            f"{of.name}={getattr(self.episode.settings, of.name)}"
            for of in fields(SchedulerSettings)
            if getattr(self.episode.settings, of.name) != getattr(plain, of.name)
        ]
        moves = (
            " ".join(name for name, _ in self.episode.script) or "none; the error shows at the end"
        )
        lines = [
            f"VIOLATION in episode {self.number} of seed {self.seed}:",
            f"  {type(error).__name__}: {error}",
            f"  settings: {', '.join(changed) or 'the defaults'}",
            f"  moves: {moves}",
            f"  the last of {len(world.events)} events:",
            *(f"    {event}" for event in world.events[-15:]),
            f"  again: --seed {self.seed} --episode {self.number} --size {self.size}",
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Tally:
    """Counts of what was played."""

    seen: Counter[str] = field(default_factory=Counter)  # events by kind, and restarts
    moves: Counter[str] = field(default_factory=Counter)
    checked: Counter[int] = field(default_factory=Counter)  # by invariant
    episodes: int = 0

    @property
    def events(self) -> int:
        """Number of events that the scheduler handled."""
        return sum(number for name, number in self.seen.items() if name[:1].isupper())

    def add(self, other: Tally) -> None:
        """Adds the counts of another tally."""
        self.seen += other.seen
        self.moves += other.moves
        self.checked += other.checked
        self.episodes += other.episodes


def fuzz(
    seed: int,
    num_events: int,
    size: int,
    tally: Tally,
    *,
    validate: bool = True,
    shrinks: bool = True,
) -> Failure | None:
    """Plays episodes until `num_events` events have happened; stops at the first failure."""
    number = 0
    while tally.events < num_events:
        failure = run_episode(seed, number, size, tally, validate=validate, shrinks=shrinks)
        if failure is not None:
            return failure
        number += 1
    return None


def run_episode(
    seed: int, number: int, size: int, tally: Tally, *, validate: bool = True, shrinks: bool = True
) -> Failure | None:
    """Plays one episode; returns its failure, or None."""
    episode = draw_episode(random.Random(f"{seed}/{number}"), size)
    if not validate:
        episode = without_validator(episode)
    world, error = play(episode)
    tally.seen += world.seen
    tally.moves.update(name for name, _ in episode.script)
    tally.checked += world.reference.checked
    tally.episodes += 1
    if error is None:
        return None
    shortest = shrink(episode, error) if shrinks else episode
    return Failure(seed=seed, number=number, size=size, episode=shortest, error=error)


def _piece(options: tuple[int, int, int, bool]) -> tuple[Tally, str | None]:
    seed, num_events, size, validate = options
    tally = Tally()
    failure = fuzz(seed, num_events, size, tally, validate=validate)
    return tally, None if failure is None else str(failure)


def _run(options: argparse.Namespace) -> tuple[Tally, list[str]]:
    """Plays all pieces, or the pieces up to the first failure."""
    if options.episode is not None:
        tally = Tally()
        failure = run_episode(
            options.seed,
            options.episode,
            options.size,
            tally,
            validate=not options.without_validator,
        )
        return tally, [str(failure)] if failure is not None else []
    pieces = [
        (options.seed + number, events, options.size, not options.without_validator)
        for number, events in enumerate(_cut(options.events))
    ]
    total, failures, began = Tally(), list[str](), time.perf_counter()
    fresh = get_context("spawn")
    several = options.jobs > 1
    with ProcessPoolExecutor(options.jobs, fresh) if several else nullcontext() as pool:
        played = map(_piece, pieces) if pool is None else pool.map(_piece, pieces)
        for tally, report in played:
            total.add(tally)
            if report is not None:
                failures.append(report)
                if pool is not None:
                    pool.shutdown(cancel_futures=True)
                break
            if len(pieces) > 1:
                _report_progress(total.events, options.events, time.perf_counter() - began)
    return total, failures


def _cut(num_events: int) -> list[int]:
    """Returns the events of each piece, which do not depend on the number of processes."""
    whole, rest = divmod(num_events, PIECE)
    return [PIECE] * whole + [rest] * bool(rest)


def _report_progress(done: int, asked: int, seconds: float) -> None:
    left = max(0.0, seconds / done * (asked - done))
    print(f"{done:,} of {asked:,} events; about {left:,.0f} s left", file=sys.stderr, flush=True)


def _table(tally: Tally, seconds: float, violations: int) -> str:
    lines = [f"{'events':32} {tally.events:>14,}"]
    names = sorted(name for name in tally.seen if name[:1].isupper())
    lines += [f"  {name:30} {tally.seen[name]:>14,}" for name in names]
    faults = {name: tally.moves[name] for name in FAULTS if name not in RESTARTS}
    lines += [f"{'faults tried':32} {sum(faults.values()):>14,}"]
    lines += [f"  {name:30} {number:>14,}" for name, number in faults.items()]
    restarts = {name: tally.seen[name] for name in RESTARTS}
    lines += [f"{'restarts from written state':32} {sum(restarts.values()):>14,}"]
    lines += [f"  {name:30} {number:>14,}" for name, number in restarts.items()]
    lines += [f"{'checks of invariants':32} {tally.checked.total():>14,}"]
    lines += [
        f"  {f'{number}: {INVARIANTS[number]}':30} {count:>14,}"
        for number, count in sorted(tally.checked.items())
    ]
    lines += [
        f"{'episodes':32} {tally.episodes:>14,}",
        f"{'violations':32} {violations:>14,}",
        f"{'seconds':32} {seconds:>14,.1f}",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description="fuzz the rollout scheduler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=at_least_one, default=100_000)
    parser.add_argument("--size", type=at_least_one, default=300, help="moves of an episode")
    parser.add_argument("--episode", type=int, help="play only the episode of this number")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="processes to play in")
    parser.add_argument(
        "--without-validator",
        action="store_true",
        help="skip the scheduler's own validator; faster",
    )
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    tally, failures = _run(options)
    print(_table(tally, time.perf_counter() - began, len(failures)))
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
