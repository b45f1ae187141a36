"""Alternatives and times that would read alike say what sets them apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.cost.analytic import AnalyticCost
from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.plan.explain.top import top_lines
from flowrl.plan.priced.anew import priced
from flowrl.plan.priced.changes import changes
from flowrl.plan.show.many import seconds_apart, seconds_text
from tests.plan.many_cases import h100, request


def test_minutes_have_three_digits_and_near_times_more() -> None:
    assert [seconds_text(one) for one in (1000.0, 1200.0, 3000.0)] == [
        "16.7 min",
        "20.0 min",
        "50.0 min",
    ]
    assert seconds_apart(1200.0, 1201.0) == ("1,200.00 s", "1,201.00 s")
    assert seconds_apart(1200.0, 1200.0) == ("20.0 min", "20.0 min")


def test_the_best_plans_are_told_apart_in_words(grpo: Graph) -> None:
    asked = request(alternatives=8)
    for pool in (h100(8), h100(16)):
        plan = make_plan(grpo, asked, pool)
        lines = [line.partition(". ")[2].partition(": ")[2] for line in top_lines(plan, 9)]
        summaries = [plan.reasons[0].choice.partition(": ")[2]]
        summaries += [one.summary for one in plan.alternatives]
        assert len(plan.alternatives) > 3
        assert len(set(lines)) == len(lines)
        assert len(set(summaries)) == len(summaries)


def test_a_step_that_a_file_has_slightly_otherwise_is_told_in_digits_that_differ(
    grpo: Graph,
) -> None:
    asked = request()
    plan = make_plan(grpo, asked, h100(8))
    step_s = plan.prediction.step_s
    assert step_s is not None
    mine = replace(plan, prediction=replace(plan.prediction, step_s=step_s * 1.0003))
    (line,) = changes(mine, priced(grpo, asked, mine, AnalyticCost()))
    new, _, said = line.removeprefix("a step: ").partition(", the file says ")
    assert new != said


@pytest.mark.parametrize("kind", ["spatial", "temporal"])
def test_what_another_schedule_takes_does_not_read_as_a_share(grpo: Graph, kind: str) -> None:
    plan = make_plan(grpo, request(kind=kind, alternatives=3), h100(16))
    told = next(one for one in plan.reasons if one.subject == "schedule")
    assert told.rejected
    assert all(", the plan's " in one.constraint and not one.limit for one in told.rejected)
