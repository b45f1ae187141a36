"""Regions are boxes, and every operation has words, at each level."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.graph import Graph
from flowrl.passes import Context, run_passes
from flowrl.user_lines import SourceRef
from flowrl.viz import render


@fl.workflow
def play(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    game: fl.Environment,
    critic: fl.Critic,
    judge: fl.RewardModel,
    reference: fl.Policy,
):
    rollout, scores = fl.interact(actor, game, prompts, n=8, max_turns=4, max_tokens=8)
    fl.log("reward", scores)
    total = fl.weighted_sum((scores, 1.0), (judge.score(rollout), 0.5))
    rollout, total = fl.select.top(rollout, total, k=4)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(total, values, rollout)
    critic.update(rollout, returns=returns, values=values)
    actor.update(
        rollout,
        advantages=advantages,
        loss=fl.loss.policy_clip(0.2, anchor="old"),
        kl=fl.kl.k3(0.1),
        reference=reference.logprobs(rollout),
    )
    reference.sync(actor, every=50)


def lowered(**context: object) -> Graph:
    graph = run_passes(play.trace(), Context(shares_weights={"actor": True}, **context))
    return graph.with_nodes(
        replace(node, source=SourceRef(file="play.py", line=i + 1))
        for i, node in enumerate(graph.nodes)
    )


@pytest.mark.parametrize("format_", ["tree", "mermaid", "dot"])
def test_drawings_of_episodes_are_as_they_were(golden, format_):
    golden(f"play.lowered.{format_}.txt", render(lowered(mini_batches=2), format_))


def test_a_cycle_has_arrows_both_ways_and_a_box_around_it():
    graph = lowered()
    tree = render(graph).splitlines()
    assert any("╔ game.interact" in line for line in tree)
    assert any("╚ actor.generate" in line for line in tree)
    assert sum("⇄" in line for line in tree) == 2
    mermaid = render(graph, "mermaid")
    box = mermaid[mermaid.index("subgraph") : mermaid.index("  end\n")]
    assert "interact: game and actor, turn by turn" in box
    assert "game.interact" in box
    assert "actor.generate" in box
    assert mermaid.count("subgraph") == 1
    assert 'subgraph "cluster interact game.interact" {' in render(graph, "dot")


def test_each_of_two_regions_has_a_box_of_its_own():
    @fl.workflow
    def twice(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment):
        one, won = fl.interact(actor, game, prompts)
        two, also = fl.interact(actor, game, prompts)
        actor.update(one, won)
        actor.update(two, also)

    graph = twice.trace()
    assert render(graph, "mermaid").count("subgraph") == 2
    assert render(graph, "dot").count('subgraph "cluster') == 2
    assert render(graph).count("╔") == render(graph).count("╚") == 2


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({}, "old logprobs are of its own forward pass, the first of the step"),
        ({"mini_batches": 2}, "old logprobs are of actor.logprobs"),
        (
            {"mini_batches": 2, "trust_rollout_logprobs": True},
            "old logprobs are rollout_logprobs, which the config trusts",
        ),
    ],
)
def test_where_old_logprobs_come_from_is_said(context, words):
    assert words in render(lowered(**context))


def test_weights_that_are_taken_over_are_not_called_a_publication():
    assert "takes over the weights of actor, every 50 steps" in render(lowered())


def test_a_truncated_rollout_says_that_its_logprobs_are_after_truncation():
    graph = lowered()
    sampling = fl.Sampling(top_p=0.9, logprobs="sampler")
    repeated = graph.replacing(graph.node("actor.generate").with_attrs(sampling=sampling))
    assert "logprobs=sampler" in render(repeated)
