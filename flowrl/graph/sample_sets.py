"""Sets of samples: the samples to which each node refers, and those that may meet at one node.

A filter and a selection make a smaller set of another. Arguments of one node refer to the same
set, but for two: a baseline has one score a prompt, and a map may compare what two policies made of
the same prompts. Between samples and those that were made of them, values go through `parent` and
`mean_of_children` (`flowrl.graph.sample_trees`).
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Level, Node, Op, Unit, node_error
from flowrl.ids import NodeId
from flowrl.specs import FilterSpec, SelectSpec

__all__ = [
    "SUBSETS",
    "answered_prompts",
    "check_sample_sets",
    "origin_of",
    "results",
    "sample_sets",
    "sampling_node",
]

_ROLLOUTS = (Op.GENERATE, Op.INTERACT)
SUBSETS = (Op.FILTER, Op.SELECT)
"""Operations that make a smaller set of another one."""
_MAKES = (Op.SOURCE, Op.PROMPTS_OF, *_ROLLOUTS, *SUBSETS)
_IN_SAMPLES = (*_ROLLOUTS, Op.SCORE, *SUBSETS)
_BETWEEN_SETS = (Op.SYNC, Op.PARENT, Op.MEAN_OF_CHILDREN)
"""Operations whose arguments are of different samples; `flowrl.graph.sample_trees` checks them."""


def sample_sets(graph: Graph) -> dict[str, str]:
    """Returns for each node the node that made the set of samples (or prompts) it refers to.

    A node of a region refers to the samples of its `interact`.
    """
    made: dict[str, str] = {}
    episodes = {node.region: node.id for node in graph.of_op(Op.INTERACT)}
    for node in graph.nodes:
        if node.region is not None and node.region in episodes:
            made[node.id] = episodes[node.region]
            continue
        edges = [e for e in graph.in_edges(node.id) if not e.carried and e.src in made]
        made[node.id] = node.id if node.op in _MAKES or not edges else made[edges[0].src]
    return made


def results(graph: Graph) -> tuple[Node, ...]:
    """Returns what a workflow without an update is for: samples and scores that no node reads.

    A run writes them to samples.jsonl. A workflow with an update has none.
    """
    if graph.of_op(Op.UPDATE):
        return ()
    read = {edge.src for edge in graph.edges if not graph.is_inner(edge)}
    return tuple(
        node
        for node in graph.of_op(*_IN_SAMPLES)
        if node.id not in read and (node.region is None or node.op is Op.INTERACT)
    )


def sampling_node(graph: Graph, node: Node) -> Node | None:
    """Returns the `generate` node of the samples that a node reads; None if no role made them."""
    while (edge := graph.feeding(node.id, "rollout")) is not None:
        node = graph.node(edge.src)
        if node.op in _ROLLOUTS:
            return graph.generator_of(node)
    return None


def check_sample_sets(graph: Graph) -> Iterator[GraphError]:
    """Yields errors of nodes whose arguments refer to samples that do not belong together."""
    made = sample_sets(graph)
    for node in graph.nodes:
        edges = [e for e in graph.in_edges(node.id) if not e.carried and not graph.is_inner(e)]
        for edge in edges[1:] if node.op not in _BETWEEN_SETS else ():
            first, other = graph.node(made[edges[0].src]), graph.node(made[edge.src])
            if edge.argument == "weights":
                continue  # of a model, whatever samples it was updated on
            if edge.argument == "baseline":
                yield from _check_baseline(graph, node, edges[0], edge, made)
            elif first == other:
                continue
            elif node.op is Op.MAP and _are_side_by_side(graph, first, other):
                yield from _check_counterpart(graph, node, edge, first, other)
            else:
                yield node_error(
                    node,
                    f"{node.id} gets '{edges[0].argument}' for the samples of '{first.id}', "
                    f"but '{edge.argument}' for the samples of '{other.id}'",
                    hint=_suggestion(graph, node, first, other),
                )


def _suggestion(graph: Graph, node: Node, first: Node, other: Node) -> str:
    smaller = next((n for n in (first, other) if n.op in SUBSETS), None)
    if smaller is None and node.op is Op.MAP:
        sizes = " and ".join(str(_group_size(graph, n) or "the config's") for n in (first, other))
        return f"rollouts of the same prompts with as large groups can be compared; here {sizes}"
    if smaller is None or origin_of(graph, first) != origin_of(graph, other):
        return f"pass what was made of the samples of '{first.id}' throughout"
    spec = smaller.attr("spec")
    assert isinstance(spec, FilterSpec | SelectSpec)
    kind = f"fl.{spec.family}.{spec.kind}"
    after = "a filter" if smaller.op is Op.FILTER else "a selection"
    return (
        f"after {after}, use what it returned everywhere: rollout, scores = {kind}(rollout, scores)"
    )


def origin_of(graph: Graph, maker: Node, of: tuple[Op, ...] = SUBSETS) -> Node:
    """Returns the rollout or the data of which a set is a part."""
    while maker.op in of and (edge := graph.feeding(maker.id, "rollout")) is not None:
        maker = graph.node(edge.src)
    return maker


def answered_prompts(graph: Graph, maker: Node) -> NodeId | None:
    """Returns the node of the prompts that the samples of a set answer; None for data."""
    edge = graph.feeding(origin_of(graph, maker).id, "prompts")
    return None if edge is None else edge.src


# Baselines.


def _check_baseline(
    graph: Graph, node: Node, scores: Edge, baseline: Edge, made: dict[str, str]
) -> Iterator[GraphError]:
    """Checks for one score for each prompt that has samples, not of those samples themselves."""
    learned, lone = graph.node(made[scores.src]), graph.node(made[baseline.src])
    wrong = None
    if baseline.src == scores.src:
        wrong = f"gets '{baseline.src}' as its baseline and as its scores"
    elif (asked := answered_prompts(graph, learned)) is None or asked != answered_prompts(
        graph, lone
    ):
        wrong = (
            f"needs a baseline for the prompts of '{learned.id}', but '{baseline.src}' scores "
            f"other samples ('{lone.id}')"
        )
    elif origin_of(graph, lone, (Op.SELECT,)).op is Op.FILTER:
        wrong = (
            f"needs a baseline for every prompt, but '{baseline.src}' lacks those that a filter "
            "took out"
        )
    elif (size := _group_size(graph, lone)) not in (1, None):
        wrong = f"needs one baseline a prompt, but '{baseline.src}' has {size} ('{lone.id}')"
    if wrong is not None:
        yield node_error(
            node,
            f"{node.id} {wrong}",
            expected="one score for each prompt, of a rollout of its own",
            hint="pass baseline=verifier.score(actor.generate(prompts, n=1, temperature=0))",
        )


# Two rollouts side by side.


def _are_side_by_side(graph: Graph, first: Node, other: Node) -> bool:
    """True if sample k of a prompt's group has a counterpart in the other rollout."""
    if first.op not in _ROLLOUTS or other.op not in _ROLLOUTS:
        return False
    asked = answered_prompts(graph, first)
    if asked is None or asked != answered_prompts(graph, other):
        return False
    sizes = {_group_size(graph, side) for side in (first, other)}
    if graph.level is Level.TRACED:
        sizes.discard(None)  # the config may make them equal; lowering asks again
    return len(sizes) <= 1


def _check_counterpart(
    graph: Graph, node: Node, edge: Edge, first: Node, other: Node
) -> Iterator[GraphError]:
    """Checks that no tokens are compared: samples have counterparts, and lengths differ."""
    source = graph.node(edge.src)
    for name in edge.fields:
        field = source.output(name)
        if field is not None and field.unit is Unit.TOKENS:
            yield node_error(
                node,
                f"{node.id} reads '{name}' per token, of other samples ('{other.id}') than its "
                f"first argument ('{first.id}')",
                expected="numbers of samples, where two rollouts are compared",
                hint="make one number a sample of it, with a map of that rollout alone",
            )


def _group_size(graph: Graph, maker: Node) -> object:
    """Returns the samples of a set for each prompt; None if the config decides it."""
    if maker.op is Op.SELECT:
        return getattr(maker.attr("spec"), "k", 2)
    generator = graph.generator_of(maker)
    return None if generator is None else generator.attr("n")
