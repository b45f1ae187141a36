"""Sums of terms in plans: one trainer, one optimizer step."""

from __future__ import annotations

from typing import Any

import pytest

import flowrl as fl
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.show.plan import plan_text
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork, tasks_of
from tests.plan.many_cases import h100, pinned, request, searched
from tests.plan.test_trainers import BOTH, layout_of, only_once
from tests.plan.workflows import lowered


def test_a_sum_is_one_trainer_and_an_update_of_every_second_step_takes_half_the_time() -> None:
    def plan_of(every: int) -> PlacementPlan:
        @fl.workflow
        def program(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
            rollout = actor.generate(prompts, n=8)
            scores = verifier.score(rollout)
            best, _ = fl.select.top(rollout, scores, k=3)
            imitates = fl.term(best, loss=fl.loss.cross_entropy())
            actor.update(fl.sum(fl.term(rollout, scores), 0.1 * imitates), every=every)

        return make_plan(lowered(program, mini_batches=4), request(), h100(8))

    always, half = plan_of(1), plan_of(2)
    assert layout_of(half, BOTH[0]) == layout_of(half, BOTH[1])
    for node in BOTH:
        spans = [
            next(s for s in plan.prediction.timeline or () if s.node == node)
            for plan in (always, half)
        ]
        full_s, half_s = (span.end_s - span.begin_s for span in spans)
        assert half_s == pytest.approx(full_s / 2, rel=0.05)
    assert "optimizer updates every 2 steps from" in plan_text(half)


@fl.workflow
def summed(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
    rollout = actor.generate(prompts, n=8)
    scores = verifier.score(rollout)
    best, _ = fl.select.top(rollout, scores, k=3)
    loss, advantages = fl.loss.policy_clip(0.2), fl.advantage.leave_one_out(scores)
    actor.update(
        fl.sum(
            fl.term(rollout, advantages=advantages, loss=loss),
            0.1 * fl.term(best, loss=fl.loss.cross_entropy()),
        )
    )


def test_a_sum_of_terms_takes_one_optimizer_step() -> None:
    def update_of(program: Any) -> tuple[TaskWork, Candidate]:
        wanted = pinned(request(kind="temporal"), "actor.update.tp=2", "actor.update.pp=1")
        graph = lowered(program, mini_batches=4)
        best = searched(graph, wanted, h100(8)).best
        (task,) = [each for each in tasks_of(graph, request()) if each.updates]
        return task, best.ways[task.id]

    (task, of_sum), (_, of_one) = update_of(summed), update_of(only_once)
    assert [each.steps for each in task.updated] == [False, True]
    assert of_sum.layout == of_one.layout
    once = dict(of_one.estimate.parts)["optimizer"]
    assert dict(of_sum.estimate.parts)["optimizer"] == pytest.approx(once)
