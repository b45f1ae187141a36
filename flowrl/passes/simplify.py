"""Passes that simplify a graph: zero penalties, defaults, equal forward passes, dead nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, count

from flowrl.graph import Edge, Graph, Node, Op, results
from flowrl.graph.ir import sums_of
from flowrl.graph.signatures import ADVANTAGE, ROLLOUT_LOGPROBS, SAMPLING_OPTIONS, SCORE
from flowrl.ids import NodeId
from flowrl.passes.context import Context, Decision
from flowrl.specs import KL, CrossEntropy, LossSpec, Sampling


def drop_zero_kl(graph: Graph, context: Context) -> Graph:
    """Clears zero penalties and the edges that fed them; the reference then reaches nothing.

    A loss that compares with the reference itself (DPO) keeps it.
    """
    nodes, cleared = [], set()
    for node in graph.nodes:
        kl, loss = node.attr("kl"), node.attr("loss")
        if node.op is Op.UPDATE and isinstance(kl, KL) and kl.coefficient == 0:
            node = node.with_attrs(kl=None)
            if not (isinstance(loss, LossSpec) and "reference_logprobs" in loss.needs):
                cleared.add(node.id)
                inputs = tuple(name for name in node.inputs if name != "reference")
                node = replace(node, inputs=inputs)
        nodes.append(node)
    edges = [e for e in graph.edges if e.dst not in cleared or e.argument != "reference"]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))


# The program's open settings come from the configuration.


def fill_defaults(graph: Graph, context: Context) -> Graph:
    """Fills group size and sampling of `generate`; loss, and advantage of rewards, of `update`.

    - A single option that the program gives (`generate(prompts, temperature=0.7)`) replaces that
      option of the configured sampling.
    - An update without a loss gets the configured one on a rollout, cross-entropy on examples.
    - An update with rewards gets an advantage node before it, on its own line.
    """
    for node in graph.nodes:
        if node.op is Op.GENERATE:
            graph = graph.replacing(_fill_generate(node, context))
        elif node.op is Op.UPDATE:
            if node.attr("loss") is None:
                on_rollout = _reads_rollout(graph, node)
                node = node.with_attrs(loss=context.loss if on_rollout else CrossEntropy())
                graph = graph.replacing(node)
            if "rewards" in node.inputs:
                graph = _insert_advantage(graph, node, context)
    return graph


def _fill_generate(node: Node, context: Context) -> Node:
    given = {name: node.attr(name) for name in SAMPLING_OPTIONS if node.attr(name) is not None}
    own = node.attr("sampling")
    base = own if isinstance(own, Sampling) else context.sampling
    n = context.group_size if node.attr("n") is None else node.attr("n")
    filled = node.without_attrs(*SAMPLING_OPTIONS)
    return filled.with_attrs(n=n, sampling=replace(base, **given))  # type: ignore[arg-type]


def _reads_rollout(graph: Graph, node: Node) -> bool:
    edge = graph.feeding(node.id, "rollout")
    return edge is not None and graph.node(edge.src).output(ROLLOUT_LOGPROBS.name) is not None


def _insert_advantage(graph: Graph, update: Node, context: Context) -> Graph:
    advantage = Node(
        id=unused_id(graph, "advantage"),
        op=Op.ADVANTAGE,
        inputs=("scores",),
        outputs=(ADVANTAGE,),
        attrs=(("spec", context.advantage),),
        source=update.source,
    )
    inputs = tuple("advantages" if name == "rewards" else name for name in update.inputs)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += [advantage, replace(update, inputs=inputs)] if node.id == update.id else [node]
    edges: list[Edge] = []
    for edge in graph.edges:
        if edge.dst == update.id and edge.argument == "rewards":
            edges.append(replace(edge, dst=advantage.id, argument="scores", fields=(SCORE.name,)))
            edge = Edge(
                src=advantage.id, dst=update.id, argument="advantages", fields=(ADVANTAGE.name,)
            )
        edges.append(edge)
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))


# One forward pass replaces several that would give the same numbers.


def merge_logprobs(graph: Graph, context: Context) -> Graph:
    """Keeps the first of several logprobs, values or model scores of one model on the same samples.

    Two roles have one model where neither changes within the run's stage and both began as copies
    of the same third, or one as a copy of the other. Scores of rules are left alone: they may be a
    person's own functions, which need not give the same twice.
    """
    kept = _kept(graph, context)
    if not kept:
        return graph
    edges = [
        replace(edge, src=kept.get(edge.src, edge.src))
        for edge in graph.edges
        if edge.dst not in kept
    ]
    nodes = tuple(node for node in graph.nodes if node.id not in kept)
    return replace(graph, nodes=nodes, edges=tuple(edges))


def decisions_on_merging(graph: Graph, context: Context) -> tuple[Decision, ...]:
    """Returns what the pass will merge in a graph that it has not seen yet, and why."""
    return tuple(
        Decision(
            subject=dropped,
            choice=f"the same as {first}",
            why="the same model on the same samples gives the same numbers",
        )
        for dropped, first in _kept(graph, context).items()
    )


def decisions_on_sums(graph: Graph) -> tuple[Decision, ...]:
    """Returns which updates are one, and with which weights."""
    return tuple(
        Decision(
            subject=terms[-1].id,
            choice=f"one update with {', '.join(node.id for node in terms[:-1]) or 'no other'}",
            why="fl.sum adds up their gradients, times "
            + " and ".join(f"{node.attr('weight'):g}" for node in terms)
            + "; times of this plan count an optimizer step for each",
        )
        for terms in sums_of(graph).values()
        if len(terms) > 1
    )


def _kept(graph: Graph, context: Context) -> dict[NodeId, NodeId]:
    """Returns, for each node that is dropped, the node that replaces it."""
    first: dict[tuple[object, ...], NodeId] = {}
    kept: dict[NodeId, NodeId] = {}
    changes: dict[str, int] = {}
    changing = {node.role for node in graph.of_op(Op.UPDATE, Op.SYNC)}
    for node in graph.nodes:
        role, edge = str(node.role), graph.feeding(node.id, "rollout")
        if node.op in (Op.UPDATE, Op.SYNC):
            changes[role] = changes.get(role, 0) + 1
        if edge is None or not _is_pass(node):
            continue
        # A model that nothing changes is that with which some role began.
        model = context.copies.get(role, role) if node.role not in changing else None
        options = (node.attr("per"), node.attr("separator"))
        key = (node.op, options, edge.src, model or (role, changes.get(role, 0)))
        if first.setdefault(key, node.id) != node.id:
            kept[node.id] = first[key]
    return kept


def _is_pass(node: Node) -> bool:
    scores = node.op is Op.SCORE and node.attr("by") == "model"
    return scores or node.op in (Op.LOGPROBS, Op.VALUES)


# Nodes that no update, log or sync needs are removed.


def drop_dead_nodes(graph: Graph, context: Context) -> Graph:
    """Keeps updates and logs, or the samples of a workflow without updates, syncs of roles that do
    something, and all that these read.
    """
    sinks = (*graph.of_op(Op.UPDATE, Op.LOG), *results(graph))
    live = ancestors(graph, {node.id for node in sinks})
    asked = {graph.node(node_id).role for node_id in live}
    live = ancestors(graph, live | {n.id for n in graph.of_op(Op.SYNC) if n.role in asked})
    return replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.id in live),
        edges=tuple(edge for edge in graph.edges if edge.dst in live),
    )


def ancestors(graph: Graph, nodes: Iterable[NodeId], *, within_step: bool = False) -> set[NodeId]:
    """Returns these nodes and all that they read, directly or not.

    Args:
        within_step: True to leave out what is carried from the step before.
    """
    seen = set(nodes)
    waiting = list(seen)
    while waiting:
        for edge in graph.in_edges(waiting.pop()):
            if edge.src not in seen and not (within_step and edge.carried):
                seen.add(edge.src)
                waiting.append(edge.src)
    return seen


def unused_id(graph: Graph, name: str) -> NodeId:
    """Returns `name`, or else `name.2`, `name.3`, ..., whichever no node has."""
    taken = {node.id for node in graph.nodes}
    names = chain([name], (f"{name}.{number}" for number in count(2)))
    return NodeId(next(each for each in names if each not in taken))
