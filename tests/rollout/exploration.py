"""Plays many random episodes for a test, and says what broke in the shortest story found."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flowrl.rollout import SchedulerSettings
from flowrl.testing.scheduler_episodes import MOVES, Rates, draw_episode, draw_settings, play
from flowrl.testing.scheduler_fuzz import Failure, Tally
from flowrl.testing.scheduler_shrink import shrink
from flowrl.testing.scheduler_world import World, WorldRules

__all__ = ["consumed", "explore"]

# Stories are shortened by the fuzzer's own shrinker, which knows what a move is.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def explore(
    rates: Rates,
    *,
    examples: int = 30,
    at_least: int = 8_500,
    fits=lambda rules: True,
    **changes,
) -> Tally:
    """Plays episodes of random settings until so many events have happened.

    Args:
        examples: Episodes that Hypothesis draws; further ones follow from fixed seeds.
        at_least: Events in all.
        fits: Which of the random settings are of interest.
        changes: Rules of the world.
    """
    tally = Tally()

    @settings(max_examples=examples, deadline=None, phases=PHASES)
    @given(seed=st.integers(0, 2**32), size=st.integers(1, 300))
    def run(seed: int, size: int) -> None:
        _play_one(seed, size, rates, fits, tally, changes)

    run()
    seed = 2**33
    while tally.events < at_least:
        _play_one(seed, 300, rates, fits, tally, changes)
        seed += 1
    return tally


def _play_one(seed, size, rates, fits, tally, changes) -> None:
    rng = random.Random(seed)
    rules = draw_settings(rng)
    while not fits(rules):
        rules = draw_settings(rng)
    world_rules = WorldRules(
        batch_groups=rng.randint(1, 4),
        lag_rate=rng.choice([0.0, 0.2]),
        ahead=rng.random() < 0.3,
        **changes,
    )
    episode = draw_episode(rng, size, rates=rates, settings=rules, rules=world_rules)
    world, error = play(episode)
    tally.seen += world.seen
    tally.moves.update(name for name, _ in episode.script)
    tally.checked += world.books.checked
    tally.episodes += 1
    if error is not None:
        found = Failure(seed=seed, number=0, size=size, episode=shrink(episode, error), error=error)
        pytest.fail(str(found).rsplit("\n", 1)[0])


def consumed(
    rules: SchedulerSettings, seed: int, rates: Rates, *, steps: int = 4, groups: int = 3
) -> list[object]:
    """What a synchronous run consumes: ask, wait for the batch, publish, again."""
    rng = random.Random(seed)
    world = World(rules, WorldRules(lag_rate=0.0))
    names, weights = list(rates), list(rates.values())
    MOVES["join"](world, rng)
    for _ in range(30_000):
        books = world.books
        if books.asked:
            for source, number in list(books.wanted.items()):
                if number:
                    world.offer(number, source=source)
            MOVES[rng.choices(names, weights)[0]](world, rng)
        elif books.untrained:
            world.publish()
        elif books.num_asked < steps:
            if rules.budget is None:
                world.offer(groups)
            world.ask(groups)
        else:
            break
    assert not world.books.asked, world.scheduler.waits()
    return [(d.batch, d.groups, d.filtered) for d in world.books.delivered]
