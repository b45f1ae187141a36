"""Many random episodes for a test, told in the shortest history if one breaks; and two runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flowrl.ids import group_id
from flowrl.rollout.actions import Submit
from flowrl.rollout.events import EngineJoined, PromptsOffered, SampleEnd, SamplesFinished
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs import FinishReason
from tests.proofs.scheduler_episodes import MOVES, Rates, draw_episode, draw_settings, play
from tests.proofs.scheduler_fuzz import Failure, Tally
from tests.proofs.scheduler_shrink import shrink
from tests.proofs.scheduler_world import World, WorldRules

__all__ = ["consumed", "explore", "makespan"]

# Stories are shortened by the fuzzer's own shrinker, which knows what a move is.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def explore(
    rates: Rates,
    *,
    at_least: int,
    fits=lambda rules: True,
    **changes,
) -> Tally:
    """Plays episodes of random settings until so many events have happened.

    Args:
        at_least: Events in all. Hypothesis draws an episode for each 350 of them; further episodes
            follow from fixed seeds.
        fits: Which of the random settings are of interest.
        changes: Rules of the world.
    """
    tally = Tally()

    @settings(max_examples=at_least // 350, deadline=None, phases=PHASES)
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
    tally.checked += world.reference.checked
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
        reference = world.reference
        if reference.asked:
            for source, number in list(reference.wanted.items()):
                if number:
                    world.offer(number, source=source)
            MOVES[rng.choices(names, weights)[0]](world, rng)
        elif reference.untrained:
            world.publish()
        elif reference.num_asked < steps:
            if rules.budget is None:
                world.offer(groups)
            world.ask(groups)
        else:
            break
    assert not world.reference.asked, world.scheduler.waits()
    return [(d.batch, d.groups, d.filtered) for d in world.reference.delivered]


def makespan(lengths, capacities, rules, sources=(), then=(), *, validate=True):
    """Decode steps until every sample is finished; each running one makes a token a step.

    With `then`, these are the lengths of a second epoch of the prompts, and only its steps count.
    """
    scheduler = RolloutScheduler(rules, validate=validate)
    running: dict[str, dict[str, int]] = {}
    todo = {f"{group_id(0, n)}/0": length for n, length in enumerate(lengths)}
    event = 0

    def carry_out(actions):
        for action in actions:
            if isinstance(action, Submit):
                running[action.engine].update({d.sample: todo[d.sample] for d in action.samples})

    for number, capacity in enumerate(capacities):
        running[f"e{number}"] = {}
        carry_out(scheduler.step(EngineJoined(id=event, engine=f"e{number}", capacity=capacity)))
        event += 1
    steps = 0
    for epoch, lengths_of in enumerate([lengths, then] if then else [lengths]):
        steps = 0
        todo |= {f"{group_id(epoch, n)}/0": length for n, length in enumerate(lengths_of)}
        # Engines are full from the beginning on, so what is offered first has no head start.
        by_source: dict[str, list[str]] = {}
        for number in range(len(lengths_of)):
            source = sources[number % len(sources)] if sources else ""
            by_source.setdefault(source, []).append(group_id(epoch, number))
        for source, names in by_source.items():
            offer = PromptsOffered(id=event, groups=tuple(names), source=source)
            carry_out(scheduler.step(offer))
            event += 1
        while any(running.values()):
            steps += 1
            for engine, samples in list(running.items()):
                for sample in samples:
                    samples[sample] -= 1
                done = [sample for sample, left in samples.items() if not left]
                for sample in done:
                    del samples[sample]
                ends = tuple(
                    SampleEnd(
                        sample=s,
                        attempt=0,
                        reason=FinishReason.STOP,
                        num_tokens=todo[s],
                        versions=((0, todo[s]),),
                    )
                    for s in done
                )
                carry_out(scheduler.step(SamplesFinished(id=event, engine=engine, ends=ends)))
                event += 1
    assert scheduler.counts.scoring == len(todo)
    return steps
