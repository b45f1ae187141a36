"""Scores that roles state: numbers in what they said, and verdicts on pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.errors import GraphError
from flowrl.graph import Op, format_graph, graph_from_json, graph_to_json, problems, sample_sets
from flowrl.specs.cut import CutLeastLikely, CutSpec
from flowrl.specs.maps import WinRate
from tests.graph_text import parse
from tests.program.refusals import line_with, refused

HERE = Path(__file__)


@fl.workflow
def stated(
    prompts: fl.Prompts, actor: fl.Policy, *, regex: str = r"(\d+)", otherwise: float | None = 0.0
):
    rollout = actor.generate(prompts)
    actor.update(rollout, fl.parse(rollout, regex=regex, otherwise=otherwise))  # type: ignore[arg-type]  # parse


@fl.workflow
def selected(prompts: fl.Prompts, actor: fl.Policy):
    rollout, scores = fl.select.parsed(actor.generate(prompts), regex=r'"score": "(\d)"')
    actor.update(rollout, scores)


@pytest.mark.parametrize("flow", [stated, selected])
def test_text_and_json_of_a_program_that_parses_lose_nothing(flow: fl.Workflow):
    graph = flow.trace()
    bare = graph.with_nodes(replace(node, source=None) for node in graph.nodes)
    assert parse(format_graph(graph)) == bare
    assert graph_from_json(graph_to_json(graph)) == graph


@pytest.mark.parametrize(
    ("args", "argument", "expected"),
    [
        ({"regex": "("}, "regex", "a regular expression (missing )"),
        ({"regex": r"\d*"}, "regex", "does not match the empty text"),
        ({"otherwise": float("nan")}, "otherwise", "a finite number"),
    ],
)
def test_an_expression_that_cannot_be_searched_for_is_refused_at_its_line(
    args: dict[str, object], argument: str, expected: str
):
    error = refused(stated, **args)
    assert error.what == f"fl.parse cannot take this '{argument}'"
    assert expected in str(error.expected)
    assert str(error.where).endswith(f"{HERE.name}:{line_with(str(HERE), 'parse')}")


def test_samples_without_a_number_are_given_one_or_left_out():
    with pytest.raises(GraphError) as caught:
        stated.trace({"otherwise": None})
    assert (
        "map gives no score where it finds no number, and actor.update needs" in caught.value.what
    )
    assert "fl.select.parsed" in str(caught.value.hint)


DUEL = "{prompt}{response}|{opponent}="


@fl.workflow
def tournament(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Policy, *, further: int = 2):
    rollout = actor.generate(prompts, n=4)
    verdicts = [
        judge.generate(fl.prompts_of(rollout, template=DUEL, opponent=k), n=2)  # duel
        for k in (1, further)
    ]
    scores = [fl.parse(each, regex="[12]", otherwise=0.0) for each in verdicts]
    actor.update(rollout, fl.win_rate(*scores))


def test_a_win_rate_is_of_the_samples_that_were_compared():
    graph = lower(tournament)
    (rate,) = [node for node in graph.of_op(Op.MAP) if isinstance(node.attr("spec"), WinRate)]
    assert sample_sets(graph)[rate.id] == "actor.generate"
    assert str(rate.attr("spec")) == 'win_rate(opponents="1, 2")'
    assert graph_from_json(graph_to_json(graph)) == graph
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)


def test_an_opponent_is_another_sample_of_the_group():
    with pytest.raises(GraphError) as caught:
        tournament.trace({"further": 4})
    assert "4 places further in a group of 4" in caught.value.what
    assert caught.value.expected == "opponent from 1 to 3"
    assert str(caught.value.where).endswith(f"{HERE.name}:{line_with(str(HERE), 'duel')}")


@pytest.mark.parametrize(
    ("asked", "what", "expected"),
    [
        ({"template": DUEL}, "'opponent'", "opponent=1, since the template has an {opponent}"),
        ({"template": "{response}", "opponent": 1}, "'template'", "with the {opponent}"),
        ({"template": DUEL, "opponent": 0}, "'opponent'", "from 1 up"),
        ({}, "'template'", "a string"),
        ({"cut": 0.5}, "'cut'", "fl.cut.share"),
        ({"cut": fl.cut.at(0)}, "'cut'", "a whole number from 1 up, as tokens of cut_at"),
        ({"cut": fl.cut.share(1.5)}, "'cut'", "a number above 0"),
        ({"cut": fl.cut.at(3), "template": DUEL}, "'cut'", "alone: it continues"),
    ],
)
def test_a_rule_for_prompts_that_is_none_is_refused(
    asked: dict[str, Any], what: str, expected: str
):
    @fl.workflow
    def wrong(prompts: fl.Prompts, actor: fl.Policy):
        fl.prompts_of(actor.generate(prompts), **asked)

    error = refused(wrong)
    assert error.what == f"fl.prompts_of cannot take this {what}"
    assert expected in str(error.expected)


@pytest.mark.parametrize(
    ("cut", "hint"),
    [
        (16, "write cut=fl.cut.at(16)"),
        (0.5, "write cut=fl.cut.share(0.5)"),
        ("entropy", "write cut=fl.cut.least_likely(), a cut before the most surprising token"),
        (fl.cut.least_likely, "call it: cut=fl.cut.least_likely()"),
        (True, None),
    ],
)
def test_a_number_or_a_name_as_a_cut_is_answered_with_the_cut_that_it_means(
    cut: Any, hint: str | None
):
    @fl.workflow
    def wrong(prompts: fl.Prompts, actor: fl.Policy):
        fl.prompts_of(actor.generate(prompts), cut=cut)

    assert refused(wrong).hint == hint


@fl.map(reads="response_mask", gives="halves/samples")
def halves(batch):
    return batch.lengths // 2


@pytest.mark.parametrize("called", [True, False])
def test_a_map_as_a_cut_is_told_that_it_cannot_choose_it(called: bool):
    @fl.workflow
    def wrong(prompts: fl.Prompts, actor: fl.Policy):
        rollout = actor.generate(prompts)
        fl.prompts_of(rollout, cut=halves(rollout) if called else halves)

    error = refused(wrong)
    assert str(error.hint).startswith("a map cannot choose the cut")
    assert "fl.cut.share(share)" in str(error.expected)


def test_scores_of_other_samples_are_no_verdicts():
    @fl.workflow
    def wrong(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, fl.win_rate(verifier.score(rollout)))

    assert "which are no verdicts on pairs" in refused(wrong).what


@pytest.mark.parametrize("cut", [fl.cut.at(3), fl.cut.share(0.5), fl.cut.least_likely(rank=2)])
def test_cuts_read_back_and_carry_the_logprobs_that_they_need(cut: CutSpec):
    @fl.workflow
    def tree(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        trunk = actor.generate(prompts)
        branches = actor.generate(fl.prompts_of(trunk, cut=cut), n=2)
        actor.update(branches, verifier.score(branches))

    graph = lower(tree)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    (edge,) = graph.in_edges("prompts_of")
    assert ("rollout_logprobs" in edge.fields) == isinstance(cut, CutLeastLikely)
    bare = replace(edge, fields=("tokens", "response_mask"))
    edges = tuple(bare if each == edge else each for each in graph.edges)
    wrong = [error.what for error in problems(replace(graph, edges=edges))]
    assert any("needs 'rollout_logprobs'" in what for what in wrong) == (
        "rollout_logprobs" in edge.fields
    )
