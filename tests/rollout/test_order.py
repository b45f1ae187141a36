"""Longest first: what is predicted, who starts when, and what it is worth."""

from __future__ import annotations

import heapq
import random

import pytest

from flowrl.rollout.events import EngineCapacityChanged, WeightsPublished
from flowrl.rollout.policies.engines import LongestFirst
from flowrl.rollout.queues import LengthPredictor, RankedQueue
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import Group, Sample, State
from tests.rollout.exploration import makespan


def group(name, **fields):
    return Group(id=name, members=[], **fields)


def predictor(**options):
    return LengthPredictor(LongestFirst(**{"shrinkage": 1.0, **options}), ages=False)


def test_a_prompt_that_was_never_seen_is_predicted_by_the_mean_of_all():
    learned = predictor()
    learned.observe(group("0/1"), 10)
    learned.observe(group("0/2"), 30)
    assert learned.predict(group("0/3")) == 20


def test_the_callers_expectation_stands_in_for_the_mean():
    learned = predictor()
    learned.observe(group("0/1"), 10)
    assert learned.predict(group("0/3", expected_tokens=500.0)) == 500


def test_a_prompts_own_answers_weigh_more_the_more_there_are():
    learned = predictor()
    learned.observe(group("0/1"), 100)
    learned.observe(group("0/2"), 0)
    assert learned.predict(group("1/1")) == (50 + 100) / 2  # of another epoch, the same prompt
    learned.observe(group("1/1"), 100)
    assert learned.predict(group("2/1")) == pytest.approx((200 / 3 + 2 * 100) / 3)


def test_old_lengths_are_forgotten():
    learned = predictor(memory=2)
    for tokens in (1000, 10, 10, 10, 10, 10, 10, 10, 10):
        learned.observe(group("0/1"), tokens)
    count, mean = learned._prompts["1"]
    assert (count, mean) == (2, pytest.approx(10, abs=8))


def test_the_prompt_longest_not_seen_is_forgotten_first():
    learned = predictor(prompts=2)
    for name in ("0/1", "0/2", "0/1", "0/3"):
        learned.observe(group(name), 5)
    assert list(learned._prompts) == ["1", "3"]


def test_the_longest_by_prediction_starts_first(play, where):
    p = play(group_size=1, order=LongestFirst())
    p.offer("0/0", "0/1", "0/2", expected_tokens=(5.0, 50.0, 20.0))
    assert where(p.join(capacity=1)) == {"e0": ["0/1/0"]}
    assert where(p(EngineCapacityChanged, engine="e0", capacity=3)) == {"e0": ["0/2/0", "0/0/0"]}


def test_one_member_of_an_unknown_prompt_goes_before_all_that_is_known(play, where):
    p = play(group_size=2, order=LongestFirst())
    p.offer("0/0", expected_tokens=(50.0,))
    p.offer("0/1")
    assert where(p.join(capacity=1)) == {"e0": ["0/1/0"]}


def test_siblings_are_ranked_anew_when_a_member_finishes(play, where):
    p = play(group_size=2, order=LongestFirst())
    p.offer("0/0", "0/1")
    p.join(capacity=2)
    assert p.runs("e0") == ["0/0/0", "0/1/0"]
    # 0/1 turns out to be long, 0/0 short: so does the rest of them.
    p(EngineCapacityChanged, engine="e0", capacity=1)
    p.finish("0/0/0", tokens=3)
    assert where(p.finish("0/1/0", tokens=90)) == {"e0": ["0/1/1"]}


@pytest.mark.parametrize("fresh", [True, False])
def test_a_sample_whose_rank_went_and_came_back_stands_in_a_line_once(fresh):
    line = RankedQueue(fresh=fresh)
    one, two = (
        Sample(id=f"0/{n}/0", group=group(f"0/{n}", seq=n), member=0, attempt=-1 if fresh else 0)
        for n in range(2)
    )
    for sample, rank in ((one, 1.0), (two, 3.0), (one, 2.0), (one, 1.0)):
        sample.rank, sample.state = rank, State.QUEUED
        line.push(sample)
    assert line.first() is one
    line.pop()
    assert line.first() is two  # though `one` has not left its state yet
    line.pop()
    assert line.first() is None


def test_what_is_kept_is_not_to_go_any_more(play, where):
    p = play(group_size=1, order=LongestFirst(probe=False))
    p.offer("0/0", "0/1", expected_tokens=(50.0, 40.0))
    p.join(capacity=2)
    p(EngineCapacityChanged, engine="e0", capacity=0)
    p.finish("0/0/0", tokens=30, reason="abort")
    p.finish("0/1/0", tokens=2, reason="abort")
    assert where(p(EngineCapacityChanged, engine="e0", capacity=1)) == {"e0": ["0/1/0"]}


def test_members_of_a_group_that_ages_go_before_longer_ones_that_have_not_begun(play, where):
    p = play(group_size=2, max_staleness=2, order=LongestFirst())
    p.offer("0/0", expected_tokens=(1.0,))
    p.join(capacity=1)
    p.offer("0/1", expected_tokens=(1000.0,))
    assert where(p(EngineCapacityChanged, engine="e0", capacity=2)) == {"e0": ["0/0/1"]}


def test_older_weights_go_first(play, where):
    p = play(group_size=2, max_staleness=2, order=LongestFirst())
    p.offer("0/0", expected_tokens=(1.0,))
    p.join(capacity=1)
    p(WeightsPublished, version=1)
    p(EngineCapacityChanged, engine="e0", capacity=0)
    p.offer("0/1", expected_tokens=(1000.0,))
    assert where(p.join("e1", 1)) == {"e1": ["0/0/1"]}
    assert where(p.join("e2", 1)) == {"e2": ["0/1/0"]}


def test_a_group_is_overtaken_only_within_its_window(play, where):
    p = play(group_size=1, order=LongestFirst(window=2))
    p.offer("0/0", "0/1", "0/2", expected_tokens=(1.0, 2.0, 99.0))
    assert where(p.join(capacity=3)) == {"e0": ["0/1/0", "0/0/0", "0/2/0"]}


def longest_first_with_known_lengths(lengths, slots):
    """Makespan of list scheduling in falling order of length."""
    ends = [0] * slots
    for length in sorted(lengths, reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


@pytest.mark.parametrize("seed", range(3))
def test_with_predictable_lengths_a_step_ends_within_5_percent_of_known_ones(seed):
    """An epoch teaches the lengths of the next, up to one in twenty; 128 samples on 16 slots."""
    rng = random.Random(seed)
    usual = [max(1, round(rng.lognormvariate(3.5, 1.2))) for _ in range(128)]
    epochs = [
        [max(1, round(usual[n] * rng.uniform(0.95, 1.05))) for n in range(128)] for _ in range(2)
    ]
    rules = SchedulerSettings(group_size=1, order=LongestFirst())
    learned = makespan(epochs[0], [16], rules, then=epochs[1])
    known = longest_first_with_known_lengths(epochs[1], 16)
    unsorted = makespan(epochs[1], [16], SchedulerSettings(group_size=1))
    assert learned <= 1.05 * known
    assert known < unsorted


def test_2048_samples_on_16_slots_keep_the_bound_and_need_a_quarter_of_the_steps_of_batches():
    """Lengths of sigma 1.2; batches are 16 samples each, until the longest of them has ended."""
    rng = random.Random(0)
    lengths = [max(1, round(rng.lognormvariate(2.5, 1.2))) for _ in range(2048)]
    steps = makespan(lengths, [16], SchedulerSettings(group_size=1), validate=False)
    batches = sum(max(lengths[begin : begin + 16]) for begin in range(0, 2048, 16))
    assert steps <= sum(lengths) / 16 + max(lengths)
    assert batches > 4 * steps


def test_predicted_lengths_of_2048_samples_are_worth_what_known_ones_are():
    rng = random.Random(0)
    usual = [max(1, round(rng.lognormvariate(2.5, 1.2))) for _ in range(2048)]
    epochs = [[max(1, round(n * rng.uniform(0.95, 1.05))) for n in usual] for _ in range(2)]
    rules = SchedulerSettings(group_size=1, order=LongestFirst())
    steps = makespan(epochs[0], [16], rules, then=epochs[1], validate=False)
    assert steps <= 1.05 * longest_first_with_known_lengths(epochs[1], 16)
    assert steps <= sum(epochs[1]) / 16 + max(epochs[1])
