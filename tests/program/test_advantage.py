"""Advantages in programs: what each call leaves in the graph, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

import flowrl as fl
from flowrl.errors import GraphError, TraceError
from flowrl.graph import Graph, Unit, format_graph, verify
from flowrl.passes import Context, run_passes
from flowrl.specs import GroupRelative
from flowrl.specs.advantage import (
    GPG,
    AdvantageSpec,
    LeaveOneOut,
    LengthWeighted,
    MaxRL,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePP,
)
from tests.graph_text import parse

Make = Callable[..., fl.Advantages]


def traced(make: Make) -> Graph:
    """A program whose advantages are `make(scores, rollout, reference logprobs)`."""

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        actor.update(rollout, advantages=make(scores, rollout), loss=fl.loss.policy_clip())

    return mine.trace()


def with_reference(make: Make) -> Graph:
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, ref: fl.Policy):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        advantages = make(scores, rollout, ref.logprobs(rollout))
        actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip())

    return mine.trace()


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (
            lambda s, r: fl.advantage.group_relative(s, std="batch", mean="batch"),
            GroupRelative(std="batch", mean="batch"),
        ),
        (lambda s, r: fl.advantage.leave_one_out(s), LeaveOneOut()),
        (
            lambda s, r: fl.advantage.leave_one_out(s, batch_std=True, singleton="raw"),
            LeaveOneOut(batch_std=True, singleton="raw"),
        ),
        (lambda s, r: fl.advantage.pass_at_k(s, std="group", ddof=0), PassAtK(std="group", ddof=0)),
        (lambda s, r: fl.advantage.gpg(s, norm=2), GPG(norm=2.0)),
        (lambda s, r: fl.advantage.max_rl(s, eps=1e-3), MaxRL(eps=1e-3)),
        (lambda s, r: fl.advantage.length_weighted(s, r), LengthWeighted()),
        (lambda s, r: fl.advantage.reinforce_pp(s, r), ReinforcePP()),
        (
            lambda s, r: fl.advantage.reinforce_pp(s, r, mean="group", gamma=1, whiten=False),
            ReinforcePP(mean="group", whiten=False),
        ),
    ],
)
def test_each_advantage_leaves_its_specification_and_its_unit(make, spec):
    graph = traced(make)
    node = graph.node("advantage")
    assert node.attr("spec") == spec
    (field,) = node.outputs
    assert field.name == "advantage"
    assert field.unit is (Unit.TOKENS if spec.per_token else Unit.SAMPLES)
    assert node.inputs == (("scores", "rollout") if "mask" in spec.needs else ("scores",))
    lowered = run_passes(graph, Context())
    assert format_graph(parse(format_graph(lowered))) == format_graph(lowered)


def test_an_edge_to_an_advantage_carries_only_what_it_reads():
    plain = traced(lambda s, r: fl.advantage.length_weighted(s, r))
    assert plain.feeding("advantage", "rollout").fields == ("response_mask",)
    penalised = with_reference(
        lambda s, r, ref: fl.advantage.reinforce_pp(s, r, reference=ref, kl=0.1)
    )
    assert penalised.feeding("advantage", "rollout").fields == ("response_mask", "rollout_logprobs")
    assert penalised.feeding("advantage", "reference").src == "ref.logprobs"


def test_a_penalty_needs_a_reference_and_a_reference_a_penalty():
    with pytest.raises(GraphError, match="needs 'reference' for its reference_logprobs") as caught:
        traced(lambda s, r: fl.advantage.reinforce_pp(s, r, kl=0.1))
    assert caught.value.hint == "pass reference=reference.logprobs(rollout), or set kl=0"
    with pytest.raises(GraphError, match="does not use its reference") as caught:
        with_reference(lambda s, r, ref: fl.advantage.reinforce_pp(s, r, reference=ref))
    assert caught.value.hint == "leave reference out, or use one that reads it"


def test_advantages_and_rollout_must_be_of_the_same_samples():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        kept, scores = fl.filter.zero_variance(rollout, reward.score(rollout))
        advantages = fl.advantage.length_weighted(scores, rollout)
        actor.update(kept, advantages=advantages)

    with pytest.raises(GraphError, match=r"for the samples of 'actor\.generate'"):
        mine.trace()


def test_a_graph_whose_advantage_says_the_wrong_unit_is_refused():
    graph = traced(lambda s, r: fl.advantage.reinforce_pp(s, r))
    sample = traced(lambda s, r: fl.advantage.leave_one_out(s)).node("advantage").outputs
    wrong = graph.replacing(replace(graph.node("advantage"), outputs=sample))
    with pytest.raises(GraphError, match="advantage does not produce what an advantage does"):
        verify(wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lunar(AdvantageSpec):
    kind: ClassVar[str] = "lunar"
    _needs: ClassVar[tuple[str, ...]] = ("mask", "moon")
    _per_token: ClassVar[bool] = True


def test_an_advantage_that_needs_what_no_operation_gives_is_refused():
    graph = traced(lambda s, r: fl.advantage.reinforce_pp(s, r))
    wants = graph.replacing(graph.node("advantage").with_attrs(spec=Lunar()))
    with pytest.raises(GraphError, match="advantage lunar needs 'moon', which no operation gives"):
        verify(wants)


def least_variance(role: str) -> Graph:
    """The optimal token baseline over probabilities of a role."""

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, other: fl.Policy):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        kept, scores = fl.filter.zero_variance(rollout, scores)
        policy = {"actor": actor, "other": other}[role].logprobs(kept)
        advantages = fl.advantage.optimal_token_baseline(scores, kept, policy=policy)
        actor.update(kept, advantages=advantages, loss=fl.loss.policy_clip())

    return mine.trace()


def test_a_baseline_of_least_variance_reads_a_pass_of_the_policy():
    graph = least_variance("actor")
    assert graph.node("advantage").attr("spec") == OptimalTokenBaseline()
    edges = {edge.argument: (edge.src, edge.fields) for edge in graph.in_edges("advantage")}
    assert edges == {
        "scores": ("filter", ("score",)),
        "rollout": ("filter", ("response_mask",)),
        "policy": ("actor.logprobs", ("logprobs",)),
    }
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)


def test_the_probabilities_are_those_of_the_role_that_drew_the_samples():
    with pytest.raises(GraphError, match="logprobs of other, but actor sampled them") as caught:
        least_variance("other")
    assert caught.value.hint == "pass policy=actor.logprobs(rollout), read before any update"


def test_probabilities_that_nothing_reads_or_that_are_missing_are_refused():
    whole = least_variance("actor")
    other = whole.replacing(whole.node("advantage").with_attrs(spec=ReinforcePP()))
    with pytest.raises(GraphError, match="does not use its policy"):
        verify(other)
    node = replace(whole.node("advantage"), inputs=("scores", "rollout"))
    edges = tuple(e for e in whole.edges if (e.dst, e.argument) != ("advantage", "policy"))
    with pytest.raises(GraphError, match="needs 'policy' for its sum_pi_squared") as caught:
        verify(replace(whole.replacing(node), edges=edges))
    assert caught.value.hint == "pass policy=actor.logprobs(rollout)"


def test_an_advantage_of_tokens_without_its_rollout_is_refused():
    graph = traced(lambda s, r: fl.advantage.length_weighted(s, r))
    node = replace(graph.node("advantage"), inputs=("scores",))
    edges = tuple(e for e in graph.edges if (e.dst, e.argument) != ("advantage", "rollout"))
    with pytest.raises(GraphError, match="needs 'rollout' for its mask"):
        verify(replace(graph.replacing(node), edges=edges))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda s, r: fl.advantage.leave_one_out(s, singleton="row"), "raw"),
        (lambda s, r: fl.advantage.leave_one_out(s, batch_std=1), "True"),
        (lambda s, r: fl.advantage.reinforce_pp(s, r, gamma=1.5), "from 0 to 1"),
        (lambda s, r: fl.advantage.reinforce_pp(s, r, kl=-1.0), "from 0 up"),
        (lambda s, r: fl.advantage.reinforce_pp(s, r, mean="groups"), "group"),
        (lambda s, r: fl.advantage.reinforce_pp(s, s), "fl.Rollout"),
        (lambda s, r: fl.advantage.reinforce_pp(s), "rollout"),
        (lambda s, r: fl.advantage.gpg(s, norm=0), "above 0"),
        (lambda s, r: fl.advantage.group_relative(s, ddof=True), "a whole number"),
        (lambda s, r: fl.advantage.pass_at_k(s, std="batch"), "'group' or 'none'"),
    ],
)
def test_wrong_arguments_are_told_with_what_would_do(make, expected):
    with pytest.raises(TraceError) as caught:
        traced(make)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "carried"),
    [("gae", True), ("reinforce_pp", True), ("remax", True), ("group_relative", False)],
)
def test_advantages_with_rewards_to_go_take_an_environments_rewards_where_they_were_given(
    kind, carried
):
    @fl.workflow
    def episodes(
        prompts: fl.Prompts, *, actor: fl.Policy, critic: fl.Critic, world: fl.Environment
    ):
        rollout, scores = fl.interact(actor, world, prompts)
        if kind == "gae":
            advantages, returns = fl.advantage.gae(scores, critic.values(rollout), rollout)
            critic.update(rollout, returns=returns)
        elif kind == "reinforce_pp":
            advantages = fl.advantage.reinforce_pp(scores, rollout)
        elif kind == "remax":
            _, baseline = fl.interact(actor, world, prompts, n=1, temperature=0)
            advantages = fl.advantage.remax(scores, rollout, baseline=baseline)
        else:
            advantages = fl.advantage.group_relative(scores)
        actor.update(rollout, advantages=advantages)

    edge = episodes.trace().feeding("advantage", "rollout")
    assert (edge is not None and "token_reward" in edge.fields) == carried
