"""Admission by age budget, and batches that are asked for ahead."""

from __future__ import annotations

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import Deliver, NeedPrompts
from flowrl.rollout.events import BatchAsked, GroupsJudged, Resumed, SampleFailed, WeightsPublished
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.policies.prompts import AgeBudget, OverSampling
from flowrl.rollout.settings import SchedulerSettings


def groups(*numbers):
    return [f"0/{number}" for number in numbers]


def delivered(deliver):
    return [group.group for group in deliver.groups]


@pytest.mark.parametrize(
    ("version", "staleness", "horizon", "served", "capacity"),
    [
        (0, 0, 0, (0, 0), 4),  # synchronous: one batch
        (0, 0, 1, (0, 1), 0),  # nothing may start before the publication
        (0, 1, 0, (0, 0), 8),  # one version ahead
        (0, 1, 1, (0, 1), 4),  # while the first batch is being trained on
        (1, 1, 1, (0, 1), 8),  # published
        (5, 4, 5, (4, 1), 20),
        (5, 4, 8, (7, 1), 8),  # three batches ahead of the weights
        (5, 4, 10, (9, 1), 0),
    ],
)
def test_the_capacity_is_what_batches_within_the_bound_can_take(
    version, staleness, horizon, served, capacity
):
    assert AgeBudget(groups=4).capacity(version, staleness, horizon, served) == capacity


def test_several_batches_a_version_are_counted_down_and_slack_is_left_out():
    budget = AgeBudget(groups=4, batches_per_version=3, slack=2)
    assert budget.capacity(0, 0, 0, (0, 0)) == 10
    assert budget.capacity(0, 0, 0, (0, 2)) == 2
    assert budget.next_version(0, (0, 2)) == 0
    assert budget.next_version(0, (0, 3)) == 1
    assert budget.next_version(7, (0, 3)) == 7


def test_prompts_are_asked_for_as_far_as_the_budget_goes_and_no_further(play, where):
    p = play(group_size=1, max_staleness=1, admission=AgeBudget(groups=2))
    assert p.join(capacity=9) == [NeedPrompts(groups=4)]
    assert where(p.offer(*groups(0, 1, 2, 3))) == {"e0": ["0/0/0", "0/1/0", "0/2/0", "0/3/0"]}
    # Offered without being asked for: they wait where nothing ages.
    assert p.offer(*groups(4, 5, 6)) == []
    assert p.scheduler.counts.queued == 3
    assert "3 groups wait for admission, first 0/4" in p.scheduler.waits()


def test_a_synchronous_run_may_offer_ahead_and_nothing_starts_before_the_publication(play, where):
    p = play(group_size=1, admission=AgeBudget(groups=2))
    p.join()
    p.offer(*groups(0, 1, 2, 3))
    p(BatchAsked, batch=0, groups=2)
    p.finish_and_score("0/0/0")
    assert where(p.finish_and_score("0/1/0")) == {}
    assert p.scheduler.counts.consumed == 2
    actions = p(WeightsPublished, version=1)
    assert where(actions) == {"e0": ["0/2/0", "0/3/0"]}


def test_a_batch_may_be_asked_for_while_the_one_before_is_trained_on(play, only):
    p = play(group_size=1, max_staleness=1, admission=AgeBudget(groups=1))
    p.join()
    p.offer("0/0", "0/1")
    p(BatchAsked, batch=0, groups=1)
    p(BatchAsked, batch=1, groups=1)
    assert only(p.finish_and_score("0/0/0"), Deliver).version == 0
    deliver = only(p.finish_and_score("0/1/0"), Deliver)
    assert (deliver.batch, deliver.version) == (1, 1)
    # Both are delivered before the first publication; what starts now would be for version 2.
    p.offer("0/2")
    assert p.scheduler.counts.running == 0
    p(WeightsPublished, version=1)
    assert p.scheduler.counts.running == 1


def test_groups_that_no_batch_will_take_make_room(play, only):
    p = play(group_size=1, judges_groups=True, refill=True, admission=AgeBudget(groups=2))
    p.join()
    p.offer("0/0", "0/1")
    p(BatchAsked, batch=0, groups=2)
    p.finish_and_score("0/0/0", "0/1/0")
    assert p(GroupsJudged, verdicts=(("0/0", "dull"), ("0/1", None))) == [NeedPrompts(groups=1)]
    p.offer("0/2")
    p.finish_and_score("0/2/0")
    deliver = only(p(GroupsJudged, verdicts=(("0/2", None),)), Deliver)
    assert delivered(deliver) == ["0/1", "0/2"]


def test_without_refill_a_dropped_group_keeps_its_place_in_the_batch(play, only):
    p = play(group_size=1, retries=Retries(attempts=1), admission=AgeBudget(groups=2))
    p.join()
    p.offer("0/0", "0/1", "0/2")
    p(BatchAsked, batch=0, groups=2)
    p(SampleFailed, engine="e0", sample="0/0/0", attempt=0, error="?")
    assert p.scheduler.counts.running == 1
    deliver = only(p.finish_and_score("0/1/0"), Deliver)
    assert (delivered(deliver), deliver.filtered) == (["0/1"], ("0/0",))


def test_some_groups_can_be_held_ready_beside_the_budget(play):
    p = play(group_size=1, admission=AgeBudget(groups=2, queue=3))
    assert p.join() == [NeedPrompts(groups=5)]
    p.offer(*groups(0, 1, 2, 3, 4))
    assert (p.scheduler.counts.running, p.scheduler.counts.queued) == (2, 3)


def test_prompts_are_asked_for_again_after_a_resume(play):
    p = play(group_size=1, admission=AgeBudget(groups=2))
    p.join()
    assert p(Resumed) == [NeedPrompts(groups=2)]


def test_slack_lets_a_fresh_group_overtake_a_straggler(play, only):
    def run(slack):
        p = play(group_size=1, max_staleness=1, admission=AgeBudget(groups=1, slack=slack))
        p.join()
        p.offer("0/0", "0/1", "0/2", "0/3")
        p(BatchAsked, batch=0, groups=1)
        p.finish_and_score("0/0/0")
        p(WeightsPublished, version=1)
        p(BatchAsked, batch=1, groups=1)
        running = p.runs("e0")
        if "0/2/0" in running:
            p.finish_and_score("0/2/0")
        return running, p.scheduler.counts.consumed

    # With the whole budget in flight, 0/1 began at version 0 and must be in the batch of version 1.
    assert run(0) == (["0/1/0", "0/2/0"], 1)
    # With a group less, 0/1 began at version 1 and can wait.
    assert run(1) == (["0/1/0"], 1)


def test_a_batch_for_a_later_version_measures_ages_against_it(play, only):
    p = play(group_size=1, max_staleness=1)
    p.join()
    p.offer("0/0", "0/1")
    p(WeightsPublished, version=1)
    p.offer("0/2")
    p.finish_and_score("0/0/0", version=0)
    p.finish_and_score("0/2/0", version=1)
    # At version 2 what began at version 0 is too old; the batch takes what began at version 1.
    deliver = only(p(BatchAsked, batch=0, groups=3, version=2), Deliver)
    assert (delivered(deliver), deliver.version) == (["0/2"], 2)
    assert p.drops() == {"0/0/0": "aged", "0/1/0": "aged"}


def test_nothing_starts_that_is_too_old_for_the_batch_that_waits(play, where):
    p = play(group_size=1)
    p.join()
    p(BatchAsked, batch=0, groups=1, version=1)
    assert where(p.offer("0/0")) == {}
    assert p.scheduler.waits() == [
        "batch 0 waits for 1 group",
        "1 sample is queued: there is no version 1 of the weights yet",
    ]
    assert where(p(WeightsPublished, version=1)) == {"e0": ["0/0/0"]}


def test_spare_prompts_are_admitted_and_the_first_ready_groups_are_taken(play, only):
    p = play(
        group_size=1,
        refill=True,
        admission=AgeBudget(groups=2),
        over_sampling=OverSampling(prompts=1),
    )
    assert p.join() == [NeedPrompts(groups=3)]
    p.offer("0/0", "0/1", "0/2")
    p(BatchAsked, batch=0, groups=2)
    p.finish_and_score("0/2/0")
    deliver = only(p.finish_and_score("0/1/0"), Deliver)
    assert delivered(deliver) == ["0/1", "0/2"]
    assert p.drops() == {"0/0/0": "redundant"}


def test_spare_groups_stay_for_the_next_batch_where_the_bound_lets_them(play, only):
    p = play(
        group_size=1,
        max_staleness=1,
        refill=True,
        admission=AgeBudget(groups=1),
        over_sampling=OverSampling(prompts=1),
    )
    p.join()
    p.offer("0/0", "0/1", "0/2")
    p.finish_and_score("0/0/0", "0/1/0", "0/2/0")
    assert delivered(only(p(BatchAsked, batch=0, groups=1), Deliver)) == ["0/0"]
    assert p.drops() == {}
    actions = p(BatchAsked, batch=1, groups=1)
    assert delivered(only(actions, Deliver)) == ["0/1"]
    assert p.drops() == {"0/2/0": "redundant"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"over_sampling": OverSampling(prompts=1)}, "need to know what a batch takes"),
        (
            {"over_sampling": OverSampling(prompts=1), "admission": AgeBudget(groups=2)},
            "need to know what a batch takes",
        ),
        ({"admission": AgeBudget(groups=2, slack=1)}, "leaves no room for a batch"),
    ],
)
def test_admission_rules_that_cannot_work_are_refused(changes, message):
    with pytest.raises(SchedulerError, match=message):
        SchedulerSettings(group_size=1, **changes)


def test_the_pool_knows_how_many_batches_of_a_version_are_still_to_come(play):
    p = play(group_size=1, max_staleness=1, admission=AgeBudget(groups=1, batches_per_version=3))
    p.join()
    p.offer(*(f"0/{n}" for n in range(6)))
    pool = p.scheduler.state.pool
    seen = [(pool._version, pool._further)]
    for number in range(4):
        p(BatchAsked, batch=number, groups=1)
        p.finish_and_score(f"0/{number}/0")
        seen.append((pool._version, pool._further))
    # Besides the next batch: two, one and none of version 0, then of version 1.
    assert seen == [(0, 2), (0, 1), (0, 0), (1, 2), (1, 1)]
