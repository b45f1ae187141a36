"""Tracing: what a program leaves."""

from __future__ import annotations

import flowrl as fl
from flowrl.specs import KL, CrossEntropy, GroupRelative, PolicyClip, Sampling
from flowrl.specs.filters import ZeroVariance
from tests.program.refusals import line_with

HERE = "test_trace.py"


@fl.workflow
def three(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    """The docstring."""
    responses = actor.generate(prompts)
    rewards = reward.score(responses)
    actor.update(responses, rewards)


def test_the_three_line_program_leaves_four_nodes():
    graph = three.trace()
    assert [node.id for node in graph.nodes] == [
        "prompts",
        "actor.generate",
        "reward.score",
        "actor.update",
    ]
    assert graph.roles == ("actor", "reward")
    assert graph.node("actor.generate").attrs == (("n", None), ("sampling", None))
    assert graph.node("actor.update").attrs == (("loss", None), ("kl", None))


def test_a_workflow_says_what_its_signature_says():
    @fl.workflow(max_staleness=2)
    def mine(prompts: fl.Prompts, *, actor: fl.Policy, reward: fl.Reward, kl: float = 0.5): ...

    assert mine.name == "mine"
    assert mine.max_staleness == 2
    assert [(r.name, r.kind) for r in mine.roles] == [("actor", fl.Policy), ("reward", fl.Reward)]
    assert [(d.parameter, d.kind) for d in mine.data] == [("prompts", fl.Prompts)]
    assert [(a.parameter, a.types, a.default) for a in mine.arguments] == [("kl", (float,), 0.5)]
    assert three.max_staleness is None
    assert three.__doc__ == "The docstring."


def test_each_node_remembers_its_line_even_in_calls_of_several_lines():
    @fl.workflow
    def mine(examples: fl.Examples, actor: fl.Policy):
        actor.update(  # several
            examples,
            loss=fl.loss.cross_entropy(),
        )

    source = mine.trace().node("actor.update").source
    assert source.file.endswith(HERE)
    assert source.line == line_with(__file__, "several")


def test_what_a_call_says_is_recorded():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, ref: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts, n=4, temperature=1, max_tokens=9)
        scores = reward.score(rollout)
        rollout, scores = fl.filter.zero_variance(rollout, scores)
        adv = fl.advantage.group_relative(scores, std="none")
        actor.update(
            rollout,
            advantages=adv,
            reference=ref.logprobs(rollout),
            loss=fl.loss.policy_clip(0.1, 0.3),
            kl=fl.kl.k3(0.01),
        )

    graph = mine.trace()
    attrs = {node.id: dict(node.attrs) for node in graph.nodes}
    assert attrs["actor.generate"] == {
        "n": 4,
        "sampling": None,
        "temperature": 1.0,
        "max_tokens": 9,
    }
    assert attrs["filter"] == {"spec": ZeroVariance()}
    assert attrs["advantage"] == {"spec": GroupRelative(std="none")}
    assert attrs["actor.update"] == {
        "loss": PolicyClip(clip_low=0.1, clip_high=0.3),
        "kl": KL(estimator="k3", coefficient=0.01),
    }
    assert graph.feeding("advantage", "scores").src == "filter"
    assert graph.feeding("ref.logprobs", "rollout").src == "filter"


def test_single_options_change_a_sampling_that_is_given():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts, sampling=fl.Sampling(top_p=0.9), temperature=0.5)
        actor.update(rollout, reward.score(rollout))

    sampling = mine.trace().node("actor.generate").attr("sampling")
    assert sampling == Sampling(top_p=0.9, temperature=0.5)


def test_repeated_operations_are_numbered():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, other: fl.Policy, reward: fl.Reward):
        one = actor.generate(prompts)
        two = actor.generate(prompts)
        actor.update(one, reward.score(one))
        other.update(two, reward.score(two))

    ids = [node.id for node in mine.trace().nodes]
    assert ids[1:3] == ["actor.generate", "actor.generate.2"]
    assert "reward.score.2" in ids


def test_python_control_flow_on_configuration_works():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, drop: bool = False):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        if drop:
            rollout, scores = fl.filter.zero_variance(rollout, scores)
        actor.update(rollout, scores)

    assert "filter" not in [node.id for node in mine.trace().nodes]
    assert "filter" in [node.id for node in mine.trace({"drop": True}).nodes]


def test_supervised_examples_need_no_advantage():
    @fl.workflow
    def mine(examples: fl.Examples, actor: fl.Policy):
        actor.update(examples, loss=fl.loss.cross_entropy())

    assert mine.trace().node("actor.update").attr("loss") == CrossEntropy()


def test_a_workflow_inside_another_becomes_part_of_it():
    @fl.workflow
    def outer(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        three(prompts, actor, reward)

    assert [n.id for n in outer.trace().nodes] == [n.id for n in three.trace().nodes]
