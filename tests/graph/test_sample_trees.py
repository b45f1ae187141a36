"""Rollouts from rollouts: what a program that makes prompts of samples leaves, and its misuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.cost.demand import samples_per_prompt
from flowrl.errors import GraphError, TraceError
from flowrl.graph import Op, graph_from_json, graph_to_json, sample_sets
from flowrl.graph.ir import format_graph
from flowrl.graph.sample_sets import parents_of
from flowrl.graph.sample_trees import data_prompts
from flowrl.specs.prompts import PromptTemplate
from tests.graph_text import parse

CRITIQUE = "{prompt}{response}\nCritique:"


@fl.map(reads=("score",), gives="long/tokens")
def long(batch):
    return batch["score"]


@fl.map(reads=("score",), gives="right: bool/samples")
def right(batch):
    return batch["score"] > 0


@fl.workflow
def refine(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Policy, verifier: fl.Reward):
    draft = actor.generate(prompts, n=4)
    critique = critic.generate(fl.prompts_of(draft, template=CRITIQUE), n=2)
    revision = actor.generate(
        fl.prompts_of(critique, template="{prompt}{response}\nIn {row.unit}:"), n=1
    )
    advantages = fl.advantage.group_relative(fl.mean_of_children(verifier.score(revision)))
    critic.update(critique, advantages=advantages)
    actor.update(revision, advantages=fl.parent(advantages, of=revision))


def test_each_rollout_knows_its_parents_and_the_data_of_its_chain():
    graph = refine.trace()
    draft, critique, revision = graph.of_op(Op.GENERATE)
    assert parents_of(graph, draft) is None
    assert parents_of(graph, critique) == draft
    assert parents_of(graph, revision) == critique
    assert data_prompts(graph, revision) == graph.node("prompts")
    made = sample_sets(graph)
    assert made["mean_of_children"] == made["advantage"] == critique.id
    assert made["parent"] == revision.id
    assert [samples_per_prompt(graph, n, 9) for n in (draft, critique, revision)] == [4, 8, 8]


def test_the_graph_reads_back_from_text_and_json_also_when_it_is_lowered():
    for graph in (refine.trace(), lower(refine)):
        assert graph_from_json(graph_to_json(graph)) == graph
        assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert '  attr spec = prompts_of:template(text="{prompt}{response}\\nCritique:")' in str(graph)


def test_a_template_is_read_as_texts_and_names():
    spec = PromptTemplate(text="{prompt}a {{b}} {response}{answer}\n{row.two words}")
    assert spec.pieces == (
        *("", "prompt", "a {b} ", "response", "", "answer", "\n", "row.two words", ""),
    )
    assert spec.begins_with_prompt


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("Say it again:", "the {response} of each sample"),
        ("{prompt}", "the {response} of each sample"),
        ("{response}{prompt}", "{prompt} at its beginning only"),
        ("{prompt}{prompt}{response}", "{prompt} at its beginning only"),
        ("{prompt}{response}{question}", "{row.FIELD}"),
        ("{prompt}{response} {", "{{ and }} for braces"),
        ("{prompt}{response}{row.}", "{row.FIELD}"),
        (None, "a string"),
    ],
)
def test_a_template_that_is_none_is_refused_at_its_line(template, expected):
    with pytest.raises(TraceError) as caught:
        program(lambda of: fl.prompts_of(of["draft"], template=template)).trace()
    assert "fl.prompts_of cannot take this 'template'" in caught.value.what
    assert expected in str(caught.value.expected)


def program(use: Callable[[dict[str, Any]], Any]) -> fl.Workflow:
    """A program that makes critiques of drafts, and does something with them."""

    @fl.workflow
    def made(
        prompts: fl.Prompts,
        examples: fl.Examples,
        *,
        actor: fl.Policy,
        critic: fl.Policy,
        judge: fl.Reward,
        scorer: fl.RewardModel,
        game: fl.Environment,
    ):
        actor.update(examples)
        draft = critic.generate(prompts, n=4)
        draft_scores = judge.score(draft)
        critique = critic.generate(fl.prompts_of(draft, template=CRITIQUE), n=2)
        scores = judge.score(critique)
        fl.log("models", scorer.score(critique))
        fl.log("drafts", draft_scores)
        use(locals())

    return made


def test_values_go_from_parents_to_their_children_and_back():
    def use(of: dict[str, Any]) -> None:
        critique, scores = fl.filter.zero_variance(of["critique"], of["scores"])
        back = fl.parent(fl.mean_of_children(of["scores"]), of=critique)
        fl.log("both", fl.weighted_sum((scores, 1.0), (back, 1.0)))
        good, _ = fl.filter.zero_variance(of["draft"], of["draft_scores"])
        deeper = of["critic"].generate(fl.prompts_of(good, template=CRITIQUE))
        fl.log("deeper", fl.parent(of["draft_scores"], of=deeper))

    graph = lower(program(use))
    made = sample_sets(graph)
    assert made["parent"] == "filter"
    assert made["parent.2"] == "critic.generate.3"


MISUSES = {
    "episodes": (
        lambda of: fl.prompts_of(
            fl.interact(of["critic"], of["game"], of["prompts"])[0], template=CRITIQUE
        ),
        "a rollout of plain responses",
    ),
    "examples": (
        lambda of: fl.prompts_of(of["examples"], template=CRITIQUE),
        "fl.Rollout",
    ),
    "of a selection": (
        lambda of: answer(of, fl.select.top(of["draft"], of["draft_scores"])[0]),
        "make prompts of all samples",
    ),
    "of a late filter": (
        lambda of: answer(
            of, fl.filter.zero_variance(of["draft"], of["scorer"].score(of["draft"]))[0]
        ),
        "make prompts of all samples",
    ),
    "of a part": (
        lambda of: answer(of, fl.where(of["draft"], row="topic", equals="sums")),
        "split the prompts: actor.generate(fl.where(prompts, row=..., equals=...))",
    ),
    "of joined sets": (
        lambda of: answer(of, fl.concat(of["draft"], of["critic"].generate(of["prompts"], n=4))),
        "the samples of a policy's generate",
    ),
    "played": (
        lambda of: fl.log(
            "played",
            fl.interact(of["critic"], of["game"], fl.prompts_of(of["draft"], template=CRITIQUE))[1],
        ),
        "the prompts of the data",
    ),
    "no children": (
        lambda of: fl.log("mean", fl.mean_of_children(of["draft_scores"])),
        "answer the prompts of fl.prompts_of",
    ),
    "no parents": (
        lambda of: fl.log("parent", fl.parent(of["draft_scores"], of=of["draft"])),
        "pass of= what was generated for fl.prompts_of",
    ),
    "own values": (
        lambda of: fl.log("parent", fl.parent(of["scores"], of=of["critique"])),
        "pass values of 'critic.generate'",
    ),
    "some parents": (
        lambda of: fl.log(
            "parent",
            fl.parent(
                fl.filter.zero_variance(of["draft"], of["draft_scores"])[1], of=of["critique"]
            ),
        ),
        "of all of them",
    ),
    "values of children for parents": (
        lambda of: answer(of, fl.select.top(of["draft"], of["scores"])[0]),
        "fl.mean_of_children",
    ),
    "values of children for grandparents": (
        lambda of: answer(
            of,
            fl.select.top(of["draft"], of["judge"].score(generated(of, of["critique"])))[0],
        ),
        "fl.mean_of_children",
    ),
    "values of parents for children": (
        lambda of: answer(of, fl.select.top(of["critique"], of["draft_scores"])[0]),
        "fl.parent",
    ),
    "lengths of children for parents": (
        lambda of: fl.log(
            "long", fl.shaping.soft_overlong(of["scores"], of["draft"], max_tokens=8, buffer=4)
        ),
        "fl.mean_of_children",
    ),
    "children that state a number": (
        lambda of: fl.log(
            "mean", fl.mean_of_children(fl.select.parsed(of["critique"], regex="[0-9]")[1])
        ),
        "take the mean before the filter",
    ),
    "some children": (
        lambda of: fl.log(
            "mean",
            fl.mean_of_children(fl.filter.zero_variance(of["critique"], of["scores"])[1]),
        ),
        "take the mean before the filter",
    ),
    "grandparents": (
        lambda of: fl.log("far", fl.parent(of["draft_scores"], of=generated(of, of["critique"]))),
        "step by step",
    ),
    "tokens": (
        lambda of: fl.log("long", fl.parent(long(of["draft_scores"]), of=of["critique"])),
        "one value a sample",
    ),
    "the rollout": (
        lambda of: fl.log("rollout", fl.parent(of["draft"], of=of["critique"])),
        "scores, advantages, or what a map gave",
    ),
    "truths": (
        lambda of: fl.log("right", fl.mean_of_children(right(of["scores"]))),
        "float32",
    ),
    "children together with parents": (
        lambda of: fl.log("sum", fl.weighted_sum((of["draft_scores"], 1.0), (of["scores"], 1.0))),
        "fl.mean_of_children",
    ),
}


def generated(of: dict[str, Any], rollout: Any) -> Any:
    return of["critic"].generate(fl.prompts_of(rollout, template=CRITIQUE), n=2)


def answer(of: dict[str, Any], rollout: Any) -> None:
    fl.log("answer", of["judge"].score(generated(of, rollout)))


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_refused_at_the_line_with_the_way_out(name):
    use, way_out = MISUSES[name]
    with pytest.raises((TraceError, GraphError)) as caught:
        lower(program(use))
    assert way_out in f"{caught.value.expected} {caught.value.hint}"
    assert f"{__file__.rpartition('/')[2]}:" in str(caught.value.where)
