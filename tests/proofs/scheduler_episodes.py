"""Episodes: settings, a world's rules and a script of moves, sampled from a seed and played.

A script is a list of moves, each with a seed of its own, so that a move does the same whichever
moves precede it, as far as the world allows. An episode can therefore be replayed exactly, and
shortened (`tests.proofs.scheduler_shrink`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from flowrl.errors import SchedulerError
from flowrl.rollout.journal import read_journal, replay
from flowrl.rollout.policies.engines import (
    AbortRunning,
    FinishRunning,
    FirstOffered,
    KeepRunning,
    LeastLoaded,
    LongestFirst,
    NoQuarantine,
    NoRepack,
    PromptAffinity,
    Quarantine,
    RepackTail,
)
from flowrl.rollout.policies.limits import DropStragglers, Patience, Retries, WaitForStragglers
from flowrl.rollout.policies.prompts import (
    AdmissionPolicy,
    AdmitAll,
    AgeBudget,
    AskByKeepRate,
    AskMissing,
    FairnessPolicy,
    FirstCome,
    OverSampling,
    RefillPolicy,
    WeightedShares,
)
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from tests.proofs.reference_model import Violation
from tests.proofs.scheduler_faults import FAULTS
from tests.proofs.scheduler_moves import ORDINARY
from tests.proofs.scheduler_world import World, WorldRules

__all__ = ["CALM", "MOVES", "STORMY", "Episode", "Rates", "draw_episode", "draw_settings", "play"]

Rates: TypeAlias = Mapping[str, float]

MOVES = {name: move for name, (move, _) in {**ORDINARY, **FAULTS}.items()}
"""All moves by name."""

CALM: Rates = {name: rate for name, (_, rate) in ORDINARY.items()}
"""Relative rates of moves without faults."""

STORMY: Rates = {**CALM, **{name: rate for name, (_, rate) in FAULTS.items()}}
"""Relative rates of moves with every fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode, which can be replayed.

    Attributes:
        settings: Settings of the scheduler.
        rules: Rules of the world.
        script: Names of moves, each with a seed.
        end: Seed of the last part, in which there are no faults and everything must end.
    """

    settings: SchedulerSettings
    rules: WorldRules
    script: tuple[tuple[str, int], ...]
    end: int = 0


def draw_episode(
    rng: random.Random,
    size: int,
    *,
    rates: Rates | None = None,
    settings: SchedulerSettings | None = None,
    rules: WorldRules | None = None,
) -> Episode:
    """Samples an episode of `size` moves; what is not given is sampled from its whole range."""
    settings = draw_settings(rng) if settings is None else settings
    rules = _draw_rules(rng) if rules is None else rules
    if rates is None:
        rates = rng.choice([CALM, STORMY, STORMY, STORMY])
    names = rng.choices(list(rates), list(rates.values()), k=size)
    script = tuple((name, rng.getrandbits(32)) for name in names)
    return Episode(settings=settings, rules=rules, script=script, end=rng.getrandbits(32))


def _draw_rules(rng: random.Random) -> WorldRules:
    return WorldRules(
        batch_groups=rng.randint(1, 4),
        max_live=rng.choice([8, 24, 48]),
        lag_rate=rng.choice([0.0, 0.2]),
        ahead=rng.random() < 0.3,
        journals=rng.random() < 0.25,
    )


def draw_settings(rng: random.Random) -> SchedulerSettings:
    """Samples settings from the whole range; most policies have their default half the time."""
    staleness = rng.choice([0, 0, 1, 2, 4])
    refill = rng.random() < 0.5
    admission = _draw_admission(rng, staleness)
    prompts = rng.choice([0, 1, 2]) if isinstance(admission, AgeBudget) and refill else 0
    refill_by: RefillPolicy = AskMissing()
    if refill and isinstance(admission, AdmitAll) and rng.random() < 0.5:
        refill_by = AskByKeepRate(prior=rng.choice([0.3, 1.0]), weight=2.0, memory=8.0)
    fairness: FairnessPolicy = FirstCome()
    if rng.random() < 0.4:
        fairness = WeightedShares(shares=(("math", 2.0), ("code", 0.5)))
    return SchedulerSettings(
        group_size=rng.choice([1, 2, 3, 4, 8]),
        max_staleness=staleness,
        retries=Retries(attempts=rng.choice([1, 2, 3, 50]), rewards=rng.choice([1, 1, 2])),
        judges_groups=rng.random() < 0.6,
        refill=refill,
        admission=admission,
        over_sampling=OverSampling(members=rng.choice([0, 0, 0, 1, 2]), prompts=prompts),
        refill_by=refill_by,
        order=rng.choice(
            [
                FirstOffered(),
                FirstOffered(),
                LongestFirst(),
                LongestFirst(memory=2, prompts=4, probe=False),
            ]
        ),
        routing=rng.choice([PromptAffinity(), LeastLoaded()]),
        publication=rng.choice([KeepRunning(), KeepRunning(), AbortRunning(), FinishRunning()]),
        repack=rng.choice([NoRepack(), RepackTail(share=0.5), RepackTail(share=0.75)]),
        quarantine=rng.choice([NoQuarantine(), Quarantine(failures=2, seconds=3.0)]),
        patience=rng.choice([Patience(), Patience(heartbeat_s=2.0, stall_s=rng.choice([0, 4.0]))]),
        fairness=fairness,
        stragglers=DropStragglers() if staleness and rng.random() < 0.3 else WaitForStragglers(),
    )


def _draw_admission(rng: random.Random, staleness: int) -> AdmissionPolicy:
    if rng.random() < 0.5:
        return AdmitAll()
    groups, batches = rng.randint(1, 4), rng.choice([1, 1, 2])
    return AgeBudget(
        groups=groups,
        batches_per_version=batches,
        slack=rng.randint(0, min(2, staleness * batches * groups)),
        queue=rng.choice([0, 2]),
    )


def play(episode: Episode) -> tuple[World, Exception | None]:
    """Plays an episode to its end; returns its world and the error that ended it, or None.

    It catches violations by the reference model, errors of the scheduler's own checks, and errors
    of Python inside the scheduler.
    """
    world = World(episode.settings, episode.rules)
    try:
        for name, seed in episode.script:
            if world.reference.stopped:
                break
            MOVES[name](world, random.Random(seed))
        world.drain(random.Random(episode.end))
        _check_replay(world)
    except (Violation, SchedulerError, ArithmeticError, LookupError, TypeError) as error:
        return world, error
    except AssertionError as error:  # the scheduler's own
        return world, error
    return world, None


def _check_replay(world: World) -> None:
    """Checks that a replay of the events, or of the journal, gives the scheduler's state."""
    if world.rules.journals:
        again = replay(read_journal(world.journal.lines))
    else:
        again = RolloutScheduler(world.settings)
        for event in world.events:
            again.step(event)
    same = again.to_json() == world.scheduler.to_json()
    world.reference.check(11, same, "the event log replays to another state")


def without_validator(episode: Episode) -> Episode:
    """Returns the episode without the scheduler's validator, for the reference model alone."""
    return replace(episode, rules=replace(episode.rules, validate=False))
