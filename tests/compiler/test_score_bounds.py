"""Bounds that no score of the reward's terms can meet are refused before a run."""

from __future__ import annotations

from itertools import count

import pytest

import flowrl as fl
from flowrl.errors import ConfigError
from tests.runtime.tiny_runs import tiny_config

NUMBERS = count()
PROGRAM = """\
import flowrl as fl


@fl.workflow
def mine(prompts: fl.Prompts, *, actor: fl.Policy, old: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts, n=4)
    scores = verifier.score(rollout)
    fl.log("old", old.logprobs(rollout))
    {choose}
    actor.update({learn})
"""
SELECTED = "rollout, loss=fl.loss.cross_entropy()"
EXACT = {"kind": "exact_match", "name": "accuracy"}
FORMAT = {"kind": "format", "name": "format", "pattern": ".*", "weight": 0.5}


PENALTY = {"kind": "overlong", "name": "long", "max_tokens": 6, "buffer": 2}


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """What compiling a workflow with a filter or a selection says; None where nothing."""
    monkeypatch.chdir(tmp_path)

    def compiled(choice: str, *terms: dict[str, object]) -> str | None:
        file = tmp_path / f"mine{next(NUMBERS)}.py"  # a program that was loaded is not read again
        pairs = "best_and_worst" in choice
        choose = f"{'pairs' if pairs else 'rollout, scores'} = fl.{choice}"
        learn = "pairs, loss=fl.loss.dpo(0.1), reference=old.logprobs(pairs)" if pairs else SELECTED
        if choice.startswith("advantage"):
            choose = f"advantages = fl.{choice}"
            learn = "rollout, loss=fl.loss.reinforce(), advantages=advantages"
        file.write_text(PROGRAM.format(choose=choose, learn=learn))
        config = tiny_config(tmp_path / "runs")
        config |= {"stages": ["mine"], "stage": {}, "workflow": file.name, "args": {}}
        config["roles"]["old"] = {"copy_of": "actor"}
        config["rewards"] = {"terms": list(terms)}
        config["eval"] = {**config.get("eval", {}), "metric": "score"}
        try:
            fl.compile(None, config)
        except ConfigError as error:
            return str(error).replace(file.name, "mine.py")
        return None

    return compiled


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("filter.difficulty(rollout, scores, low=1.0, high=2.0)", "low below 1 and high above"),
        ("filter.difficulty(rollout, scores, low=-1.0, high=0.0)", "high above 0"),
        ("select.threshold(rollout, scores, at_least=1.5)", "at_least of at most 1"),
        ("filter.zero_variance(rollout, scores, tolerance=1.0)", "a tolerance below 1"),
        ("select.best_and_worst(rollout, scores, tolerance=2)", "a tolerance below 1"),
    ],
)
def test_bounds_that_no_score_meets_are_refused(refusal, choice: str, said: str):
    text = refusal(choice, EXACT)
    assert said in text
    assert "mine.py:9" in text
    assert "rewards.terms" in text
    assert "the terms of 'verifier' score from 0 to 1" in text


@pytest.mark.parametrize(
    "choice",
    [
        "filter.difficulty(rollout, scores)",
        "filter.difficulty(rollout, scores, low=0.5, high=1.0)",
        "filter.difficulty(rollout, scores, low=0.8, high=1.1)",
        "select.threshold(rollout, scores, at_least=1.0)",
        "filter.zero_variance(rollout, scores, tolerance=0.9)",
        "select.best_and_worst(rollout, scores, tolerance=0.9)",
    ],
)
def test_bounds_that_some_score_meets_are_taken(refusal, choice: str):
    assert refusal(choice, EXACT) is None


@pytest.mark.parametrize(
    ("terms", "most"),
    [
        ((EXACT, FORMAT), 1.5),
        (({**EXACT, "weight": -2.0}, FORMAT), 0.5),
        ((EXACT, {"kind": "overlong", "max_tokens": 4, "buffer": 2, "factor": 3}), 1.0),
        ((EXACT, {"kind": "repetition", "weight": -1.0, "max_penalty": -2.0}), 3.0),
        (({**EXACT, "weight": 3}, {"kind": "stop_properly", "of": "accuracy"}), 3.0),
        ((EXACT, {"kind": "stop_properly", "of": "accuracy", "coefficient": 2.0}), 2.0),
        ((EXACT, {"kind": "cosine_length", "of": "accuracy", "max_tokens": 4}), 1.0),
        (
            (
                {**EXACT, "weight": 2},
                {"kind": "cosine_length", "of": "accuracy", "max_tokens": 4, "correct_long": 4.0},
            ),
            8.0,
        ),
    ],
)
def test_the_most_that_terms_can_score_is_their_weighted_sum(refusal, terms, most: float):
    assert refusal(f"select.threshold(rollout, scores, at_least={most})", *terms) is None
    text = refusal(f"select.threshold(rollout, scores, at_least={most + 0.01})", *terms)
    assert f"at_least of at most {most:g}" in text


def test_a_function_of_ones_own_may_score_anything(refusal, tmp_path):
    (tmp_path / "own.py").write_text("def reward(response):\n    return 7.0\n")
    own = {"kind": "python", "function": "own.py:reward", "name": "own"}
    choice = "filter.difficulty(rollout, scores, low=5.0, high=9.0)"
    assert refusal(choice, EXACT, own) is None
    assert refusal(choice, EXACT) is not None
    uncapped = {"kind": "overlong", "max_tokens": 4, "buffer": 2, "weight": -1.0, "cap": False}
    assert refusal(choice, EXACT, uncapped) is None


def test_scores_are_followed_through_filters_and_selections(refusal):
    first = "select.threshold(rollout, scores, at_least=0.0)\n    rollout, scores = fl."
    between = "filter.zero_variance(rollout, scores)\n    rollout, scores = fl."
    for before in (first, between):
        assert refusal(before + "filter.difficulty(rollout, scores)", EXACT) is None
        assert refusal(before + "filter.difficulty(rollout, scores, low=1, high=2)", EXACT)


def test_max_rl_is_refused_where_terms_add_up_to_less_than_0(refusal):
    choice = "advantage.max_rl(scores)"
    for terms in ((EXACT, PENALTY), (EXACT, {**FORMAT, "weight": -0.5})):
        text = refusal(choice, *terms)
        assert "divides by the mean score of each group, and scores below 0 bring it to 0" in text
        assert "mine.py:9" in text
        assert "rewards.terms" in text
    assert refusal(choice, EXACT, FORMAT) is None
    assert refusal("advantage.group_relative(scores)", EXACT, PENALTY) is None
