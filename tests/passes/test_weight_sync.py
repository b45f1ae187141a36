"""How weights reach those who use them: every role its own way."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import Op
from flowrl.passes import Context, run_passes
from flowrl.passes.insert_weight_sync import insert_weight_sync
from flowrl.passes.simplify import drop_dead_nodes

CONTEXT = Context(shares_weights={"actor": True, "rival": True})


@fl.workflow
def refreshed(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    ref = reference.logprobs(rollout)
    actor.update(rollout, judge.score(rollout), reference=ref, kl=fl.kl.k3(0.1))
    reference.sync(actor, every=50)


@fl.workflow
def self_play(prompts: fl.Prompts, actor: fl.Policy, rival: fl.Policy, judge: fl.Reward):
    mine, theirs = actor.generate(prompts), rival.generate(prompts)
    fl.log("rival", judge.score(theirs))
    actor.update(mine, judge.score(mine))
    rival.sync(actor, every=10)


@fl.workflow
def trained_and_refreshed(
    prompts: fl.Prompts, actor: fl.Policy, rival: fl.Policy, judge: fl.Reward
):
    rollout = actor.generate(prompts)
    scores = judge.score(rollout)
    actor.update(rollout, scores)
    rival.update(rollout, scores)
    rival.sync(actor)


@fl.workflow
def played(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
    rollout, scores = fl.interact(actor, game, prompts)
    actor.update(rollout, scores)


def test_a_refreshed_reference_does_not_keep_the_policy_from_its_own_sync():
    graph = run_passes(refreshed.trace(), CONTEXT)
    assert graph.feeding("actor.generate", "weights").src == "actor.sync"
    assert graph.feeding("reference.sync", "weights").src == "actor.update"
    assert graph.node("actor.sync").attr("in_place") is True
    sync = graph.node("reference.sync")
    assert (sync.attr("in_place"), sync.attr("every")) == (False, 50)


def test_weights_that_are_taken_over_reach_the_generation_of_their_new_role():
    graph = run_passes(self_play.trace(), CONTEXT)
    edge = graph.feeding("rival.generate", "weights")
    assert (edge.src, edge.carried) == ("rival.sync", True)
    assert graph.feeding("actor.generate", "weights").src == "actor.sync"
    assert run_passes(graph, CONTEXT) == graph


def test_a_role_cannot_learn_and_take_over_weights_too():
    with pytest.raises(GraphError, match="rival takes over the weights of actor") as caught:
        insert_weight_sync(trained_and_refreshed.trace(), CONTEXT)
    assert "test_weight_sync.py" in caught.value.where
    assert "rival.update" in caught.value.found


def test_a_policy_within_a_region_gets_new_weights_and_lives_with_its_environment():
    graph = run_passes(played.trace(), CONTEXT)
    edge = graph.feeding("actor.generate", "weights")
    assert (edge.src, edge.carried) == ("actor.sync", True)
    assert {node.region for node in graph.nodes if node.region} == {"interact"}
    assert drop_dead_nodes(graph, CONTEXT) == graph


def test_episodes_that_nothing_uses_go_with_both_of_their_nodes():
    @fl.workflow
    def watched(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
        rollout, scores = fl.interact(actor, game, prompts)
        _, seen = fl.interact(actor, game, prompts)
        fl.log("seen", seen)
        actor.update(rollout, scores)

    graph = watched.trace()
    blind = replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.op is not Op.LOG),
        edges=tuple(edge for edge in graph.edges if graph.node(edge.dst).op is not Op.LOG),
    )
    left = [node.region for node in drop_dead_nodes(blind, CONTEXT).nodes if node.region]
    assert left == ["interact", "interact"]
