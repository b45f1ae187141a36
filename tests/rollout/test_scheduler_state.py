"""The state as data: events seen before, JSON, the validator, the tables."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import SchedulerError
from flowrl.ids import GroupId, SampleId
from flowrl.rollout.actions import Submit
from flowrl.rollout.admission import OfferedGroups
from flowrl.rollout.events import (
    AbortAsked,
    BatchAsked,
    EngineLost,
    PromptsOffered,
    WeightsPublished,
)
from flowrl.rollout.machine import TRANSITIONS
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.state import TimerKind
from flowrl.rollout.states import LIVE, TERMINAL, BatchRequest, ClosedReason, Counts, State
from flowrl.rollout.validation import check_state


@pytest.fixture
def busy(play):
    """A scheduler with a sample in every state that lasts."""
    p = play(group_size=2, max_staleness=2, judges_groups=True)
    p.join("e0", 5)
    p.join("e1", 3)
    p.offer(*(f"0/{n}" for n in range(6)))
    p.finish("0/0/0", "0/0/1")
    p.score("0/0/0", "0/0/1")
    p(WeightsPublished, version=1)
    p.finish("0/1/0")
    p.finish("0/2/0", tokens=4, reason="abort")
    p(AbortAsked, samples=("0/2/1",))
    p(EngineLost, engine="e1", reason="killed")
    p(BatchAsked, batch=3, groups=2)
    return p


def test_the_state_survives_json_unchanged(busy):
    written = busy.scheduler.to_json()
    again = RolloutScheduler.from_json(json.loads(json.dumps(written)), validate=True)
    assert again.to_json() == written
    assert again.counts == busy.scheduler.counts
    assert again.last_event_id == busy.scheduler.last_event_id


def test_a_scheduler_that_was_read_back_goes_on_like_the_one_written(busy):
    again = RolloutScheduler.from_json(busy.scheduler.to_json(), validate=True)
    event = EngineLost(id=100, engine="e0", reason="killed")
    assert again.step(event) == busy.scheduler.step(event)
    assert again.to_json() == busy.scheduler.to_json()


def test_a_state_of_another_layout_is_refused(busy):
    written = busy.scheduler.to_json()
    with pytest.raises(SchedulerError, match="another layout"):
        RolloutScheduler.from_json({**written, "format": 99})


@pytest.mark.parametrize("key", ["settings", "groups", "engines", "ended", "queues"])
def test_a_state_with_a_missing_part_is_refused(busy, key):
    written = busy.scheduler.to_json()
    del written[key]
    with pytest.raises(SchedulerError, match=f"cannot be read\n.*KeyError: '{key}'"):
        RolloutScheduler.from_json(written)


def test_a_state_that_breaks_an_invariant_is_refused(busy):
    written = busy.scheduler.to_json()
    written["ended"]["consumed"] += 1
    with pytest.raises(SchedulerError, match="invariants are broken"):
        RolloutScheduler.from_json(written, validate=True)


def test_the_validator_keeps_a_sample_s_history_from_its_admission_without_an_observer():
    scheduler = RolloutScheduler(SchedulerSettings(group_size=1), validate=True)
    scheduler.step(PromptsOffered(id=3, groups=(GroupId("0/0"),)))
    assert scheduler.history(SampleId("0/0/0")) == "event 3: new -> queued attempt -1, version 0"


def test_an_event_that_was_seen_before_changes_nothing(play):
    p = play(group_size=1)
    p.join()
    event = PromptsOffered(id=50, groups=(GroupId("0/0"),))
    assert [type(a) for a in p.scheduler.step(event)] == [Submit]
    written = p.scheduler.to_json()
    assert p.scheduler.step(event) == []
    assert p.scheduler.step(PromptsOffered(id=7, groups=(GroupId("0/9"),))) == []
    assert p.scheduler.to_json() == written


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.machine.counts.update({State.QUEUED: 99}),
        lambda s: s.placement.queues._fresh[""]._samples.clear(),
        lambda s: s.placement.engines["e0"].held.clear(),
        lambda s: s.groups.popitem(),
        lambda s: setattr(s.machine.samples["0/2/0"], "kept_tokens", 99),
        lambda s: setattr(s.machine.samples["0/2/0"], "first_version", -1),
        lambda s: setattr(s.groups["0/0"], "num_ready", 1),
        lambda s: s.pool._begun.clear(),
        lambda s: setattr(s.placement.engines["e0"], "capacity", 50),
        lambda s: (
            s.pool.take(BatchRequest(batch=9, groups=0))
            or s.waiting.appendleft(BatchRequest(batch=9, groups=0))
        ),
        lambda s: setattr(s, "horizon", 7),
        lambda s: setattr(s.admission, "admitted", 1),
        lambda s: s.placement.engines["e0"].closed.add(ClosedReason.REPACKED),
        lambda s: s.timers.set(TimerKind.STALL, "", 5.0),
    ],
)
def test_the_validator_notices_damage(busy, damage):
    busy.offer("0/6")
    check_state(busy.scheduler.state)
    damage(busy.scheduler.state)
    with pytest.raises(SchedulerError, match="invariants are broken"):
        check_state(busy.scheduler.state)


def test_every_live_state_can_be_dropped_and_no_end_is_ever_left():
    assert {before for before, after in TRANSITIONS if after is State.DROPPED} == set(LIVE)
    assert not {before for before, _ in TRANSITIONS} & set(TERMINAL)
    assert set(LIVE) | set(TERMINAL) == set(State)


def test_counts_know_whether_they_add_up():
    assert Counts(admitted=3, queued=1, consumed=2).conserved
    assert Counts(admitted=3, queued=1, consumed=2).live == 1
    assert not Counts(admitted=3, queued=1, consumed=1).conserved


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0}, "group_size is too small"),
        ({"group_size": 1, "max_staleness": -1}, "max_staleness is too small"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(SchedulerError, match=message):
        SchedulerSettings(**fields)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), max_size=80))
def test_offered_groups_are_a_set_that_survives_json(pairs):
    offered = OfferedGroups()
    seen = set()
    for epoch, prompt in pairs:
        assert offered.add(GroupId(f"{epoch}/{prompt}")) == ((epoch, prompt) not in seen)
        seen.add((epoch, prompt))
    again = OfferedGroups.from_json(json.loads(json.dumps(offered.to_json())))
    assert again.to_json() == offered.to_json()
    for epoch in range(5):
        for prompt in (0, 1, 7, 8, 150, 299, 300, 301):
            assert (GroupId(f"{epoch}/{prompt}") in again) == ((epoch, prompt) in seen)
