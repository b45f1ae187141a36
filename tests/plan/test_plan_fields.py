"""Values of two plans in a line each: of what is long, where they differ."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.plan.plan_fields import texts_apart
from flowrl.plan.priced.changes import changes
from flowrl.plan.show.diff import diff_plans
from tests.plan.many_cases import h100, pinned, request

SHARES = tuple((i + 1) / 16 for i in range(16))


def test_long_lists_are_told_by_the_entries_that_differ():
    other = [0.5 if i in (3, 9) else share for i, share in enumerate(SHARES)]
    assert texts_apart(list(SHARES), other) == ("0.25, 0.625 as entries 3, 9 of 16", "0.5, 0.5")
    assert texts_apart([1, 2], [1, 3]) == ("[1, 2]", "[1, 3]")
    one = [f"node-{i}/cuda:0" for i in range(20)]
    assert texts_apart(one, one[:18]) == (
        "20 entries, of them node-18/cuda:0, node-19/cuda:0 alone",
        "18 entries",
    )
    moved = [f"pod-{i}/cuda:0" for i in range(20)]
    told, said = texts_apart(one, moved)
    assert told.endswith("node-3/cuda:0, 16 more as entries 0, 1, 2, 3 and 16 more of 20")
    assert said.endswith("pod-3/cuda:0, 16 more")


def test_what_a_file_says_of_chunks_is_told_by_those_that_differ(grpo: Graph):
    plan = make_plan(grpo, pinned(request(), "rollout.devices=0-3", "actor.devices=4-7"), h100(8))
    assert plan.schedule is not None
    before, after = (
        replace(plan, schedule=replace(plan.schedule, chunks=16, ready=ready))
        for ready in ((*SHARES[:5], 0.99, *SHARES[6:]), SHARES)
    )
    told = "schedule.ready: 0.375 as entry 5 of 16 by the decisions of the plan, the file says 0.99"
    assert list(changes(before, after)) == [told]
    assert "16 entries -> 16 entries" not in "\n".join(diff_plans(before, after))
