"""What the program left open comes from the configuration."""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph import Edge, Graph, Node, Op
from flowrl.graph.signatures import ADVANTAGE, ROLLOUT_LOGPROBS, SAMPLING_OPTIONS, SCORE
from flowrl.ids import NodeId
from flowrl.passes.context import Context
from flowrl.specs import CrossEntropy, Sampling

__all__ = ["fill_defaults"]


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
    taken = {node.id for node in graph.nodes}
    names = ["advantage", *(f"advantage.{i}" for i in range(2, len(taken) + 3))]
    advantage = Node(
        id=NodeId(next(name for name in names if name not in taken)),
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
