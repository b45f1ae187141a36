"""Rewards of tokens and logprobs in programs: where they come from, who reads them, misuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flowrl as fl
from flowrl.errors import FlowError, GraphError
from flowrl.graph import Graph, format_graph, graph_from_json, graph_to_json, verify
from flowrl.passes import Context, run_passes
from flowrl.specs.advantage import GAE, ReinforcePP
from tests.graph_text import parse


@fl.map(reads="token_reward", gives="token_reward", per_sample=True)
def squashed(batch):
    return np.tanh(batch["token_reward"])


@fl.map(reads=("logprobs", "rollout_logprobs"), gives="logprobs", per_sample=True)
def halfway(batch):
    return (batch["logprobs"] + batch["rollout_logprobs"]) / 2


@fl.advantage.own(per="token", needs=("mask", "process_rewards"))
def of_tokens(batch):
    return batch.process_rewards * batch.mask


def traced(body) -> Graph:
    """A program whose update comes after `body(actor, rollout, scores, prm, reference)`."""

    @fl.workflow
    def mine(
        prompts: fl.Prompts,
        *,
        actor: fl.Policy,
        prm: fl.RewardModel,
        critic: fl.Critic,
        reference: fl.Policy,
        verifier: fl.Reward,
    ):
        rollout = actor.generate(prompts)
        body(actor, rollout, verifier.score(rollout), prm, reference, critic)

    return mine.trace()


def refusal(body) -> FlowError:
    with pytest.raises(FlowError) as caught:
        traced(body)
    return caught.value


def everything(actor, rollout, scores, prm, reference, critic):
    steps = squashed(prm.score(rollout, per="step", separator="\n\n"))
    tokens = prm.score(rollout, per="token")
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(scores, values, rollout, token_rewards=steps)
    critic.update(rollout, returns=returns)
    alone = fl.advantage.reinforce_pp(None, rollout, token_rewards=tokens)
    logprobs = halfway(reference.logprobs(rollout), rollout)
    actor.update(rollout, advantages=advantages, reference=logprobs, kl=fl.kl.k3(0.1))
    actor.update(rollout, advantages=alone)
    actor.update(rollout, advantages=of_tokens(scores, rollout, token_rewards=tokens))


def test_models_and_maps_give_rewards_of_tokens_that_advantages_add_to_the_score():
    graph = traced(everything)
    (score,) = [node for node in graph.nodes if node.attr("separator")]
    assert (score.attr("per"), score.attr("separator")) == ("step", "\n\n")
    assert [str(field) for field in score.outputs] == ["token_reward: float32/tokens"]
    assert graph.feeding("advantage", "token_rewards").src == "map"
    assert graph.node("advantage").attr("spec") == GAE(token_rewards="added")
    assert graph.node("advantage.2").attr("spec") == ReinforcePP(token_rewards="alone")
    assert graph.node("advantage.2").inputs == ("rollout", "token_rewards")
    assert graph.feeding("actor.update", "reference").src == "map.2"


def test_text_and_json_of_dense_scores_lose_nothing():
    graph = traced(everything)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph


def test_passes_of_a_model_are_merged_only_where_they_score_the_same_parts():
    def body(actor, rollout, scores, prm, reference, critic):
        for rewards in (
            prm.score(rollout, per="token"),
            prm.score(rollout, per="token"),
            prm.score(rollout, per="step", separator="."),
            prm.score(rollout, per="step", separator=";"),
        ):
            advantages = fl.advantage.reinforce_pp(scores, rollout, token_rewards=rewards)
            actor.update(rollout, advantages=advantages)
        actor.update(rollout, prm.score(rollout))

    lowered = run_passes(traced(body), Context())
    left = [(n.attr("per"), n.attr("separator")) for n in lowered.nodes if n.role == "prm"]
    assert left == [("token", None), ("step", "."), ("step", ";"), (None, None)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda a, r, s, prm, ref, c: prm.score(r, per="word"), ["'per'", "'token' or 'step'"]),
        (lambda a, r, s, prm, ref, c: prm.score(r, separator="."), ["'per'", "'token' or 'step'"]),
        (
            lambda a, r, s, prm, ref, c: prm.score(r, per="step"),
            ["'separator'", "the text that ends a step"],
        ),
        (
            lambda a, r, s, prm, ref, c: prm.score(r, per="token", separator="."),
            ["'separator'", 'per="step"'],
        ),
        (
            lambda a, r, s, prm, ref, c: fl.advantage.reinforce_pp(
                prm.score(r, per="token"), r, mean="group"
            ),
            ["'scores'", "token_rewards=..."],
        ),
        (
            lambda a, r, s, prm, ref, c: fl.advantage.gae(s, c.values(r), r, token_rewards=s),
            ["'token_rewards'", 'prm.score(rollout, per="token")', "a map that gives token_reward"],
        ),
        (
            lambda a, r, s, prm, ref, c: fl.advantage.reinforce_pp(None, r),
            ["'scores'", "scores, or token_rewards= as all of the reward"],
        ),
        (
            lambda a, r, s, prm, ref, c: a.update(r, advantages=of_tokens(s, r)),
            ["needs 'token_rewards' for its process_rewards", "prm.score(rollout"],
        ),
        (
            lambda a, r, s, prm, ref, c: a.update(r, prm.score(r, per="token")),
            ["'rewards'", "the token rewards", "rewards of tokens are token_rewards=..."],
        ),
        (
            lambda a, r, s, prm, ref, c: fl.filter.zero_variance(r, prm.score(r, per="token")),
            ["'scores'", "the token rewards"],
        ),
    ],
)
def test_misuse_of_dense_scores_is_told_with_the_way_out(body, expected):
    error = str(refusal(body))
    for part in expected:
        assert part in error, error
    assert "test_dense.py:" in error


def test_whole_distributions_and_probabilities_are_not_what_a_map_gives():
    def full(actor, rollout, scores, prm, reference, critic):
        logprobs = halfway(reference.logprobs(rollout), rollout)
        actor.update(rollout, scores, reference=logprobs, kl=fl.kl.full(0.1))

    error = refusal(full)
    assert "needs the reference's whole distributions, and map gives logprobs of tokens" in str(
        error
    )
    assert error.hint is not None

    def probabilities(actor, rollout, scores, prm, reference, critic):
        policy = halfway(actor.logprobs(rollout), rollout)
        advantages = fl.advantage.optimal_token_baseline(scores, rollout, policy=policy)
        actor.update(rollout, advantages=advantages)

    assert "are logprobs of map, but actor sampled them" in str(refusal(probabilities))


def test_old_logprobs_may_be_what_a_map_makes_and_the_decision_says_so():
    def body(actor, rollout, scores, prm, reference, critic):
        old = halfway(actor.logprobs(rollout), rollout)
        loss = fl.loss.policy_clip(0.2, anchor="old")
        actor.update(rollout, scores, old=old, loss=loss)

    from flowrl.passes.logprobs import decisions_on_old_logprobs

    lowered = run_passes(traced(body), Context())
    assert lowered.node("actor.update").attr("old_logprobs") == "forward"
    (decision,) = decisions_on_old_logprobs(lowered, Context())
    assert (decision.choice, decision.why) == ("of map", "the program passes it")


@fl.workflow
def prime(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    prm: fl.Policy,
    reference: fl.Policy,
    verifier: fl.Reward,
):
    rollout = actor.generate(prompts)
    scores, ref = verifier.score(rollout), reference.logprobs(rollout)
    newer = prm.update(rollout, scores, reference=ref, loss=fl.loss.implicit_reward(0.1))
    rewards = fl.shaping.implicit_reward(newer.logprobs(rollout), ref, beta=0.1)
    advantages = fl.advantage.reinforce_pp(
        scores, rollout, mean="group_others", token_rewards=rewards
    )
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))


def test_a_loss_on_outcomes_reads_the_scores_and_its_model_scores_after_its_update():
    graph = prime.trace()
    edges = {edge.argument: (edge.src, edge.fields) for edge in graph.in_edges("prm.update")}
    assert edges["extra"] == ("verifier.score", ("score",))
    assert edges["reference"] == ("reference.logprobs", ("logprobs",))
    assert graph.feeding("prm.logprobs", "weights").src == "prm.update"
    assert [e.src for e in graph.in_edges("map")] == ["prm.logprobs", "reference.logprobs"]
    lowered = run_passes(graph, Context(max_staleness=1))
    assert lowered.node("prm.update").attr("old_logprobs") is None
    for each in (graph, lowered):
        assert format_graph(parse(format_graph(each))) == format_graph(each)


def test_reward_models_learn_outcomes_of_samples_and_of_tokens():
    def body(actor, rollout, scores, prm, reference, critic):
        newer = prm.update(rollout, scores)
        newer = newer.update(rollout, scores, loss=fl.loss.outcome(per="token"))
        rewards = newer.score(rollout, per="token")
        advantages = fl.advantage.reinforce_pp(None, rollout, token_rewards=rewards)
        actor.update(rollout, advantages=advantages)

    graph = traced(body)
    losses = [
        node.attr("loss") for node in graph.nodes if node.role == "prm" and "update" in node.id
    ]
    assert losses == [fl.loss.outcome(), fl.loss.outcome(per="token")]
    verify(run_passes(graph, Context()))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            lambda a, r, s, prm, ref, c: a.update(
                r, reference=ref.logprobs(r), loss=fl.loss.implicit_reward()
            ),
            ["needs the field 'score'", "pass the scores: update(rollout, scores, ...)"],
        ),
        (
            lambda a, r, s, prm, ref, c: a.update(r, s, loss=fl.loss.implicit_reward()),
            ["needs 'reference' for its reference_logprobs"],
        ),
        (
            lambda a, r, s, prm, ref, c: a.update(r, s, loss=fl.loss.outcome()),
            ["a loss of logprobs, which is what a policy gives", "this one reads scores"],
        ),
        (
            lambda a, r, s, prm, ref, c: prm.update(r, s, loss=fl.loss.bradley_terry()),
            ["needs 'preferred'"],
        ),
        (
            lambda a, r, s, prm, ref, c: prm.update(r, s, loss=fl.loss.implicit_reward()),
            ["a loss of scores, which is what a reward model gives"],
        ),
        (lambda a, r, s, prm, ref, c: fl.loss.outcome(per="step"), ["per=", "sample, token"]),
        (
            lambda a, r, s, prm, ref, c: fl.shaping.implicit_reward(ref.logprobs(r), s),
            ["'reference'", "the scores of 'verifier.score'"],
        ),
    ],
)
def test_misuse_of_outcomes_is_told_with_the_way_out(body, expected):
    error = str(refusal(body))
    for part in expected:
        assert part in error, error


def test_a_graph_with_a_score_of_parts_that_is_none_is_refused():
    graph = traced(everything)
    score = next(node for node in graph.nodes if node.attr("separator"))
    for changed, message in (
        (score.with_attrs(per="word"), "cannot score each word"),
        (score.without_attrs("separator"), "scores each step"),
        (score.without_attrs("by"), "scores whole responses by rules"),
        (score.without_attrs("per", "separator"), "does not produce what a score does"),
    ):
        with pytest.raises(GraphError, match=message):
            verify(graph.replacing(changed))
    spec = replace(graph.node("advantage").attr("spec"), token_rewards="none")
    with pytest.raises(GraphError, match="does not use its token_rewards"):
        verify(graph.replacing(graph.node("advantage").with_attrs(spec=spec)))
