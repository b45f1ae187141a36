"""Sets of samples: the samples to which each node refers, and those that may meet at one node.

A filter, a selection and `fl.where` make a smaller set of another, a replay one of earlier samples;
`fl.pair` and `fl.concat` make one of several. Arguments of one node refer to the same set, but for
these: the two sets of pairs answer the same prompts, values that are concatenated go with the
samples of the same place, a baseline has one score a prompt, and a map may compare what two
policies made of the same prompts. Between samples and those that were made of them, values go
through `parent` and `mean_of_children` (`flowrl.graph.sample_trees`).
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Level, Node, Op, Unit
from flowrl.ids import NodeId
from flowrl.specs.filters import Threshold, Turns
from flowrl.specs.prompts import PromptTemplate

_ROLLOUTS = (Op.GENERATE, Op.INTERACT)
SUBSETS = (Op.FILTER, Op.SELECT, Op.WHERE)
"""Operations that make a smaller set of another one; `where` of prompts makes a set of prompts."""
JOINS = (Op.PAIR, Op.CONCAT)
"""Operations that make a set of samples of several other sets."""
_MAKES = (Op.SOURCE, Op.PROMPTS_OF, *_ROLLOUTS, *SUBSETS, *JOINS, Op.REPLAY)
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
        for node in graph.nodes
        if node.id not in read
        and node.op not in (Op.SOURCE, Op.REPLAY)
        and (node.region is None or node.op is Op.INTERACT)
        and (node.output("tokens") is not None or node.output("score") is not None)
    )


def sample_edges(graph: Graph, node: Node) -> tuple[Edge, ...]:
    """Returns the edges by which a node reads samples: of one set, or of those that it joins."""
    return tuple(
        edge
        for edge in graph.in_edges(node.id)
        if edge.argument in ("preferred", "other") or edge.argument.partition("_")[0] == "rollout"
    )


def sampling_nodes(graph: Graph, node: Node) -> tuple[Node | None, ...]:
    """Returns the `generate` nodes of the samples that a node reads; None for those of data."""
    samplers: list[Node | None] = []
    for edge in sample_edges(graph, node):
        source = graph.node(edge.src)
        if source.op in _ROLLOUTS:
            spec, generators = node.attr("spec"), graph.generators_of(source)
            # Of an episode's turns, those of one policy; otherwise they are all by the first one.
            place = spec.policy if isinstance(spec, Turns) else 0
            samplers.append(generators[place] if place < len(generators) else None)
        else:
            samplers += sampling_nodes(graph, source)
    return tuple(dict.fromkeys(samplers)) if samplers or node.op is not Op.SOURCE else (None,)


def sampling_node(graph: Graph, node: Node) -> Node | None:
    """Returns the `generate` node of all samples that a node reads; None if there is none such."""
    nodes = sampling_nodes(graph, node)
    return nodes[0] if len(nodes) == 1 else None


def replay_before(graph: Graph, node: Node) -> Node | None:
    """Returns a replay that some of a node's samples come from; None if all are of this step."""
    for edge in sample_edges(graph, node):
        source = graph.node(edge.src)
        replay = source if source.op is Op.REPLAY else replay_before(graph, source)
        if replay is not None:
            return replay
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
            elif node.op is Op.PAIR:
                yield from _check_pair(graph, node, first, other)
            elif node.op is Op.CONCAT:
                yield from _check_part(graph, node, edge, made)
            elif first == other:
                continue
            elif node.op is Op.MAP and _are_side_by_side(graph, first, other):
                yield from _check_counterpart(graph, node, edge, first, other)
            else:
                yield node.error(
                    f"{node.id} gets '{edges[0].argument}' for the samples of '{first.id}', "
                    f"but '{edge.argument}' for the samples of '{other.id}'",
                    hint=_SEVERAL_SETS if node.op is Op.MAP else _ONE_SET,
                )


_SEVERAL_SETS = (
    "give each set a map of its own, or join them first: samples, scores = fl.concat(...); between "
    "samples and those that answer them, values go through fl.parent and fl.mean_of_children"
)
_ONE_SET = (
    "use what an operation returned in all that follows, as in rollout, scores = "
    "fl.filter.zero_variance(rollout, scores); between samples and those that answer them, values "
    "go through fl.parent and fl.mean_of_children"
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


def parents_of(graph: Graph, maker: Node) -> Node | None:
    """Returns the node that made the parents of a set; None where it answers prompts of data.

    Args:
        maker: The node that made the set.
    """
    prompts = answered_prompts(graph, maker)
    edge = None if prompts is None else graph.feeding(prompts, "rollout")
    return None if edge is None else graph.node(edge.src)


def line_of_descent(graph: Graph, maker: Node, ancestor: Node) -> tuple[Node, ...]:
    """Returns the nodes of prompts between a set and one that it descends from, nearest first.

    It is empty where the samples of the one are not made of those of the other.
    """
    between: list[Node] = []
    origin = origin_of(graph, ancestor)
    while (prompts := answered_prompts(graph, maker)) is not None:
        parents = parents_of(graph, maker)
        if parents is None:
            break
        between.append(graph.node(prompts))
        if origin_of(graph, parents) == origin:
            return tuple(between)
        maker = parents
    return ()


# Baselines.


def _check_baseline(
    graph: Graph, node: Node, scores: Edge, baseline: Edge, made: dict[str, str]
) -> Iterator[GraphError]:
    """Checks for one score for each prompt that has samples, not of those samples themselves."""
    learned, lone = graph.node(made[scores.src]), graph.node(made[baseline.src])
    asked, size = answered_prompts(graph, learned), _group_size(graph, lone)
    wrong = None
    if baseline.src == scores.src:
        wrong = f"gets '{baseline.src}' as its baseline and as its scores"
    elif asked is None or asked != answered_prompts(graph, lone):
        wrong = f"compares '{learned.id}' with other prompts: '{baseline.src}' scores '{lone.id}'"
    elif origin_of(graph, lone, (Op.SELECT,)).op is Op.FILTER:
        wrong = f"needs a baseline for every prompt, and a filter took some out of '{baseline.src}'"
    elif size not in (1, None):
        wrong = f"needs one baseline a prompt, but '{baseline.src}' has {size} ('{lone.id}')"
    if wrong is not None:
        yield node.error(
            f"{node.id} {wrong}",
            expected="one score for each prompt, of a rollout of its own",
            hint="pass baseline=verifier.score(actor.generate(prompts, n=1, temperature=0))",
        )


# Pairs.


def _check_pair(graph: Graph, node: Node, preferred: Node, other: Node) -> Iterator[GraphError]:
    """Checks that two sets answer the same prompts, with counterparts in their groups."""
    prompts = [answered_prompts(graph, maker) for maker in (preferred, other)]
    sizes = [_sure_size(graph, maker) for maker in (preferred, other)]
    whole = [size for size in sizes if isinstance(size, int)]
    line = line_of_descent(graph, preferred, other) or line_of_descent(graph, other, preferred)
    if line:
        yield from _check_revisions(node, line)
    elif preferred == other:
        yield node.error(
            f"{node.id} gets '{preferred.id}' as its preferred samples and as the others",
            hint="pairs of one rollout are fl.select.best_and_worst(rollout, scores)",
        )
    elif None in prompts or prompts[0] != prompts[1]:
        yield node.error(
            f"{node.id} compares samples of the same prompts, but '{preferred.id}' and "
            f"'{other.id}' answer others",
            found=" and ".join(str(name or "data of its own") for name in prompts),
            hint="generate both from the same prompts, or one from samples of the other; solutions "
            "of these prompts are fl.Examples.of(prompts)",
        )
    elif len(whole) == 2 and 1 not in whole and whole[0] != whole[1]:
        yield node.error(
            f"{node.id} pairs sample k of a prompt with sample k of the other set, but these have "
            f"{whole[0]} and {whole[1]} samples a prompt",
            expected="as many of both, or one of either, which is paired with each of the other",
            hint="give both generate calls the same n, or one of them n=1",
        )


def _check_revisions(node: Node, line: tuple[Node, ...]) -> Iterator[GraphError]:
    """Checks that what samples are made of can be answered by them too."""
    for prompts in line:
        spec = prompts.attr("spec")
        if not isinstance(spec, PromptTemplate):
            yield node.error(
                f"{node.id} compares a response with its continuation from a cut "
                f"({prompts.source or prompts.id})",
                expected="responses to one prompt, of which neither is the beginning of the other",
                hint="compare continuations with each other: "
                "fl.select.best_and_worst(branches, scores)",
            )
        elif not spec.begins_with_prompt:
            yield node.error(
                f"{node.id} takes responses as answers to a prompt that they were not shown "
                f"({prompts.source or prompts.id})",
                expected="a template that begins with {prompt}",
            )


def _sure_size(graph: Graph, maker: Node) -> object:
    """Returns the samples of a set for each prompt that has any; None if it is not known yet."""
    maker = origin_of(graph, maker, (Op.FILTER,))
    return None if isinstance(maker.attr("spec"), Threshold) else _group_size(graph, maker)


# Sets one behind the other.


def _check_part(graph: Graph, node: Node, edge: Edge, made: dict[str, str]) -> Iterator[GraphError]:
    """Checks that values are of the samples that they go with, and that no set comes twice."""
    name, _, number = edge.argument.partition("_")
    samples = graph.feeding(node.id, "rollout" + (f"_{number}" if number else ""))
    if samples is None:
        return  # the signature reports it
    if name != "rollout" and made[samples.src] != made[edge.src]:
        yield node.error(
            f"{node.id} joins the samples of '{made[samples.src]}' with {name} of the samples of "
            f"'{made[edge.src]}'",
            hint="put the values of each set next to it: fl.concat((a, a_scores), (b, b_scores))",
        )
    before = [e for e in sample_edges(graph, node) if e.argument != edge.argument]
    if name == "rollout" and any(made[e.src] == made[edge.src] for e in before):
        yield node.error(
            f"{node.id} gets the samples of '{made[edge.src]}' twice",
            hint="join sets of different samples, and pass each once",
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
            yield node.error(
                f"{node.id} reads '{name}' per token, of other samples ('{other.id}') than its "
                f"first argument ('{first.id}')",
                expected="numbers of samples, where two rollouts are compared",
                hint="make one number a sample of it, with a map of that rollout alone",
            )


def _group_size(graph: Graph, maker: Node) -> object:
    """Returns the samples of a set for each prompt; None if the config decides it."""
    if maker.op is Op.SELECT:
        return getattr(maker.attr("spec"), "k", 2)
    if maker.op is Op.SOURCE:
        return 1 if maker.attr("data") == "examples" else 2
    generator = graph.generator_of(maker)
    return None if generator is None else generator.attr("n")


# Where scores come from.


_PASSES_ON = (Op.FILTER, Op.SELECT, Op.WHERE, Op.REPLAY)
_COMPUTE = (Op.MAP, Op.ADVANTAGE, Op.PARENT, Op.MEAN_OF_CHILDREN, Op.CONCAT)
_SCORE = "score"


def score_source(graph: Graph, node_id: str, argument: str = "scores") -> Node | None:
    """Returns the node whose scores an argument reads, through subsets and replays."""
    while True:
        edge = graph.feeding(node_id, argument)
        if edge is None:
            return None
        node = graph.node(edge.src)
        if node.op not in _PASSES_ON:
            return node
        node_id, argument = node.id, "scores"


def scoring_nodes(graph: Graph, node_id: str) -> tuple[Node, ...]:
    """Returns the `score` and `interact` nodes whose scores a node reads.

    They are found through whatever computes with scores, in the order of the arguments.
    """
    scores: dict[str, Node] = {}
    for edge in graph.in_edges(node_id):
        source = graph.node(edge.src)
        if source.op in _PASSES_ON and _SCORE in edge.fields:
            passed_on = score_source(graph, source.id)
            assert passed_on is not None  # the verifier of graphs proves it
            source = passed_on
        if source.op in _COMPUTE:
            scores |= {node.id: node for node in scoring_nodes(graph, source.id)}
        elif source.op in (Op.SCORE, Op.INTERACT) and _SCORE in edge.fields:
            scores[source.id] = source
    return tuple(scores.values())
