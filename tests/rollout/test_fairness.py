"""Sources of prompts share the engines by weight."""

from __future__ import annotations

from collections import Counter

import pytest

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import NeedPrompts
from flowrl.rollout.events import BatchAsked, SamplesFinished, WeightsPublished
from flowrl.rollout.policies.engines import LongestFirst
from flowrl.rollout.policies.prompts import AgeBudget, WeightedShares
from flowrl.rollout.queues import Shares

SHARES = WeightedShares(shares=(("math", 3.0), ("code", 1.0)))


def starts(p, number):
    """Prompts of the next samples to start, on one slot; 0 to 99 are math, the others code."""
    found = []
    for _ in range(number):
        (sample,) = p.runs("e0")
        found.append("math" if int(sample.split("/")[1]) < 100 else "code")
        p(SamplesFinished, engine="e0", ends=(p.end(sample),))
    return found


def two_sources(play, **rules):
    p = play(**{"group_size": 1, "fairness": SHARES, **rules})
    p.offer(*(f"0/{n}" for n in range(40)), source="math")
    p.offer(*(f"0/{n}" for n in range(100, 140)), source="code")
    return p


def test_without_shares_the_first_offered_come_first(play):
    p = two_sources(play, fairness=type(play().scheduler.settings.fairness)())
    p.join(capacity=1)
    assert set(starts(p, 30)) == {"math"}


@pytest.mark.parametrize("order", [None, LongestFirst()])
def test_starts_are_shared_out_by_weight(play, order):
    p = two_sources(play, **({"order": order} if order else {}))
    p.join(capacity=1)
    for _ in range(5):
        assert Counter(starts(p, 8)) == {"math": 6, "code": 2}


def test_members_of_a_group_start_one_after_the_other(play):
    p = play(group_size=3, fairness=WeightedShares())
    p.offer("0/0", "0/1", source="math")
    p.offer("0/100", "0/101", source="code")
    p.join(capacity=1)
    assert starts(p, 12) == ["code"] * 3 + ["math"] * 3 + ["code"] * 3 + ["math"] * 3


def test_a_source_has_no_claim_on_what_it_missed(play):
    p = play(group_size=1, fairness=WeightedShares())
    p.offer(*(f"0/{n}" for n in range(40)), source="math")
    p.join(capacity=1)
    assert set(starts(p, 20)) == {"math"}
    p.offer(*(f"0/{n}" for n in range(100, 140)), source="code")
    assert Counter(starts(p, 10))["code"] <= 6


def test_with_an_age_budget_each_source_is_asked_for_its_share(play):
    p = play(group_size=1, max_staleness=1, fairness=SHARES, admission=AgeBudget(groups=4))
    assert set(p.join()) == {
        NeedPrompts(groups=6, source="math"),
        NeedPrompts(groups=2, source="code"),
    }


def test_a_source_may_stand_in_for_another_that_has_none_left(play):
    p = play(group_size=1, fairness=SHARES, admission=AgeBudget(groups=4))
    assert set(p.join()) == {
        NeedPrompts(groups=3, source="math"),
        NeedPrompts(groups=1, source="code"),
    }
    p.offer("0/9", source="code")
    assert p.scheduler.state.admission.requested == {"math": 3}  # its own come first
    assert p.offer("0/0", "0/1", "0/2", "0/3", source="math")
    assert p.scheduler.state.admission.requested == {}


def test_with_an_age_budget_admissions_are_shared_out_by_weight(play):
    p = two_sources(play, admission=AgeBudget(groups=4))
    p.join(capacity=4)
    begun = Counter()
    for version in range(1, 10):
        now = p.runs("e0")
        # The first groups began before the second source was offered.
        if version > 1:
            begun.update("math" if int(s.split("/")[1]) < 100 else "code" for s in now)
        p(BatchAsked, batch=version, groups=4)
        p.finish_and_score(*now)
        p(WeightsPublished, version=version)
    assert begun["math"] == pytest.approx(24, abs=1)
    assert begun.total() == 32


def test_a_source_that_is_not_named_has_the_weight_of_the_others(play):
    p = play(group_size=1, fairness=WeightedShares(shares=(("math", 1.0),), other=3.0))
    p.offer(*(f"0/{n}" for n in range(20)), source="math")
    p.offer(*(f"0/{n}" for n in range(100, 120)), source="web")
    p.join(capacity=1)
    assert Counter(starts(p, 12)) == {"math": 3, "code": 9}


def test_turns_that_are_already_taken_count(play):
    shares = Shares(WeightedShares(shares=(("a", 1.0), ("b", 1.0))))
    assert shares.demand(4, {}) == {"a": 2, "b": 2}
    assert shares.demand(4, {"a": 3}) == {"b": 3, "a": 1}
    assert shares.demand(0, {"a": 3}) == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedShares(shares=(("math", 0.0),)),
        lambda: WeightedShares(shares=(("math", 1.0), ("math", 2.0))),
        lambda: WeightedShares(shares=(("other", 1.0),)),
        lambda: WeightedShares(shares=(("math", float("nan")),)),
    ],
)
def test_shares_that_make_no_sense_are_refused(make):
    with pytest.raises(SchedulerError, match="the shares of sources are wrong"):
        make()
