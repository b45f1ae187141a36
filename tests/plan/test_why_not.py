"""Why an alternative is not the plan: its seconds, the kind that was asked for, the objective."""

from __future__ import annotations

import re

import pytest

from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.plan.render_many import seconds_text
from tests.plan.many_cases import h100, request
from tests.plan.test_ways_out import of_gib, with_hosts


def test_a_shorter_plan_of_another_kind_names_the_kind_that_was_asked_for(grpo: Graph):
    asked = request(kind="spatial", kind_where="--set plan.kind=spatial")
    plan = make_plan(grpo, asked, h100(16))
    (turns,) = (one for one in plan.alternatives if one.kind == "temporal")
    assert plan.prediction.step_s is not None
    assert turns.step_s is not None
    assert turns.step_s < plan.prediction.step_s
    assert turns.why_not.endswith("shorter, but --set plan.kind=spatial asks for spatial")
    (told,) = (one for one in plan.reasons if one.subject == "schedule")
    (reason,) = (one for one in told.rejected if one.choice.startswith("temporal"))
    took = [seconds_text(one) for one in (turns.step_s, plan.prediction.step_s)]
    says = "--set plan.kind=spatial asks for spatial"
    assert reason.constraint == f"{says}: {took[0]}, the plan's {took[1]}"


def test_a_shorter_plan_that_takes_more_device_time_says_so(grpo: Graph):
    plan = make_plan(grpo, request(objective="device_time", alternatives=3), h100(16))
    step_s, device_s = plan.prediction.step_s, plan.prediction.device_s
    assert step_s is not None
    assert device_s is not None
    shorter = [one for one in plan.alternatives if one.step_s and one.step_s < 0.99 * step_s]
    assert shorter
    for one in shorter:
        assert one.device_s is not None
        more = 100 * (one.device_s / device_s - 1)
        assert f"and {more:.1f} % more device time" in one.why_not
        assert "less plain" not in one.why_not
    (told,) = (one for one in plan.reasons if one.subject == "schedule")
    assert not any("not worth" in one.constraint for one in told.rejected)


@pytest.mark.parametrize(("gib", "host_gib"), [(18, 2048), (20, 2048), (24, 400)])
def test_a_layout_that_is_said_to_need_too_much_needs_more_than_there_is(
    grpo: Graph, gib: int, host_gib: int
):
    plan = make_plan(grpo, request(), with_hosts(of_gib(gib), host_gib))
    needs = r"needs ([\d.]+) (MiB|GiB|TiB) of ([\d.]+) GiB even"
    of = {"MiB": 1 / 1024, "GiB": 1.0, "TiB": 1024.0}
    told = 0
    for reason in plan.reasons:
        for other in reason.rejected:
            if found := re.search(needs, other.constraint):
                told += 1
                assert float(found[1]) * of[found[2]] >= float(found[3]), other
    assert told
