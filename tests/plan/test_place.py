"""The placed graph: what a plan says of each node, as golden text; and what it must say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrl.errors import GraphError, PlanError
from flowrl.graph import (
    Graph,
    Level,
    Node,
    format_graph,
    graph_from_json,
    graph_to_json,
    problems,
    verify,
)
from flowrl.plan import place
from tests.graph_text import parse
from tests.plan.workflows import lowered, play, ppo, requested, two_rollouts

PROGRAMS = [ppo, play, two_rollouts]


def placed(cases: Any, program: Any) -> Graph:
    graph = lowered(program)
    return place(graph, requested(cases, graph, max_response_tokens=21, max_length=27))


def first_problem(graph: Graph) -> GraphError:
    return next(problems(graph))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_what_is_placed_is_as_it_was(golden: Any, cases: Any, program: Any) -> None:
    golden(f"{program.name}.placed.txt", format_graph(placed(cases, program)))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_placed_graph_survives_text_and_json(cases: Any, program: Any) -> None:
    graph = placed(cases, program)
    assert graph.level is Level.PLACED
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph


def test_placing_twice_changes_nothing(cases: Any) -> None:
    graph = lowered(ppo)
    plan = requested(cases, graph)
    once = place(graph, plan)
    assert place(once, plan) == once


def test_nothing_but_places_is_added_and_nothing_but_open_attributes_left_out(cases: Any) -> None:
    graph, result = lowered(ppo), placed(cases, ppo)
    assert result.edges == graph.edges
    for before, after in zip(graph.nodes, result.nodes, strict=True):
        said = [(name, value) for name, value in before.attrs if value is not None]
        assert list(after.attrs[: len(said)]) == said
        assert replace(after, attrs=before.attrs) == before


@pytest.mark.parametrize(
    ("node", "attr"),
    [
        ("actor.generate", "devices"),
        ("game.interact", "devices"),
        ("game.interact", "process"),
        ("actor.generate", "replicas"),
        ("prompts", "start"),
        ("filter", "chunk"),
        ("actor.update", "micro_batch"),
        ("actor.sync", "transport"),
    ],
)
def test_each_thing_that_a_plan_says_must_be_there(cases: Any, node: str, attr: str) -> None:
    graph = placed(cases, play)
    left_out = graph.replacing(graph.node(node).without_attrs(attr))
    error = first_problem(left_out)
    assert f"attribute '{attr}' of {node} is not filled" in error.what
    assert error.where is not None
    assert error.where.startswith("program.py:")


def test_a_role_on_no_device_is_not_placed(cases: Any) -> None:
    graph = placed(cases, play)
    nowhere = graph.replacing(graph.node("game.interact").with_attrs(devices=""))
    assert "attribute 'devices' of game.interact is not filled" in first_problem(nowhere).what


def test_nothing_is_left_open(cases: Any) -> None:
    graph = placed(cases, ppo)
    assert all(value is not None for node in graph.nodes for _, value in node.attrs)
    opened = graph.replacing(graph.node("actor.update").with_attrs(kl=None))
    assert "attribute 'kl' of actor.update is open" in first_problem(opened).what


def test_a_driver_s_node_is_on_no_device(cases: Any) -> None:
    graph = placed(cases, ppo)
    odd = graph.replacing(graph.node("advantage").with_attrs(devices="cpu:0"))
    assert "advantage has no attribute 'devices'" in first_problem(odd).what


@pytest.mark.parametrize("level", [Level.TRACED, Level.LOWERED])
def test_a_graph_of_an_earlier_level_says_nothing_of_places(level: Level) -> None:
    graph = replace(lowered(ppo), level=level)
    assert list(problems(graph)) == []
    early = graph.replacing(graph.node("actor.generate").with_attrs(devices="cpu:0"))
    assert f"no attribute 'devices' in a {level} graph" in first_problem(early).what


def test_every_level_is_stricter_than_the_one_before(cases: Any) -> None:
    graph = placed(cases, ppo)
    verify(graph)
    assert list(problems(replace(lowered(ppo), level=Level.PLACED)))
    traced = ppo.trace()
    assert list(problems(traced)) == []
    assert list(problems(replace(traced, level=Level.LOWERED)))


def test_a_plan_of_another_graph_places_nothing(cases: Any) -> None:
    with pytest.raises(PlanError, match="the plan of 'play' does not say where") as caught:
        place(lowered(ppo), requested(cases, lowered(play)))
    assert caught.value.where is not None
    assert caught.value.where.startswith("program.py:")


def test_a_sync_whose_weights_have_no_route_is_refused(cases: Any) -> None:
    graph = lowered(ppo)
    plan = replace(requested(cases, graph), weight_routes=())
    with pytest.raises(PlanError, match="no route for the weights"):
        place(graph, plan)


def test_a_sync_says_how_its_weights_travel(cases: Any) -> None:
    graph = placed(cases, ppo)
    syncs: list[Node] = [graph.node("actor.sync"), graph.node("reference.sync")]
    assert [node.attr("transport") for node in syncs] == ["in_place", "folder"]


def test_samples_of_a_step_divide_among_the_replicas_of_a_role(cases: Any) -> None:
    graph = placed(cases, ppo)
    node = next(node for node in graph.nodes if node.id == "actor.generate")
    samples = node.attr("samples")
    assert isinstance(samples, int)
    assert node.attr("samples_per_replica") == samples
    each = samples // 3
    error = first_problem(graph.replacing(node.with_attrs(replicas=3, samples_per_replica=each)))
    assert f"{samples} samples of actor.generate do not divide among 3 replicas" in str(error)
    assert error.expected is not None
    assert error.expected.startswith(f"{each * 3} or {each * 3 + 3} samples a step")
