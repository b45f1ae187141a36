"""Conditions between the arguments of nodes that split, join and hold sets of samples."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import GraphError
from flowrl.graph.ir import Graph, Level, Node, Op, node_error
from flowrl.graph.sample_sets import parents_of, replay_before, sample_edges, sampling_nodes
from flowrl.graph.signatures import ROLLOUT_LOGPROBS
from flowrl.specs import RowCondition, Sampling


def check_join(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that logprobs of all samples of a set are computed in one way."""
    samplers = [g for g in sampling_nodes(graph, node) if g is not None]
    drawn = [(g, s) for g in samplers if isinstance(s := g.attr("sampling"), Sampling)]
    if graph.level is Level.TRACED or not drawn:
        return
    # Logprobs of a greedy rollout are those at temperature 1.
    temperatures = {s.temperature or 1.0 for _, s in drawn}
    if len(temperatures) > 1:
        yield node_error(
            node,
            f"{node.id} joins samples of several temperatures, and a model reads a set at one",
            found=", ".join(f"{g.id} at {s.temperature:g}" for g, s in drawn),
            hint="generate them at one temperature, or update with each set by itself",
        )
    for generate, sampling in drawn:
        if sampling.logprobs == "sampler":
            yield node_error(
                node,
                f"{node.id} joins the samples of {generate.id}, whose logprobs repeat the "
                "truncation of its sampling, with others",
                hint="generate without top_p, top_k, min_p and penalties, or set "
                "train.truncated=ignore",
            )


def check_concat(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that sets are joined that need it, with the logprobs that they lack."""
    yield from check_join(graph, node)
    edges = sample_edges(graph, node)
    sampled = [edge for edge in edges if ROLLOUT_LOGPROBS.name in edge.fields]
    if not edges:
        yield node_error(node, f"{node.id} joins no sets", expected="one or more")
    if node.attr("missing_logprob") is not None and len(sampled) in (0, len(edges)):
        which = "every" if sampled else "no"
        yield node_error(
            node,
            f"{node.id} gets missing_logprob=, and {which} set has the logprobs of its tokens",
            hint="leave missing_logprob out",
        )


def check_where(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that prompts of the data are split, or samples."""
    if ("prompts" in node.inputs) == ("rollout" in node.inputs):
        yield node_error(
            node,
            f"{node.id} splits prompts or samples, one of the two",
            found=", ".join(node.inputs) or "no arguments",
        )
    edge = graph.feeding(node.id, "prompts")
    if edge is not None and graph.node(edge.src).op is Op.PROMPTS_OF:
        yield node_error(
            node,
            f"{node.id} splits prompts that are made of samples ('{edge.src}')",
            expected="prompts of the data",
            hint="split the samples before: fl.prompts_of(fl.where(rollout, row=...), ...)",
        )
    yield from _check_nested_where(graph, node)


def _check_nested_where(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that a row can meet the condition together with those before it."""
    own, before = node.attr("spec"), node
    if not isinstance(own, RowCondition):
        return
    while edge := graph.feeding(before.id, "rollout") or graph.feeding(before.id, "prompts"):
        before = graph.node(edge.src)
        spec = before.attr("spec")
        if isinstance(spec, RowCondition) and spec.field == own.field and spec.excludes(own):
            yield node_error(
                node,
                f"{node.id} keeps no row: it splits rows with {spec.described} "
                f"({before.source or before.id}) by {own.described}",
                expected="a condition that some of these rows meet",
                hint="split what was there before the first condition, or ask for another field",
            )
            return


def check_replay(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that new samples of one rollout of the data are held."""
    before = replay_before(graph, node)
    if before is not None:
        yield node_error(
            node,
            f"{node.id} holds what {before.id} returns, which is held already",
            expected="samples of this step",
            hint="pass the rollout, or what a filter or a selection of it returned",
        )
    if len(samplers := sampling_nodes(graph, node)) > 1:
        yield node_error(
            node,
            f"{node.id} holds samples of several sets",
            found=", ".join("data" if each is None else each.id for each in samplers),
            hint="hold those of each rollout by themselves",
        )
    regions = {each.region for each in samplers if each is not None and each.region is not None}
    if any(len([g for g in graph.of_op(Op.GENERATE) if g.region == one]) > 1 for one in regions):
        yield node_error(
            node,
            f"{node.id} holds turns of an episode in which several policies take turns",
            expected="responses, or episodes of one policy",
            hint="update on these turns in the step that generates them",
        )
    source = graph.feeding(node.id, "rollout")
    if source is not None and parents_of(graph, graph.node(source.src)) is not None:
        yield node_error(
            node,
            f"{node.id} holds samples that answer prompts made of other samples",
            expected="samples that answer prompts of the data, which a resumed run reads again",
            hint="hold the samples of actor.generate(prompts)",
        )
