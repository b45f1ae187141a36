"""Scores that roles state: numbers in what they said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import format_graph, graph_from_json, graph_to_json, parse
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
