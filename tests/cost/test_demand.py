"""What nodes ask of a model: kind of work, samples, length of the longest response."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.cost import Phase
from flowrl.cost.demand import phase_of, response_bound, samples_of_step, samples_per_prompt
from flowrl.graph import Graph, Op
from flowrl.specs import Sampling


@fl.workflow
def many(
    prompts: fl.Prompts,
    pairs: fl.Pairs,
    examples: fl.Examples,
    actor: fl.Policy,
    game: fl.Environment,
    rule: fl.Reward,
    judge: fl.RewardModel,
    critic: fl.Critic,
):
    rollout = actor.generate(prompts, n=6, max_tokens=9)
    scores = rule.score(rollout)
    best, high = fl.select.top(rollout, scores, k=4)
    fl.log("value", critic.values(best))
    best, high = fl.filter.zero_variance(best, high)
    bar, _ = fl.select.threshold(rollout, scores, at_least=0.5)
    fl.log("good", critic.values(bar))
    extremes = fl.select.best_and_worst(rollout, scores)
    episodes, won = fl.interact(actor, game, prompts, n=3, max_turns=5, max_observation_tokens=7)
    fl.log("judged", judge.score(episodes))
    actor.update(best, high)
    actor.update(episodes, won)
    actor.update(examples)
    judge.update(extremes)
    judge.update(pairs)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return many.trace()


@pytest.mark.parametrize(
    ("node", "number"),
    [
        ("prompts", 1),
        ("pairs", 2),
        ("examples", 1),
        ("actor.generate", 6),
        ("rule.score", 6),
        ("select", 4),
        ("critic.values", 4),
        ("filter", 4),
        ("actor.update", 4),
        ("select.2", 6),  # at most: all of a group may be good enough
        ("critic.values.2", 6),
        ("select.3", 2),
        ("judge.update", 2),
        ("judge.update.2", 2),
        ("game.interact", 3),
        ("actor.generate.2", 3),
        ("actor.update.2", 3),
        ("judge.score", 3),
        ("actor.update.3", 1),
        ("log.judged", 3),
    ],
)
def test_samples_of_each_prompt_follow_from_what_made_them(graph, node, number):
    assert samples_per_prompt(graph, graph.node(node), group_size=100) == number


def test_a_rollout_that_does_not_say_draws_what_the_config_says(graph):
    open_ = graph.replacing(graph.node("actor.generate").with_attrs(n=None))
    assert samples_per_prompt(open_, open_.node("rule.score"), group_size=100) == 100
    assert samples_per_prompt(open_, open_.node("select"), group_size=3) == 3


def test_the_kinds_of_work_of_models_and_of_none(graph):
    found = {node.id: phase_of(node) for node in graph.nodes}
    assert found["actor.generate"] is found["actor.generate.2"] is Phase.ROLLOUT
    assert found["critic.values"] is Phase.VALUES
    assert found["judge.score"] is Phase.SCORES
    assert found["judge.update"] is Phase.UPDATE
    for node in graph.nodes:
        if node.op in (Op.SOURCE, Op.INTERACT, Op.FILTER, Op.SELECT, Op.LOG):
            assert found[node.id] is None
    assert found["rule.score"] is None


def test_an_episode_has_its_turns_and_what_is_said_before_each(graph):
    default = Sampling(max_tokens=20)
    lowered = graph.replacing(
        graph.node("actor.generate").with_attrs(sampling=Sampling(max_tokens=9)),
    )
    assert response_bound(lowered, lowered.node("actor.generate"), default) == 9
    assert response_bound(lowered, lowered.node("actor.generate.2"), default) == 5 * (20 + 7)


def test_samples_of_a_replay_are_those_of_its_groups():
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts, n=4)
        old, scores = fl.replay(*fl.select.top(rollout, judge.score(rollout), k=2), n=3)
        actor.update(old, advantages=fl.advantage.group_relative(scores))

    graph = program.trace()
    for node, number in (("actor.generate", 80), ("select", 40), ("replay", 6), ("advantage", 6)):
        assert samples_of_step(graph, graph.node(node), prompts=20, group_size=100) == number
