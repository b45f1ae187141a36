"""Sets that are made of other sets: rows of prompts, pairs of two sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.cost.demand import samples_per_prompt
from flowrl.errors import FlowError, GraphError, TraceError
from flowrl.graph import graph_from_json, graph_to_json
from flowrl.graph.sample_sets import sampling_nodes
from flowrl.passes import Context, run_passes
from flowrl.specs import RowCondition
from tests.graph_text import parse


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


def test_a_sample_is_paired_with_what_it_comes_of_without_the_logprobs_of_another_prompt():
    def revised(of: dict[str, Any]) -> fl.Pairs:
        draft = of["actor"].generate(of["prompts"], n=2)
        critique = of["rival"].generate(fl.prompts_of(draft, template="{prompt}{response}="), n=3)
        asked = fl.prompts_of(critique, template="{prompt}{response}+")
        return fl.pair(preferred=of["actor"].generate(asked, n=1), other=draft)

    graph = lower(preferring(revised))
    assert graph.node("pair").output("rollout_logprobs") is None
    assert samples_per_prompt(graph, graph.node("pair"), group_size=8) == 2 * 2 * 3


def to_a_prompt_without_theirs(of: dict[str, Any]) -> Any:
    draft = of["actor"].generate(of["prompts"], n=2)
    revision = of["actor"].generate(fl.prompts_of(draft, template="{response}+"), n=1)
    return fl.pair(preferred=revision, other=draft)


def from_a_cut(of: dict[str, Any]) -> Any:
    trunk = of["actor"].generate(of["prompts"], n=2)
    branches = of["actor"].generate(fl.prompts_of(trunk, cut=fl.cut.share(0.5)), n=2)
    return fl.pair(preferred=trunk, other=branches)


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
        (to_a_prompt_without_theirs, GraphError, "a prompt that they were not shown"),
        (from_a_cut, GraphError, "its continuation from a cut"),
        (of_pairs, TraceError, "fl.pair cannot take this 'preferred'"),
        (of_a_score, TraceError, "fl.pair takes samples as 'preferred'"),
        (by_place, TraceError, "arguments preferred, other"),
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


# Parts of sets by row, and sets one behind the other.


def mixing(make: Callable[..., Any], loss: Any = None) -> fl.Workflow:
    """A program that learns from the samples and scores that `make` gives."""

    @fl.workflow
    def program(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward, game: fl.Environment):
        rollout, scores = make(locals())
        actor.update(rollout, scores, loss=loss or fl.loss.policy_clip(0.2))

    return program


def demonstrations(of: dict[str, Any], **options: Any) -> Any:
    rollout, solutions = of["actor"].generate(of["prompts"], n=3), fl.Examples.of(of["prompts"])
    scores = of["judge"].score(rollout), of["judge"].score(solutions)
    return fl.concat((rollout, scores[0]), (solutions, scores[1]), **options)


def by_topic(of: dict[str, Any]) -> Any:
    sums = fl.where(of["prompts"], row="meta.topic", equals="sums")
    games = fl.where(of["prompts"], row="meta.topic", none_of=["sums", 3, True])
    rollout = of["actor"].generate(sums, n=2)
    episodes = fl.interact(of["actor"], of["game"], games, n=4)
    return fl.concat((rollout, of["judge"].score(rollout)), episodes)


@pytest.mark.parametrize("make", [by_topic, lambda of: demonstrations(of, missing_logprob=0.0)])
def test_splits_and_joins_are_written_and_read(make: Callable[..., Any]):
    for graph in (mixing(make).trace(), lower(mixing(make))):
        assert str(parse(str(graph))) == str(graph)
        assert graph_from_json(graph_to_json(graph)) == graph


def test_a_split_gives_prompts_and_a_join_says_where_each_sample_is_from():
    graph = lower(mixing(by_topic))
    assert str(graph.node("where").attr("spec")) == 'row(field="meta.topic", values="[\\"sums\\"]")'
    rest = graph.node("where.2").attr("spec")
    assert [rest.accepts(value) for value in ("sums", "chess", 3, 1, True)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    outputs = [field.name for field in graph.node("concat").outputs]
    assert outputs == [
        *("tokens", "response_mask", "rollout_logprobs", "turn", "token_reward", "state"),
        *("source", "score"),
    ]
    # A prompt is of one of the topics, and a step's prompts may all be of the larger one: a bound.
    assert samples_per_prompt(graph, graph.node("actor.update"), group_size=8) == 4


def test_demonstrations_have_a_logprob_only_where_the_program_says_so():
    with pytest.raises(GraphError, match="needs 'rollout_logprobs'") as refused:
        mixing(demonstrations).trace()
    assert refused.value.hint is not None
    assert "missing_logprob=0.0" in refused.value.hint
    graph = lower(mixing(lambda of: demonstrations(of, missing_logprob=0.0)))
    assert graph.node("concat").attr("missing_logprob") == 0.0
    assert graph.node("actor.update").attr("behaviour_logprobs") == "rollout_logprobs"
    # Without a loss that reads them they are samples to imitate.
    imitated = lower(mixing(lambda of: demonstrations(of), loss=fl.loss.reinforce()))
    assert imitated.node("concat").output("rollout_logprobs") is None


def test_stale_samples_among_the_joined_ones_need_a_loss_that_corrects():
    stale = mixing(lambda of: demonstrations(of, missing_logprob=0.0), fl.loss.reinforce())
    with pytest.raises(GraphError, match="up to 2 publications old"):
        run_passes(stale.trace(), Context(max_staleness=2))


def with_scores_of_others(of: dict[str, Any]) -> Any:
    first, second = (of["actor"].generate(of["prompts"], n=2) for _ in range(2))
    scores = of["judge"].score(first)
    return fl.concat((first, scores), (second, scores))


def twice(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"], n=2)
    scores = of["judge"].score(rollout)
    return fl.concat((rollout, scores), (rollout, scores))


def one_alone(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"], n=2)
    return fl.concat((rollout, of["judge"].score(rollout)), rollout)


def of_nothing(of: dict[str, Any]) -> Any:
    return fl.concat()


def without_scores(of: dict[str, Any]) -> Any:
    rollout, solutions = of["actor"].generate(of["prompts"], n=2), fl.Examples.of(of["prompts"])
    return fl.concat((rollout, of["judge"].score(rollout)), (solutions,))


def needless(of: dict[str, Any]) -> Any:
    rollouts = [of["actor"].generate(of["prompts"], n=2) for _ in range(2)]
    return fl.concat(*((r, of["judge"].score(r)) for r in rollouts), missing_logprob=0.0)


def without_a_condition(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(fl.where(of["prompts"], row="topic"))
    return rollout, of["judge"].score(rollout)


def with_two_conditions(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(fl.where(of["prompts"], row="topic", equals=1, none_of=[2]))
    return rollout, of["judge"].score(rollout)


def by_a_handle(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"])
    scores = of["judge"].score(rollout)
    return fl.where((rollout, scores), row="topic", equals=scores)


def before_and_after(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(of["prompts"])
    return fl.where(rollout, row="topic", equals="sums"), of["judge"].score(rollout)


def of_no_row(of: dict[str, Any]) -> Any:
    rollout = of["actor"].generate(fl.where(of["prompts"], row="topic", equals="sums"))
    return fl.where((rollout, of["judge"].score(rollout)), row="topic", none_of=["sums", "games"])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (of_no_row, GraphError, r"keeps no row: it splits rows with topic='sums'"),
        (with_scores_of_others, GraphError, "with scores of the samples of 'actor.generate'"),
        (twice, GraphError, "gets the samples of 'actor.generate' twice"),
        (one_alone, TraceError, "either all alone or all with their values"),
        (of_nothing, TraceError, "one or more sets"),
        (without_scores, TraceError, "the same kinds of values"),
        (needless, GraphError, "every set has the logprobs"),
        (without_a_condition, TraceError, "one of equals=, one_of= and none_of="),
        (with_two_conditions, TraceError, "found: equals= and none_of="),
        (by_a_handle, TraceError, "fl.where cannot take this 'equals'"),
        (before_and_after, GraphError, "use what an operation returned"),
    ],
)
def test_splits_and_joins_without_a_meaning_are_refused(
    make: Callable[..., Any], error: type[FlowError], says: str
):
    with pytest.raises(error, match=says):
        mixing(make).trace()


def test_parts_that_share_no_row_are_counted_once_in_a_plan():
    conditions = [
        RowCondition.of("topic", values, excluded=excluded)
        for values, excluded in ((["a"], False), (["b", 1], False), (["a", "b", 1], True))
    ]
    first, second, rest = conditions
    assert first.excludes(second)
    assert rest.excludes(first)
    assert second.excludes(rest)
    assert not rest.excludes(rest)
    assert not RowCondition.of("topic", ["c"], excluded=False).excludes(rest)
    assert RowCondition.of("topic", [True], excluded=False).excludes(second)
