"""One forward pass where several would say the same; none is dropped that says something else."""

from __future__ import annotations

from dataclasses import replace

import flowrl as fl
from flowrl.graph import Graph, Op, verify
from flowrl.passes import Context, run_passes
from flowrl.passes.simplify import decisions_on_merging, merge_logprobs

PLAIN = Context()
COPIES = Context(copies={"reference": "actor", "twin": "actor"})


@fl.workflow
def compared(
    prompts: fl.Prompts,
    actor: fl.Policy,
    reference: fl.Policy,
    twin: fl.Policy,
    judge: fl.RewardModel,
    refreshed: bool = False,
):
    rollout = actor.generate(prompts)
    fl.log("twin", twin.logprobs(rollout))
    fl.log("score", judge.score(rollout))
    ref = reference.logprobs(rollout)
    actor.update(rollout, judge.score(rollout), reference=ref, kl=fl.kl.k3(0.1))
    if refreshed:
        twin.sync(actor, every=2)


@fl.workflow
def subsets(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, rule: fl.Reward):
    rollout = actor.generate(prompts)
    scores = rule.score(rollout)
    fl.log("before", reference.logprobs(rollout))
    fl.log("again", rule.score(rollout))
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    ref = reference.logprobs(rollout)
    actor.update(rollout, scores, reference=ref, kl=fl.kl.k3(0.1))


def passes(graph: Graph) -> list[str]:
    return [node.id for node in graph.of_op(Op.LOGPROBS, Op.SCORE, Op.VALUES)]


def test_a_model_scores_the_same_samples_once():
    graph = merge_logprobs(compared.trace(), PLAIN)
    assert passes(graph) == ["twin.logprobs", "judge.score", "reference.logprobs"]
    assert graph.feeding("actor.update", "rewards").src == "judge.score"
    verify(graph)


def test_frozen_copies_of_one_model_are_one():
    graph = merge_logprobs(compared.trace(), COPIES)
    assert passes(graph) == ["twin.logprobs", "judge.score"]
    assert graph.feeding("actor.update", "reference").src == "twin.logprobs"
    assert "reference" not in run_passes(compared.trace(), COPIES).roles


def test_a_copy_and_its_frozen_original_are_one():
    context = Context(copies={"twin": "reference"})
    graph = merge_logprobs(compared.trace(), context)
    assert passes(graph) == ["twin.logprobs", "judge.score"]


def test_a_copy_that_is_refreshed_is_another_model():
    graph = merge_logprobs(compared.trace({"refreshed": True}), COPIES)
    assert "reference.logprobs" in passes(graph)


def test_other_samples_and_rules_are_left_alone():
    graph = subsets.trace()
    assert merge_logprobs(graph, PLAIN) == graph


def test_a_pass_on_either_side_of_an_update_is_by_other_weights():
    @fl.workflow
    def program(examples: fl.Examples, actor: fl.Policy):
        fl.log("before", actor.logprobs(examples))
        new = actor.update(examples)
        fl.log("after", new.logprobs(examples))
        fl.log("again", new.logprobs(examples))

    merged = merge_logprobs(program.trace(), PLAIN)
    assert passes(merged) == ["actor.logprobs", "actor.logprobs.2"]
    assert [merged.feeding(log.id, "value").src for log in merged.of_op(Op.LOG)] == [
        "actor.logprobs",
        "actor.logprobs.2",
        "actor.logprobs.2",
    ]


def test_passes_on_one_side_of_an_update_are_one():
    @fl.workflow
    def twice(prompts: fl.Prompts, actor: fl.Policy, rival: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        fl.log("first", actor.logprobs(rollout))
        rival.update(rollout, scores)  # another role's weights
        fl.log("second", actor.logprobs(rollout))
        actor.update(rollout, scores)

    graph = merge_logprobs(twice.trace(), PLAIN)
    assert passes(graph) == ["judge.score", "actor.logprobs"]
    assert {graph.feeding(log.id, "value").src for log in graph.of_op(Op.LOG)} == {"actor.logprobs"}


def test_what_is_merged_is_told():
    told = {d.subject: d.choice for d in decisions_on_merging(compared.trace(), COPIES)}
    assert told == {
        "judge.score.2": "the same as judge.score",
        "reference.logprobs": "the same as twin.logprobs",
    }
    assert decisions_on_merging(merge_logprobs(compared.trace(), COPIES), COPIES) == ()
    assert decisions_on_merging(subsets.trace(), replace(COPIES, copies={})) == ()
