"""One optimizer update of several losses, each on samples of its own: `fl.sum` and `fl.term`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import format_graph, graph_from_json, graph_to_json
from flowrl.graph.verify import problems
from flowrl.passes import Context, run_passes
from flowrl.viz.labels import node_notes
from tests.graph_text import parse
from tests.program.refusals import line_with, refused


@fl.workflow
def with_examples(prompts: fl.Prompts, examples: fl.Examples, actor: fl.Policy, judge: fl.Reward):
    rollout = actor.generate(prompts)
    advantages = fl.advantage.group_relative(judge.score(rollout))
    loss = fl.loss.policy_clip(0.2, correction=fl.loss.truncate(2.0))
    new = actor.update(
        fl.sum(
            fl.term(rollout, advantages=advantages, loss=loss),  # the first term
            0.1 * fl.term(examples),
        ),
        every=2,
    )
    fl.log("moved", new.logprobs(rollout))


def test_each_term_is_an_update_with_its_weight_and_its_line():
    graph = with_examples.trace()
    first, second = graph.node("actor.update"), graph.node("actor.update.2")
    assert [dict(n.attrs)["weight"] for n in (first, second)] == [1.0, 0.1]
    assert first.attr("sum") == second.attr("sum") == "sum"
    assert first.attr("every") == second.attr("every") == 2
    assert str(first.source).endswith(f":{line_with(__file__, 'the first term')}")
    assert second.source.line == first.source.line + 1
    # New weights are there after the last term.
    assert graph.feeding("actor.logprobs", "weights").src == "actor.update.2"
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph
    assert {"a term of sum", "weight=0.1"} <= set(node_notes(graph, second))


def test_the_terms_of_a_first_update_have_the_weights_that_the_step_begins_with():
    lowered = run_passes(with_examples.trace(), Context())
    assert lowered.node("actor.update").attr("old_logprobs") == "own"
    assert str(lowered.node("actor.update.2").attr("loss")).startswith("cross_entropy(")
    several = run_passes(with_examples.trace(), Context(mini_batches=2))
    old = several.feeding("actor.update", "old").src
    assert [n.id for n in several.nodes].index(old) < [n.id for n in several.nodes].index(
        "actor.update"
    )


def learning(made: Callable[..., Any]) -> fl.Workflow:
    @fl.workflow
    def program(
        prompts: fl.Prompts,
        examples: fl.Examples,
        actor: fl.Policy,
        critic: fl.Critic,
        judge: fl.Reward,
    ):
        rollout = actor.generate(prompts)
        scores = judge.score(rollout)
        made(rollout=rollout, scores=scores, examples=examples, actor=actor, critic=critic)

    return program


@pytest.mark.parametrize(
    ("made", "what", "hint"),
    [
        (
            lambda rollout, scores, actor, **_: actor.update(fl.sum(scores, scores)),
            "fl.sum cannot take this 'terms'",
            "fl.weighted_sum(",
        ),
        (
            lambda rollout, actor, **_: actor.update(fl.sum((rollout, fl.loss.reinforce(), 1.0))),
            "fl.sum cannot take this 'terms'",
            "a term names its advantages and its loss, and its factor: fl.sum(fl.term(rollout",
        ),
        (
            lambda scores, actor, **_: actor.update(fl.sum((scores, 1.0))),
            "fl.sum cannot take this 'terms'",
            "fl.weighted_sum(",
        ),
        (
            lambda examples, actor, **_: actor.update(sum([fl.term(examples), fl.term(examples)])),
            "terms are not added with + or with Python's sum",
            "write fl.sum(fl.term(rollout",
        ),
        (
            lambda examples, actor, **_: actor.update(fl.term(examples) - fl.term(examples)),
            "terms are not added with + or with Python's sum",
            "write fl.sum(fl.term(rollout",
        ),
        (
            lambda examples, actor, **_: actor.update(0.1 * fl.sum(fl.term(examples))),
            "a sum of terms has no factor",
            "multiply each of its terms",
        ),
        (
            lambda examples, actor, **_: actor.update(
                examples, loss=sum([fl.loss.cross_entropy(), fl.loss.reinforce()])
            ),
            "losses are not added with + or with Python's sum",
            "write actor.update(fl.sum(",
        ),
        (
            lambda rollout, examples, actor, **_: actor.update(
                fl.sum([fl.term(examples), fl.term(examples)])
            ),
            "fl.sum cannot take this 'terms'",
            "write fl.sum(*terms)",
        ),
        (lambda actor, **_: actor.update(fl.sum()), "fl.sum has no terms", "fl.term("),
        (
            lambda examples, actor, **_: actor.update(fl.sum(0 * fl.term(examples))),
            "a term cannot be multiplied by this",
            "inside `if weight:`",
        ),
        (
            lambda examples, actor, **_: actor.update(fl.sum(fl.term(examples) * -1)),
            "a term cannot be multiplied by this",
            None,
        ),
        (
            lambda examples, scores, actor, **_: actor.update(fl.sum(fl.term(examples)), scores),
            "actor.update cannot take this 'rewards'",
            "write fl.term(samples, rewards=...)",
        ),
        (
            lambda examples, actor, **_: actor.update(
                fl.sum(fl.term(examples)), loss=fl.loss.cross_entropy()
            ),
            "actor.update cannot take this 'loss'",
            "write fl.term(samples, loss=...)",
        ),
        (
            lambda examples, actor, **_: actor.update(fl.term(examples)),
            "actor.update takes samples as 'rollout'",
            "fl.sum(",
        ),
        (
            lambda rollout, scores, critic, **_: critic.update(
                fl.sum(fl.term(rollout, scores)), returns=None
            ),
            "critic.update takes samples as 'rollout'",
            "one update after the other",
        ),
        (
            lambda scores, actor, **_: actor.update(fl.sum(fl.term(scores))),
            "fl.term takes samples as 'samples'",
            None,
        ),
    ],
)
def test_what_is_no_sum_is_refused_at_the_line(made: Any, what: str, hint: str | None):
    error = refused(learning(made))
    assert error.what == what
    assert "test_sums.py" in error.where
    assert hint is None or hint in error.hint


def test_a_term_without_what_its_loss_reads_is_named():
    def made(rollout: Any, scores: Any, examples: Any, actor: Any, **_: Any) -> None:
        fl.log("score", scores)
        actor.update(
            fl.sum(
                fl.term(examples),
                fl.term(rollout, loss=fl.loss.reinforce()),  # lacks advantages
            )
        )

    with pytest.raises(GraphError, match="needs 'rewards' or 'advantages'") as caught:
        learning(made).trace()
    assert caught.value.where.endswith(f":{line_with(__file__, 'lacks advantages')}")


def test_terms_that_are_not_one_update_are_no_graph():
    graph = with_examples.trace()
    last = graph.node("actor.update.2")
    for changed in (last.with_attrs(every=3), replace(last, role="other")):
        errors = [e.what for e in problems(graph.replacing(changed))]
        assert any("the terms of sum are not one update" in what for what in errors)
