"""The scheduler's invariants under random and adversarial event orders with faults.

`World` checks every action against its own books: conservation, exactly one end, age at delivery,
whole groups, exact batches, capacity, tokens that join, fencing, no lost wake-up and liveness.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.rollout import TRANSITIONS, SchedulerSettings, State
from flowrl.rollout.batches import ByDeadline, OfferOrder
from flowrl.rollout.lives import Lives
from flowrl.rollout.placement import Placement
from flowrl.testing.scheduler_fuzz import draw_world, fuzz, main, run_episode
from flowrl.testing.scheduler_world import STORMY, Weights, World

LATE_AND_LOST = Weights(
    offer=0, ask=0, publish=0, lose=1, fail=2, refuse=1, late=2, repeat=1, abort=3, rewrite=1
)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 150))
def test_no_order_of_events_breaks_an_invariant(seed, size):
    run_episode(draw_world(random.Random(seed)), size)


def test_faults_of_every_kind_break_no_invariant():
    seen: Counter[str] = Counter()
    failure = fuzz(seed=11, num_events=20_000, size=400, seen=seen)
    assert failure is None, str(failure)
    for kind in ("crash", "rewrite", "EngineLost", "StopAsked", "RewardFailed", "WeightsPublished"):
        assert seen[kind], f"the fuzzer never tried {kind}"


@pytest.mark.slow
def test_many_faults_break_no_invariant():
    failure = fuzz(seed=12, num_events=100_000, size=300, seen=Counter())
    assert failure is None, str(failure)


def batches(seed, rules, weights, *, steps=4, groups=3):
    """What a synchronous run consumes: offer, ask, wait for the batch, publish, again."""
    world = World(rules, random.Random(seed), weights=weights, lag_rate=0.0)
    books = world.books
    for _ in range(20_000):
        books = world.books
        if books.asked:
            if books.wanted:
                world.offer(books.wanted)
            world.run(1)
        elif books.untrained:
            world.do_publish()
        elif books.num_asked < steps:
            world.offer(groups)
            world.ask(groups)
        else:
            break
    assert not books.asked
    assert not world.scheduler.counts.dropped
    return [(d.batch, d.groups, d.filtered) for d in world.books.delivered]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), refill=st.booleans())
def test_a_synchronous_run_consumes_the_same_batches_in_any_order_of_arrival(seed, refill):
    rules = SchedulerSettings(
        group_size=3, judges_groups=True, refill=refill, max_attempts=1_000_000
    )
    calm = batches(0, rules, Weights(offer=0, ask=0, publish=0))
    assert batches(seed, rules, LATE_AND_LOST) == calm


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), refill=st.booleans())
def test_a_crashed_and_resumed_run_consumes_what_one_without_a_crash_does(seed, refill):
    rules = SchedulerSettings(
        group_size=2, judges_groups=True, refill=refill, max_attempts=1_000_000
    )
    calm = batches(0, rules, Weights(offer=0, ask=0, publish=0))
    crashing = Weights(offer=0, ask=0, publish=0, rewrite=2, crash=0.3)
    assert batches(seed, rules, crashing) == calm


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 3),
    refill=st.booleans(),
)
def test_no_sample_is_too_old_when_prompts_are_dosed_by_the_age_bound(
    seed, staleness, groups, refill
):
    rules = SchedulerSettings(group_size=2, max_staleness=staleness, refill=refill)
    world = World(
        rules,
        random.Random(seed),
        weights=Weights(offer=0, ask=0, publish=0),
        lag_rate=0.0,
    )
    books = world.books
    while books.version < 8:
        if books.asked:
            world.run(1)
        elif books.untrained:
            world.do_publish()
        else:
            # By the end of version v at most (v + staleness + 1) batches may have begun.
            world.offer((books.version + staleness + 1) * groups - books.num_offered)
            world.ask(groups)
    assert world.scheduler.counts.dropped == 0
    ages = {d.batch: d for d in world.books.delivered}
    assert len(ages) == 8


def forget_attempt(self, engine, sample, attempt):
    record = self._machine.samples.get(sample)
    return record if record is not None and record.state is State.RUNNING else None


def keep_the_slot(self, sample):
    sample.engine = None
    sample.aborting = False


def one_too_few(self, num_groups):
    return (self._kept if self._refill else len(self._front)) > num_groups


def wait_for_one_more(self, num_groups):
    return len(self._ready) + (0 if self._refill else len(self._dead)) > num_groups


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Lives, "attempt", forget_attempt),
        (Lives, "abort", lambda self, sample: None),
        (Lives, "date", lambda self, sample, version: None),
        (Placement, "release", keep_the_slot),
        (OfferOrder, "complete", one_too_few),
        (ByDeadline, "complete", wait_for_one_more),
    ],
)
def test_the_fuzzer_finds_a_sabotaged_scheduler(monkeypatch, owner, name, replacement):
    monkeypatch.setattr(owner, name, replacement)
    assert fuzz(seed=1, num_events=20_000, size=200, seen=Counter()) is not None


def test_the_fuzzer_finds_a_transition_that_loses_its_effect(monkeypatch):
    monkeypatch.setitem(TRANSITIONS, (State.PARTIAL, State.QUEUED), None)
    assert fuzz(seed=1, num_events=20_000, size=200, seen=Counter()) is not None


def test_the_worlds_books_alone_find_a_broken_age_bound():
    rules = SchedulerSettings(group_size=2, max_staleness=3)
    found = 0
    for seed in range(30):
        world = World(rules, random.Random(seed), weights=STORMY, validate=False)
        world.books.settings = SchedulerSettings(group_size=2, max_staleness=1)
        try:
            world.run(400)
        except AssertionError as error:
            found += "versions old" in str(error)
    assert found


def test_the_fuzz_command_ends_with_0_when_nothing_breaks(capsys):
    assert main(["--seed", "5", "--events", "800", "--size", "100"]) == 0
    assert "violations 0" in capsys.readouterr().out


def test_the_fuzz_command_ends_with_1_and_says_how_to_see_it_again(monkeypatch, capsys):
    monkeypatch.setitem(TRANSITIONS, (State.PARTIAL, State.QUEUED), None)
    assert main(["--seed", "5", "--events", "20000"]) == 1
    shown = capsys.readouterr().out
    assert "VIOLATION in episode" in shown
    again = shown.rsplit("again: ", 1)[1].split()
    assert main(again) == 1
