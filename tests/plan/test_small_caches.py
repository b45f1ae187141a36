"""What plans say where an engine's cache does not hold the samples that it may draw at once."""

from __future__ import annotations

import re
from dataclasses import replace

from flowrl.cost.lengths import LognormalLengths
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan
from flowrl.plan.show.many import seconds_text
from tests.plan.many_cases import pinned, request
from tests.plan.test_ways_out import of_gib


def long_answers(slots: int) -> PlanRequest:
    asked = request(lengths=LognormalLengths(mean=12_000.0, sigma=0.3, maximum=30_000.0))
    actor, *others = asked.roles
    asked = replace(
        asked,
        roles=(replace(actor, num_slots=slots), *others),
        max_response_tokens=30_000,
        max_length=30_512,
        prompts_per_step=256,
    )
    return pinned(asked, "actor.generate.tp=1")


def told(plan: PlacementPlan) -> list[str]:
    return [note for note in plan.notes if "computes contexts again" in note]


def rollout_s(plan: PlacementPlan) -> float:
    (found,) = (one for one in plan.prediction.confidence if one.node == "actor.generate")
    return found.seconds


def test_what_is_computed_again_is_told_with_slots_that_take_less(grpo: Graph):
    plan = make_plan(grpo, long_answers(256), of_gib(24))
    (note,) = told(plan)
    holds = plan.operation("actor.generate").kv_tokens / 12_200
    assert f"holds {holds:,.0f} samples of mean length, it may run 256 at once" in note
    fewer = re.search(r"with roles\.actor\.num_slots=(\d+) the rollout takes (.+), not (.+)$", note)
    assert fewer is not None
    tried = make_plan(grpo, long_answers(int(fewer[1])), of_gib(24))
    assert fewer[3] == seconds_text(rollout_s(plan))
    assert fewer[2] == seconds_text(rollout_s(tried))


def test_fewer_slots_are_not_offered_where_they_take_as_long(grpo: Graph):
    plan = make_plan(grpo, long_answers(256), of_gib(28))
    (note,) = told(plan)
    assert note.endswith("; fewer slots take no less time")
    for slots in (128, 64):
        assert rollout_s(make_plan(grpo, long_answers(slots), of_gib(28))) > 0.98 * rollout_s(plan)


def test_nothing_is_told_of_caches_that_hold_all(grpo: Graph):
    assert not told(make_plan(grpo, long_answers(16), of_gib(40)))
