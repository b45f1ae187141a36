"""Maps, own advantages and losses, selections, shaping and sums of scores in programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flowrl as fl
from flowrl.errors import FlowError, GraphError, TraceError
from flowrl.graph import Op, format_graph, graph_from_json, graph_to_json, problems, verify
from flowrl.program.workflow import Workflow
from tests.graph_text import parse


@fl.map(reads=("score", "response_mask"), gives="score", per_sample=True)
def brief(batch, *, scale=0.01):
    return batch["score"] - scale * batch.lengths


@fl.map(reads=("score", "score_2"), gives="won/samples")
def duel(batch):
    return batch["score"] > batch["score_2"]


@fl.map(reads="logprobs", gives="surprise/tokens")
def surprise(batch):
    return -batch["logprobs"]


@fl.advantage.own(needs=("mask",))
def by_length(batch, *, power=0.5):
    return batch.scores / np.maximum(batch.mask.sum(1), 1) ** power


@fl.loss.own(needs=("advantages",), extra=("surprise",))
def weighted(logprobs, batch, *, beta=0.1):
    return -logprobs * batch.advantages * batch.extra["surprise"] * beta


def program(body) -> Workflow:
    """A workflow whose update comes after `body(rollout, scores, style, reference)`."""

    @fl.workflow
    def mine(
        prompts: fl.Prompts,
        actor: fl.Policy,
        verifier: fl.Reward,
        style: fl.Reward,
        reference: fl.Policy,
    ):
        rollout = actor.generate(prompts)
        body(actor, rollout, verifier.score(rollout), style, reference)

    return mine


def refusal(body) -> FlowError:
    with pytest.raises(FlowError) as caught:
        program(body).trace()
    return caught.value


def everything(actor, rollout, scores, style, reference):
    total = fl.weighted_sum((scores, 1.0), (style.score(rollout), 0.25))
    total = brief(fl.shaping.soft_overlong(total, rollout, max_tokens=8, buffer=2), rollout)
    rollout, total = fl.filter.difficulty(rollout, total, high=0.9)
    rollout, total = fl.select.top(rollout, total, k=2)
    odd = surprise(reference.logprobs(rollout))
    fl.log("surprise", odd)
    actor.update(
        rollout,
        advantages=by_length(total, rollout, power=1.0),
        loss=weighted(beta=0.5),
        extra=odd,
    )


def test_own_functions_travel_by_name_and_their_options_with_them():
    graph = program(everything).trace()
    maps = [node.attr("spec") for node in graph.of_op(Op.MAP)]
    assert [spec.kind for spec in maps] == ["weighted_sum", "soft_overlong", "own", "own"]
    assert maps[2].function.endswith("test_own_functions:brief")
    assert dict(graph.node("advantage").attr("spec").options) == {"power": 1.0}
    assert dict(graph.node("actor.update").attr("loss").options) == {"beta": 0.5}


def test_text_and_json_of_own_functions_lose_nothing():
    graph = program(everything).trace()
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph


def test_edges_to_a_map_carry_the_fields_that_it_reads():
    graph = program(everything).trace()
    node = graph.of_op(Op.MAP)[2]
    assert [e.fields for e in graph.in_edges(node.id)] == [("score",), ("response_mask",)]
    assert [str(f) for f in graph.of_op(Op.MAP)[3].outputs] == ["surprise: float32/tokens"]


def test_a_key_with_a_number_is_the_field_of_a_later_argument():
    @fl.workflow
    def players(prompts: fl.Prompts, left: fl.Policy, right: fl.Policy, judge: fl.Reward):
        mine, theirs = left.generate(prompts, n=2), right.generate(prompts, n=2)
        scores, others = judge.score(mine), judge.score(theirs)
        fl.log("won", duel(scores, others))
        left.update(mine, scores)
        right.update(theirs, others)

    graph = players.trace()
    assert graph.feeding("map", "input_2").src == "judge.score.2"


def test_samples_of_different_groups_are_not_compared():
    @fl.workflow
    def players(prompts: fl.Prompts, left: fl.Policy, right: fl.Policy, judge: fl.Reward):
        mine, theirs = left.generate(prompts, n=2), right.generate(prompts, n=3)
        scores = judge.score(mine)
        fl.log("won", duel(scores, judge.score(theirs)))
        left.update(mine, scores)

    with pytest.raises(GraphError, match=r"but 'input_2' for the samples of 'right\.generate'"):
        players.trace()


def test_a_map_that_is_given_too_little_or_too_much_says_what_it_reads():
    error = refusal(lambda a, r, s, style, ref: brief(s))
    assert isinstance(error, TraceError)
    assert "brief reads 'response_mask', which none of its arguments gives" in str(error)
    error = refusal(lambda a, r, s, style, ref: surprise(ref.logprobs(r), s))
    assert "surprise reads nothing of the scores of 'verifier.score'" in str(error)


@fl.map(reads=("score", "row.meta.topic", "text", "text_2"), per_sample=True)
def spoken(batch):
    return batch["score"]


def test_maps_read_texts_and_rows_of_the_samples_that_they_are_given():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, reference: fl.Policy):
        rollout, others = actor.generate(prompts), reference.generate(prompts)
        actor.update(rollout, spoken(verifier.score(rollout), rollout, others))

    graph = mine.trace()
    read = [(edge.src, edge.fields) for edge in graph.in_edges("map")]
    assert read == [
        ("verifier.score", ("score",)),
        ("actor.generate", ("row.meta.topic", "text")),
        ("reference.generate", ("text",)),
    ]
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph


@fl.map(reads=("score", "row.topic"))
def by_topic(batch):
    return batch["score"]


def test_a_map_of_rows_that_is_given_no_samples_says_who_has_them():
    error = refusal(lambda a, r, s, style, ref: by_topic(s))
    assert "by_topic reads 'row.topic', which none of its arguments gives" in str(error)
    assert error.hint == "pass the rollout: samples have their texts and their data row"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("answer", 'write "row.answer", if the field of the data row is called so'),
        ("response", 'the text of the response is "text"'),
        ("prompt", 'the text of the prompt is "prompt_text" of the rollout'),
        ("row", 'name the fields of the data row that it reads: reads="row.topic"'),
    ],
)
def test_texts_and_rows_by_other_names_are_told_theirs(key, hint):
    mapped = fl.map(reads=("score", key))(by_topic.__wrapped__)
    assert refusal(lambda a, r, s, style, ref: mapped(s, r)).hint == hint


def test_a_key_of_a_row_is_a_path_and_texts_cannot_be_given():
    with pytest.raises(TraceError, match=r"'row\.a b' is not the key of a field") as caught:
        fl.map(reads="row.a b")
    assert (
        caught.value.hint == "a field of the data row is row.NAME, one inside another row.NAME.NAME"
    )
    with pytest.raises(TraceError, match="cannot give 'text': a map gives numbers"):
        fl.map(reads="score", gives="text/samples")


def test_an_unknown_option_is_told_the_nearest_one():
    assert "scale" in str(refusal(lambda a, r, s, style, ref: brief(s, r, scal=1.0)))


def test_an_edge_that_a_map_does_not_read_is_refused():
    from dataclasses import replace

    graph = program(everything).trace()
    first = graph.of_op(Op.MAP)[2].id
    edges = [
        replace(e, fields=("response_mask", "tokens"))
        if (e.dst, e.argument) == (first, "input_2")
        else e
        for e in graph.edges
    ]
    with pytest.raises(GraphError, match="does not read 'tokens'"):
        verify(replace(graph, edges=tuple(edges)))


def test_a_loss_of_ones_own_gets_the_extra_fields_that_it_names():
    def without(actor, rollout, scores, style, reference):
        actor.update(rollout, advantages=by_length(scores, rollout), loss=weighted)

    assert "needs the field 'surprise' of a map" in str(refusal(without))

    def beside(actor, rollout, scores, style, reference):
        odd = surprise(reference.logprobs(rollout))
        actor.update(rollout, advantages=by_length(scores, rollout), extra=odd)

    # The configured loss reads none; it is known when the graph is lowered.
    from flowrl.passes import Context, run_passes

    with pytest.raises(GraphError, match="does not use its extra field 'surprise'"):
        run_passes(program(beside).trace(), Context())


def test_best_and_worst_make_pairs_for_losses_of_pairs():
    @fl.workflow
    def online_dpo(
        prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, reference: fl.Policy
    ):
        rollout = actor.generate(prompts)
        pairs = fl.select.best_and_worst(rollout, verifier.score(rollout))
        actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.1))

    assert "preferred" in online_dpo.trace().feeding("actor.update", "rollout").fields


def test_weights_of_scores_are_numbers():
    for pairs in ((), ("text",), (1.0,)):
        error = refusal(lambda a, r, s, style, ref, pairs=pairs: fl.weighted_sum(*pairs))
        assert "fl.weighted_sum cannot take this 'scores'" in str(error)


def test_several_rewards_are_normalised_by_themselves():
    def gdpo(actor, rollout, scores, style, reference):
        advantages = fl.advantage.normalise_then_sum((scores, 1.0), (style.score(rollout), 0.5))
        actor.update(rollout, advantages=advantages)

    @fl.workflow
    def two(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, style: fl.Reward):
        rollout = actor.generate(prompts)
        gdpo(actor, rollout, verifier.score(rollout), style, None)

    graph = two.trace()
    assert graph.feeding("advantage", "scores_2").src == "style.score"
    assert graph.node("advantage").attr("spec").weights == (1.0, 0.5)


def test_a_teacher_takes_the_place_of_scores():
    @fl.workflow
    def opd(prompts: fl.Prompts, student: fl.Policy, teacher: fl.Policy):
        rollout = student.generate(prompts)
        advantages = fl.advantage.distill(rollout, teacher=teacher.logprobs(rollout))
        student.update(rollout, advantages=advantages)

    graph = opd.trace()
    assert graph.node("advantage").inputs == ("rollout", "reference")
    assert "rollout_logprobs" in graph.feeding("advantage", "rollout").fields


def test_scores_beside_a_teacher_have_a_weight():
    error = refusal(
        lambda a, r, s, style, ref: fl.advantage.distill(r, teacher=ref.logprobs(r), scores=s)
    )
    assert "a weight above 0 with scores" in str(error)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda s, r: fl.select.top(r, s, k=0), "a whole number from 1 up"),
        (lambda s, r: fl.select.random(r, s, seed=0.5), "a whole number"),
        (lambda s, r: fl.select.threshold(r, s, at_least=float("nan")), "a finite number"),
        (lambda s, r: fl.select.threshold(r, s, at_least="1"), "a finite number"),
        (lambda s, r: fl.filter.difficulty(r, s, low=1.0, high=0.5), "a number below high=0.5"),
        (lambda s, r: fl.filter.difficulty(r, s, low=0.5, high=0.5), "a number below high=0.5"),
        (
            lambda s, r: fl.shaping.soft_overlong(s, r, max_tokens=4, buffer=8),
            "at most max_tokens=4",
        ),
        (lambda s, r: fl.shaping.repetition(s, r, max_penalty=1), "at most 0"),
    ],
)
def test_wrong_options_say_what_would_do(call, expected):
    error = refusal(lambda a, r, s, style, ref: call(s, r))
    assert expected in str(error)


@fl.map(reads=("score", "score_2"), gives="score")
def lead(batch):
    return batch["score"] - batch["score_2"]


@fl.map(reads="prompt", gives="length/samples")
def prompt_length(batch):
    return batch["prompt"]


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({"reads": "score_2"}, "reads 'score_2', but not 'score'"),
        ({"reads": ("score", "score_3")}, "reads 'score_3', but not 'score_2'"),
        ({"reads": ("x", "score_2")}, "reads 'score_2', but not 'score'"),
        ({"reads": (3,)}, "3 is not the key of a field"),
        ({"reads": "score", "gives": ("a/samples", "a/tokens")}, "gives 'a' twice"),
        ({"reads": "score", "gives": "score: int64/samples"}, "cannot give 'score' as int64/samp"),
        ({"reads": "score", "gives": "score/tokens"}, "cannot give 'score' as float32/tokens"),
        ({"reads": "score", "gives": "advantage: bool/tokens"}, "cannot give 'advantage'"),
        ({"reads": "score", "gives": "token_reward/samples"}, "cannot give 'token_reward'"),
    ],
)
def test_a_map_whose_declaration_makes_no_sense_is_refused_where_it_stands(declared, what):
    with pytest.raises(TraceError) as caught:
        fl.map(**declared)
    assert what in caught.value.what
    assert "test_own_functions.py" in caught.value.where


def test_a_map_may_give_advantages_of_tokens():
    made = fl.map(reads="logprobs", gives="advantage/tokens")
    assert callable(made)


def test_keys_of_one_field_are_of_its_arguments_in_order():
    def body(actor, rollout, scores, style, reference):
        actor.update(rollout, lead(scores, style.score(rollout)))

    graph = program(body).trace()
    assert [edge.src for edge in graph.in_edges("map")] == ["verifier.score", "style.score"]


def test_a_map_computes_with_no_prompts():
    @fl.workflow
    def lengths(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
        fl.log("length", prompt_length(prompts))
        rollout = actor.generate(prompts)
        actor.update(rollout, verifier.score(rollout))

    with pytest.raises(TraceError, match="reads 'prompt' of the prompts, which is one of prompts"):
        lengths.trace()


def test_an_option_is_of_the_sort_of_its_default():
    def wrong(value):
        def body(actor, rollout, scores, style, reference):
            actor.update(rollout, brief(scores, rollout, scale=value))

        return body

    for value in ("a lot", True):
        error = refusal(wrong(value))
        assert error.what == "option 'scale' of brief is a number"
        assert repr(value) in error.found
    program(wrong(2)).trace()


def test_weights_of_scores_are_finite_numbers():
    def wrong(weight):
        return lambda actor, rollout, scores, *_: actor.update(
            rollout, fl.weighted_sum((scores, weight))
        )

    for weight in (float("inf"), float("nan"), "1", True, None):
        assert "pairs of scores and weight" in refusal(wrong(weight)).expected
    program(wrong(-1)).trace()  # a penalty


def test_extra_fields_may_come_as_a_list():
    def body(actor, rollout, scores, style, reference):
        odd = surprise(reference.logprobs(rollout))
        actor.update(rollout, scores, loss=weighted, extra=[odd])

    assert program(body).trace().feeding("actor.update", "extra").fields == ("surprise",)


def test_a_graph_cannot_log_or_map_what_is_no_number_of_samples_or_tokens():
    def body(actor, rollout, scores, style, reference):
        fl.log("score", scores)
        actor.update(rollout, duel_scores(scores, style.score(rollout)))

    graph = program(body).trace()
    for reader in ("log.score", "map"):
        edges = tuple(
            replace(e, src="prompts", fields=("prompt",)) if e.dst == reader else e
            for e in graph.edges
        )
        found = [error.what for error in problems(replace(graph, edges=edges))]
        assert any(f"{reader} cannot compute with 'prompt'" in what for what in found), found


@fl.map(reads=("score", "score_2"), gives="score")
def duel_scores(batch):
    return batch["score"] - batch["score_2"]
