"""Losses with values that no formula takes are refused at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import flowrl as fl
from flowrl.errors import TraceError
from flowrl.graph import format_attr, format_graph, graph_from_json, graph_to_json, problems
from flowrl.graph.serialization import parse_attr
from flowrl.specs import KL, GroupRelative, LossSpec
from flowrl.specs.base import wrong_fields
from tests.graph_text import parse

loss = fl.loss


def learning(made: Callable[[], LossSpec]) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, judge.score(rollout), loss=made())

    return program


@pytest.mark.parametrize(
    ("made", "what", "expected"),
    [
        (lambda: loss.policy_clip(-1), "-1", "a number from 0 up"),
        (lambda: loss.policy_clip("0.2"), "'0.2'", "a number"),
        (lambda: loss.policy_clip(float("nan")), "nan", "clip_low"),
        (lambda: loss.policy_clip(True), "True", "clip_low"),
        (lambda: loss.policy_clip(anchor="olds"), "'olds'", "'behaviour' or 'old'"),
        (lambda: loss.policy_clip(ratio="tokens"), "'tokens'", "one of 'token', 'sequence'"),
        (lambda: loss.policy_clip(entropy=float("inf")), "inf", "entropy of policy_clip"),
        (lambda: loss.policy_clip(entropy="x"), "'x'", "a finite"),
        (lambda: loss.policy_clip(dual_clip="2"), "'2'", "dual_clip"),
        (
            lambda: loss.policy_clip(dual_clip=1),
            "1",
            "a number above",
        ),
        (lambda: loss.dpo(-1), "-1", "a number above 0"),
        (lambda: loss.dpo("0.1"), "'0.1'", "a number"),
        (
            lambda: loss.dpo(label_smoothing=0.1, form="ipo"),
            "0.1",
            "0 in IPO",
        ),
        (lambda: loss.cispo(cap=-0.5), "-0.5", "a number from 0 up"),
        (lambda: loss.dppo(-0.1), "-0.1", "limit of dppo"),
        (
            lambda: loss.kl_cov(fraction=1.5),
            "1.5",
            "a number above 0 and of at most 1",
        ),
        (lambda: loss.sapo(0.0), "0.0", "a number above 0"),
        (
            lambda: loss.reinforce(correction=loss.truncate(1.0, low=2.0)),
            "2.0",
            "a number of at most weights_high=1",
        ),
        (
            lambda: loss.policy_clip(correction=loss.truncate(level="tokens")),
            "'tokens'",
            "one of 'none', 'token', 'sequence', 'geometric'",
        ),
        (lambda: loss.policy_clip(rejection=loss.reject()), "'token'", "a bound, low or high"),
    ],
)
def test_a_value_that_no_formula_takes_is_refused(made, what, expected):
    with pytest.raises(TraceError, match=r"actor\.update cannot take this 'loss'") as caught:
        learning(made).trace()
    assert what in caught.value.found
    assert expected in caught.value.expected
    assert "test_loss_values.py" in caught.value.where


def test_the_nearest_choice_is_told():
    with pytest.raises(TraceError) as caught:
        learning(lambda: loss.policy_clip(aggregation="token-means")).trace()
    assert caught.value.hint == "did you mean 'token-mean'?"


@pytest.mark.parametrize(
    ("made", "what", "hint"),
    [
        (
            lambda: loss.gspo(agregation="token-mean"),
            "keyword argument 'agregation'",
            "aggregation",
        ),
        (lambda: loss.policy_clip(correction=3), "not a correction of a policy loss", None),
        (lambda: loss.policy_clip(rejection=loss.truncate()), "not a rejection of a policy", None),
        (
            lambda: loss.cispo(correction=loss.truncate(), anchor="behaviour"),
            "needs no importance weights",
            "omit anchor",
        ),
        (
            lambda: fl.kl.k3(0.1, targets=1.0),
            "argument 'targets'",
            "did you mean 'target'?",
        ),
        (lambda: 0 * loss.dpo(), "cannot be multiplied by this", "inside `if weight:`"),
        (lambda: -loss.dpo(), "cannot be multiplied by this", "has no bound"),
        (lambda: loss.dpo() * -0.5, "cannot be multiplied by this", "has no bound"),
        (lambda: float("nan") * loss.dpo(), "cannot be multiplied by this", None),
        (lambda: "0.1" * loss.dpo(), "cannot be multiplied by this", "weigh samples"),
        (lambda: loss.dpo() + loss.cispo(), "not added with +", "fl.sum(fl.term("),
    ],
)
def test_what_a_loss_cannot_be_made_of_is_told_with_the_line(made, what, hint):
    with pytest.raises(TraceError) as caught:
        made()
    assert what in caught.value.what
    assert "test_loss_values.py" in caught.value.where
    assert hint is None or hint in caught.value.hint


def test_a_scaled_loss_is_written_and_read_with_its_factor():
    @fl.workflow
    def program(pairs: fl.Pairs, actor: fl.Policy, reference: fl.Policy):
        actor.update(pairs, reference=reference.logprobs(pairs), loss=0.5 * loss.dpo() * 0.5)

    graph = program.trace()
    assert "  attr loss = loss:dpo(scaled_by=0.25, beta=0.1)\n" in format_graph(graph)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph


def test_every_loss_as_it_is_has_values_that_it_may_have():
    makers = [getattr(loss, name) for name in loss.__all__ if name.islower()]
    made = [make() for make in makers if make not in (loss.own, loss.reject)]
    specs = [spec for spec in made if isinstance(spec, LossSpec)]
    assert len(specs) >= 15
    assert [list(wrong_fields(spec)) for spec in specs] == [[]] * len(specs)


def test_the_verifier_looks_at_every_specification():
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        advantages = fl.advantage.group_relative(judge.score(rollout))
        actor.update(rollout, advantages=advantages)

    graph = program.trace()
    wrong = GroupRelative(std="groups")  # type: ignore[arg-type]
    (problem,) = problems(graph.replacing(graph.node("advantage").with_attrs(spec=wrong)))
    assert problem.what == "spec group_relative of advantage cannot have this std"
    assert problem.found == "'groups'"
    for kl, field in (
        (KL(estimator="k4", coefficient=0.1), "estimator"),  # type: ignore[arg-type]
        (fl.kl.k3(0.1, target="1"), "target"),  # type: ignore[arg-type]
        (fl.kl.k3(0.0, target=1.0), "coefficient"),
    ):
        update = graph.node("actor.update").with_attrs(kl=kl)
        found = next(problems(graph.replacing(update)))
        assert f"cannot have this {field}" in found.what


def test_numbers_of_numpy_are_numbers_in_the_text_too():
    spec = loss.policy_clip(np.float64(0.1), np.float64(0.3))
    assert 'clip_low=0.1, clip_high=0.3, aggregation="token-mean"' in format_attr(spec)
    assert parse_attr(format_attr(spec)) == spec
    assert list(wrong_fields(replace(spec, clip_low=np.float32(0.1)))) != []
