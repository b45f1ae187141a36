"""An update returns the role with its new weights: what may be asked of it, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import Graph, Op, format_graph, graph_from_json, graph_to_json
from flowrl.graph.verify import problems
from flowrl.passes import Context, run_passes
from flowrl.passes.logprobs import decisions_on_old_logprobs
from flowrl.viz.labels import node_notes
from tests.graph_text import parse
from tests.program.refusals import line_with, refused


def workflow_of(body: Callable[..., Any]) -> fl.Workflow:
    """A workflow whose update is followed by `body`."""

    @fl.workflow
    def mine(
        prompts: fl.Prompts,
        actor: fl.Policy,
        model: fl.RewardModel,
        critic: fl.Critic,
        reference: fl.Policy,
        game: fl.Environment,
    ):
        rollout = actor.generate(prompts)
        fl.log("reference", reference.logprobs(rollout))
        new = actor.update(rollout, model.score(rollout))
        body(
            rollout=rollout,
            prompts=prompts,
            new=new,
            actor=actor,
            reference=reference,
            critic=critic,
            game=game,
        )

    return mine


def fed(graph: Graph, node: str) -> str | None:
    edge = graph.feeding(node, "weights")
    return None if edge is None else edge.src


@fl.workflow
def all_kinds(
    prompts: fl.Prompts,
    pairs: fl.Pairs,
    actor: fl.Policy,
    critic: fl.Critic,
    model: fl.RewardModel,
):
    rollout = actor.generate(prompts)
    model2 = model.update(pairs)
    values = critic.values(rollout)
    scores = model2.score(rollout)
    advantages, returns = fl.advantage.gae(scores, values, rollout)
    critic2 = critic.update(rollout, returns=returns, values=values)
    fl.log("valued", critic2.values(rollout))
    actor2 = actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2))
    fl.log("moved", actor2.logprobs(rollout))


def test_each_forward_pass_says_which_weights_it_runs_with():
    graph = all_kinds.trace()
    assert fed(graph, "model.score") == "model.update"
    assert (fed(graph, "critic.values"), fed(graph, "critic.values.2")) == (None, "critic.update")
    assert fed(graph, "actor.logprobs") == "actor.update"
    assert "  in weights = actor.update{weights}\n" in format_graph(graph)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph
    lowered = run_passes(graph, Context())
    assert fed(lowered, "actor.logprobs") == "actor.update"
    assert fed(lowered, "critic.values.2") == "critic.update"


def test_versions_follow_one_another():
    def twice(rollout, new, actor, **_):
        newer = new.update(rollout, loss=fl.loss.cross_entropy())
        fl.log("moved", newer.logprobs(rollout))
        actor.update(rollout, loss=fl.loss.cross_entropy())

    assert fed(workflow_of(twice).trace(), "actor.logprobs") == "actor.update.2"


def test_an_update_may_still_be_called_without_using_what_it_returns():
    assert workflow_of(lambda **_: None).trace().node("actor.update").op is Op.UPDATE


def test_the_old_name_is_refused_and_the_message_names_the_new_way():
    def body(rollout, actor, **_):
        fl.log("moved", actor.logprobs(rollout))  # the old name

    error = refused(workflow_of(body))
    assert error.where.endswith(f":{line_with(__file__, 'the old name')}")
    assert error.what.startswith("actor.logprobs comes after actor.update (")
    assert "ask the role that it returns: actor2 = actor.update(...)" in error.hint


@pytest.mark.parametrize(
    "body",
    [
        lambda prompts, new, **_: new.generate(prompts),
        lambda prompts, new, game, **_: fl.interact(new, game, prompts),
    ],
)
def test_a_new_version_does_not_generate_in_the_same_step(body: Callable[..., Any]):
    error = refused(workflow_of(body))
    assert "actor.generate.2 comes after actor.update (" in error.what
    assert error.expected.startswith("rollouts by the weights that the step begins with")


@pytest.mark.parametrize(
    "use",
    [
        lambda old, rollout: fl.log("moved", old.logprobs(rollout)),
        lambda old, rollout: old.update(rollout, loss=fl.loss.cross_entropy()),
    ],
)
def test_a_version_that_was_updated_again_is_refused(use: Callable[..., Any]):
    def body(rollout, new, **_):
        new.update(rollout, loss=fl.loss.cross_entropy())
        use(new, rollout)

    error = refused(workflow_of(body))
    assert error.expected == "the newest version of actor"
    assert "use what actor.update (" in error.hint


def test_a_sync_takes_the_newest_version():
    def newest(reference, new, **_):
        reference.sync(new)

    def older(rollout, reference, new, **_):
        new.update(rollout, loss=fl.loss.cross_entropy())
        reference.sync(new)

    assert fed(workflow_of(newest).trace(), "reference.sync") == "actor.update"
    error = refused(workflow_of(older))
    assert error.expected == "the newest version of actor"


def test_probabilities_after_an_update_are_not_those_that_sampled():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward, critic: fl.Policy):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        new = actor.update(rollout, scores)
        advantages = fl.advantage.optimal_token_baseline(
            scores, rollout, policy=new.logprobs(rollout)
        )
        critic.update(rollout, advantages=advantages, loss=fl.loss.reinforce())

    with pytest.raises(GraphError, match=r"logprobs of actor after actor\.update, but actor"):
        mine.trace()


def test_old_logprobs_of_a_later_version_are_told_as_such():
    @fl.workflow
    def mine(prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        new = actor.update(examples)
        old = new.logprobs(rollout)
        new.update(rollout, scores, old=old, loss=fl.loss.policy_clip(0.2, anchor="old"))

    context = Context()
    (decision,) = decisions_on_old_logprobs(run_passes(mine.trace(), context), context)
    assert decision.choice == "of actor.logprobs"
    assert decision.why.startswith("a forward pass at the weights after actor.update")


def test_an_inserted_pass_for_old_logprobs_has_the_weights_of_the_beginning():
    @fl.workflow
    def mine(prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        new = actor.update(examples)
        fl.log("moved", new.logprobs(rollout))
        new.update(rollout, scores, loss=fl.loss.policy_clip(0.2, anchor="old"))

    graph = run_passes(mine.trace(), Context())
    source = graph.feeding("actor.update.2", "old").src
    assert source == "actor.logprobs.2"
    assert fed(graph, source) is None
    assert [n.id for n in graph.nodes].index(source) < [n.id for n in graph.nodes].index(
        "actor.update"
    )


def test_a_pass_with_other_weights_than_it_says_is_no_graph():
    graph = all_kinds.trace()
    node = graph.node("actor.logprobs")
    wrong = replace(
        graph.replacing(replace(node, inputs=("rollout",))),
        edges=tuple(e for e in graph.edges if (e.dst, e.argument) != (node.id, "weights")),
    )
    (error,) = problems(wrong)
    assert "actor.logprobs comes after actor.update (" in error.what


# Updates that are not made in every step.


def slow(every: Any) -> fl.Workflow:
    @fl.workflow
    def program(examples: fl.Examples, actor: fl.Policy):
        actor.update(examples, every=every)

    return program


def test_the_steps_between_updates_are_written_read_and_drawn():
    graph = slow(3).trace()
    assert "  attr every = 3\n" in format_graph(graph)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph
    assert "every 3 steps" in node_notes(graph, graph.node("actor.update"))
    assert "every" not in dict(slow(1).trace().node("actor.update").attrs)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2", None])
def test_steps_between_updates_that_are_no_number_are_refused(every: Any):
    error = refused(slow(every))
    assert error.what == "actor.update cannot take this 'every'"
    assert error.expected == "a whole number from 1 up"


# Weights that are taken over.


def following(**options: Any) -> fl.Workflow:
    @fl.workflow
    def program(examples: fl.Examples, actor: fl.Policy, reference: fl.Policy):
        fl.log("reference", reference.logprobs(examples))
        actor.update(examples)
        reference.sync(actor, **options)

    return program


def test_an_average_and_a_reset_are_written_read_and_drawn():
    graph = following(decay=0.99, every=10, reset_optimizer=True).trace()
    text = format_graph(graph)
    assert "  attr every = 10\n  attr decay = 0.99\n  attr reset_optimizer = true\n" in text
    assert format_graph(parse(text)) == text
    assert graph_from_json(graph_to_json(graph)) == graph
    assert node_notes(graph, graph.node("reference.sync")) == (
        "averages weights: 0.99 own + 0.01 actor",
        "resets the optimizer of actor",
        "every 10 steps",
    )
    assert [name for name, _ in following(decay=0).trace().node("reference.sync").attrs] == [
        "in_place",
        "every",
    ]


@pytest.mark.parametrize("decay", [1, 1.5, -0.1, float("nan"), True, "0.9", None])
def test_a_decay_that_is_no_share_is_refused(decay: Any):
    error = refused(following(decay=decay))
    assert error.what == "reference.sync cannot take this 'decay'"
    assert error.expected == "a number from 0 to below 1"


def test_a_reset_that_is_no_truth_value_is_refused():
    error = refused(following(reset_optimizer=200))
    assert error.what == "reference.sync cannot take this 'reset_optimizer'"
    assert error.expected == "True or False"
