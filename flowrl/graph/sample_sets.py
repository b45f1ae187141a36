"""Sets of samples: which samples each node speaks of, and which may meet at one node.

A filter and a selection make a smaller set of another. Arguments of one node speak of the same
set, but for two: a baseline has one score a prompt, and a map may compare what two policies made of
the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Node, node_error
from flowrl.graph.types import Level, Op, Unit
from flowrl.specs import FilterSpec, SelectSpec

__all__ = ["check_sample_sets", "group_size", "sample_sets"]

_DRAWS = (Op.GENERATE, Op.INTERACT)
_MAKES = (Op.SOURCE, *_DRAWS, Op.FILTER, Op.SELECT)


def sample_sets(graph: Graph) -> dict[str, str]:
    """For each node, the node that made the set of samples (or prompts) that it speaks of.

    A node of a region speaks of the samples of its `interact`.
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


def check_sample_sets(graph: Graph) -> Iterator[GraphError]:
    """Arguments of one node that speak of samples which do not belong together."""
    made = sample_sets(graph)
    for node in graph.nodes:
        edges = [e for e in graph.in_edges(node.id) if not e.carried and not graph.is_inner(e)]
        for edge in edges[1:] if node.op is not Op.SYNC else ():
            first, other = graph.node(made[edges[0].src]), graph.node(made[edge.src])
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
                    hint=_way_out(graph, node, first, other),
                )


def _way_out(graph: Graph, node: Node, first: Node, other: Node) -> str:
    smaller = next((n for n in (first, other) if n.op in (Op.FILTER, Op.SELECT)), None)
    if smaller is None and node.op is Op.MAP:
        sizes = " and ".join(str(group_size(graph, n) or "the config's") for n in (first, other))
        return f"rollouts of the same prompts with as large groups can be compared; here {sizes}"
    if smaller is None or _origin(graph, first) != _origin(graph, other):
        return f"pass what was made of the samples of '{first.id}' throughout"
    spec = smaller.attr("spec")
    assert isinstance(spec, FilterSpec | SelectSpec)
    kind = f"fl.{spec.family}.{spec.kind}"
    after = "a filter" if smaller.op is Op.FILTER else "a selection"
    return (
        f"after {after}, use what it returned everywhere: rollout, scores = {kind}(rollout, scores)"
    )


def _origin(graph: Graph, maker: Node, of: tuple[Op, ...] = (Op.FILTER, Op.SELECT)) -> Node:
    """The set that a set is a smaller one of: the rollout or the data, at the end."""
    while maker.op in of and (edge := graph.feeding(maker.id, "rollout")) is not None:
        maker = graph.node(edge.src)
    return maker


def _prompts(graph: Graph, maker: Node) -> str | None:
    """The prompts that a set's samples answer; None for data that nobody drew."""
    edge = graph.feeding(_origin(graph, maker).id, "prompts")
    return None if edge is None else edge.src


# Baselines.


def _check_baseline(
    graph: Graph, node: Node, scores: Edge, baseline: Edge, made: dict[str, str]
) -> Iterator[GraphError]:
    """One score for each prompt that has samples, and not of those samples themselves."""
    learned, lone = graph.node(made[scores.src]), graph.node(made[baseline.src])
    wrong = None
    if baseline.src == scores.src:
        wrong = f"gets '{baseline.src}' as its baseline and as its scores"
    elif _prompts(graph, learned) is None or _prompts(graph, learned) != _prompts(graph, lone):
        wrong = (
            f"needs a baseline for the prompts of '{learned.id}', but '{baseline.src}' scores "
            f"other samples ('{lone.id}')"
        )
    elif _origin(graph, lone, (Op.SELECT,)).op is Op.FILTER:
        wrong = (
            f"needs a baseline for every prompt, but '{baseline.src}' lacks those that a filter "
            "took out"
        )
    elif (size := _scores_a_prompt(graph, lone)) not in (1, None):
        wrong = f"needs one baseline a prompt, but '{baseline.src}' has {size} ('{lone.id}')"
    if wrong is not None:
        yield node_error(
            node,
            f"{node.id} {wrong}",
            expected="one score for each prompt, of a rollout of its own",
            hint="pass baseline=verifier.score(actor.generate(prompts, n=1, temperature=0))",
        )


def _scores_a_prompt(graph: Graph, maker: Node) -> object:
    """Samples of a set for each prompt; None where the config says it."""
    if maker.op is Op.SELECT:
        return getattr(maker.attr("spec"), "k", 2)
    return group_size(graph, maker)


# Two rollouts side by side.


def _are_side_by_side(graph: Graph, first: Node, other: Node) -> bool:
    """True if sample k of a prompt's group has a counterpart in the other rollout."""
    if first.op not in _DRAWS or other.op not in _DRAWS:
        return False
    if _prompts(graph, first) is None or _prompts(graph, first) != _prompts(graph, other):
        return False
    sizes = {group_size(graph, side) for side in (first, other)}
    if graph.level is Level.TRACED:
        sizes.discard(None)  # the config may make them equal; lowering asks again
    return len(sizes) <= 1


def _check_counterpart(
    graph: Graph, node: Node, edge: Edge, first: Node, other: Node
) -> Iterator[GraphError]:
    """Samples have counterparts; their tokens have none, as lengths differ."""
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


def group_size(graph: Graph, node: Node) -> object:
    """Samples for each prompt of a `generate` or an `interact`; None where the config says it."""
    if node.op is Op.INTERACT:
        generators = [g for g in graph.of_op(Op.GENERATE) if g.region == node.region]
        return generators[0].attr("n") if generators else None
    return node.attr("n")
