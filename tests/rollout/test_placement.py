"""Which engine gets which sample, and how long a batch takes at most."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.ids import EngineId, group_id
from flowrl.rollout import (
    AbortAsked,
    EngineCapacityChanged,
    EngineJoined,
    EngineLost,
    PromptsOffered,
    RolloutScheduler,
    SampleEnd,
    SamplesFinished,
    SchedulerSettings,
    Submit,
)
from flowrl.specs import FinishReason


def where(actions):
    """Engine -> samples, of the submissions."""
    return {a.engine: [d.sample for d in a.samples] for a in actions if isinstance(a, Submit)}


def test_members_of_a_group_share_an_engine_and_groups_spread(play):
    p = play(group_size=2)
    p.join("e0", 4)
    p.join("e1", 4)
    assert where(p.offer("0/0", "0/1", "0/2")) == {
        "e0": ["0/0/0", "0/0/1", "0/2/0", "0/2/1"],
        "e1": ["0/1/0", "0/1/1"],
    }


def test_a_group_larger_than_the_room_overflows_to_the_next_engine(play):
    p = play(group_size=4)
    p.join("e0", 3)
    p.join("e1", 2)
    assert where(p.offer("0/0")) == {"e0": ["0/0/0", "0/0/1", "0/0/2"], "e1": ["0/0/3"]}


def test_load_is_relative_to_capacity(play):
    p = play(group_size=1)
    p.join("small", 2)
    p.join("large", 8)
    p.offer("0/0", "0/1")
    assert where(p.offer("0/2", "0/3", "0/4")) == {"large": ["0/2/0", "0/3/0", "0/4/0"]}


def test_a_free_slot_is_filled_at_once_and_never_exceeds_the_capacity(play):
    p = play(group_size=1)
    p.join(capacity=2)
    p.offer("0/0", "0/1", "0/2")
    assert p.scheduler.counts.queued == 1
    assert where(p.finish("0/1/0")) == {"e0": ["0/2/0"]}


def test_capacity_zero_pauses_an_engine_and_a_higher_one_continues(play):
    p = play(group_size=1)
    p.join(capacity=1)
    p.offer("0/0", "0/1")
    p(EngineCapacityChanged, engine="e0", capacity=0)
    assert where(p.finish("0/0/0")) == {}
    assert where(p(EngineCapacityChanged, engine="e0", capacity=2)) == {"e0": ["0/1/0"]}


def test_samples_can_be_moved_off_an_engine_with_their_tokens(play):
    p = play(group_size=1)
    p.join("e0", 2)
    p.offer("0/0")
    p(EngineCapacityChanged, engine="e0", capacity=0)
    p.join("e1", 2)
    p(AbortAsked, samples=("0/0/0",))
    assert where(p.finish("0/0/0", tokens=2, reason="abort")) == {"e1": ["0/0/0"]}


def test_returned_samples_go_before_fresh_ones(play):
    p = play(group_size=1)
    p.join("e0", 2)
    p.offer("0/0", "0/1", "0/2", "0/3")
    p(EngineLost, engine="e0", reason="killed")
    assert where(p.join("e1", 3)) == {"e1": ["0/0/0", "0/1/0", "0/2/0"]}


def test_an_engine_without_capacity_is_allowed_and_a_negative_one_is_not(play):
    from flowrl.errors import SchedulerError

    p = play(group_size=1)
    p.join(capacity=0)
    assert where(p.offer("0/0")) == {}
    with pytest.raises(SchedulerError, match="capacity is negative"):
        p(EngineCapacityChanged, engine="e0", capacity=-1)


def test_the_same_events_give_the_same_assignments():
    def assignments(seed):
        rng = random.Random(seed)
        scheduler = RolloutScheduler(SchedulerSettings(group_size=3))
        found = []
        for i in range(20):
            scheduler.step(EngineJoined(id=i, engine=EngineId(f"e{i}"), capacity=rng.randint(1, 9)))
        for i in range(20, 60):
            groups = (group_id(0, i),)
            found.append(where(scheduler.step(PromptsOffered(id=i, groups=groups))))
        return found

    assert assignments(3) == assignments(3)
    assert assignments(3) != assignments(4)


def makespan(lengths, capacities):
    """Decode steps until every sample is finished; each running one makes a token a step."""
    scheduler = RolloutScheduler(SchedulerSettings(group_size=1), validate=True)
    running: dict[str, dict[str, int]] = {}
    todo = dict(enumerate(lengths))
    event = 0

    def carry_out(actions):
        for engine, samples in where(actions).items():
            running[engine].update({s: todo[int(s.split("/")[1])] for s in samples})

    for number, capacity in enumerate(capacities):
        running[f"e{number}"] = {}
        carry_out(scheduler.step(EngineJoined(id=event, engine=f"e{number}", capacity=capacity)))
        event += 1
    groups = tuple(group_id(0, n) for n in todo)
    carry_out(scheduler.step(PromptsOffered(id=event, groups=groups)))
    steps = 0
    while any(running.values()):
        steps += 1
        for engine, samples in list(running.items()):
            done = []
            for sample in samples:
                samples[sample] -= 1
                if not samples[sample]:
                    done.append(sample)
            for sample in done:
                del samples[sample]
            length = {s: todo[int(s.split("/")[1])] for s in done}
            ends = tuple(
                SampleEnd(
                    sample=s,
                    attempt=0,
                    reason=FinishReason.STOP,
                    num_tokens=length[s],
                    versions=((0, length[s]),),
                )
                for s in done
            )
            event += 1
            carry_out(scheduler.step(SamplesFinished(id=event, engine=engine, ends=ends)))
    assert scheduler.counts.scoring == len(lengths)
    return steps


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    capacities=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_makespan_is_at_most_the_mean_load_and_the_longest_sample(lengths, capacities):
    slots = sum(capacities)
    assert makespan(lengths, capacities) <= sum(lengths) / slots + max(lengths)


def test_finished_samples_do_not_wait_for_the_longest_one():
    lengths = [100, *[1] * 100]
    assert makespan(lengths, [2]) == 100


def test_every_engine_gets_its_share_of_a_large_offer():
    scheduler = RolloutScheduler(SchedulerSettings(group_size=8))
    for i in range(16):
        scheduler.step(EngineJoined(id=i, engine=EngineId(f"e{i}"), capacity=64))
    groups = tuple(group_id(0, n) for n in range(64))
    submits = where(scheduler.step(PromptsOffered(id=99, groups=groups)))
    assert Counter(len(samples) for samples in submits.values()) == {32: 16}
