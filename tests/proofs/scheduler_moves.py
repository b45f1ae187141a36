"""The moves of a world without faults: what happens around a scheduler when all goes well."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from flowrl.ids import EngineId
from flowrl.rollout.events import (
    BatchAsked,
    DeadlineReached,
    EngineCapacityChanged,
    EngineContinueAsked,
    EngineLeaving,
    EnginePauseAsked,
)
from flowrl.rollout.policies.prompts import WeightedShares
from tests.proofs.scheduler_world import SOURCES, World

__all__ = ["ORDINARY", "Move", "pick"]

Move: TypeAlias = Callable[[World, random.Random], None]

T = TypeVar("T")


def pick(rng: random.Random, items: Sequence[T]) -> T | None:
    """Returns one of the items, or None where there are none."""
    return rng.choice(items) if items else None


def offer(world: World, rng: random.Random) -> None:
    """Offers the prompts that were asked for, or a few unless many samples are live."""
    wanted = [source for source, number in world.reference.wanted.items() if number]
    source = pick(rng, wanted)
    if source is not None:
        world.offer(rng.randint(1, world.reference.wanted[source]), source=source, rng=rng)
    elif world.scheduler.counts.live < world.rules.max_live:
        shared = isinstance(world.settings.fairness, WeightedShares)
        source = rng.choice(SOURCES) if shared else ""
        world.offer(rng.randint(1, 3), source=source, rng=rng)


def ask(world: World, rng: random.Random) -> None:
    """Asks for a batch; sometimes several wait, or a batch is asked for twice or ahead."""
    reference, budget = world.reference, world.settings.budget
    if len(reference.asked) >= 1 and rng.random() >= 0.1:
        batch, (groups, version) = rng.choice(list(reference.asked.items()))
        world.send(lambda **k: BatchAsked(batch=batch, groups=groups, version=version, **k))
    elif budget is not None:
        world.ask(budget.groups)
    else:
        ahead = world.rules.ahead and rng.random() < 0.5
        version = reference.version + rng.randint(0, 1) if ahead else None
        world.ask(rng.randint(1, world.rules.batch_groups), version)


def publish(world: World, rng: random.Random) -> None:
    """Publishes new weights after a delivered batch."""
    if world.reference.untrained:
        world.publish()


def progress(world: World, rng: random.Random) -> None:
    """Lets an engine decode; some samples end."""
    engine = pick(
        rng, [n for n, e in world.reference.engines.items() if e.running and not e.silent]
    )
    if engine is not None:
        world.advance(engine, rng.randint(1, 4), rng)


def score(world: World, rng: random.Random) -> None:
    """Scores some samples, in any order."""
    names = list(world.reference.scoring)
    if names:
        world.score(rng.sample(names, rng.randint(1, len(names))))


def judge(world: World, rng: random.Random) -> None:
    """Judges some groups, in any order."""
    names = list(world.reference.judging)
    if names:
        world.judge(rng.sample(names, rng.randint(1, len(names))))


def update(world: World, rng: random.Random) -> None:
    """Reports that an engine has loaded its weights."""
    loading = [
        n for n, e in world.reference.engines.items() if e.loading is not None and not e.silent
    ]
    engine = pick(rng, loading)
    if engine is not None:
        world.update(engine)


def join(world: World, rng: random.Random) -> None:
    """Adds an engine, sometimes under a name that is in use or with old weights."""
    reference = world.reference
    engine = pick(rng, list(reference.engines)) if rng.random() < 0.1 else None
    if engine is None:
        if len(reference.engines) >= 4:
            return
        # Some names return, as those of engines that were restarted.
        known = [
            n for n in range(world.num_engines) if EngineId(f"engine[{n}]") not in reference.engines
        ]
        if known and rng.random() < 0.5:
            engine = EngineId(f"engine[{rng.choice(known)}]")
        else:
            engine = EngineId(f"engine[{world.num_engines}]")
            world.num_engines += 1
    else:
        world.reference.forget(engine)
    version = rng.randint(0, reference.version) if rng.random() < 0.2 else None
    world.join(engine, rng.randint(1, 7), version)


def resize(world: World, rng: random.Random) -> None:
    """Changes the capacity of an engine, sometimes to 0."""
    engine = pick(rng, list(world.reference.engines))
    if engine is not None:
        capacity = rng.choice([0, 1, 2, 3, 5, 8])
        world.reference.engines[engine].capacity = capacity
        aborts = rng.random() < 0.3
        world.send(
            lambda **k: EngineCapacityChanged(
                engine=engine, capacity=capacity, excess="abort" if aborts else "stay", **k
            )
        )


def leave(world: World, rng: random.Random) -> None:
    """Asks an engine to leave."""
    engine = pick(rng, list(world.reference.engines))
    if engine is not None:
        world.reference.engines[engine].leaving = True
        aborts = rng.random() < 0.5
        world.send(
            lambda **k: EngineLeaving(engine=engine, running="abort" if aborts else "finish", **k)
        )


def pause(world: World, rng: random.Random) -> None:
    """Pauses an engine at the caller's request, or continues a paused one."""
    engine = pick(rng, list(world.reference.engines))
    if engine is None:
        return
    truth = world.reference.engines[engine]
    if truth.held:
        truth.held = False
        world.send(lambda **k: EngineContinueAsked(engine=engine, **k))
    else:
        truth.held = True
        aborts = rng.random() < 0.5
        world.send(
            lambda **k: EnginePauseAsked(engine=engine, running="abort" if aborts else "keep", **k)
        )


def go_on(world: World, rng: random.Random) -> None:
    """Ends a pause that the caller asked for."""
    engine = pick(rng, [name for name, truth in world.reference.engines.items() if truth.held])
    if engine is not None:
        world.reference.engines[engine].held = False
        world.send(lambda **k: EngineContinueAsked(engine=engine, **k))


def tick(world: World, rng: random.Random) -> None:
    """Advances the clock by less than a second."""
    world.clock_s += rng.random()


def wake(world: World, rng: random.Random) -> None:
    """Wakes the scheduler at the deadline that it asked for."""
    if world.reference.wake_s is not None:
        world.clock_s = max(world.clock_s, world.reference.wake_s)
        world.send(DeadlineReached)


ORDINARY: dict[str, tuple[Move, float]] = {
    "offer": (offer, 4),
    "ask": (ask, 4),
    "publish": (publish, 3),
    "progress": (progress, 20),
    "score": (score, 12),
    "judge": (judge, 8),
    "update": (update, 6),
    "join": (join, 2),
    "resize": (resize, 1),
    "leave": (leave, 0.3),
    "pause": (pause, 0.5),
    "go_on": (go_on, 1),
    "tick": (tick, 3),
    "wake": (wake, 1),
}
"""Moves by name, each with its rate relative to the others."""
