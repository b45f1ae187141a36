"""Sets that are made of other sets: rows of prompts, pairs of two sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.cost.demand import samples_per_prompt
from flowrl.errors import FlowError, GraphError, TraceError
from flowrl.graph import graph_from_json, graph_to_json, parse
from flowrl.graph.sample_sets import sampling_nodes
from flowrl.passes import Context, run_passes


def preferring(make: Callable[..., Any]) -> fl.Workflow:
    """A program that learns from the pairs that `make` gives."""

    @fl.workflow
    def program(
        prompts: fl.Prompts,
        others: fl.Prompts,
        *,
        actor: fl.Policy,
        rival: fl.Policy,
        judge: fl.Reward,
    ):
        fl.log("others", judge.score(actor.generate(others, n=1)))  # all data is used
        pairs = make(locals())
        actor.update(pairs, reference=rival.logprobs(pairs), loss=fl.loss.dpo(0.1))

    return program


def solutions(of: dict[str, Any], n: int | None = 3) -> fl.Pairs:
    rollout = of["actor"].generate(of["prompts"], n=n)
    return fl.pair(preferred=fl.Examples.of(of["prompts"]), other=rollout)


def test_pairs_of_solutions_and_answers_are_one_node_of_two_sets():
    graph = lower(preferring(solutions))
    pair = graph.node("pair")
    assert [(e.argument, e.src) for e in graph.in_edges("pair")] == [
        ("preferred", "examples"),
        ("other", "actor.generate.2"),
    ]
    assert [field.name for field in pair.outputs] == ["tokens", "response_mask", "preferred"]
    assert graph.feeding("examples", "prompts").src == "prompts"
    assert sampling_nodes(graph, graph.node("actor.update")) == (
        None,
        graph.node("actor.generate.2"),
    )
    assert str(parse(str(graph))) == str(graph)
    assert graph_from_json(graph_to_json(graph)) == graph
    # Each of the three answers has its pair.
    assert samples_per_prompt(graph, graph.node("actor.update"), group_size=8) == 6


def test_pairs_of_two_rollouts_have_the_logprobs_of_both():
    def both(of: dict[str, Any]) -> fl.Pairs:
        mine, theirs = (of[role].generate(of["prompts"], n=2) for role in ("actor", "rival"))
        return fl.pair(preferred=theirs, other=mine)

    graph = lower(preferring(both))
    assert graph.node("pair").output("rollout_logprobs") is not None
    assert samples_per_prompt(graph, graph.node("pair"), group_size=8) == 4


def itself(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"], n=2)
    return fl.pair(preferred=rollout, other=rollout)


def of_other_prompts(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"], n=2)
    return fl.pair(preferred=fl.Examples.of(of["others"]), other=rollout)


def of_other_sizes(of: dict[str, Any]) -> Any:
    mine, theirs = (of["actor"].generate(of["prompts"], n=n) for n in (2, 3))
    return fl.pair(preferred=mine, other=theirs)


def at_two_temperatures(of: dict[str, Any]) -> Any:
    mine, theirs = (of["actor"].generate(of["prompts"], n=2, temperature=t) for t in (0.5, 1.0))
    return fl.pair(preferred=mine, other=theirs)


def of_pairs(of: dict[str, Any]) -> Any:
    return fl.pair(preferred=fl.Pairs.of(of["prompts"]), other=of["actor"].generate(of["prompts"]))


def of_a_score(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"])
    return fl.pair(preferred=of["judge"].score(rollout), other=rollout)


def by_place(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"])
    return fl.pair(fl.Examples.of(of["prompts"]), rollout)


def of_a_rollout(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"])
    return fl.pair(preferred=fl.Examples.of(rollout), other=rollout)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (itself, GraphError, "fl.select.best_and_worst"),
        (of_other_prompts, GraphError, r"'examples' and 'actor.generate.2' answer others"),
        (of_other_sizes, GraphError, "2 and 3 samples a prompt"),
        (at_two_temperatures, GraphError, "samples of several temperatures"),
        (of_pairs, TraceError, "fl.pair cannot take this 'preferred'"),
        (of_a_score, TraceError, "fl.pair takes samples as 'preferred'"),
        (by_place, TraceError, r"write fl.pair\(preferred=..., other=...\)"),
        (of_a_rollout, TraceError, "fl.Examples.of takes the prompts as 'prompts'"),
    ],
)
def test_sets_that_do_not_make_pairs_are_refused_at_their_line(
    make: Callable[..., Any], error: type[FlowError], says: str
):
    with pytest.raises(error, match=says) as refused:
        lower(preferring(make))
    line = make.__code__.co_firstlineno
    assert refused.value.where is not None
    name, _, number = refused.value.where.rpartition(":")
    assert name.endswith("test_joined_sets.py")
    assert line < int(number) < line + 5


def test_joined_samples_of_a_truncated_rollout_cannot_repeat_its_sampler():
    sampling = fl.Sampling(top_p=0.9, logprobs="sampler")
    able = {role: frozenset({"top_p"}) for role in ("actor", "rival")}

    def truncated(of: dict[str, Any]) -> Any:
        rollout = of["actor"].generate(of["prompts"], sampling=sampling)
        return fl.pair(preferred=fl.Examples.of(of["prompts"]), other=rollout)

    with pytest.raises(GraphError, match="repeat the truncation"):
        run_passes(preferring(truncated).trace(), Context(repeats_truncation=able))


def test_rows_of_prompts_that_nothing_uses_are_refused():
    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        fl.Examples.of(prompts)
        actor.update(rollout, judge.score(rollout))

    with pytest.raises(TraceError, match="nothing uses what examples makes"):
        program.trace()
