"""A role has one model, and what a model was before its update is said by that model."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.errors import FlowError, GraphError, TraceError
from flowrl.graph import Graph, Level, problems, verify


@fl.workflow
def ppo(
    prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, judge: fl.RewardModel, rule: fl.Reward
):
    rollout = actor.generate(prompts)
    values = critic.values(rollout)
    scores = fl.weighted_sum((judge.score(rollout), 1.0), (rule.score(rollout), 1.0))
    advantages, returns = fl.advantage.gae(scores, values, rollout)
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages)


def played_by(graph: Graph, **players: str) -> Graph:
    """The graph with other roles for some nodes, by id with `_` for the dot."""
    nodes = (replace(n, role=players.get(n.id.replace(".", "_"), n.role)) for n in graph.nodes)
    return graph.with_nodes(nodes)


@pytest.mark.parametrize(
    ("players", "what"),
    [
        ({"critic_values": "actor"}, "critic.values asks for a critic, whose model gives values"),
        ({"judge_score": "critic"}, "judge.score asks for a reward model, which gives scores"),
        ({"rule_score": "judge"}, "rule.score asks for a reward by rules, without a model"),
        ({"judge_score": "actor"}, "judge.score asks for a reward model"),
    ],
)
def test_a_role_is_not_used_for_two_incompatible_models(players, what):
    assert list(problems(ppo.trace())) == []
    graph = played_by(ppo.trace(), **players)
    found = [error for error in problems(graph) if "two incompatible models" in error.what]
    assert any(what in error.what for error in found)
    assert all("test_role_models.py" in error.where for error in found)
    assert all("asks for" in error.found for error in found)


def test_an_environment_is_no_policy():
    @fl.workflow
    def play(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
        rollout, scores = fl.interact(actor, game, prompts)
        actor.update(rollout, scores)

    graph = played_by(play.trace(), actor_generate="game", actor_update="game")
    with pytest.raises(GraphError, match="two incompatible models"):
        verify(graph)


def refused(program: fl.Workflow) -> FlowError:
    with pytest.raises(FlowError) as caught:
        program.trace()
    assert "test_role_models.py" in caught.value.where
    return caught.value


def test_old_logprobs_are_the_role_s_own():
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, other: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores, old = judge.score(rollout), other.logprobs(rollout)
        actor.update(rollout, scores, old=old, loss=fl.loss.policy_clip(0.2, anchor="old"))

    error = refused(program)
    assert "actor.update gets 'old' of another model: other.logprobs is by other" in error.what
    assert error.hint == "pass old=actor.logprobs(rollout)"


def test_a_critic_stays_near_to_its_own_values():
    @fl.workflow
    def program(
        prompts: fl.Prompts,
        actor: fl.Policy,
        critic: fl.Critic,
        target: fl.Critic,
        judge: fl.Reward,
    ):
        rollout = actor.generate(prompts)
        values = target.values(rollout)
        advantages, returns = fl.advantage.gae(judge.score(rollout), values, rollout)
        critic.update(rollout, returns=returns, values=values)
        actor.update(rollout, advantages=advantages)

    assert "critic.update gets 'values' of another model" in refused(program).what


def test_a_critic_may_learn_returns_that_another_critic_s_values_gave():
    @fl.workflow
    def program(
        prompts: fl.Prompts,
        actor: fl.Policy,
        critic: fl.Critic,
        target: fl.Critic,
        judge: fl.Reward,
    ):
        rollout = actor.generate(prompts)
        values = target.values(rollout)
        advantages, returns = fl.advantage.gae(judge.score(rollout), values, rollout)
        critic.update(rollout, returns=returns)
        actor.update(rollout, advantages=advantages)

    assert program.trace().level is Level.TRACED


@fl.loss.own(needs="preferred")
def margin(logprobs, batch):
    return -logprobs


def test_a_loss_reads_what_the_role_s_model_gives():
    @fl.workflow
    def policy(pairs: fl.Pairs, actor: fl.Policy):
        actor.update(pairs, loss=fl.loss.bradley_terry())

    @fl.workflow
    def reward_model(pairs: fl.Pairs, judge: fl.RewardModel):
        judge.update(pairs, loss=margin)

    @fl.workflow
    def critic(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, judge: fl.Reward):
        rollout = actor.generate(prompts)
        advantages, returns = fl.advantage.gae(
            judge.score(rollout), critic.values(rollout), rollout
        )
        critic.update(rollout, returns=returns, loss=fl.loss.policy_clip(0.2))
        actor.update(rollout, advantages=advantages)

    for program, expected, hint in (
        (policy, "a loss of logprobs, which is what a policy gives", "fl.loss.policy_clip"),
        (reward_model, "a loss of scores, which is what a reward model gives", "bradley_terry"),
        (critic, "a loss of values, which is what a critic gives", "fl.loss.value_clip(0.2)"),
    ):
        error = refused(program)
        assert isinstance(error, TraceError)
        assert expected in error.expected
        assert hint in error.hint


def test_a_loss_that_does_not_tell_the_two_of_a_pair_apart_is_refused():
    @fl.workflow
    def data(pairs: fl.Pairs, actor: fl.Policy):
        actor.update(pairs, loss=fl.loss.cross_entropy())

    @fl.workflow
    def selected(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        pairs = fl.select.best_and_worst(rollout, judge.score(rollout))
        actor.update(pairs, loss=fl.loss.cross_entropy())

    @fl.workflow
    def weighed(pairs: fl.Pairs, actor: fl.Policy, judge: fl.Reward):
        advantages = fl.advantage.group_relative(judge.score(pairs))
        actor.update(pairs, advantages=advantages, loss=fl.loss.reinforce())

    for program in (data, selected):
        assert "learns both samples of a pair alike" in refused(program).what
    weighed.trace()


def test_an_own_loss_is_called_by_its_name():
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy):
        actor.update(actor.generate(prompts), loss=margin)

    assert "update(loss=margin) needs 'preferred'" in refused(program).what
