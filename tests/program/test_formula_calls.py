"""Calls of losses, advantages and grammars with other values than they take."""

from __future__ import annotations

import math
from functools import partial

import pytest

import flowrl as fl
from tests.program.refusals import refusal_in

refusal = partial(refusal_in, "test_formula_calls.py")


@fl.advantage.own(needs=("rewards",))
def best_of(batch):
    return batch.rewards.max(1)


def plain_loss(logprobs, batch):
    return -logprobs


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (fl.loss.gspo, "write loss=fl.loss.policy_clip(0.2)"),
        (plain_loss, "mark a function of a module of yours: @fl.loss.own(needs=...)"),
        (lambda logprobs, batch: logprobs, "a function of a module of yours: @fl.loss.own"),
        ("policy_clip", "write loss=fl.loss.policy_clip(0.2)"),
    ],
)
def test_what_is_no_loss_is_told_with_what_was_meant(value, hint):
    error = refusal(lambda rollout, scores, actor, *_: actor.update(rollout, scores, loss=value))
    assert "cannot take this 'loss'" in error.what
    assert hint in error.hint


def test_an_own_advantage_that_is_called_wrongly_is_called_by_its_name():
    error = refusal(lambda rollout, scores, *_: best_of(scores, rollout, 3))
    assert error.what == "best_of: too many positional arguments"
    error = refusal(lambda rollout, scores, *_: best_of([]))
    assert "best_of takes the scores as 'scores'" in error.what


def test_a_teacher_is_called_a_teacher():
    error = refusal(lambda r, s, actor, other, judge: fl.advantage.distill(r, teacher=other))
    assert "takes the logprobs as 'teacher'" in error.what
    assert error.hint.startswith("logprobs come from reference.logprobs(rollout)")


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: fl.grammar.regex("(["), "not a regular expression: unterminated character set"),
        (lambda: fl.grammar.regex(3), "not a regular expression"),
        (lambda: fl.grammar.regex(b"a"), "not a regular expression: it is not a string"),
        (lambda: fl.grammar.json_schema('{"type": "object"}'), "a JSON schema is a mapping"),
        (lambda: fl.grammar.json_schema({"a": {1}}), "JSON cannot hold this schema"),
        (lambda: fl.grammar.json_schema({"a": math.nan}), "JSON cannot hold this schema"),
    ],
)
def test_a_grammar_that_is_none_is_refused_at_the_user_s_line(made, what):
    error = refusal(lambda *_: made())
    assert what in error.what


@pytest.mark.parametrize("name", ["advantage", "filter", "loss"])
def test_a_family_of_functions_is_found_by_its_plural(name):
    plural = "losses" if name == "loss" else f"{name}s"
    with pytest.raises(AttributeError, match=rf"fl has no '{plural}': write fl\.{name}$"):
        getattr(fl, plural)
