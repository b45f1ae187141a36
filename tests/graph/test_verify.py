"""The verifier finds what is wrong with a graph, and says where."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.errors import GraphError
from flowrl.graph import Edge, Graph, Level, Op, Unit, problems, verify
from flowrl.passes import Context, run_passes
from flowrl.specs import CrossEntropy, PolicyClip
from flowrl.specs.loss import policy_clip, truncate, value_clip


@fl.workflow
def good(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, reference: fl.Policy):
    rollout = actor.generate(prompts, n=4)
    scores = verifier.score(rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    adv = fl.advantage.group_relative(scores)
    ref = reference.logprobs(rollout)
    actor.update(rollout, advantages=adv, reference=ref, loss=fl.loss.policy_clip(), kl=fl.kl.k3(1))


@pytest.fixture
def graph() -> Graph:
    return good.trace()


def refused(graph: Graph) -> GraphError:
    with pytest.raises(GraphError) as caught:
        verify(graph)
    return caught.value


def without_edge(graph: Graph, dst: str, argument: str) -> Graph:
    node = graph.node(dst)
    node = replace(node, inputs=tuple(name for name in node.inputs if name != argument))
    edges = tuple(e for e in graph.edges if (e.dst, e.argument) != (dst, argument))
    return replace(graph.replacing(node), edges=edges)


def changed_edge(graph: Graph, dst: str, argument: str, **changes: object) -> Graph:
    edges = tuple(
        replace(e, **changes) if (e.dst, e.argument) == (dst, argument) else e for e in graph.edges
    )
    return replace(graph, edges=edges)


def line_of(graph: Graph, node: str) -> str:
    return f"test_verify.py:{graph.node(node).source.line}"


def test_a_sound_graph_has_no_problems_at_either_level(graph):
    assert list(problems(graph)) == []
    lowered = run_passes(graph, Context())
    assert lowered.level is Level.LOWERED
    assert list(problems(lowered)) == []


def test_duplicate_ids_are_refused(graph):
    error = refused(graph.with_nodes((*graph.nodes, graph.node("advantage"))))
    assert "two nodes have the id 'advantage'" in str(error)


def test_reading_what_is_not_there_is_refused(graph):
    error = refused(changed_edge(graph, "advantage", "scores", src="nowhere"))
    assert "'nowhere', which is not a node" in str(error)
    assert error.where.endswith(line_of(graph, "advantage"))


def test_an_edge_to_nowhere_is_refused(graph):
    extra = Edge(src="filter", dst="nowhere", argument="scores", fields=("score",))
    error = refused(replace(graph, edges=(*graph.edges, extra)))
    assert "an edge leads to 'nowhere', which is not a node" in str(error)


def test_a_cycle_is_refused_and_named(graph):
    error = refused(changed_edge(graph, "verifier.score", "rollout", src="filter"))
    assert "cycle" in str(error)
    assert set(error.found.split(" -> ")) == {"verifier.score", "filter"}


def test_nodes_in_the_wrong_order_are_refused(graph):
    error = refused(graph.with_nodes(reversed(graph.nodes)))
    assert "comes before" in str(error)


def test_an_argument_that_nothing_feeds_is_refused(graph):
    edges = tuple(e for e in graph.edges if e.dst != "advantage")
    assert "nothing feeds argument 'scores'" in str(refused(replace(graph, edges=edges)))
    error = refused(without_edge(graph, "advantage", "scores"))
    assert "advantage group_relative needs 'scores'" in str(error)


def test_an_update_that_nobody_feeds_is_refused(graph):
    error = refused(without_edge(graph, "actor.update", "rollout"))
    assert "actor.update needs 'rollout'" in str(error)
    assert error.where.endswith(line_of(graph, "actor.update"))


def test_two_edges_to_one_argument_are_refused(graph):
    extra = Edge(src="verifier.score", dst="advantage", argument="scores", fields=("score",))
    error = refused(replace(graph, edges=(*graph.edges, extra)))
    assert "several edges feed argument 'scores'" in str(error)


def test_an_unknown_argument_is_refused(graph):
    node = graph.node("advantage")
    extra = Edge(src="verifier.score", dst="advantage", argument="moon", fields=("score",))
    broken = graph.replacing(replace(node, inputs=(*node.inputs, "moon")))
    error = refused(replace(broken, edges=(*graph.edges, extra)))
    assert "has no argument 'moon'" in str(error)


def test_kl_without_reference_is_told_as_the_user_wrote_it(graph):
    error = refused(without_edge(graph, "actor.update", "reference"))
    first, _ = str(error).splitlines()
    assert f"{line_of(graph, 'actor.update')}: update(kl=k3) needs 'reference' logprobs" in first
    assert first.endswith("'rollout' gives tokens, response_mask, rollout_logprobs, score")
    assert "reference=reference.logprobs(rollout)" in error.hint


def test_reference_without_kl_is_refused(graph):
    node = graph.node("actor.update").with_attrs(kl=None)
    assert "no KL penalty uses them" in str(refused(graph.replacing(node)))


def test_a_missing_field_names_what_is_there(graph):
    error = refused(changed_edge(graph, "actor.update", "rollout", fields=("tokens",)))
    assert "needs 'response_mask' per token as 'rollout', but 'filter' gives tokens" in str(error)
    error = refused(
        changed_edge(graph, "actor.update", "rollout", fields=("tokens", "response_mask"))
    )
    assert "policy_clip) needs 'rollout_logprobs'" in str(error)


def test_a_field_that_the_source_does_not_make_is_refused(graph):
    error = refused(changed_edge(graph, "advantage", "scores", fields=("score", "moon")))
    assert "reads 'moon' of filter, which does not produce it" in str(error)


def test_a_field_that_the_argument_does_not_take_is_refused(graph):
    error = refused(changed_edge(graph, "advantage", "scores", fields=("score", "tokens")))
    assert "does not take 'tokens'" in str(error)


def test_a_unit_mismatch_names_both_units(graph):
    filtered = graph.node("filter")
    outputs = tuple(
        replace(f, unit=Unit.TOKENS) if f.name == "score" else f for f in filtered.outputs
    )
    error = refused(graph.replacing(replace(filtered, outputs=outputs)))
    assert "needs 'score' per sample (float32), but 'filter' gives it per token" in str(error)


def test_outputs_that_the_operation_does_not_make_are_refused(graph):
    node = graph.node("verifier.score")
    assert "does not produce" in str(refused(graph.replacing(replace(node, outputs=()))))
    filtered = graph.node("filter")
    extra = replace(filtered.outputs[0], name="moon")
    broken = graph.replacing(replace(filtered, outputs=(*filtered.outputs, extra)))
    assert "passes on 'moon'" in str(refused(broken))


def test_attributes_are_checked_by_name_type_and_presence(graph):
    node = graph.node("actor.generate")
    assert "no attribute 'm'" in str(refused(graph.replacing(node.with_attrs(m=1))))
    assert "wrong type" in str(refused(graph.replacing(node.with_attrs(n=True))))
    assert "wrong type" in str(refused(graph.replacing(node.with_attrs(n=PolicyClip()))))
    bare = graph.node("advantage").without_attrs("spec")
    assert "'spec' of advantage is not filled" in str(refused(graph.replacing(bare)))
    assert "unknown kind of data" in str(
        refused(graph.replacing(graph.node("prompts").with_attrs(data="moons")))
    )


def test_roles_are_where_they_belong(graph):
    assert "needs a role" in str(
        refused(graph.replacing(replace(graph.node("actor.generate"), role=None)))
    )
    assert "performed by no role" in str(
        refused(graph.replacing(replace(graph.node("advantage"), role="actor")))
    )


def test_mixing_samples_from_before_and_after_a_filter_is_refused(graph):
    error = refused(changed_edge(graph, "reference.logprobs", "rollout", src="actor.generate"))
    assert (
        "gets 'rollout' for the samples of 'filter', but 'reference' for the samples of "
        "'actor.generate'" in str(error)
    )


def test_a_loss_that_cannot_use_its_advantages_is_refused(graph):
    node = graph.node("actor.update").with_attrs(loss=CrossEntropy())
    assert "does not use its advantages" in str(refused(graph.replacing(node)))


def test_a_policy_loss_without_advantages_is_refused(graph):
    error = refused(without_edge(graph, "actor.update", "advantages"))
    assert "needs 'rewards' or 'advantages'" in str(error)


def test_a_lowered_update_says_where_its_old_logprobs_come_from(graph):
    loss = policy_clip(0.2, anchor="old", correction=truncate(2.0))
    update = graph.node("actor.update").with_attrs(loss=loss)
    said = [str(p) for p in problems(replace(graph.replacing(update), level=Level.LOWERED))]
    assert any("where actor.update takes its old logprobs from" in text for text in said)
    fed = update.with_attrs(old_logprobs="forward")
    said = [str(p) for p in problems(replace(graph.replacing(fed), level=Level.LOWERED))]
    assert any("old_logprobs=forward of actor.update does not fit" in text for text in said)


def test_a_loss_of_a_critic_needs_what_a_critic_gives(graph):
    said = str(refused(graph.replacing(graph.node("actor.update").with_attrs(loss=value_clip()))))
    assert "update(loss=value_clip) needs 'returns'" in said


def test_a_graph_without_updates_logs_and_samples_is_refused(graph):
    nodes = tuple(node for node in graph.nodes if node.op is Op.SOURCE)
    assert "does nothing" in str(refused(replace(graph, nodes=nodes, edges=())))


def test_an_operation_without_signature_is_refused(graph):
    node = replace(graph.node("advantage"), op="nonsense")
    assert "'nonsense' cannot be compiled" in str(refused(graph.replacing(node)))


def test_a_traced_graph_is_not_a_lowered_one(graph):
    said = [str(problem) for problem in problems(replace(graph, level=Level.LOWERED))]
    assert any("'sampling' of actor.generate is not filled" in text for text in said)
    assert any("behaviour logprobs" in text for text in said)
    assert any("weights of actor.update never reach actor.generate" in text for text in said)


def test_a_value_of_the_step_before_is_taken_only_where_it_belongs(graph):
    error = refused(changed_edge(graph, "advantage", "scores", carried=True))
    assert "takes a value of the same step" in str(error)


@pytest.mark.parametrize("weights", ["rewards", "advantages"])
@pytest.mark.parametrize("loss", [None, CrossEntropy()])
def test_examples_that_are_imitated_are_not_weighed(weights, loss):
    @fl.workflow
    def program(examples: fl.Examples, actor: fl.Policy, judge: fl.Reward):
        scores = judge.score(examples)
        made = scores if weights == "rewards" else fl.advantage.group_relative(scores)
        actor.update(examples, **{weights: made}, loss=loss)

    with pytest.raises(GraphError, match=f"does not use its {weights}") as caught:
        program.trace()
    assert f"leave {weights} out" in caught.value.hint
