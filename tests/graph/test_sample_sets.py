"""Which samples may meet at one node: those of one set, a baseline's, and those of two rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.errors import GraphError


@fl.map(reads=("logprobs", "logprobs_2"), gives="gap/tokens")
def gap(batch):
    return batch["logprobs"] - batch["logprobs_2"]


@fl.map(reads=("score", "score_2"), gives="score")
def lead(batch):
    return batch["score"] - batch["score_2"]


def with_baseline(baseline: Callable[..., Any], *, group_size: int | None = 4) -> fl.Workflow:
    """A program that learns from `rollout`, against what `baseline` makes a baseline of."""

    @fl.workflow
    def program(
        prompts: fl.Prompts,
        others: fl.Prompts,
        pairs: fl.Pairs,
        *,
        actor: fl.Policy,
        judge: fl.Reward,
        game: fl.Environment,
    ):
        fl.log("others", judge.score(actor.generate(others, n=1)))  # all data is used
        fl.log("pairs", judge.score(pairs))
        rollout = actor.generate(prompts, n=group_size)
        scores = judge.score(rollout)
        lone = baseline(locals())
        actor.update(rollout, advantages=fl.advantage.remax(scores, rollout, baseline=lone))

    return program


def greedy(of: dict[str, Any]) -> Any:
    return of["judge"].score(of["actor"].generate(of["prompts"], n=1, temperature=0))


def one_episode(of: dict[str, Any]) -> Any:
    rollout, scores = fl.interact(of["actor"], of["game"], of["prompts"], n=1)
    fl.log("episode", rollout)
    return scores


def best(of: dict[str, Any]) -> Any:
    drawn = of["actor"].generate(of["prompts"], n=3)
    return fl.select.top(drawn, of["judge"].score(drawn), k=1)[1]


@pytest.mark.parametrize(
    ("baseline", "scores", "rollout"),
    [
        (greedy, "judge.score.4", "actor.generate.3"),
        (one_episode, "game.interact", "game.interact"),
        (best, "select", "select"),
    ],
)
def test_a_baseline_is_one_score_of_each_prompt(baseline, scores: str, rollout: str):
    graph = lower(with_baseline(baseline))
    assert graph.feeding("advantage", "scores").src == "judge.score.3"
    edge = graph.feeding("advantage", "baseline")
    assert (edge.src, edge.fields) == (scores, ("score",))
    if scores != rollout:
        assert graph.feeding(scores, "rollout").src == rollout


def test_a_filter_of_the_samples_leaves_a_baseline_of_all_prompts():
    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts, n=4)
        rollout, scores = fl.filter.zero_variance(rollout, judge.score(rollout))
        lone = judge.score(actor.generate(prompts, n=1, temperature=0))
        actor.update(rollout, advantages=fl.advantage.remax(scores, rollout, baseline=lone))

    graph = lower(program)
    assert graph.feeding("advantage", "scores").src == "filter"
    assert graph.feeding("advantage", "baseline").src == "judge.score.2"
    assert graph.feeding("judge.score.2", "rollout").src == "actor.generate.2"


def several(of: dict[str, Any]) -> Any:
    return of["judge"].score(of["actor"].generate(of["prompts"], n=2))


def itself(of: dict[str, Any]) -> Any:
    return of["scores"]


def of_other_prompts(of: dict[str, Any]) -> Any:
    return of["judge"].score(of["actor"].generate(of["others"], n=1))


def of_pairs(of: dict[str, Any]) -> Any:
    return of["judge"].score(of["pairs"])


def several_episodes(of: dict[str, Any]) -> Any:
    rollout, scores = fl.interact(of["actor"], of["game"], of["prompts"], n=2)
    fl.log("episode", rollout)
    return scores


def filtered(of: dict[str, Any]) -> Any:
    drawn = of["actor"].generate(of["prompts"], n=1)
    return fl.filter.difficulty(drawn, of["judge"].score(drawn))[1]


def best_of_filtered(of: dict[str, Any]) -> Any:
    drawn = of["actor"].generate(of["prompts"], n=4)
    return fl.select.top(*fl.filter.difficulty(drawn, of["judge"].score(drawn)), k=1)[1]


def two_best(of: dict[str, Any]) -> Any:
    drawn = of["actor"].generate(of["prompts"], n=4)
    return fl.select.top(drawn, of["judge"].score(drawn), k=2)[1]


@pytest.mark.parametrize(
    ("baseline", "what"),
    [
        (several, "needs one baseline a prompt, but 'judge.score.4' has 2"),
        (itself, "gets 'judge.score.3' as its baseline and as its scores"),
        (of_other_prompts, "compares 'actor.generate.2' with other prompts"),
        (of_pairs, "'judge.score.4' scores 'pairs'"),
        (several_episodes, "needs one baseline a prompt, but 'game.interact' has 2"),
        (filtered, "a filter took some out of 'filter'"),
        (best_of_filtered, "a filter took some out of 'select'"),
        (two_best, "needs one baseline a prompt, but 'select' has 2"),
    ],
)
def test_every_other_baseline_is_refused_at_its_line(baseline, what):
    with pytest.raises(GraphError) as caught:
        with_baseline(baseline).trace()
    assert what in caught.value.what
    assert "test_sample_sets.py" in caught.value.where
    assert "n=1, temperature=0" in caught.value.hint


def test_a_baseline_whose_number_the_config_says_is_looked_at_when_it_is_known():
    def drawn(of: dict[str, Any]) -> Any:
        return of["judge"].score(of["actor"].generate(of["prompts"]))

    with_baseline(drawn).trace()
    with pytest.raises(GraphError, match=r"one baseline a prompt, but 'judge\.score\.4' has 8"):
        lower(with_baseline(drawn))


def compared(compare: Callable[..., Any], *, first: int | None, second: int | None) -> fl.Workflow:
    @fl.workflow
    def program(prompts: fl.Prompts, left: fl.Policy, right: fl.Policy, judge: fl.Reward):
        one, two = left.generate(prompts, n=first), right.generate(prompts, n=second)
        fl.log("compared", compare(one, two, right, judge))
        left.update(one, judge.score(one))

    return program


def leads(one: Any, two: Any, model: Any, judge: Any) -> Any:
    return lead(judge.score(one), judge.score(two))


def gaps(one: Any, two: Any, model: Any, judge: Any) -> Any:
    return gap(model.logprobs(one), model.logprobs(two))


def test_numbers_of_samples_of_two_rollouts_may_be_compared():
    lower(compared(leads, first=2, second=2))
    lower(compared(leads, first=None, second=8))  # the config's default is 8


def test_groups_of_two_rollouts_that_are_compared_are_of_one_size():
    with pytest.raises(GraphError, match=r"but 'input_2' for the samples of"):
        compared(leads, first=2, second=3).trace()
    compared(leads, first=None, second=3).trace()
    with pytest.raises(GraphError, match=r"but 'input_2' for the samples of"):
        lower(compared(leads, first=None, second=3))


def test_tokens_of_two_rollouts_have_no_counterparts():
    with pytest.raises(GraphError, match="reads 'logprobs' per token, of other samples") as caught:
        compared(gaps, first=2, second=2).trace()
    assert "test_sample_sets.py" in caught.value.where


@pytest.mark.parametrize("narrower", [lambda *of: of, fl.filter.zero_variance])
def test_scores_of_another_policy_of_an_episode_are_to_be_its_own(narrower):
    @fl.workflow
    def swapped(prompts: fl.Prompts, pro: fl.Policy, con: fl.Policy, court: fl.Environment):
        (mine, my_scores), (theirs, scores) = fl.interact((pro, con), court, prompts, max_turns=4)
        mine, my_scores = narrower(mine, my_scores)
        pro.update(mine, scores)
        con.update(theirs, my_scores)

    with pytest.raises(GraphError, match="for the samples of") as caught:
        swapped.trace()
    assert "use what an operation returned in all that follows" in caught.value.hint
