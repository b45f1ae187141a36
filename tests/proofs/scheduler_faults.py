"""The moves of a world that are faults: what may go wrong around a scheduler."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.events import (
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
    SampleEnd,
    SampleFailed,
    SamplesFinished,
    SamplesScored,
)
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.specs import FinishReason
from tests.proofs.reference_model import Attempt
from tests.proofs.scheduler_moves import Move, pick
from tests.proofs.scheduler_world import World

__all__ = ["FAULTS"]


def lose(world: World, rng: random.Random) -> None:
    """Kills an engine, sometimes one that does not exist."""
    engine = rng.choice([*world.reference.engines, EngineId("engine[none]")])
    world.reference.forget(engine)
    world.send(lambda **k: EngineLost(engine=engine, reason="killed", **k))


def fail(world: World, rng: random.Random) -> None:
    """Fails an attempt."""
    found = _pick_attempt(world, rng)
    if found is not None:
        engine, sample, attempt = found
        world.reference.engines[engine].silent = False
        world.end_attempt(engine, sample)
        world.reference.lose_tokens(sample)
        world.send(
            lambda **k: SampleFailed(
                engine=engine, sample=sample, attempt=attempt.attempt, error="broken", **k
            )
        )


def fail_often(world: World, rng: random.Random) -> None:
    """Fails several attempts of one engine in succession."""
    engine = pick(rng, [name for name, truth in world.reference.engines.items() if truth.running])
    if engine is None:
        return
    for _ in range(rng.randint(2, 4)):
        truth = world.reference.engines.get(engine)
        sample = pick(
            rng, [s for s in truth.running if s not in world.reference.end] if truth else []
        )
        if sample is None:
            return
        world.reference.engines[engine].silent = False
        attempt = world.end_attempt(engine, sample)
        world.reference.lose_tokens(sample)
        number = attempt.attempt
        world.send(
            lambda sample=sample, number=number, **k: SampleFailed(
                engine=engine, sample=sample, attempt=number, error="broken", **k
            )
        )


def refuse(world: World, rng: random.Random) -> None:
    """Ends an attempt as aborted though nobody asked for it, perhaps without a token."""
    found = _pick_attempt(world, rng)
    if found is not None:
        world.reference.engines[found[0]].silent = False
        world.report(found[0], [(found[1], FinishReason.ABORT)])


def late(world: World, rng: random.Random) -> None:
    """Reports on an attempt that is over, or on a sample that never existed."""
    reference = world.reference
    known = [past for past in world.reference.past[-50:] if not _is_suspected(world, past[0])]
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
    if sample not in reference.scoring:
        reports.append(lambda **k: SamplesScored(scores=((sample, 1.0),), **k))
        reports.append(lambda **k: RewardFailed(sample=sample, error="late", **k))
    if group not in reference.judging:
        reports.append(lambda **k: GroupsJudged(verdicts=((group, "late"),), **k))
    before, fenced = _facts(world), world.scheduler.fenced
    # At time 0, because otherwise a deadline might pass with the report.
    world.send(rng.choice(reports), at_s=0.0)
    reference.check(2, _facts(world) == before, f"a late report on {sample} changed something")
    reference.check(
        2, world.scheduler.fenced > fenced, f"a late report on {sample} was not counted"
    )


def repeat(world: World, rng: random.Random) -> None:
    """Sends an event a second time."""
    event = pick(rng, world.events[-20:])
    if event is not None:
        actions = world.scheduler.step(event)
        world.reference.check(2, not actions, f"{event} had an effect when sent again")


def reward_fail(world: World, rng: random.Random) -> None:
    """Fails the reward of a sample."""
    sample = pick(rng, list(world.reference.scoring))
    if sample is not None:
        del world.reference.scoring[sample]
        world.send(lambda **k: RewardFailed(sample=sample, error="raised", **k))


def abort(world: World, rng: random.Random) -> None:
    """Asks to abort some samples, which may be unknown, not running or named twice."""
    names = [*world.reference.attempts, SampleId("9/9/9")][-30:]
    chosen = tuple(rng.choices(names, k=rng.randint(1, 4)))
    world.send(lambda **k: AbortAsked(samples=chosen, **k))


def silence(world: World, rng: random.Random) -> None:
    """Loses an engine's heartbeat, or restores a lost one."""
    engine = pick(rng, list(world.reference.engines))
    if engine is None:
        return
    truth = world.reference.engines[engine]
    if truth.silent and rng.random() < 0.7:
        truth.silent = False
        world.send(lambda **k: HeartbeatSeen(engine=engine, **k))
        return
    truth.silent = True
    if not world.settings.patience.heartbeat_s:
        # Given up at once: its tokens are lost before the scheduler acts on it.
        for sample, attempt in truth.running.items():
            world.reference.bury(engine, sample, attempt)
            world.reference.lose_tokens(sample)
        truth.running.clear()
    world.send(lambda **k: HeartbeatLost(engine=engine, **k))


def stick(world: World, rng: random.Random) -> None:
    """Makes an attempt hang: it makes no further token and answers no abort."""
    found = _pick_attempt(world, rng)
    if found is not None:
        found[2].stuck = True


def jump(world: World, rng: random.Random) -> None:
    """Moves the clock far ahead, or back."""
    if rng.random() < 0.5:
        world.clock_s += rng.choice([5.0, 60.0, 86_400.0])
    else:
        world.clock_s = max(0.0, world.clock_s - rng.choice([0.5, 30.0]))
    world.send(DeadlineReached)


def early_publish(world: World, rng: random.Random) -> None:
    """Publishes new weights without a delivered batch."""
    world.publish()


def rewrite(world: World, rng: random.Random) -> None:
    """Writes the scheduler and reads it back; sometimes saves that as a checkpoint."""
    world.write_and_read()
    world.seen["rewrite"] += 1
    if rng.random() < 0.5:
        world.save()


def crash(world: World, rng: random.Random) -> None:
    """Restarts the process from its checkpoint, with another clock."""
    if world.saved is None:
        world.save()
        return
    written, reference = world.saved
    for engine in list(world.reference.engines):
        world.reference.forget(engine)
    world.scheduler = RolloutScheduler.from_json(
        json.loads(json.dumps(written)), validate=world.rules.validate, observer=world.observe
    )
    world.reference = reference = reference.clone()
    world.rewind(world.scheduler.last_event_id)
    for engine in list(reference.engines):
        world.reference.forget(engine)
    waiting = set(reference.scoring), set(reference.judging)
    reference.scoring.clear()
    reference.judging.clear()
    reference.wanted.clear()
    reference.wake_s = None
    reference.past.clear()
    world.clock_s = reference.now_s = rng.choice([0.0, world.clock_s, 1e6])
    world.seen["crash"] += 1
    world.send(Resumed)
    reference.check(
        11,
        (set(reference.scoring), set(reference.judging)) == waiting,
        "what waited for a score or a verdict is not asked for again after a crash",
    )


def stop(world: World, rng: random.Random) -> None:
    """Ends the run."""
    world.stop()


def _pick_attempt(world: World, rng: random.Random) -> tuple[EngineId, SampleId, Attempt] | None:
    return pick(
        rng,
        [
            (name, sample, attempt)
            for name, engine in world.reference.engines.items()
            for sample, attempt in engine.running.items()
        ],
    )


def _is_suspected(world: World, engine: EngineId) -> bool:
    truth = world.reference.engines.get(engine)
    return truth is not None and truth.silent


def _facts(world: World) -> object:
    counts = world.scheduler.counts
    return (counts, len(world.reference.delivered), world.scheduler.version)


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
"""Faults by name, each with its rate relative to ordinary moves."""
