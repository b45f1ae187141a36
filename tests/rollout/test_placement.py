"""Which engine gets which sample."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from flowrl.ids import EngineId, GroupId, SampleId, group_id
from flowrl.rollout.actions import Abort
from flowrl.rollout.events import (
    AbortAsked,
    EngineCapacityChanged,
    EngineJoined,
    EngineLost,
    Progressed,
    PromptsOffered,
    SampleFailed,
)
from flowrl.rollout.placement import Placement
from flowrl.rollout.policies.engines import LeastLoaded
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import Engine, Group, Sample


def test_members_of_a_group_share_an_engine_and_groups_spread(play, where):
    p = play(group_size=2)
    p.join("e0", 4)
    p.join("e1", 4)
    assert where(p.offer("0/0", "0/1", "0/2")) == {
        "e0": ["0/0/0", "0/0/1", "0/2/0", "0/2/1"],
        "e1": ["0/1/0", "0/1/1"],
    }


def test_a_group_larger_than_the_room_overflows_to_the_next_engine(play, where):
    p = play(group_size=4)
    p.join("e0", 3)
    p.join("e1", 2)
    assert where(p.offer("0/0")) == {"e0": ["0/0/0", "0/0/1", "0/0/2"], "e1": ["0/0/3"]}


def test_load_is_relative_to_capacity(play, where):
    p = play(group_size=1)
    p.join("small", 2)
    p.join("large", 8)
    p.offer("0/0", "0/1")
    assert where(p.offer("0/2", "0/3", "0/4")) == {"large": ["0/2/0", "0/3/0", "0/4/0"]}


def test_a_free_slot_is_filled_at_once_and_never_exceeds_the_capacity(play, where):
    p = play(group_size=1)
    p.join(capacity=2)
    p.offer("0/0", "0/1", "0/2")
    assert p.scheduler.counts.queued == 1
    assert where(p.finish("0/1/0")) == {"e0": ["0/2/0"]}


def test_capacity_zero_pauses_an_engine_and_a_higher_one_continues(play, where):
    p = play(group_size=1)
    p.join(capacity=1)
    p.offer("0/0", "0/1")
    p(EngineCapacityChanged, engine="e0", capacity=0)
    assert where(p.finish("0/0/0")) == {}
    assert where(p(EngineCapacityChanged, engine="e0", capacity=2)) == {"e0": ["0/1/0"]}


def test_samples_can_be_moved_off_an_engine_with_their_tokens(play, where):
    p = play(group_size=1)
    p.join("e0", 2)
    p.offer("0/0")
    p(EngineCapacityChanged, engine="e0", capacity=0)
    p.join("e1", 2)
    p(AbortAsked, samples=("0/0/0",))
    assert where(p.finish("0/0/0", tokens=2, reason="abort")) == {"e1": ["0/0/0"]}


def test_what_is_too_much_for_an_engine_can_be_moved_off_it(play, where):
    p = play(group_size=1)
    p.join("e0", 4)
    p.offer("0/0", "0/1", "0/2", "0/3")
    p.join("e1", 4)
    p(Progressed, engine="e0", progress=(("0/0/0", 0, 9), ("0/2/0", 0, 5), ("0/3/0", 0, 7)))
    p(AbortAsked, samples=("0/0/0",))
    # Of the three others one may stay: the one with the most tokens.
    actions = p(EngineCapacityChanged, engine="e0", capacity=1, excess="abort")
    assert actions == [Abort(engine="e0", samples=("0/1/0", "0/2/0"))]
    assert where(p.finish("0/2/0", tokens=5, reason="abort")) == {"e1": ["0/2/0"]}


def test_returned_samples_go_before_fresh_ones(play, where):
    p = play(group_size=1)
    p.join("e0", 2)
    p.offer("0/0", "0/1", "0/2", "0/3")
    p(EngineLost, engine="e0", reason="killed")
    assert where(p.join("e1", 3)) == {"e1": ["0/0/0", "0/1/0", "0/2/0"]}


def test_an_engine_without_capacity_is_allowed_and_a_negative_one_is_not(play, where):
    from flowrl.errors import SchedulerError

    p = play(group_size=1)
    p.join(capacity=0)
    assert where(p.offer("0/0")) == {}
    with pytest.raises(SchedulerError, match="capacity is negative"):
        p(EngineCapacityChanged, engine="e0", capacity=-1)


def test_the_same_events_give_the_same_assignments(where):
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


def test_every_engine_gets_its_share_of_a_large_offer(where):
    scheduler = RolloutScheduler(SchedulerSettings(group_size=8))
    for i in range(16):
        scheduler.step(EngineJoined(id=i, engine=EngineId(f"e{i}"), capacity=64))
    groups = tuple(group_id(0, n) for n in range(64))
    submits = where(scheduler.step(PromptsOffered(id=99, groups=groups)))
    assert Counter(len(samples) for samples in submits.values()) == {32: 16}


def test_without_affinity_members_of_a_group_spread_too(play, where):
    p = play(group_size=4, routing=LeastLoaded())
    p.join("e0", 4)
    p.join("e1", 4)
    assert where(p.offer("0/0")) == {"e0": ["0/0/0", "0/0/2"], "e1": ["0/0/1", "0/0/3"]}


def test_a_sample_that_failed_on_an_engine_tries_another_first_if_there_is_room(play, where):
    p = play(group_size=1, retries=Retries(attempts=5))
    p.join("e0", 2)
    p.join("e1", 2)
    p.offer("0/0")
    actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=0, error="oom")
    assert where(actions) == {"e1": ["0/0/0"]}
    actions = p(SampleFailed, engine="e1", sample="0/0/0", attempt=1, error="oom")
    assert where(actions) == {"e0": ["0/0/0"]}


def test_a_sample_that_failed_goes_back_to_the_only_engine_there_is(play, where):
    p = play(group_size=1, retries=Retries(attempts=5))
    p.join("e0", 2)
    p.join("e1", 0)
    p.offer("0/0")
    actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=0, error="oom")
    assert where(actions) == {"e0": ["0/0/0"]}


def test_a_sample_that_failed_goes_to_the_least_loaded_of_the_other_engines():
    """Least loaded for what it takes: 3 of 8 is less than 1 of 2, and less than 4 of 8."""
    placement = Placement(SchedulerSettings(group_size=1))
    numbers = {"failed": (0, 8), "fuller": (4, 8), "large": (3, 8), "small": (1, 2), "full": (1, 1)}
    for order, (name, (held, limit)) in enumerate(numbers.items()):
        engine = Engine(id=EngineId(name), capacity=limit, order=order, limit=limit)
        engine.held = dict.fromkeys(SampleId(f"9/{name}/{i}") for i in range(held))  # type: ignore[assignment]
        placement.add(engine)
    group = Group(id=GroupId("0/0"), members=[])
    sample = Sample(id=SampleId("0/0/0"), group=group, member=0)
    assert placement._choose(sample) is placement.engines[EngineId("failed")]
    sample.avoids = placement.engines[EngineId("failed")]
    assert placement._choose(sample) is placement.engines[EngineId("large")]
