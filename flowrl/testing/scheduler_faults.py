"""What may go wrong around a scheduler: each a move that a world makes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout import (
    AbortAsked,
    DeadlineReached,
    EngineLost,
    EngineUpdated,
    Event,
    GroupsJudged,
    HeartbeatLost,
    HeartbeatSeen,
    Progressed,
    Resumed,
    RewardFailed,
    RolloutScheduler,
    SampleEnd,
    SampleFailed,
    SamplesFinished,
    SamplesScored,
)
from flowrl.specs import FinishReason
from flowrl.testing.scheduler_books import Attempt
from flowrl.testing.scheduler_moves import Move, pick
from flowrl.testing.scheduler_world import World

__all__ = ["FAULTS"]


def lose(world: World, rng: random.Random) -> None:
    """An engine dies, sometimes one that is dead already."""
    engine = rng.choice([*world.books.engines, EngineId("engine[none]")])
    world.books.forget(engine)
    world.tell(lambda **k: EngineLost(engine=engine, reason="killed", **k))


def fail(world: World, rng: random.Random) -> None:
    """An attempt breaks; often on the engine that broke one before."""
    found = _pick_attempt(world, rng)
    if found is not None:
        engine, sample, attempt = found
        world.books.engines[engine].silent = False
        world.end_attempt(engine, sample)
        world.books.lose_tokens(sample)
        world.tell(
            lambda **k: SampleFailed(
                engine=engine, sample=sample, attempt=attempt.attempt, error="broken", **k
            )
        )


def fail_often(world: World, rng: random.Random) -> None:
    """An engine breaks everything it runs, one after the other."""
    engine = pick(rng, [name for name, truth in world.books.engines.items() if truth.running])
    if engine is None:
        return
    for _ in range(rng.randint(2, 4)):
        truth = world.books.engines.get(engine)
        sample = pick(rng, [s for s in truth.running if s not in world.books.end] if truth else [])
        if sample is None:
            return
        world.books.engines[engine].silent = False
        attempt = world.end_attempt(engine, sample)
        world.books.lose_tokens(sample)
        number = attempt.attempt
        world.tell(
            lambda sample=sample, number=number, **k: SampleFailed(
                engine=engine, sample=sample, attempt=number, error="broken", **k
            )
        )


def refuse(world: World, rng: random.Random) -> None:
    """An engine gives a sample back of its own accord, perhaps without any token."""
    found = _pick_attempt(world, rng)
    if found is not None:
        world.books.engines[found[0]].silent = False
        world.report(found[0], [(found[1], FinishReason.ABORT)])


def late(world: World, rng: random.Random) -> None:
    """A report arrives on an attempt that is over, or on a sample that never was."""
    books = world.books
    known = [past for past in world.books.past[-50:] if not _is_suspected(world, past[0])]
    past = rng.choice([*known, (EngineId("x"), SampleId("9/9/9"), 0, 1)])
    engine, sample, attempt, tokens = past
    end = SampleEnd(
        sample=sample,
        attempt=attempt,
        reason=rng.choice(list(FinishReason)),
        num_tokens=tokens,
        versions=((0, tokens),) if tokens else (),
    )
    group = GroupId(sample.rpartition("/")[0])
    reports: list[Callable[..., Event]] = [
        lambda **k: SamplesFinished(engine=engine, ends=(end, end), **k),
        lambda **k: SampleFailed(engine=engine, sample=sample, attempt=attempt, error="late", **k),
        lambda **k: Progressed(engine=engine, progress=((sample, attempt, 99),), **k),
        lambda **k: HeartbeatLost(engine=EngineId("engine[none]"), **k),
        lambda **k: EngineUpdated(engine=EngineId("engine[none]"), version=0, **k),
    ]
    if sample not in books.scoring:
        reports.append(lambda **k: SamplesScored(scores=((sample, 1.0),), **k))
        reports.append(lambda **k: RewardFailed(sample=sample, error="late", **k))
    if group not in books.judging:
        reports.append(lambda **k: GroupsJudged(verdicts=((group, "late"),), **k))
    before, fenced = _facts(world), world.scheduler.fenced
    # The clock stands still meanwhile, or a deadline might come with the report.
    world.tell(rng.choice(reports), at_s=0.0)
    books.check(2, _facts(world) == before, f"a late report on {sample} changed something")
    books.check(2, world.scheduler.fenced > fenced, f"a late report on {sample} was not counted")


def repeat(world: World, rng: random.Random) -> None:
    """An event is sent a second time."""
    event = pick(rng, world.events[-20:])
    if event is not None:
        actions = world.scheduler.step(event)
        world.books.check(2, not actions, f"{event} had an effect when sent again")


def reward_fail(world: World, rng: random.Random) -> None:
    """A reward raises."""
    sample = pick(rng, list(world.books.scoring))
    if sample is not None:
        del world.books.scoring[sample]
        world.tell(lambda **k: RewardFailed(sample=sample, error="raised", **k))


def abort(world: World, rng: random.Random) -> None:
    """Some samples are to be aborted, running or not, known or not, twice or not."""
    names = [*world.books.attempts, SampleId("9/9/9")][-30:]
    chosen = tuple(rng.choices(names, k=rng.randint(1, 4)))
    world.tell(lambda **k: AbortAsked(samples=chosen, **k))


def silence(world: World, rng: random.Random) -> None:
    """An engine's heartbeat is lost; it comes back, or not."""
    engine = pick(rng, list(world.books.engines))
    if engine is None:
        return
    truth = world.books.engines[engine]
    if truth.silent and rng.random() < 0.7:
        truth.silent = False
        world.tell(lambda **k: HeartbeatSeen(engine=engine, **k))
        return
    truth.silent = True
    if not world.settings.patience.heartbeat_s:
        # Given up at once: its tokens are lost before the scheduler acts on it.
        for sample, attempt in truth.running.items():
            world.books.bury(engine, sample, attempt)
            world.books.lose_tokens(sample)
        truth.running.clear()
    world.tell(lambda **k: HeartbeatLost(engine=engine, **k))


def stick(world: World, rng: random.Random) -> None:
    """An attempt hangs: no token any more, and no answer to an abort."""
    found = _pick_attempt(world, rng)
    if found is not None:
        found[2].stuck = True


def jump(world: World, rng: random.Random) -> None:
    """The clock jumps: far ahead, or back."""
    if rng.random() < 0.5:
        world.clock_s += rng.choice([5.0, 60.0, 86_400.0])
    else:
        world.clock_s = max(0.0, world.clock_s - rng.choice([0.5, 30.0]))
    world.tell(DeadlineReached)


def early_publish(world: World, rng: random.Random) -> None:
    """New weights that no batch called for."""
    world.publish()


def rewrite(world: World, rng: random.Random) -> None:
    """The scheduler is written and read back; sometimes that is a checkpoint."""
    world.write_and_read()
    world.seen["rewrite"] += 1
    if rng.random() < 0.5:
        world.save()


def crash(world: World, rng: random.Random) -> None:
    """The process dies and begins anew from its checkpoint, with another clock."""
    if world.saved is None:
        world.save()
        return
    written, books = world.saved
    for engine in list(world.books.engines):
        world.books.forget(engine)
    world.scheduler = RolloutScheduler.from_json(
        json.loads(json.dumps(written)), validate=world.rules.validate, observer=world.observe
    )
    world.books = books = books.clone()
    world.rewind(world.scheduler.last_event_id)
    for engine in list(books.engines):
        world.books.forget(engine)
    waiting = set(books.scoring), set(books.judging)
    books.scoring.clear()
    books.judging.clear()
    books.wanted.clear()
    books.wake_s = None
    books.past.clear()
    world.clock_s = books.now_s = rng.choice([0.0, world.clock_s, 1e6])
    world.seen["crash"] += 1
    world.tell(Resumed)
    books.check(
        11,
        (set(books.scoring), set(books.judging)) == waiting,
        "what waited for a score or a verdict is not asked for again after a crash",
    )


def stop(world: World, rng: random.Random) -> None:
    """The run ends."""
    world.stop()


def _pick_attempt(world: World, rng: random.Random) -> tuple[EngineId, SampleId, Attempt] | None:
    return pick(
        rng,
        [
            (name, sample, attempt)
            for name, engine in world.books.engines.items()
            for sample, attempt in engine.running.items()
        ],
    )


def _is_suspected(world: World, engine: EngineId) -> bool:
    truth = world.books.engines.get(engine)
    return truth is not None and truth.silent


def _facts(world: World) -> object:
    counts = world.scheduler.counts
    return (counts, len(world.books.delivered), world.scheduler.version)


FAULTS: dict[str, tuple[Move, float]] = {
    "lose": (lose, 1),
    "fail": (fail, 2),
    "fail_often": (fail_often, 0.5),
    "refuse": (refuse, 1),
    "late": (late, 3),
    "repeat": (repeat, 2),
    "reward_fail": (reward_fail, 0.5),
    "abort": (abort, 3),
    "silence": (silence, 0.7),
    "stick": (stick, 0.5),
    "jump": (jump, 0.3),
    "early_publish": (early_publish, 0.5),
    "rewrite": (rewrite, 1),
    "crash": (crash, 0.7),
    "stop": (stop, 0.02),
}
"""Faults by name, and how often each is tried in a storm, relative to ordinary moves."""
