"""Groups and batches: what is delivered, when, in which order, and what is not."""

from __future__ import annotations

import json

import pytest

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, SampleId
from flowrl.rollout.actions import Abort, Deliver, DeliveredGroup, Drop, Judge, NeedPrompts
from flowrl.rollout.batches import OfferOrder
from flowrl.rollout.events import (
    BatchAsked,
    EngineJoined,
    EngineLost,
    GroupsJudged,
    ParentsDropped,
    PromptsOffered,
    Resumed,
    RewardFailed,
    SampleEnd,
    SampleFailed,
    SamplesFinished,
    SamplesScored,
    StopAsked,
    WeightsPublished,
)
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import BatchRequest, Group, GroupPhase
from flowrl.specs import FinishReason


def ask(p, groups, batch=0):
    return p(BatchAsked, batch=batch, groups=groups)


def delivered(deliver):
    return [group.group for group in deliver.groups]


def test_a_batch_is_delivered_with_the_score_that_completes_it(play, only):
    p = play()
    p.join()
    p.offer("0/0", "0/1")
    assert ask(p, 2) == []
    p.finish_and_score("0/1/1", "0/0/0", "0/1/0")
    p.finish("0/0/1")
    deliver = only(p.score("0/0/1"), Deliver)
    assert deliver == Deliver(
        batch=0,
        groups=(
            DeliveredGroup(group="0/0", samples=("0/0/0", "0/0/1")),
            DeliveredGroup(group="0/1", samples=("0/1/0", "0/1/1")),
        ),
        filtered=(),
    )
    assert p.scheduler.counts.consumed == 4


def test_a_batch_that_is_there_already_is_delivered_when_asked_for(play, only):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    p.finish_and_score("0/0/0")
    assert delivered(only(ask(p, 1), Deliver)) == ["0/0"]


def test_synchronous_batches_follow_offer_order_whoever_finishes_first(play, only):
    p = play(group_size=1)
    p.join()
    p.offer("0/2", "0/0", "0/1")
    ask(p, 2)
    assert p.finish_and_score("0/1/0", "0/0/0") == []
    assert delivered(only(p.finish_and_score("0/2/0"), Deliver)) == ["0/2", "0/0"]


def test_several_batches_wait_in_the_order_asked(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0", "0/1", "0/2")
    ask(p, 1, batch=7)
    ask(p, 2, batch=8)
    ask(p, 2, batch=8)
    actions = p.finish_and_score("0/0/0", "0/1/0", "0/2/0")
    assert [(a.batch, delivered(a)) for a in actions] == [(7, ["0/0"]), (8, ["0/1", "0/2"])]


def test_a_group_is_judged_once_all_its_members_are_scored(play, only):
    p = play(judges_groups=True)
    p.join()
    p.offer("0/0", "0/1")
    ask(p, 1)
    assert p.finish_and_score("0/0/0") == []
    assert p.finish_and_score("0/0/1") == [Judge(groups=("0/0",), samples=(("0/0/0", "0/0/1"),))]
    assert delivered(only(p(GroupsJudged, verdicts=(("0/0", None),)), Deliver)) == ["0/0"]


def test_without_refill_filtered_groups_count_and_are_named(play, only):
    p = play(judges_groups=True)
    p.join()
    p.offer("0/0", "0/1")
    ask(p, 2)
    p.finish_and_score("0/0/0", "0/0/1", "0/1/0", "0/1/1")
    deliver = only(p(GroupsJudged, verdicts=(("0/0", "dull"), ("0/1", None))), Deliver)
    assert (delivered(deliver), deliver.filtered) == (["0/1"], ("0/0",))
    assert (p.scheduler.counts.filtered, p.scheduler.counts.consumed) == (2, 2)


def test_with_refill_a_batch_has_exactly_the_asked_number_of_kept_groups(play, only):
    p = play(group_size=1, judges_groups=True, refill=True)
    p.join()
    p.offer("0/0", "0/1")
    ask(p, 2)
    p.finish_and_score("0/0/0", "0/1/0")
    actions = p(GroupsJudged, verdicts=(("0/0", "dull"), ("0/1", None)))
    assert actions == [NeedPrompts(groups=1)]
    p.offer("0/2")
    p.finish_and_score("0/2/0")
    deliver = only(p(GroupsJudged, verdicts=(("0/2", None),)), Deliver)
    assert (delivered(deliver), deliver.filtered) == (["0/1", "0/2"], ("0/0",))


def test_prompts_are_asked_for_once_and_only_when_a_batch_lacks_them(play):
    p = play(group_size=1, judges_groups=True, refill=True)
    p.join()
    p.offer("0/0", "0/1", "0/2")
    ask(p, 1)
    p.finish_and_score("0/0/0", "0/1/0", "0/2/0")
    assert p(GroupsJudged, verdicts=(("0/0", "dull"), ("0/1", "dull"))) == []
    assert p(GroupsJudged, verdicts=(("0/2", "dull"),)) == [NeedPrompts(groups=1)]
    assert ask(p, 1, batch=1) == [NeedPrompts(groups=1)]
    assert ask(p, 1, batch=1) == []


def test_prompts_that_were_asked_for_and_not_offered_are_asked_for_after_a_resume(play):
    p = play(group_size=1, refill=True, retries=Retries(attempts=1))
    p.join()
    p.offer("0/0")
    ask(p, 1)
    actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=0, error="?")
    assert NeedPrompts(groups=1) in actions
    assert p(Resumed) == [NeedPrompts(groups=1)]


def test_a_group_that_lost_a_member_is_dropped_as_a_whole_and_counts(play, only):
    p = play(group_size=3, retries=Retries(attempts=1))
    p.join()
    p.offer("0/0", "0/1")
    ask(p, 2)
    p.finish_and_score("0/1/0", "0/1/1", "0/1/2")
    p.finish_and_score("0/0/0")
    actions = p(SampleFailed, engine="e0", sample="0/0/1", attempt=0, error="?")
    assert only(actions, Abort).samples == ("0/0/2",)
    deliver = only(actions, Deliver)
    assert (delivered(deliver), deliver.filtered) == (["0/1"], ("0/0",))
    assert p.drops() == {
        "0/0/0": "incomplete_group",
        "0/0/1": "retries",
        "0/0/2": "incomplete_group",
    }


def test_a_failed_reward_drops_the_group_and_never_delivers_it_short(play, only):
    p = play(group_size=2)
    p.join()
    p.offer("0/0")
    ask(p, 1)
    p.finish_and_score("0/0/0")
    p.finish("0/0/1")
    deliver = only(p(RewardFailed, sample="0/0/1", error="hung"), Deliver)
    assert (deliver.groups, deliver.filtered) == ((), ("0/0",))


def test_a_slot_of_a_dropped_sample_is_free_at_once_and_its_abort_comes_first(play):
    p = play(group_size=2, retries=Retries(attempts=1))
    p.join(capacity=2)
    p.offer("0/0", "0/1")
    actions = p(SampleFailed, engine="e0", sample="0/0/0", attempt=0, error="?")
    kinds = [type(action).__name__ for action in actions]
    assert kinds.index("Abort") < kinds.index("Submit")
    assert [d.sample for d in actions[-1].samples] == ["0/1/0", "0/1/1"]


def test_a_stuck_sample_blocks_only_its_own_group(play, only):
    p = play(max_staleness=1)
    p.join()
    p.offer("0/0", "0/1", "0/2")
    ask(p, 2)
    assert p.finish_and_score("0/1/0", "0/1/1") == []
    assert delivered(only(p.finish_and_score("0/2/0", "0/2/1"), Deliver)) == ["0/1", "0/2"]


def test_an_asynchronous_batch_waits_for_a_group_that_the_next_version_makes_too_old(play, only):
    p = play(group_size=1, max_staleness=1)
    p.join()
    p.offer("0/0", "0/1")
    p(WeightsPublished, version=1)
    p.offer("0/2", "0/3")
    ask(p, 1)
    p.finish_and_score("0/2/0", "0/3/0")
    assert p.scheduler.counts.consumed == 0
    assert delivered(only(p.finish_and_score("0/1/0", version=0), Deliver)) == ["0/1"]


def test_surplus_stays_for_the_next_batch_until_it_is_too_old(play, only):
    p = play(group_size=1, max_staleness=1)
    p.join()
    p.offer("0/0", "0/1", "0/2")
    p.finish_and_score("0/0/0", "0/1/0", "0/2/0")
    assert delivered(only(ask(p, 1), Deliver)) == ["0/0"]
    p(WeightsPublished, version=1)
    assert delivered(only(ask(p, 1), Deliver)) == ["0/1"]
    p(WeightsPublished, version=2)
    assert p.drops() == {"0/2/0": "aged"}
    deliver = only(ask(p, 1), Deliver)
    assert (deliver.groups, deliver.filtered) == ((), ("0/2",))


def test_running_samples_that_are_too_old_are_aborted_at_the_publication(play, only):
    p = play(group_size=2)
    p.join(capacity=1)
    p.offer("0/0")
    assert only(p(WeightsPublished, version=1), Abort).samples == ("0/0/0",)
    assert p.drops() == {"0/0/0": "aged", "0/0/1": "incomplete_group"}


def test_samples_that_did_not_begin_are_not_aged_by_a_publication(play, only):
    p = play(group_size=1)
    p.offer("0/0")
    p(WeightsPublished, version=5)
    p.join()
    ask(p, 1)
    assert delivered(only(p.finish_and_score("0/0/0"), Deliver)) == ["0/0"]


def test_an_engine_that_lags_behind_cannot_slip_an_old_sample_in(play):
    p = play(group_size=2, max_staleness=1)
    p.join()
    p(WeightsPublished, version=3)
    p.offer("0/0")
    p.finish("0/0/0", "0/0/1", version=1)
    assert p.drops() == {"0/0/0": "aged", "0/0/1": "incomplete_group"}


def test_a_sample_that_lost_all_its_tokens_begins_anew_in_age_too(play, only):
    p = play(group_size=1, max_staleness=1)
    p.join()
    p.offer("0/0")
    p(WeightsPublished, version=1)
    p(EngineLost, engine="e0", reason="killed")
    p.join("e1")
    p(WeightsPublished, version=2)
    ask(p, 1)
    assert delivered(only(p.finish_and_score("0/0/0"), Deliver)) == ["0/0"]


def test_a_group_offered_twice_is_an_error_even_after_its_consumption(play):
    p = play(group_size=1)
    p.join()
    p.offer("0/0")
    ask(p, 1)
    p.finish_and_score("0/0/0")
    with pytest.raises(SchedulerError, match="offered a second time"):
        p.offer("0/0")


def test_a_version_that_falls_is_an_error(play):
    p = play()
    p(WeightsPublished, version=2)
    with pytest.raises(SchedulerError, match="version of the weights falls"):
        p(WeightsPublished, version=1)


def test_a_batch_asked_for_after_the_stop_is_an_error_not_a_silent_wait(play):
    p = play()
    p(StopAsked, reason="done")
    with pytest.raises(SchedulerError, match="cannot be answered"):
        ask(p, 1)


def test_a_batch_of_no_groups_is_an_error(play):
    with pytest.raises(SchedulerError, match="cannot be answered"):
        ask(play(), 0)


def test_a_malformed_group_id_is_an_error(play):
    with pytest.raises(SchedulerError, match="epoch/prompt"):
        play().offer("seventeen")


def test_what_the_scheduler_waits_for_can_be_read(play):
    p = play(group_size=1, judges_groups=True)
    p.join(capacity=3)
    p.offer("0/0", "0/1", "0/2", "0/3")
    ask(p, 4)
    p(BatchAsked, batch=1, groups=1)
    p.finish_and_score("0/0/0")
    p.finish("0/1/0")
    assert p.scheduler.waits() == [
        "batch 0 waits for 4 groups",
        "batch 1 waits for 1 group",
        "engine e0 holds 2 of 3 samples, first 0/2/0",
        "1 sample waits for a score, first 0/1/0",
        "1 group waits for a verdict, first 0/0",
    ]


def asked(groups: int) -> BatchRequest:
    return BatchRequest(batch=0, groups=groups)


def settled(pool: OfferOrder, *groups: Group) -> None:
    for group in groups:
        group.phase = GroupPhase.READY
        pool.settle(group)


def test_a_ready_group_that_is_lost_counts_as_dead_once_wherever_it_stands():
    pool = OfferOrder(refill=True)
    first, second, third, fourth = groups = [
        Group(id=f"0/{n}", members=[], seq=n) for n in range(4)
    ]
    for group in groups:
        pool.add(group)
    settled(pool, first, second, fourth)  # the third holds the fourth back
    assert pool.complete(asked(2))
    for lost in (fourth, second):
        lost.phase = GroupPhase.DROPPED
        pool.lose(lost)
        assert pool.complete(asked(1))
    assert not pool.complete(asked(2))
    settled(pool, third)
    assert pool.take(asked(2)) == [first, second, third]
    assert list(pool.groups()) == [fourth]
    assert not pool.complete(asked(1))


def test_without_refill_a_group_that_is_lost_stays_one_answer():
    pool = OfferOrder(refill=False)
    first, second = Group(id="0/0", members=[], seq=0), Group(id="0/1", members=[], seq=1)
    for group in (first, second):
        pool.add(group)
    settled(pool, first, second)
    first.phase = GroupPhase.DROPPED
    pool.lose(first)
    assert (pool.num_counted_dead, pool.complete(asked(2)), pool.complete(asked(3))) == (
        1,
        True,
        False,
    )
    assert pool.take(asked(1)) == [first]
    assert pool.num_counted_dead == 0
    assert pool.take(asked(1)) == [second]


def test_a_batch_that_names_its_groups_has_these_in_that_order_and_waits_for_no_others():
    scheduler = RolloutScheduler(SchedulerSettings(group_size=1, named=True), validate=True)
    scheduler.step(EngineJoined(id=0, engine=EngineId("e"), capacity=8))
    names = tuple(GroupId(f"0/1/{member}") for member in range(3))
    scheduler.step(PromptsOffered(id=1, groups=names))
    asked = BatchAsked(id=2, batch=0, groups=2, names=(names[2], names[1]))
    assert scheduler.step(asked) == []
    again = RolloutScheduler.from_json(json.loads(json.dumps(scheduler.to_json())), validate=True)
    for machine in (scheduler, again):
        for number, member in enumerate((1, 2)):
            sample = SampleId(f"{names[member]}/0")
            end = SampleEnd(
                sample=sample, attempt=0, reason=FinishReason.STOP, num_tokens=1, versions=((0, 1),)
            )
            machine.step(SamplesFinished(id=3 + 2 * number, engine=EngineId("e"), ends=(end,)))
            actions = machine.step(SamplesScored(id=4 + 2 * number, scores=((sample, 1.0),)))
        (deliver,) = actions
        assert [group.group for group in deliver.groups] == [names[2], names[1]]
        dropped = machine.step(ParentsDropped(id=9, groups=names))
        assert [(a.sample, a.reason) for a in dropped if isinstance(a, Drop)] == [
            (f"{names[0]}/0", "no_parent")
        ]
        (deliver,) = machine.step(BatchAsked(id=10, batch=1, groups=1, names=names[:1]))
        assert (deliver.groups, deliver.filtered) == ((), names[:1])
        assert machine.counts.live == 0
