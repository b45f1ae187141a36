"""What may happen around a scheduler when all goes well: each a move that a world makes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from flowrl.ids import EngineId
from flowrl.rollout import (
    BatchAsked,
    DeadlineReached,
    EngineCapacityChanged,
    EngineContinueAsked,
    EngineLeaving,
    EnginePauseAsked,
)
from flowrl.rollout.policies import WeightedShares
from flowrl.testing.scheduler_world import SOURCES, World

__all__ = ["ORDINARY", "Move", "pick"]

Move: TypeAlias = Callable[[World, random.Random], None]

T = TypeVar("T")


def pick(rng: random.Random, items: Sequence[T]) -> T | None:
    """One of the items, if there are any."""
    return rng.choice(items) if items else None


def offer(world: World, rng: random.Random) -> None:
    """A few prompts: those that were asked for, or some unless many are live."""
    wanted = [source for source, number in world.books.wanted.items() if number]
    source = pick(rng, wanted)
    if source is not None:
        world.offer(rng.randint(1, world.books.wanted[source]), source=source, rng=rng)
    elif world.scheduler.counts.live < world.rules.max_live:
        shared = isinstance(world.settings.fairness, WeightedShares)
        source = rng.choice(SOURCES) if shared else ""
        world.offer(rng.randint(1, 3), source=source, rng=rng)


def ask(world: World, rng: random.Random) -> None:
    """Asks for a batch; sometimes several wait, or one is asked for twice, or ahead."""
    books, budget = world.books, world.settings.budget
    if len(books.asked) >= 1 and rng.random() >= 0.1:
        batch, (groups, version) = rng.choice(list(books.asked.items()))
        world.tell(lambda **k: BatchAsked(batch=batch, groups=groups, version=version, **k))
    elif budget is not None:
        world.ask(budget.groups)
    else:
        ahead = world.rules.ahead and rng.random() < 0.5
        version = books.version + rng.randint(0, 1) if ahead else None
        world.ask(rng.randint(1, world.rules.batch_groups), version)


def publish(world: World, rng: random.Random) -> None:
    """New weights for a batch that was delivered."""
    if world.books.untrained:
        world.publish()


def progress(world: World, rng: random.Random) -> None:
    """An engine decodes; some samples end."""
    engine = pick(rng, [n for n, e in world.books.engines.items() if e.running and not e.silent])
    if engine is not None:
        world.advance(engine, rng.randint(1, 4), rng)


def score(world: World, rng: random.Random) -> None:
    """Some samples are scored, in any order."""
    names = list(world.books.scoring)
    if names:
        world.score(rng.sample(names, rng.randint(1, len(names))))


def judge(world: World, rng: random.Random) -> None:
    """Some groups are judged, in any order."""
    names = list(world.books.judging)
    if names:
        world.judge(rng.sample(names, rng.randint(1, len(names))))


def update(world: World, rng: random.Random) -> None:
    """An engine has loaded its weights."""
    loading = [n for n, e in world.books.engines.items() if e.loading is not None and not e.silent]
    engine = pick(rng, loading)
    if engine is not None:
        world.update(engine)


def join(world: World, rng: random.Random) -> None:
    """An engine joins; seldom under a name that is in use, or with old weights."""
    books = world.books
    engine = pick(rng, list(books.engines)) if rng.random() < 0.1 else None
    if engine is None:
        if len(books.engines) >= 4:
            return
        # Names come back now and then, as those of engines that were restarted.
        known = [
            n for n in range(world.num_engines) if EngineId(f"engine[{n}]") not in books.engines
        ]
        if known and rng.random() < 0.5:
            engine = EngineId(f"engine[{rng.choice(known)}]")
        else:
            engine = EngineId(f"engine[{world.num_engines}]")
            world.num_engines += 1
    else:
        world.books.forget(engine)
    version = rng.randint(0, books.version) if rng.random() < 0.2 else None
    world.join(engine, rng.randint(1, 7), version)


def resize(world: World, rng: random.Random) -> None:
    """An engine takes more or fewer samples, or none for a while."""
    engine = pick(rng, list(world.books.engines))
    if engine is not None:
        capacity = rng.choice([0, 1, 2, 3, 5, 8])
        world.books.engines[engine].capacity = capacity
        aborts = rng.random() < 0.3
        world.tell(
            lambda **k: EngineCapacityChanged(
                engine=engine, capacity=capacity, excess="abort" if aborts else "stay", **k
            )
        )


def leave(world: World, rng: random.Random) -> None:
    """An engine is to go."""
    engine = pick(rng, list(world.books.engines))
    if engine is not None:
        world.books.engines[engine].leaving = True
        aborts = rng.random() < 0.5
        world.tell(
            lambda **k: EngineLeaving(engine=engine, running="abort" if aborts else "finish", **k)
        )


def pause(world: World, rng: random.Random) -> None:
    """The caller needs an engine's devices, or needs them no more."""
    engine = pick(rng, list(world.books.engines))
    if engine is None:
        return
    truth = world.books.engines[engine]
    if truth.held:
        truth.held = False
        world.tell(lambda **k: EngineContinueAsked(engine=engine, **k))
    else:
        truth.held = True
        aborts = rng.random() < 0.5
        world.tell(
            lambda **k: EnginePauseAsked(engine=engine, running="abort" if aborts else "keep", **k)
        )


def go_on(world: World, rng: random.Random) -> None:
    """A pause that the caller asked for is over."""
    engine = pick(rng, [name for name, truth in world.books.engines.items() if truth.held])
    if engine is not None:
        world.books.engines[engine].held = False
        world.tell(lambda **k: EngineContinueAsked(engine=engine, **k))


def tick(world: World, rng: random.Random) -> None:
    """A little time passes."""
    world.clock_s += rng.random()


def wake(world: World, rng: random.Random) -> None:
    """The scheduler is woken when it asked to be."""
    if world.books.wake_s is not None:
        world.clock_s = max(world.clock_s, world.books.wake_s)
        world.tell(DeadlineReached)


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
"""Moves by name, and how often each is tried, relative to the others."""
