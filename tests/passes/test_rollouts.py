"""Who drew the samples that a node reads, and what is done about how they were drawn."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import Graph, Node
from flowrl.graph.sample_sets import sampling_node
from flowrl.passes import Context, run_passes
from flowrl.passes.settle_truncation import changed_options, includes_truncation, neutral_options
from flowrl.specs import Sampling

STALE = Context(max_staleness=1)


@fl.workflow
def two_games(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    rival: fl.Policy,
    game: fl.Environment,
    other: fl.Environment,
    judge: fl.Reward,
):
    drawn = actor.generate(prompts)
    kept, scores = fl.filter.zero_variance(drawn, judge.score(drawn))
    lost, losses = fl.interact(rival, other, prompts)
    episodes, wins = fl.interact(actor, game, prompts)
    actor.update(kept, scores, loss=fl.loss.reinforce())
    actor.update(episodes, wins, loss=fl.loss.reinforce())
    rival.update(lost, losses, loss=fl.loss.reinforce())


@fl.workflow
def examples_alone(pairs: fl.Examples, *, actor: fl.Policy):
    actor.update(pairs)


def test_samples_are_of_the_role_that_drew_them_also_behind_a_filter_and_in_episodes() -> None:
    graph = two_games.trace()
    found = {
        node.id: (drawn.id, drawn.role)
        for node in graph.nodes
        if node.id.startswith(("actor.update", "rival.update", "judge.score"))
        and (drawn := sampling_node(graph, node)) is not None
    }
    drawn, turns, lost = "actor.generate", "actor.generate.2", "rival.generate"
    assert found == {
        "judge.score": (drawn, "actor"),
        "actor.update": (drawn, "actor"),
        "actor.update.2": (turns, "actor"),
        "rival.update": (lost, "rival"),
    }
    episodes, other = (graph.feeding(i, "rollout") for i in ("actor.update.2", "rival.update"))
    assert graph.node(turns).region == graph.node(episodes.src).region
    assert graph.node(lost).region == graph.node(other.src).region
    assert len({graph.node(i).region for i in (drawn, turns, lost)}) == 3


def test_nobody_drew_examples() -> None:
    graph = examples_alone.trace()
    assert sampling_node(graph, graph.node("actor.update")) is None


@pytest.mark.parametrize("update", ["actor.update", "actor.update.2", "rival.update"])
def test_stale_samples_are_refused_of_episodes_as_of_rollouts(update: str) -> None:
    graph = two_games.trace()
    corrected = [
        node.with_attrs(loss=fl.loss.policy_clip())
        if node.id in {"actor.update", "actor.update.2", "rival.update"} - {update}
        else node
        for node in graph.nodes
    ]
    with pytest.raises(GraphError, match="gets samples of policies up to 1 publication old") as e:
        run_passes(graph.with_nodes(corrected), STALE)
    assert e.value.what.startswith("update(loss=reinforce")
    run_passes(graph, Context())


def generating(sampling: Sampling) -> Node:
    return two_games.trace().node("actor.generate").with_attrs(sampling=sampling)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("top_p", 0.9, "top_p=1.0"),
        ("top_k", 5, "top_k=0"),
        ("top_k", 1, "top_k=0"),
        ("min_p", 0.1, "min_p=0.0"),
        ("repetition_penalty", 1.2, "repetition_penalty=1.0"),
        ("repetition_penalty", 0.9, "repetition_penalty=1.0"),
        ("min_tokens", 1, "min_tokens=0"),
    ],
)
def test_each_option_that_changes_the_distribution_is_found(
    name: str, value: float, neutral: str
) -> None:
    changed = changed_options(generating(Sampling(**{name: value})))  # type: ignore[arg-type]
    assert changed == {name: str(value)}
    assert neutral_options(changed) == neutral


def test_temperature_and_length_change_no_distribution_and_a_grammar_does() -> None:
    plain = generating(Sampling(temperature=0.3, max_tokens=7))
    assert changed_options(plain) == {}
    changed = changed_options(plain.with_attrs(grammar=fl.grammar.regex("[0-9]+")))
    assert changed == {"grammar": "regex"}
    assert neutral_options(changed) == "no grammar"


def test_logprobs_are_the_samplers_only_where_the_sampling_says_so() -> None:
    assert includes_truncation(generating(Sampling(logprobs="sampler")))
    assert not includes_truncation(generating(Sampling()))


def sampled(loss: fl.loss.LossSpec, **sampling: object) -> Graph:
    @fl.workflow
    def one(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts, sampling=fl.Sampling(max_tokens=4, **sampling))
        actor.update(rollout, judge.score(rollout), loss=loss)

    return one.trace()


def settled(truncated: str, able: tuple[str, ...] = ("top_p",), **sampling: object) -> object:
    context = Context(truncated=truncated, repeats_truncation={"actor": frozenset(able)})  # type: ignore[arg-type]
    graph = run_passes(sampled(fl.loss.reinforce(), **sampling), context)
    return graph.node("actor.generate").attr("sampling").logprobs


def test_each_way_to_settle_a_truncated_rollout() -> None:
    with pytest.raises(GraphError, match=r"with top_p=0\.9, but its logprobs"):
        settled("refuse", top_p=0.9)
    assert settled("ignore", top_p=0.9) == Sampling().logprobs != "sampler"
    assert settled("repeat", top_p=0.9) == "sampler"
    # What the program asks for holds, whatever the configuration says.
    for truncated in ("refuse", "ignore", "repeat"):
        assert settled(truncated, top_p=0.9, logprobs="sampler") == "sampler"
        with pytest.raises(GraphError, match="cannot include in logprobs"):
            settled(truncated, able=("top_k",), top_p=0.9, logprobs="sampler")
    # Nothing is truncated: there is nothing to settle.
    for truncated in ("refuse", "ignore", "repeat"):
        assert settled(truncated) == Sampling().logprobs
    with pytest.raises(GraphError, match="cannot include in logprobs"):
        settled("repeat", able=(), top_p=0.9)


def test_what_takes_no_sample_for_a_draw_is_not_refused() -> None:
    @fl.workflow
    def imitated(prompts: fl.Prompts, *, actor: fl.Policy):
        rollout = actor.generate(prompts, sampling=fl.Sampling(max_tokens=4, top_p=0.9))
        actor.update(rollout, loss=fl.loss.cross_entropy())

    for truncated in ("refuse", "repeat"):
        graph = run_passes(imitated.trace(), Context(truncated=truncated))  # type: ignore[arg-type]
        assert graph.node("actor.generate").attr("sampling").logprobs == Sampling().logprobs
