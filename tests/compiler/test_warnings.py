"""What is legal, and yet seldom meant, is said aloud when a run is compiled."""

from __future__ import annotations

from typing import Any

import pytest

import flowrl as fl
from flowrl.specs import LossSpec
from tests.compiler.programs import config, model


def warned(caplog: pytest.LogCaptureFixture, workflow: fl.Workflow, **changes: Any) -> list[str]:
    settings = config(**changes)
    if "teacher" in workflow.trace().roles:
        settings["roles"] |= {"teacher": model()}
    caplog.clear()
    fl.compile(workflow, settings)
    return [record.getMessage() for record in caplog.records]


def taught(loss: LossSpec, *, follows: bool = False) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, teacher: fl.Policy, judge: fl.Reward):
        rollout = teacher.generate(prompts)
        scores = judge.score(rollout)
        if loss == fl.loss.cross_entropy():
            fl.log("score", scores)
            actor.update(rollout, loss=loss)
        else:
            actor.update(rollout, scores, loss=loss)
        if follows:
            teacher.sync(actor)

    return program


def test_a_policy_gradient_over_another_policy_s_samples_is_told(caplog):
    (said,) = warned(caplog, taught(fl.loss.reinforce()))
    assert "actor.update learns by policy gradient from samples that teacher generated" in said
    assert "reinforce does not correct" in said


@pytest.mark.parametrize(
    "program",
    [
        taught(fl.loss.policy_clip(0.2)),
        taught(fl.loss.cross_entropy()),
        taught(fl.loss.reinforce(), follows=True),
    ],
)
def test_one_that_corrects_imitates_or_follows_is_not(caplog, program):
    assert warned(caplog, program) == []


def greedy(*, learned: bool) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts, temperature=0.0 if learned else 1.0)
        scores = judge.score(rollout)
        if not learned:
            fl.log("greedy", judge.score(actor.generate(prompts, n=1, temperature=0.0)))
        actor.update(rollout, scores)

    return program


def test_equal_samples_of_a_group_are_told_where_they_are_compared(caplog):
    (said,) = warned(caplog, greedy(learned=True))
    assert "actor.generate gives the same sample to all of a group" in said
    assert warned(caplog, greedy(learned=False)) == []


def imitating(*, selected: bool) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        best, _ = fl.select.top(rollout, scores)
        fl.log("best", best)
        actor.update(best if selected else rollout, loss=fl.loss.cross_entropy())

    return program


def test_imitating_all_of_its_own_samples_is_told(caplog):
    (said,) = warned(caplog, imitating(selected=False))
    assert "actor.update imitates all that actor generates" in said
    assert warned(caplog, imitating(selected=True)) == []


def waiting(every: int, *, teacher_every: int) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, teacher: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        actor.update(rollout, scores, every=every)
        teacher.update(rollout, scores, every=teacher_every)

    return program


def test_updates_that_no_step_makes_and_steps_without_an_update_are_told(caplog):
    assert warned(caplog, waiting(2, teacher_every=1)) == []
    (said,) = warned(caplog, waiting(2, teacher_every=2))
    assert "no update is made in step 1 of the stage main" in said
    assert "actor.update, teacher.update are made every 2 or more steps" in said
    (said,) = warned(caplog, waiting(1000, teacher_every=1))
    assert "actor.update is made every 1000 steps, and the stage main has" in said
