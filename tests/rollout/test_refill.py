"""Dynamic sampling: how many prompts are asked for when filtered groups leave a batch short."""

from __future__ import annotations

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import Deliver, NeedPrompts
from flowrl.rollout.events import BatchAsked, GroupsJudged, Resumed
from flowrl.rollout.policies.prompts import AgeBudget, AskByKeepRate, AskMissing
from flowrl.rollout.settings import SchedulerSettings


def needs(actions):
    return [action.groups for action in actions if isinstance(action, NeedPrompts)]


def judge(p, **verdicts):
    return p(GroupsJudged, verdicts=tuple((f"0/{n[1:]}", why) for n, why in verdicts.items()))


def filled(play, by):
    """A run whose first batch of four lacks them all."""
    p = play(group_size=1, judges_groups=True, refill=True, refill_by=by)
    p.join(capacity=20)
    p.offer("0/0", "0/1", "0/2", "0/3")
    p(BatchAsked, batch=0, groups=4)
    p.finish_and_score("0/0/0", "0/1/0", "0/2/0", "0/3/0")
    return p


def test_as_many_are_asked_for_as_are_missing(play):
    p = filled(play, AskMissing())
    assert needs(judge(p, g0="dull", g1="dull", g2="dull", g3=None)) == [3]


@pytest.mark.parametrize("by", [AskMissing(), AskByKeepRate(weight=2.0, memory=2.0)])
def test_what_is_asked_for_does_not_depend_on_the_order_of_verdicts(play, by):
    def asked_after(*parts):
        p, asked = filled(play, by), []
        for names in parts:
            asked += needs(judge(p, **{n: None if n == "g3" else "dull" for n in names}))
        return asked, p.scheduler.to_json()["admission"]

    together = asked_after(("g0", "g1", "g2", "g3"))
    assert together[0]
    assert asked_after(("g3",), ("g1", "g0"), ("g2",)) == together
    assert asked_after(("g2",), ("g1",), ("g0",), ("g3",)) == together


def test_more_are_asked_for_where_few_are_kept(play):
    p = filled(play, AskByKeepRate(prior=0.5, weight=2.0, memory=1e9, most=10.0))
    # 2 of 2 + 4 so far, with the prior: a third of what is asked for will be kept.
    assert needs(judge(p, g0="dull", g1="dull", g2="dull", g3=None)) == [9]


def test_no_more_is_asked_for_than_the_limit(play):
    p = filled(play, AskByKeepRate(prior=0.01, weight=100.0, most=3.0))
    assert needs(judge(p, g0="dull", g1="dull", g2=None, g3=None)) == [6]


def test_what_was_asked_for_is_not_asked_for_again(play):
    p = filled(play, AskByKeepRate(prior=0.5, weight=2.0, memory=1e9, most=10.0))
    judge(p, g0="dull", g1="dull", g2="dull", g3=None)
    p.offer(*(f"1/{n}" for n in range(5)))
    assert p.scheduler.state.admission.requested == {"": 4}
    assert needs(p.finish_and_score(*(f"1/{n}/0" for n in range(5)))) == []


def test_surplus_that_was_kept_stays_for_the_next_batch(play, only):
    p = play(
        group_size=1,
        max_staleness=1,
        judges_groups=True,
        refill=True,
        refill_by=AskByKeepRate(prior=0.6, weight=1000.0),
    )
    p.join(capacity=20)
    p.offer("0/0")
    p(BatchAsked, batch=0, groups=1)
    p.finish_and_score("0/0/0")
    assert needs(judge(p, g0="dull")) == [2]
    p.offer("0/1", "0/2")
    p.finish_and_score("0/1/0", "0/2/0")
    assert only(judge(p, g1=None, g2=None), Deliver).groups[0].group == "0/1"
    assert only(p(BatchAsked, batch=1, groups=1), Deliver).groups[0].group == "0/2"


def test_after_a_resume_it_is_asked_for_what_was_lost_not_for_what_was_asked(play):
    p = filled(play, AskByKeepRate(prior=0.6, weight=1000.0))
    assert needs(judge(p, g0="dull", g1="dull", g2="dull", g3=None)) == [6]
    p.offer("1/0")
    assert p.scheduler.state.admission.asked_for_lost == 3
    assert needs(p(Resumed)) == []  # of those there, one is under way
    p.join(capacity=20)
    p.finish_and_score("1/0/0")
    kept = p(GroupsJudged, verdicts=(("1/0", None),))
    assert needs(kept) == [4]  # two are missing now, at a share of 0.6


@pytest.mark.parametrize("rules", [{}, {"refill": True, "admission": AgeBudget(groups=1)}])
def test_the_share_is_of_use_only_where_something_is_refilled(rules):
    with pytest.raises(SchedulerError, match="asking by the share"):
        SchedulerSettings(group_size=1, refill_by=AskByKeepRate(), **rules)
