"""Drawings are as they were, and hold everything that a person looks for."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

import flowrl as fl
from flowrl.errors import ConfigError
from flowrl.graph import Graph, format_graph, graph_from_json
from flowrl.passes import Context, run_passes
from flowrl.program.registry import load_workflow
from flowrl.user_lines import SourceRef
from flowrl.viz import FORMATS, render
from flowrl.viz.labels import node_notes
from flowrl_graphs.grpo import grpo
from flowrl_graphs.sft import sft
from tests.viz.own_parts import own_parts


def with_short_sources(graph: Graph) -> Graph:
    """Golden files hold no absolute paths and no lines that move with docstrings."""
    return graph.with_nodes(
        replace(node, source=SourceRef(file="grpo.py", line=i + 1))
        for i, node in enumerate(graph.nodes)
    )


@pytest.fixture
def traced() -> Graph:
    return with_short_sources(grpo.trace())


@pytest.fixture
def lowered() -> Graph:
    context = Context(shares_weights={"actor": True})
    return with_short_sources(run_passes(grpo.trace({"kl": 0.001}), context))


@pytest.mark.parametrize("format_", ["tree", "text", "mermaid", "dot"])
def test_drawings_of_the_lowered_graph_are_as_they_were(golden, lowered, format_):
    golden(f"grpo.lowered.{format_}.txt", render(lowered, format_))


def test_the_tree_of_the_traced_graph_is_as_it_was(golden, traced):
    golden("grpo.traced.tree.txt", render(traced))


def test_the_tree_names_every_node_with_its_line(lowered):
    text = render(lowered)
    for node in lowered.nodes:
        assert re.search(rf"{re.escape(node.id)}\b.*{re.escape(str(node.source))}$", text, re.M)


def test_colours_change_nothing_but_colour(lowered):
    coloured = render(lowered, color=True)
    assert "\x1b[" in coloured
    assert "\x1b[" not in render(lowered)
    # What stands under the colour is the same text.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == render(lowered).splitlines()


def test_text_is_the_canonical_form(lowered):
    assert render(lowered, "text") == format_graph(lowered)


def test_json_reads_back(lowered):
    assert graph_from_json(json.loads(render(lowered, "json"))) == lowered


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_ends_in_one_newline(format_):
    text = render(sft.trace(), format_)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_special_characters_do_not_break_the_pictures(traced):
    from flowrl.graph import Node, Op
    from flowrl.ids import NodeId

    odd = Node(id=NodeId('a"b<c>&\\'), op=Op.SOURCE, attrs=(("data", 'x"<y>'),))
    graph = replace(traced, nodes=(odd,), edges=())
    mermaid = render(graph, "mermaid")
    assert 'n0[("<b>a#quot;b#lt;c>#amp;\\</b><br/>a step\'s x#quot;#lt;y>")]' in mermaid
    assert '"a\\"b<c>&\\\\" [id="n0", label=' in render(graph, "dot")


@pytest.fixture
def with_markup(tmp_path) -> Graph:
    """A workflow named `<script>`, in a file whose name is markup."""
    file = tmp_path / "<img src=x onerror=alert(1)>.py"
    file.write_text(
        "import flowrl as fl\n\n\n"
        "@fl.map(reads='score', per_sample=True)\n"
        "def brief(batch):\n"
        "    return batch['score']\n\n\n"
        "@fl.workflow\n"
        "def named(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):\n"
        "    rollout = actor.generate(prompts, n=2)\n"
        "    actor.update(rollout, brief(judge.score(rollout)))\n"
    )
    graph = load_workflow(str(file)).trace()
    assert any("<img src" in note for node in graph.nodes for note in node_notes(graph, node))
    return replace(graph, name='<script>: "#1" \\')


def test_names_of_the_user_are_no_markup_in_mermaid(with_markup):
    text = render(with_markup, "mermaid")
    _, head, picture = text.split("---\n")
    assert yaml.safe_load(head) == {"title": '<script>: "#1" \\ (traced)'}
    assert "<" not in head
    assert set(re.findall(r"<[^>]*>", picture)) <= {"<b>", "</b>", "<br/>"}
    assert "#lt;img src=x onerror=alert(1)>.py:brief" in picture


def test_names_of_the_user_stay_in_their_quotes_in_dot(with_markup):
    lines = render(with_markup, "dot").splitlines()
    assert lines[0] == r'digraph "<script>: \"#1\" \\" {'
    (label,) = (line for line in lines if "<img" in line)
    assert label.count('"') - label.count(r"\"") == 10  # two ids, label and two colours


def test_an_unknown_format_gets_the_nearest_name(traced):
    with pytest.raises(ConfigError) as caught:
        render(traced, "mermade")
    assert "did you mean 'mermaid'?" in str(caught.value)


@fl.workflow
def held(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
    grammar = fl.grammar.regex('a\n"b" <c> #d; & \\\\e')
    rollout = actor.generate(prompts, n=2, grammar=grammar)
    actor.update(rollout, judge.score(rollout))


@pytest.mark.parametrize("format_", ["tree", "mermaid", "dot"])
def test_texts_of_the_program_break_no_line_and_no_label(format_):
    text = render(with_short_sources(held.trace()), format_)
    (line,) = (line for line in text.splitlines() if "regex(" in line)
    if format_ == "tree":
        assert 'pattern=a\\n\\"b\\"' in line
    elif format_ == "mermaid":
        assert line.count('"') == 2
        assert "#35;d; #amp; " in line
    else:
        assert line.endswith("];")


def said_of(node: str, **attrs: object) -> tuple[str, ...]:
    """What drawings say of a node of `own_parts`."""
    graph = own_parts.trace(attrs)  # type: ignore[arg-type]
    return node_notes(graph, graph.node(node))


def test_functions_of_ones_own_are_told_in_words() -> None:
    assert said_of("map") == ("tests.viz.own_parts:brief(scale=0.5), each sample by itself",)
    assert said_of("map.2") == ("tests.viz.own_parts:surprise, gives surprise per token",)
    assert said_of("advantage") == ("tests.viz.own_parts:by_length(power=0.5)",)
    assert said_of("actor.update")[0] == (
        "loss=tests.viz.own_parts:nearby(beta=0.1), sequence-mean-token-mean, corrects for the "
        "behaviour policy"
    )
    # What a log is called stands in its id.
    assert said_of("log.brief") == ()


def test_a_steered_penalty_tells_where_it_is_steered_to() -> None:
    assert said_of("actor.update")[1] == "kl=k3(0.1)"
    assert said_of("actor.update", target=6.0)[1] == "kl=k3(0.1, target=6)"
