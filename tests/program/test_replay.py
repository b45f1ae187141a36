"""What `fl.replay` returns may be asked only what is known of earlier samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import GraphError, TraceError
from flowrl.passes import Context, run_passes
from tests.program.refusals import line_with


def workflow_of(body: Callable[..., Any]) -> fl.Workflow:
    @fl.workflow
    def mine(
        prompts: fl.Prompts,
        examples: fl.Examples,
        actor: fl.Policy,
        other: fl.Policy,
        judge: fl.Reward,
        model: fl.RewardModel,
    ):
        fl.log("examples", actor.logprobs(examples))
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        fl.log("model", model.score(rollout))
        fl.log("other", other.logprobs(rollout))
        body(
            prompts=prompts,
            examples=examples,
            actor=actor,
            judge=judge,
            rollout=rollout,
            scores=scores,
            model=model,
        )

    return mine


def again(*, rollout, scores, actor, judge, **_):
    old, _ = fl.replay(rollout, scores, n=2)
    actor.update(old, judge.score(old))  # scored again


def nested(*, rollout, scores, actor, **_):
    old, old_scores = fl.replay(rollout, scores, n=2)
    actor.update(*fl.replay(old, old_scores, n=2))  # replayed again


def mixed(*, rollout, scores, actor, **_):
    old, _ = fl.replay(rollout, scores, n=2)
    actor.update(old, scores)  # other scores


def of_children(*, rollout, actor, judge, **_):
    children = actor.generate(fl.prompts_of(rollout, template="{response}"))
    scores = judge.score(children)
    actor.update(*fl.replay(children, scores, n=2))  # children


def as_parents(*, rollout, scores, actor, judge, **_):
    old, _ = fl.replay(rollout, scores, n=2)
    made = fl.prompts_of(old, template="{response}")  # parents
    second = actor.generate(made)
    actor.update(second, judge.score(second))


def test_turns_among_those_of_other_policies_are_not_replayed():
    @fl.workflow
    def mine(prompts: fl.Prompts, pro: fl.Policy, con: fl.Policy, court: fl.Environment):
        (turns, scores), _ = fl.interact((pro, con), court, prompts)
        pro.update(*fl.replay(turns, scores, n=2))  # turns

    with pytest.raises(GraphError, match="several policies take turns") as caught:
        mine.trace()
    assert caught.value.where.endswith(f":{line_with(__file__, 'turns')}")


def test_replayed_samples_have_the_scores_of_their_step():
    with pytest.raises(GraphError) as caught:
        workflow_of(again).trace()
    assert "scores the samples of replay by rules once more" in caught.value.what
    assert caught.value.where.endswith(f":{line_with(__file__, 'scored again')}")
    assert "old, old_scores = fl.replay(" in caught.value.hint


@pytest.mark.parametrize(
    ("body", "mark", "said", "hint"),
    [
        (nested, "replayed again", "holds what replay returns", "pass the rollout"),
        (mixed, "other scores", "for the samples of 'replay'", "use what an operation returned"),
        (of_children, "children", "answer prompts made of other samples", "generate(prompts)"),
        (as_parents, "parents", "makes prompts of earlier samples ('replay')", "generate(prompts)"),
    ],
)
def test_samples_that_cannot_be_replayed_are_refused_at_their_line(body, mark, said, hint):
    with pytest.raises(GraphError) as caught:
        workflow_of(body).trace()
    assert said in caught.value.what
    assert caught.value.where.endswith(f":{line_with(__file__, mark)}")
    assert hint in caught.value.hint


def test_only_what_a_role_generated_is_replayed():
    def body(*, examples, scores, actor, **_):
        fl.replay(examples, scores, n=2)

    with pytest.raises(TraceError, match=r"fl\.replay"):
        workflow_of(body).trace()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 0}, "'n'"),
        ({"n": 3, "capacity": 2}, "at most capacity=2"),
        ({"n": 1, "max_age": 0}, "'max_age'"),
        ({"n": 1, "choose": "best"}, "'choose'"),
    ],
)
def test_options_that_make_no_buffer_are_refused(options, said):
    def body(*, rollout, scores, actor, **_):
        actor.update(*fl.replay(rollout, scores, **options))

    with pytest.raises(TraceError) as caught:
        workflow_of(body).trace()
    assert said in str(caught.value)


def updated_by(loss):
    def body(*, rollout, scores, actor, **_):
        old, old_scores = fl.replay(rollout, scores, n=2, max_age=3)  # held
        advantages = fl.advantage.group_relative(old_scores)
        actor.update(old, advantages=advantages, loss=loss)

    return workflow_of(body).trace()


def test_an_update_on_replayed_samples_needs_a_loss_that_corrects_for_their_policy():
    with pytest.raises(GraphError) as caught:
        run_passes(updated_by(fl.loss.reinforce()), Context())
    assert "samples of policies up to 3 publications old" in caught.value.what
    assert f"test_replay.py:{line_with(__file__, 'held')}" in caught.value.found
    assert "update on fresh samples" in caught.value.hint
    run_passes(updated_by(fl.loss.policy_clip(0.2)), Context())
    run_passes(updated_by(fl.loss.reinforce(correction=fl.loss.truncate(2.0))), Context())


def test_the_engine_s_logprobs_of_replayed_samples_are_not_those_of_the_old_policy():
    loss = fl.loss.policy_clip(0.2, anchor="old", correction=fl.loss.truncate(2.0))
    context = Context(mini_batches=2, trust_rollout_logprobs=True, shares_weights={"actor": True})
    lowered = run_passes(updated_by(loss), context)
    assert lowered.node("actor.update").attr("old_logprobs") == "forward"
