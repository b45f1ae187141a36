"""The twelve invariants of docs/scheduling.md, each under random and adversarial orders of events.

All policies in random combination; engines that die, fall silent, fail in a row, come back; late
and repeated reports; rewards that fail; clocks that jump; restarts from written state. What is
checked is the reference model of a `World`, beside the scheduler's validator.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.ids import EngineId
from flowrl.rollout.events import DeadlineReached
from flowrl.rollout.policies.engines import (
    AbortRunning,
    FinishRunning,
    FirstOffered,
    KeepRunning,
    LeastLoaded,
    LongestFirst,
    NoRepack,
    PromptAffinity,
    Quarantine,
    RepackTail,
)
from flowrl.rollout.policies.limits import DropStragglers, Patience, Retries
from flowrl.rollout.policies.prompts import AdmitAll, AgeBudget, FirstCome, WeightedShares
from flowrl.rollout.settings import SchedulerSettings
from tests.proofs.scheduler_episodes import CALM, STORMY
from tests.proofs.scheduler_world import World, WorldRules
from tests.rollout.exploration import consumed, explore, makespan

WHOLE = 10_500


@pytest.fixture(params=[3_500, pytest.param(WHOLE, marks=pytest.mark.slow)])
def events(request: pytest.FixtureRequest) -> int:
    """How many events are explored."""
    number: int = request.param
    return number


def test_1_every_admitted_sample_is_in_exactly_one_state(events):
    tally = explore(STORMY, at_least=events)
    assert tally.checked[1] > 8_000 * events / WHOLE
    assert {"crash", "rewrite", "stall", "StopAsked", "EngineLost"} <= set(tally.seen)


def test_2_a_sample_is_consumed_at_most_once_and_late_reports_change_nothing(events):
    tally = explore(
        {**STORMY, "late": 10, "repeat": 5, "lose": 3, "crash": 2, "silence": 2}, at_least=events
    )
    assert tally.checked[2] > 5_000 * events / WHOLE
    assert (
        min(tally.moves[name] for name in ("late", "repeat", "lose", "crash"))
        > 100 * events / WHOLE
    )


def test_3_no_consumed_sample_is_older_than_the_bound(events):
    rates = {**STORMY, "publish": 8, "early_publish": 2, "ask": 8, "crash": 1.5}
    tally = explore(rates, fits=lambda rules: rules.max_staleness > 0, at_least=events)
    assert tally.checked[3] > 2_000 * events / WHOLE


def test_4_a_delivered_group_has_exactly_its_members_and_the_others_are_accounted_for(events):
    rates = {**STORMY, "ask": 10, "reward_fail": 2, "stop": 0.1}
    tally = explore(rates, fits=lambda rules: rules.over_sampling.members > 0, at_least=events)
    assert tally.checked[4] > 500 * events / WHOLE


def test_5_a_batch_has_exactly_the_groups_that_were_asked_for(events):
    rates = {**STORMY, "ask": 10, "reward_fail": 1}
    tally = explore(rates, fits=lambda rules: rules.judges_groups, filter_rate=0.5, at_least=events)
    assert tally.checked[5] > 500 * events / WHOLE


def test_6_a_batch_waits_only_for_samples_that_the_next_version_makes_too_old(events):
    tally = explore({**STORMY, "ask": 10, "publish": 6, "score": 20, "judge": 16}, at_least=events)
    assert tally.checked[6] > 3_000 * events / WHOLE


def with_a_stuck_sample(rules: SchedulerSettings, seed: int, versions: int) -> World:
    """A trainer's loop in which the first sample that starts never ends; one batch a version."""
    rng = random.Random(seed)
    world = World(rules, WorldRules(lag_rate=0.0, filter_rate=0.0))
    world.join(EngineId("e0"), 3)
    world.join(EngineId("e1"), 3)
    world.offer(4)
    first = next(iter(world.reference.running()))
    for engine in world.reference.engines.values():
        if first in engine.running:
            engine.running[first].stuck = True
    for _ in range(versions):
        world.ask(2)
        for _ in range(400):
            if not world.reference.asked:
                break
            before = world.next_event
            for name, engine in world.reference.engines.items():
                if not all(attempt.stuck for attempt in engine.running.values()):
                    world.advance(name, rng.randint(1, 3), rng)
            if world.reference.scoring:
                world.score(list(world.reference.scoring))
            if world.next_event == before and world.reference.wake_s is not None:
                world.clock_s = world.reference.wake_s
                world.send(DeadlineReached)
        if world.reference.asked:
            break
        world.publish()
        world.offer(2)
    return world


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), staleness=st.integers(1, 4), group_size=st.integers(1, 3))
def test_7_a_stuck_sample_blocks_nothing_before_its_own_group_would_be_too_old(
    seed, staleness, group_size
):
    rules = SchedulerSettings(group_size=group_size, max_staleness=staleness)
    world = with_a_stuck_sample(rules, seed, versions=staleness + 3)
    # Batches for the versions 0 to staleness - 1 go without it; the next one waits for it, because
    # the one after that could not take it any more.
    assert [batch.version for batch in world.reference.delivered] == list(range(staleness))
    assert not any(
        group.group == "0/0" for batch in world.reference.delivered for group in batch.groups
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 2),
    group_size=st.integers(1, 3),
    drops=st.booleans(),
)
def test_7_a_stuck_sample_blocks_nothing_at_all_where_stragglers_are_dropped_or_given_up(
    seed, staleness, group_size, drops
):
    rules = SchedulerSettings(group_size=group_size, max_staleness=staleness)
    if drops and staleness:
        rules = replace(rules, stragglers=DropStragglers())
    else:
        rules = replace(rules, patience=Patience(stall_s=5.0))
    world = with_a_stuck_sample(rules, seed, versions=staleness + 3)
    assert [batch.version for batch in world.reference.delivered] == list(range(staleness + 3))


def test_8_after_any_fault_the_run_goes_on_to_its_end(events):
    faults = ("lose", "fail", "fail_often", "refuse", "silence", "stick", "crash", "reward_fail")
    tally = explore({**STORMY, **dict.fromkeys(faults, 3), "leave": 1, "pause": 1}, at_least=events)
    assert tally.checked[8] > 1_000 * events / WHOLE
    assert min(tally.moves[name] for name in faults) > 300 * events / WHOLE


def test_9_nothing_that_could_run_waits_and_no_deadline_is_forgotten(events):
    def has_deadlines(rules):
        return isinstance(rules.quarantine, Quarantine) or rules.patience != Patience()

    rates = {**STORMY, "fail_often": 2, "silence": 2, "stick": 1, "tick": 6, "wake": 4, "jump": 1}
    tally = explore(rates, fits=has_deadlines, at_least=events)
    assert tally.checked[9] > 3_000 * events / WHOLE
    assert tally.seen["DeadlineReached"] > 300 * events / WHOLE


def test_10_aborts_are_idempotent_and_tokens_join_exactly(events):
    rates = {**STORMY, "abort": 12, "refuse": 4, "publish": 6, "ask": 8, "pause": 1, "leave": 1}
    tally = explore(rates, at_least=events)
    assert tally.checked[10] > 8_000 * events / WHOLE


def test_11_a_written_state_goes_on_like_the_scheduler_and_the_log_replays_to_it(events):
    tally = explore({**STORMY, "crash": 3, "rewrite": 6}, journals=True, at_least=events)
    assert tally.checked[11] > 500 * events / WHOLE
    assert tally.seen["crash"] > 100 * events / WHOLE


@st.composite
def synchronous_rules(draw):
    """Rules that must not change what a synchronous run consumes."""
    return SchedulerSettings(
        group_size=3,
        judges_groups=True,
        refill=draw(st.booleans()),
        retries=Retries(attempts=1_000_000),
        admission=draw(st.sampled_from([AdmitAll(), AgeBudget(groups=3)])),
        order=draw(st.sampled_from([FirstOffered(), LongestFirst()])),
        routing=draw(st.sampled_from([PromptAffinity(), LeastLoaded()])),
        publication=draw(st.sampled_from([KeepRunning(), AbortRunning(), FinishRunning()])),
        repack=draw(st.sampled_from([NoRepack(), RepackTail()])),
        quarantine=Quarantine(failures=2, seconds=1.0),
        patience=draw(st.sampled_from([Patience(), Patience(heartbeat_s=1.0, stall_s=2.0)])),
    )


CALM_RUN = {**CALM, "offer": 0, "ask": 0, "publish": 0, "leave": 0, "pause": 0}
PLAIN = SchedulerSettings(group_size=3, judges_groups=True)


@settings(max_examples=25, deadline=None)
@given(rules=synchronous_rules(), seed=st.integers(0, 2**32))
def test_11_a_crashed_and_resumed_run_consumes_what_one_without_a_crash_does(rules, seed):
    calm = consumed(replace(PLAIN, refill=rules.refill), 0, CALM_RUN)
    assert consumed(rules, seed, {**CALM_RUN, "rewrite": 2, "crash": 0.3}) == calm


@settings(max_examples=25, deadline=None)
@given(rules=synchronous_rules(), seed=st.integers(0, 2**32))
def test_a_synchronous_run_consumes_the_same_batches_whoever_finishes_first_or_dies(rules, seed):
    calm = consumed(replace(PLAIN, refill=rules.refill), 0, CALM_RUN)
    names = ("lose", "fail", "fail_often", "refuse", "late", "repeat", "abort", "rewrite")
    stormy = {**CALM_RUN, **{name: STORMY[name] for name in names}, "pause": 0.5, "go_on": 2}
    assert consumed(rules, seed, stormy) == calm


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    capacities=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.sampled_from([FirstOffered(), LongestFirst(), LongestFirst(probe=False, memory=1)]),
    routing=st.sampled_from([PromptAffinity(), LeastLoaded()]),
    fairness=st.sampled_from([FirstCome(), WeightedShares(shares=(("math", 3.0),))]),
)
def test_12_makespan_is_at_most_the_mean_load_and_the_longest_sample(
    lengths, capacities, order, routing, fairness
):
    rules = SchedulerSettings(group_size=1, order=order, routing=routing, fairness=fairness)
    slots = sum(capacities)
    steps = makespan(lengths, capacities, rules, sources=("math", "code"))
    assert steps <= sum(lengths) / slots + max(lengths)


def test_finished_samples_do_not_wait_for_the_longest_one():
    lengths = [100, *[1] * 100]
    assert makespan(lengths, [2], SchedulerSettings(group_size=1)) == 100


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 3),
    batches=st.integers(1, 2),
    slack=st.integers(0, 2),
    refill=st.booleans(),
    publication=st.sampled_from([KeepRunning(), AbortRunning(), FinishRunning()]),
)
def test_nothing_that_an_age_budget_admits_is_ever_too_old(
    seed, staleness, groups, batches, slack, refill, publication
):
    rules = SchedulerSettings(
        group_size=2,
        max_staleness=staleness,
        judges_groups=True,
        refill=refill,
        publication=publication,
        admission=AgeBudget(
            groups=groups,
            batches_per_version=batches,
            slack=min(slack, staleness * batches * groups),
            queue=2,
        ),
    )
    rng = random.Random(seed)
    world = World(rules, WorldRules(lag_rate=0.0))
    for number in range(3):
        world.join(EngineId(f"e{number}"), rng.randint(1, 4))
    due = 0
    for _ in range(4_000):
        reference = world.reference
        if reference.version >= 8:
            break
        for source, number in list(reference.wanted.items()):
            if number:
                world.offer(number, source=source)
        if len(reference.asked) < 2:
            world.ask(groups)  # one batch ahead of the one that is trained on
        if len(reference.delivered) - due >= batches:
            due += batches
            world.publish()
        name = rng.choice(list(reference.engines))
        if reference.engines[name].loading is not None:
            world.update(name)
        world.advance(name, rng.randint(1, 3), rng)
        if reference.scoring:
            world.score(rng.sample(list(reference.scoring), rng.randint(1, len(reference.scoring))))
        if reference.judging:
            world.judge(list(reference.judging))
    assert world.reference.version == 8
    assert world.scheduler.counts.dropped == 0
    ages = Counter(
        batch.version - min(world.reference.payload[sample], default=batch.version)
        for batch in world.reference.delivered
        for group in batch.groups
        for sample in group.samples
    )
    assert max(ages) <= staleness


def test_the_bound_on_age_is_reached_not_only_kept():
    """Otherwise the tests above could pass with samples that are always fresh."""
    rules = SchedulerSettings(group_size=2, max_staleness=2, admission=AgeBudget(groups=2))
    world = World(rules, WorldRules(lag_rate=0.0, filter_rate=0.0))
    world.join(EngineId("e0"), 20)
    rng = random.Random(0)
    for _ in range(60):
        for source, number in list(world.reference.wanted.items()):
            world.offer(number, source=source)
        if not world.reference.asked:
            world.ask(2)
        if world.reference.untrained:
            world.publish()
        world.advance(EngineId("e0"), 1, rng)
        if world.reference.scoring:
            world.score(list(world.reference.scoring))
    ages = {
        batch.version - min(world.reference.payload[sample], default=batch.version)
        for batch in world.reference.delivered
        for group in batch.groups
        for sample in group.samples
    }
    assert max(ages) == 2


@pytest.mark.parametrize("seed", range(3))
def test_episodes_do_the_same_when_they_are_played_again(seed):
    from tests.proofs.scheduler_episodes import draw_episode, play

    episode = draw_episode(random.Random(seed), 150)
    first, second = play(episode)[0], play(episode)[0]
    assert first.events == second.events
    assert first.scheduler.to_json() == second.scheduler.to_json()
