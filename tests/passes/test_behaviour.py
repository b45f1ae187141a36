"""Stale samples need a loss that corrects; the message lists those that do."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.passes import Context, run_passes
from flowrl.passes.logprobs import correcting_losses
from flowrl.specs import LossSpec

STALE = Context(max_staleness=2)


def workflow_with(loss: LossSpec | None) -> fl.Workflow:
    @fl.workflow
    def one(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, judge.score(rollout), loss=loss)

    return one


@fl.workflow
def critic_learns(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, judge: fl.Reward):
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(judge.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


@fl.workflow
def preferences(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, reference: fl.Policy):
    rollout = actor.generate(prompts)
    pairs = fl.select.best_and_worst(rollout, judge.score(rollout))
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo())


def refused(loss: LossSpec) -> GraphError:
    with pytest.raises(GraphError) as caught:
        run_passes(workflow_with(loss).trace(), STALE)
    return caught.value


def test_the_losses_that_correct_are_those_whose_ratio_is_to_the_behaviour_policy():
    names = correcting_losses()
    assert {"policy_clip", "gspo", "cispo", "sapo"} <= set(names)
    assert not {"reinforce", "cross_entropy", "value_clip", "dpo"} & set(names)
    for name in names:
        graph = run_passes(workflow_with(getattr(fl.loss, name)()).trace(), STALE)
        assert graph.node("actor.update").attr("behaviour_logprobs") == "rollout_logprobs"


def test_a_loss_that_does_not_correct_is_refused_with_those_that_do_and_its_own_way_out():
    error = refused(fl.loss.reinforce())
    assert "samples of policies up to 2 publications old" in error.what
    assert "test_behaviour.py" in error.where
    for name in correcting_losses():
        assert f"fl.loss.{name}()" in error.expected
    assert "fl.loss.reinforce(correction=fl.loss.truncate(2.0)" in error.hint
    assert "set max_staleness to 0" in error.hint


def test_the_way_out_that_the_message_shows_is_one():
    loss = fl.loss.reinforce(correction=fl.loss.truncate(2.0))
    update = run_passes(workflow_with(loss).trace(), STALE).node("actor.update")
    assert update.attr("behaviour_logprobs") == "rollout_logprobs"
    assert update.attr("loss") == loss
    old = fl.loss.policy_clip(0.2, anchor="old")
    assert "correction=fl.loss.truncate" in refused(old).hint


def test_a_critic_and_preferences_are_of_no_policy_that_must_be_corrected_for():
    graph = run_passes(critic_learns.trace(), STALE)
    assert graph.node("critic.update").attr("behaviour_logprobs") is None
    assert graph.node("actor.update").attr("behaviour_logprobs") == "rollout_logprobs"
    graph = run_passes(preferences.trace(), STALE)
    assert graph.node("actor.update").attr("behaviour_logprobs") is None


def test_an_update_on_its_own_rollout_carries_what_the_mismatch_is_measured_with():
    graph = run_passes(workflow_with(fl.loss.reinforce()).trace(), Context())
    assert graph.node("actor.update").attr("behaviour_logprobs") == "rollout_logprobs"
    assert "rollout_logprobs" in graph.feeding("actor.update", "rollout").fields


def test_a_critic_carries_tokens_alone():
    graph = run_passes(critic_learns.trace(), Context())
    assert graph.feeding("critic.update", "rollout").fields == ("tokens", "response_mask")


def test_an_update_on_pairs_carries_which_is_preferred_and_no_more():
    graph = run_passes(preferences.trace(), Context())
    fields = graph.feeding("actor.update", "rollout").fields
    assert fields == ("tokens", "response_mask", "preferred")


@fl.loss.own(needs="preferred")
def margin(logprobs, batch):
    return -logprobs


def test_a_loss_of_pairs_is_told_those_of_pairs():
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(fl.select.best_and_worst(rollout, judge.score(rollout)), loss=margin)

    with pytest.raises(GraphError, match=r"update\(loss=margin\)") as caught:
        run_passes(program.trace(), STALE)
    assert caught.value.expected == "a loss that does: fl.loss.dpo()"
    assert "declare it: @fl.loss.own(corrects_behaviour=True" in caught.value.hint


def refreshed(every: int, loss: LossSpec) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, player: fl.Policy, judge: fl.Reward):
        rollout = player.generate(prompts)
        actor.update(rollout, judge.score(rollout), loss=loss)
        player.sync(actor, every=every)

    return program


def test_who_draws_with_averaged_weights_is_another_policy():
    def averaged(loss: LossSpec) -> fl.Workflow:
        @fl.workflow
        def program(prompts: fl.Prompts, actor: fl.Policy, player: fl.Policy, judge: fl.Reward):
            rollout = player.generate(prompts)
            actor.update(rollout, judge.score(rollout), loss=loss)
            player.sync(actor, decay=0.9)

        return program

    run_passes(averaged(fl.loss.policy_clip(0.2)).trace(), Context())
    with pytest.raises(GraphError, match="an average of earlier weights of actor") as caught:
        run_passes(averaged(fl.loss.reinforce()).trace(), Context())
    assert "player.sync, every=1, decay=0.9 (" in caught.value.found
    assert "write player.sync without decay" in caught.value.hint


def test_who_draws_with_weights_of_some_steps_ago_draws_stale_samples():
    run_passes(refreshed(1, fl.loss.reinforce()).trace(), Context())
    run_passes(refreshed(3, fl.loss.policy_clip(0.2)).trace(), Context())
    with pytest.raises(GraphError, match="up to 2 publications old") as caught:
        run_passes(refreshed(3, fl.loss.reinforce()).trace(), Context())
    assert "player.sync, every=3 (" in caught.value.found
    assert "write player.sync without every" in caught.value.hint
    with pytest.raises(GraphError, match="up to 1 publication old"):
        run_passes(refreshed(2, fl.loss.reinforce()).trace(), Context())
