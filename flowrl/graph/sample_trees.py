"""Rollouts from rollouts: samples that answer prompts made of other samples.

    prompts -> draft -> prompts_of -> critique -> prompts_of -> revision

`prompts_of` makes a set of prompts, one of each sample of another set: of its parents. What is
generated for such a prompt are the children of that sample, and they are a group of their own.

A set of children refers to the set of its parents by its prompts: `parents_of`. The parents are
the samples of a rollout or of a streaming filter. In ids the relation is plain (`flowrl.ids`): the
group of a sample's children has the sample's id, so the children of `0/17/3` are `0/17/3/0`,
`0/17/3/1`, ... Ids are unique within a rollout; two rollouts may answer the same prompts. A child
keeps the data row of the prompt at the root.

`parent` repeats values of the parents over their children; `mean_of_children` gives each parent the
mean of its children's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.errors import GraphError
from flowrl.graph.ir import DType, Edge, Graph, Node, Op, Unit
from flowrl.graph.sample_sets import SUBSETS, answered_prompts, origin_of, parents_of, sample_sets
from flowrl.graph.signatures import prompt_fields
from flowrl.graph.streaming import streaming_nodes
from flowrl.ids import RoleName
from flowrl.specs import LossSpec, PromptsSpec


def data_prompts(graph: Graph, maker: Node) -> Node | None:
    """Returns the data whose prompts a set, its parents or theirs answer; None of other data."""
    while (parents := parents_of(graph, maker)) is not None:
        maker = parents
    prompts = answered_prompts(graph, maker)
    return None if prompts is None else graph.node(prompts)


def evaluated_role(graphs: Sequence[Graph]) -> RoleName | None:
    """Returns the policy of a run that is evaluated: the last one that is updated.

    A policy that answers nothing but prompts made of samples, as a critic does, comes after the
    others: held-out prompts are prompts of data.
    """
    updated = [
        node.role
        for graph in graphs
        for node in graph.of_op(Op.UPDATE)
        # A loss that a traced graph leaves to the config is a policy's.
        if (loss := node.attr("loss")) is None
        or (isinstance(loss, LossSpec) and loss.predicts == "logprobs")
    ]
    generates = [(graph, node) for graph in graphs for node in graph.of_op(Op.GENERATE)]
    of_data = {node.role for graph, node in generates if parents_of(graph, node) is None}
    of_samples = {node.role for _, node in generates} - of_data
    ordered = sorted(updated, key=lambda role: role not in of_samples)  # stable
    return ordered[-1] if ordered else None


def check_sample_trees(graph: Graph) -> Iterator[GraphError]:
    """Yields errors of prompts that cannot be made of samples, and of values of other samples."""
    made = sample_sets(graph)
    for node in graph.nodes:
        source = graph.feeding(node.id, "rollout")
        match node.op:
            case Op.PROMPTS_OF if source is not None:
                yield from _check_prompts(graph, node, graph.node(made[source.src]))
            case Op.INTERACT:
                yield from _check_task(graph, node)
            case Op.PARENT | Op.MEAN_OF_CHILDREN if source is not None:
                values = graph.feeding(node.id, "input")
                if values is None:
                    continue  # the signature reports it
                receivers, givers = graph.node(made[source.src]), graph.node(made[values.src])
                check = _check_parent if node.op is Op.PARENT else _check_mean
                yield from check(graph, node, receivers, givers)
                yield from _check_fields(graph, node, values)


def _check_prompts(graph: Graph, node: Node, maker: Node) -> Iterator[GraphError]:
    """Checks that samples are generated, and known while others still run."""
    origin = origin_of(graph, maker)
    if origin.op is not Op.GENERATE or origin.region is not None:
        kinds = {Op.CONCAT: "joined samples", Op.REPLAY: "earlier samples", Op.SOURCE: "examples"}
        what = kinds.get(origin.op, "episodes")
        yield node.error(
            f"{node.id} makes prompts of {what} ('{origin.id}')",
            expected="the samples of a policy's generate",
            hint="make them of what actor.generate(prompts) returned",
        )
        return
    yield from _check_rule(graph, node, origin)
    streaming = streaming_nodes(graph)
    while maker.op in SUBSETS:
        if maker.id not in streaming:
            yield node.error(
                f"{node.id} makes prompts of what '{maker.id}' keeps, which is known only when "
                "the whole batch is there",
                expected="samples of a rollout, or of a filter that reads rule scores of it",
                hint="split the prompts: actor.generate(fl.where(prompts, row=..., equals=...))"
                if maker.op is Op.WHERE
                else "make prompts of all samples, and use the filter or the selection after that",
            )
            return
        edge = graph.feeding(maker.id, "rollout")
        assert edge is not None  # the signature reports it
        maker = graph.node(edge.src)


def _check_rule(graph: Graph, node: Node, origin: Node) -> Iterator[GraphError]:
    """Checks that the samples have what the rule of the prompts reads."""
    spec, read = node.attr("spec"), graph.feeding(node.id, "rollout")
    if not isinstance(spec, PromptsSpec) or read is None:
        return  # the signature reports it
    for field in prompt_fields(spec):
        if field.name not in read.fields:
            yield node.error(f"{node.id} needs '{field.name}' to make prompts by {spec}")
    size = origin.attr("n")
    further = getattr(spec, "opponent", None)
    if isinstance(further, int) and isinstance(size, int) and further >= size:
        yield node.error(
            f"{node.id} compares each sample with the one {further} places further in a group of "
            f"{size}",
            expected={1: "two samples or more in a group", 2: "opponent=1"}.get(
                size, f"opponent from 1 to {size - 1}"
            ),
            hint=f"generate at least n={further + 1} samples a prompt ('{origin.id}')",
        )


def _check_task(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that an episode's task is a prompt of the data."""
    prompts = graph.feeding(node.id, "prompts")
    if prompts is not None and graph.node(prompts.src).op is Op.PROMPTS_OF:
        yield node.error(
            f"{node.id} plays episodes for prompts that are made of samples ('{prompts.src}')",
            expected="the prompts of the data",
            hint="answer such prompts with actor.generate(...)",
        )


def _check_parent(graph: Graph, node: Node, children: Node, givers: Node) -> Iterator[GraphError]:
    parents = parents_of(graph, children)
    if parents is None:
        yield node.error(
            f"{node.id} asks for the parents of '{children.id}', which answers the prompts of data",
            expected="samples that answer the prompts of fl.prompts_of",
            hint="pass of= what was generated for fl.prompts_of(...)",
        )
        return
    at = parents
    larger = [at.id]
    while at.op in SUBSETS and (edge := graph.feeding(at.id, "rollout")) is not None:
        at = graph.node(edge.src)
        larger.append(at.id)
    if givers.id not in larger:
        yield node.error(
            f"{node.id} gets values of '{givers.id}', and the parents of '{children.id}' are "
            f"samples of '{parents.id}'",
            hint=f"pass values of '{parents.id}', of all of them; go from one generation to the "
            "next, step by step",
        )


def _check_mean(graph: Graph, node: Node, receivers: Node, givers: Node) -> Iterator[GraphError]:
    parents = parents_of(graph, givers)
    if parents != receivers:
        yield node.error(
            f"{node.id} gives values to '{receivers.id}', but '{givers.id}' has other parents",
            found="none" if parents is None else f"'{parents.id}'",
        )
    elif givers.op in SUBSETS:
        yield node.error(
            f"{node.id} needs the values of all children, and '{givers.id}' has only some of them",
            hint="take the mean before the filter or the selection",
        )


def _check_fields(graph: Graph, node: Node, values: Edge) -> Iterator[GraphError]:
    for name in values.fields:
        field = graph.node(values.src).output(name)
        if field is None:
            continue  # the verifier reports it
        if field.unit is not Unit.SAMPLES:
            yield node.error(
                f"{node.id} maps '{name}' of {field.unit}, and the tokens of a sample are not "
                "those of its parent or children",
                expected="one value a sample, such as scores",
                hint="make one number a sample of it first, with a function marked @fl.map",
            )
        elif node.op is Op.MEAN_OF_CHILDREN and field.dtype is not DType.FLOAT32:
            yield node.error(
                f"{node.id} takes the mean of '{name}', which is {field.dtype}",
                expected="float32",
                hint="let a function marked @fl.map give it as float32",
            )
