"""The canonical text and JSON forms keep everything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import (
    DType,
    Edge,
    Field,
    Graph,
    Level,
    Node,
    Op,
    Unit,
    format_graph,
    graph_from_json,
    graph_to_json,
)
from flowrl.specs import KL, GroupRelative, OwnLoss, PolicyClip, Sampling
from flowrl.specs.filters import Difficulty, ZeroVariance
from flowrl.specs.grammar import Regex
from flowrl.user_lines import SourceRef
from tests.graph_text import parse

names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
floats = st.floats(allow_nan=False)
texts = st.text(max_size=12)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), floats, texts)
specs = st.one_of(
    st.builds(PolicyClip, clip_low=floats, clip_high=floats),
    st.builds(KL, estimator=st.sampled_from(["k1", "k3"]), coefficient=floats),
    st.builds(GroupRelative, std=st.sampled_from(["group", "none"]), ddof=st.integers(0, 1)),
    st.builds(Sampling, temperature=floats, max_tokens=st.integers(1, 99)),
    st.builds(ZeroVariance, tolerance=floats),
    st.builds(Difficulty, low=floats, high=floats),
    st.builds(Regex, pattern=texts),
    st.builds(
        OwnLoss,
        function=texts,
        reads=texts,
        options=st.dictionaries(st.from_regex(r"o_[a-z]{1,5}", fullmatch=True), scalars).map(
            lambda options: tuple(sorted(options.items()))
        ),
    ),
)
fields = st.builds(
    Field, name=names, dtype=st.sampled_from(list(DType)), unit=st.sampled_from(list(Unit))
)
sources = st.none() | st.builds(
    SourceRef,
    file=st.sampled_from(["a.py", "/b c/d:e.py", "<stdin>", "/x @ y:3.py", "/ö.py", "C:\\d\\e.py"])
    | texts,
    line=st.integers(1, 9999),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph that can be written down; it need not make sense."""
    ids = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    nodes, edges = [], []
    for node_id in ids:
        inputs = tuple(draw(st.lists(names, max_size=3, unique=True)))
        edges += [
            Edge(
                src=draw(st.sampled_from(ids)),
                dst=node_id,
                argument=argument,
                fields=tuple(draw(st.lists(names, max_size=3))),
                carried=draw(st.booleans()),
            )
            for argument in inputs
        ]
        nodes.append(
            Node(
                id=node_id,
                op=draw(st.sampled_from(list(Op))),
                role=draw(st.none() | names),
                inputs=inputs,
                outputs=tuple(draw(st.lists(fields, max_size=3))),
                attrs=tuple(draw(st.dictionaries(names, scalars | specs, max_size=3)).items()),
                source=draw(sources),
            )
        )
    level = draw(st.sampled_from(list(Level)))
    return Graph(name=draw(names), level=level, nodes=tuple(nodes), edges=tuple(edges))


@given(graphs())
def test_text_parses_back_to_the_same_graph(graph):
    without_sources = graph.with_nodes(replace(node, source=None) for node in graph.nodes)
    assert parse(format_graph(graph)) == without_sources


@given(graphs())
def test_json_reads_back_to_the_same_graph(graph):
    text = json.dumps(graph_to_json(graph), allow_nan=False)  # what readers of JSON know
    assert graph_from_json(json.loads(text)) == graph


@fl.workflow
def one(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts, n=4, temperature=0.7)
    scores = verifier.score(rollout)
    adv = fl.advantage.group_relative(scores)
    actor.update(rollout, advantages=adv, loss=fl.loss.policy_clip(0.2), kl=fl.kl.k3(0))


def test_text_is_as_it_was(golden):
    golden("one.txt", format_graph(one.trace()))


def test_text_does_not_depend_on_the_names_of_variables():
    @fl.workflow
    def one(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        alpha = actor.generate(prompts, n=4, temperature=0.7)
        beta = verifier.score(alpha)
        gamma = fl.advantage.group_relative(beta)
        actor.update(alpha, advantages=gamma, loss=fl.loss.policy_clip(0.2), kl=fl.kl.k3(0))

    assert format_graph(one.trace()) == format_graph(globals()["one"].trace())


def test_graphs_that_say_the_same_compare_equal_whatever_the_order_of_their_edges():
    graph = one.trace()
    other = Graph(
        name=graph.name, level=graph.level, nodes=graph.nodes, edges=tuple(reversed(graph.edges))
    )
    assert other == graph


def test_networkx_form_holds_nodes_and_edges():
    graph = one.trace()
    nx_graph = graph.to_networkx()
    assert set(nx_graph.nodes) == {node.id for node in graph.nodes}
    assert nx_graph.number_of_edges() == len(graph.edges)
    assert nx_graph.nodes["actor.update"]["node"].op is Op.UPDATE
    assert nx_graph.edges["verifier.score", "advantage", "scores"]["edge"].fields == ("score",)


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("nonsense", "line 1", "graph NAME LEVEL"),
        ("graph g odd", "line 1", "traced, lowered, placed"),
        ("graph g traced\n  attr n = 1", "line 2", "a node"),
        ("graph g traced\na = fly", "line 2", "generate"),
        ("graph g traced\na = source\n  attr n = [1]", "line 3", "JSON value"),
        ("graph g traced\na = source\n  attr n = loss:no_such()", "line 3", "FAMILY"),
        ("graph g traced\na = source\n  out x: int64/moons", "line 3", "prompts"),
        ("graph g traced\na = source\n  what", "line 3", "in ARGUMENT"),
    ],
)
def test_text_that_is_no_graph_is_refused_with_its_line(text, where, expected):
    with pytest.raises(GraphError) as caught:
        parse(text)
    assert caught.value.where == where
    assert expected in str(caught.value)


def test_json_of_another_version_is_refused():
    with pytest.raises(GraphError, match="another version"):
        graph_from_json({**graph_to_json(one.trace()), "version": 0})
    with pytest.raises(GraphError, match="JSON form"):
        graph_from_json({"version": 2, "name": "x"})
