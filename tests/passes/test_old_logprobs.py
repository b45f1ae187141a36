"""Where an update takes the old policy's logprobs from: exactly, sparingly, and said aloud."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import Graph, verify
from flowrl.passes import Context, run_passes
from flowrl.passes.logprobs import decisions_on_old_logprobs

ONE = Context()
SEVERAL = Context(mini_batches=4)
TRUSTED = Context(mini_batches=4, trust_rollout_logprobs=True, shares_weights={"actor": True})

OLD = fl.loss.policy_clip(0.2, anchor="old")


@fl.workflow
def anchored(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, temperature: float = 1.0):
    rollout = actor.generate(prompts, temperature=temperature)
    actor.update(rollout, judge.score(rollout), loss=OLD)


@fl.workflow
def passed(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    before = actor.logprobs(rollout)
    actor.update(rollout, judge.score(rollout), old=before, loss=OLD)


@fl.workflow
def logged(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    fl.log("logprob", actor.logprobs(rollout))
    actor.update(rollout, judge.score(rollout), loss=OLD)


@fl.workflow
def twice(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    one, two = actor.generate(prompts), actor.generate(prompts)
    first, second = judge.score(one), judge.score(two)
    actor.update(one, first, loss=OLD)
    two, second = fl.filter.zero_variance(two, second)
    actor.update(two, second, loss=OLD)


@fl.workflow
def taught(prompts: fl.Prompts, actor: fl.Policy, teacher: fl.Policy, judge: fl.Reward):
    rollout = teacher.generate(prompts)
    actor.update(rollout, judge.score(rollout), loss=OLD)


def choice(graph: Graph, update: str = "actor.update") -> object:
    return graph.node(update).attr("old_logprobs")


def source(graph: Graph, update: str = "actor.update") -> str | None:
    edge = graph.feeding(update, "old")
    return None if edge is None else edge.src


def test_the_only_update_of_a_step_is_its_own_old_policy():
    graph = run_passes(anchored.trace(), ONE)
    assert (choice(graph), source(graph)) == ("own", None)
    assert "actor.logprobs" not in [node.id for node in graph.nodes]


def test_several_updates_need_a_forward_pass_before_them():
    graph = run_passes(anchored.trace(), SEVERAL)
    assert (choice(graph), source(graph)) == ("forward", "actor.logprobs")
    ids = [node.id for node in graph.nodes]
    assert ids.index("actor.logprobs") < ids.index("actor.update")
    assert graph.feeding("actor.logprobs", "rollout").src == "actor.generate"


def test_two_updates_a_step_are_several():
    assert choice(run_passes(anchored.trace(), Context(mini_batches=2))) == "forward"
    assert choice(run_passes(anchored.trace(), Context(mini_batches=1))) == "own"


def test_logprobs_of_the_program_are_taken():
    graph = run_passes(passed.trace(), ONE)
    assert (choice(graph), source(graph)) == ("forward", "actor.logprobs")


def test_logprobs_that_are_there_for_something_else_are_used_again():
    graph = run_passes(logged.trace(), SEVERAL)
    assert (choice(graph), source(graph)) == ("forward", "actor.logprobs")
    assert sum(node.op == "logprobs" for node in graph.nodes) == 1


def test_a_second_update_looks_back_past_the_first():
    """Its samples stand behind the first update; they are made, and passed, before it."""
    graph = run_passes(twice.trace(), ONE)
    assert choice(graph) == "own"
    assert (choice(graph, "actor.update.2"), source(graph, "actor.update.2")) == (
        "forward",
        "actor.logprobs",
    )
    ids = [node.id for node in graph.nodes]
    assert ids.index("filter") < ids.index("actor.logprobs") < ids.index("actor.update")
    verify(graph)
    [_, decision] = decisions_on_old_logprobs(graph, ONE)
    assert decision.subject == "actor.update.2.old_logprobs"
    why = dict(decision.rejected)["own"]
    assert why.startswith("actor.update (")
    assert why.endswith(") changes the weights before")
    assert "test_old_logprobs.py:" in why


def test_all_that_makes_the_samples_of_a_later_update_comes_before_the_first():
    @fl.workflow
    def chained(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        one, two = actor.generate(prompts), actor.generate(prompts)
        actor.update(one, judge.score(one), loss=OLD)
        two, scores = fl.filter.zero_variance(two, judge.score(two))
        two, scores = fl.filter.difficulty(two, scores)
        actor.update(two, scores, loss=OLD)

    ids = [node.id for node in run_passes(chained.trace(), ONE).nodes]
    order = ["judge.score.2", "filter", "filter.2", "actor.logprobs", "actor.update"]
    assert [each for each in ids if each in order] == order
    assert ids.index("actor.update") < ids.index("actor.update.2")


def test_trusted_logprobs_of_the_engine_stand_for_the_old_policy():
    graph = run_passes(anchored.trace(), TRUSTED)
    assert (choice(graph), source(graph)) == ("rollout_logprobs", None)
    assert "rollout_logprobs" in graph.feeding("actor.update", "rollout").fields


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (replace(TRUSTED, trust_rollout_logprobs=False), "trust_rollout_logprobs is not set"),
        (replace(TRUSTED, shares_weights={}), "its engine has weights of its own"),
        (
            replace(TRUSTED, truncated="ignore", sampling=fl.Sampling(top_k=5)),
            "actor.generate samples with top_k=5",
        ),
    ],
)
def test_the_engine_is_not_trusted_where_it_is_of_another_distribution(context, why):
    graph = run_passes(anchored.trace(), context)
    assert choice(graph) == "forward"
    [decision] = decisions_on_old_logprobs(graph, context)
    assert why in dict(decision.rejected)["rollout_logprobs"]


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_engine_is_not_trusted_with_stale_samples(staleness: int):
    loss = fl.loss.policy_clip(0.2, correction=fl.loss.truncate(2.0))

    @fl.workflow(max_staleness=staleness)
    def stale(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, judge.score(rollout), loss=loss)

    context = replace(TRUSTED, max_staleness=staleness)
    graph = run_passes(stale.trace(), context)
    assert choice(graph) == "forward"
    [decision] = decisions_on_old_logprobs(graph, context)
    assert f"{staleness} publication" in dict(decision.rejected)["rollout_logprobs"]


def test_another_policy_s_engine_is_not_the_old_policy():
    shared = {"teacher": True, "actor": True}
    graph = run_passes(taught.trace(), replace(TRUSTED, shares_weights=shared))
    assert source(graph) == "actor.logprobs"


def test_every_choice_says_why_and_what_speaks_against_the_others():
    graph = run_passes(anchored.trace(), ONE)
    [own] = decisions_on_old_logprobs(graph, ONE)
    assert (own.subject, own.choice, own.rejected) == ("actor.update.old_logprobs", "own", ())
    graph = run_passes(anchored.trace(), SEVERAL)
    [forward] = decisions_on_old_logprobs(graph, SEVERAL)
    assert forward.choice == "of actor.logprobs"
    assert "4 optimizer updates a step" in dict(forward.rejected)["own"]
    graph = run_passes(passed.trace(), ONE)
    [said] = decisions_on_old_logprobs(graph, ONE)
    assert said.why.endswith("as the program says")
    graph = run_passes(anchored.trace(), TRUSTED)
    [trusted] = decisions_on_old_logprobs(graph, TRUSTED)
    assert "trust_rollout_logprobs is set" in trusted.why


def test_old_logprobs_that_no_loss_reads_are_refused_at_the_user_s_line():
    @fl.workflow
    def unread(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        before = actor.logprobs(rollout)
        actor.update(rollout, judge.score(rollout), old=before, loss=fl.loss.policy_clip(0.2))

    with pytest.raises(GraphError, match="does not use its old") as caught:
        unread.trace()
    assert "test_old_logprobs.py" in caught.value.where


def test_a_role_may_have_more_than_a_hundred_forward_passes():
    @fl.workflow
    def many(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollouts = [actor.generate(prompts) for _ in range(101)]
        scores = [judge.score(rollout) for rollout in rollouts]
        for rollout, rewards in zip(rollouts, scores, strict=True):
            actor.update(rollout, rewards, loss=OLD)

    graph = run_passes(many.trace(), SEVERAL)
    sources = [source(graph, node.id) for node in graph.of_op("update")]
    assert len(set(sources)) == 101
