"""Spare members: the first that are ready make the group, the others are accounted for."""

from __future__ import annotations

from flowrl.rollout.actions import Abort, Deliver, Drop, Judge, Score
from flowrl.rollout.events import (
    BatchAsked,
    EngineCapacityChanged,
    EngineLost,
    GroupsJudged,
    RewardFailed,
    SampleFailed,
    SamplesScored,
    WeightsPublished,
)
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.policies.prompts import OverSampling


def spare(play, members=1, **rules):
    p = play(**{"group_size": 2, "over_sampling": OverSampling(members=members), **rules})
    p.join()
    return p


def test_a_group_is_delivered_with_the_first_members_that_are_ready(play, only):
    p = spare(play)
    p.offer("0/0")
    p(BatchAsked, batch=0, groups=1)
    assert p.scheduler.counts.running == 3
    p.finish_and_score("0/0/2")
    actions = p.finish_and_score("0/0/0")
    assert only(actions, Deliver).groups[0].samples == ("0/0/0", "0/0/2")
    assert only(actions, Abort).samples == ("0/0/1",)
    assert only(actions, Drop) == Drop(sample="0/0/1", reason="redundant")
    assert (p.scheduler.counts.consumed, p.scheduler.counts.dropped) == (2, 1)


def test_only_the_members_that_count_are_judged(play, only):
    p = spare(play, judges_groups=True)
    p.offer("0/0")
    p.finish("0/0/0", "0/0/1", "0/0/2")
    judge = only(p.score("0/0/1", "0/0/2", "0/0/0"), Judge)
    assert judge == Judge(groups=("0/0",), samples=(("0/0/1", "0/0/2"),))
    assert p.scheduler.fenced == 1  # the third score came for a sample that was not needed any more
    p(GroupsJudged, verdicts=(("0/0", "dull"),))
    assert (p.scheduler.counts.filtered, p.scheduler.counts.dropped) == (2, 1)


def test_a_spare_sample_that_waits_for_its_score_is_dropped_too(play):
    p = spare(play)
    p.offer("0/0")
    p.finish("0/0/0", "0/0/1", "0/0/2")
    p.score("0/0/0", "0/0/1")
    assert p.drops() == {"0/0/2": "redundant"}


def test_a_member_that_fails_for_good_costs_nothing_while_enough_are_left(play, only):
    p = spare(play, retries=Retries(attempts=1))
    p.offer("0/0")
    p(BatchAsked, batch=0, groups=1)
    assert p(SampleFailed, engine="e0", sample="0/0/1", attempt=0, error="?") == [
        Drop(sample="0/0/1", reason="retries")
    ]
    p.finish_and_score("0/0/0")
    assert only(p.finish_and_score("0/0/2"), Deliver).groups[0].samples == ("0/0/0", "0/0/2")


def test_a_group_with_too_few_members_left_is_dropped(play):
    p = spare(play, retries=Retries(attempts=1))
    p.offer("0/0")
    p.finish("0/0/0")
    p(RewardFailed, sample="0/0/0", error="?")
    assert p.drops() == {"0/0/0": "reward_failed"}
    p(SampleFailed, engine="e0", sample="0/0/1", attempt=0, error="?")
    assert p.drops() == {
        "0/0/0": "reward_failed",
        "0/0/1": "retries",
        "0/0/2": "incomplete_group",
    }


def test_the_loss_of_an_engine_can_leave_a_group_with_enough_members(play, only):
    p = spare(play, retries=Retries(attempts=1))
    p.join("e1", 1)
    p(EngineCapacityChanged, engine="e0", capacity=2)
    p.offer("0/0")
    assert (len(p.runs("e0")), len(p.runs("e1"))) == (2, 1)
    p(EngineLost, engine="e1", reason="killed")
    assert list(p.drops().values()) == ["retries"]
    p(BatchAsked, batch=0, groups=1)
    first, second = p.runs("e0")
    p.finish_and_score(first)
    assert only(p.finish_and_score(second), Deliver).groups[0].samples == (first, second)


def test_without_its_old_member_a_group_is_as_young_as_the_others(play, only):
    p = spare(play, max_staleness=1)
    p(EngineCapacityChanged, engine="e0", capacity=1)
    p.offer("0/0")
    p(WeightsPublished, version=1)
    p(EngineCapacityChanged, engine="e0", capacity=8)
    p(WeightsPublished, version=2)
    # The first member began at version 0 and is too old; the group goes on with the two others.
    assert p.drops() == {"0/0/0": "aged"}
    p(BatchAsked, batch=0, groups=1)
    p.finish_and_score("0/0/1", version=1)
    assert only(p.finish_and_score("0/0/2", version=2), Deliver).groups[0].samples == (
        "0/0/1",
        "0/0/2",
    )


def test_a_reward_that_fails_is_asked_for_again_as_often_as_allowed(play, only):
    p = play(group_size=1, retries=Retries(rewards=2))
    p.join()
    p.offer("0/0", "0/1")
    p.finish("0/0/0", "0/1/0")
    assert only(p(RewardFailed, sample="0/0/0", error="hung"), Score).samples == ("0/0/0",)
    p(SamplesScored, scores=(("0/0/0", 1.0),))
    assert p.scheduler.counts.ready == 1
    p(RewardFailed, sample="0/1/0", error="hung")
    assert p(RewardFailed, sample="0/1/0", error="hung") == [
        Drop(sample="0/1/0", reason="reward_failed")
    ]
