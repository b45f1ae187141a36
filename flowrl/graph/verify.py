"""The verifier: proves that a graph keeps the specification of its level.

`problems` lists everything wrong, first things first; `verify` raises the first. Every error names
the line of the user's program that made the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from flowrl.errors import GraphError
from flowrl.graph.conditions import conditions
from flowrl.graph.ir import (
    Edge,
    Graph,
    Level,
    Node,
    Op,
    called,
    names_of,
    per,
    sums_of,
)
from flowrl.graph.sample_sets import check_sample_sets, results
from flowrl.graph.sample_trees import check_sample_trees
from flowrl.graph.signatures import (
    FORWARD_PASSES,
    PART,
    PREFERRED,
    PROMPT,
    RESPONSE_MASK,
    SIGNATURES,
    TOKENS,
    WEIGHTS,
    Argument,
    Signature,
    advantage_outputs,
    map_outputs,
    score_outputs,
)
from flowrl.ids import NodeId
from flowrl.specs import AdvantageSpec, LossSpec, MapSpec, Spec
from flowrl.specs.base import wrong_fields

_ORDER = {level: i for i, level in enumerate(Level)}
_SOURCES = {
    "prompts": (PROMPT,),
    "examples": (TOKENS, RESPONSE_MASK),
    "pairs": (TOKENS, RESPONSE_MASK, PREFERRED),
}


def verify(graph: Graph) -> Graph:
    """The same graph, when it keeps the specification of its level.

    Raises:
        GraphError: the first problem.
    """
    for problem in problems(graph):
        raise problem
    return graph


def problems(graph: Graph) -> Iterator[GraphError]:
    """Everything wrong with the graph; a broken structure hides what is behind it."""
    structure = list(_check_structure(graph))
    yield from structure
    if structure:
        return
    for node in graph.nodes:
        yield from _check_node(graph, node, SIGNATURES[node.op])
    yield from check_role_models(graph)
    yield from _check_versions(graph)
    yield from _check_sums(graph)
    yield from check_sample_sets(graph)
    yield from check_sample_trees(graph)
    if not graph.of_op(Op.UPDATE, Op.LOG) and not results(graph):
        yield GraphError(
            f"workflow '{graph.name}' does nothing",
            expected="an update, such as actor.update(rollout, rewards), or samples that a run "
            "writes down",
        )


# Structure: ids, edges, order.


def _check_structure(graph: Graph) -> Iterator[GraphError]:
    by_id: dict[str, Node] = {}
    for node in graph.nodes:
        if node.id in by_id:
            yield node.error(f"two nodes have the id '{node.id}'")
        by_id[node.id] = node
        if node.op not in SIGNATURES:
            yield node.error(
                f"operation '{node.op}' cannot be compiled",
                expected="one of " + ", ".join(SIGNATURES),
            )
    for edge in graph.edges:
        yield from _check_edge(edge, by_id)
    for node in graph.nodes:
        fed = [edge.argument for edge in graph.in_edges(node.id)]
        for name in node.inputs:
            if fed.count(name) != 1:
                many = "nothing feeds" if name not in fed else "several edges feed"
                yield node.error(f"{many} argument '{name}' of {node.id}")
    if all(edge.src in by_id and edge.dst in by_id for edge in graph.edges):
        yield from _check_order(graph, by_id)


def _check_edge(edge: Edge, by_id: dict[str, Node]) -> Iterator[GraphError]:
    if edge.dst not in by_id:
        yield GraphError(
            f"an edge leads to '{edge.dst}', which is not a node", where=f"node {edge.src}"
        )
        return
    node = by_id[edge.dst]
    if edge.src not in by_id:
        yield node.error(f"{node.id} reads '{edge.src}', which is not a node")
    if edge.argument not in node.inputs:
        yield node.error(
            f"an edge feeds argument '{edge.argument}' of {node.id}, which it does not list",
            expected=", ".join(node.inputs) or "no arguments",
        )


def _check_order(graph: Graph, by_id: dict[str, Node]) -> Iterator[GraphError]:
    # Edges to the next step and those of a region may form cycles.
    ordered = [edge for edge in graph.edges if not edge.carried and not graph.is_inner(edge)]
    sorter = TopologicalSorter[NodeId]()
    for edge in ordered:
        sorter.add(edge.dst, edge.src)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = error.args[1]
        yield by_id[cycle[0]].error("the graph has a cycle", found=" -> ".join(cycle))
        return
    place = {node.id: i for i, node in enumerate(graph.nodes)}
    for edge in ordered:
        if place[edge.src] > place[edge.dst]:
            yield by_id[edge.dst].error(f"{edge.dst} comes before {edge.src}, which it reads")


# A node against its signature.


def _check_node(graph: Graph, node: Node, signature: Signature) -> Iterator[GraphError]:
    if signature.has_role and node.role is None:
        yield node.error(f"{node.id} needs a role to perform it")
    if not signature.has_role and node.role is not None:
        yield node.error(f"{node.id} is performed by no role", found=f"role '{node.role}'")
    yield from _check_arguments(graph, node, signature)
    yield from _check_attrs(graph.level, node, signature)
    yield from _check_outputs(graph, node, signature)
    yield from conditions(graph, node)


def _check_arguments(graph: Graph, node: Node, signature: Signature) -> Iterator[GraphError]:
    known = [a for a in signature.arguments if _ORDER[graph.level] <= _ORDER[a.until]]
    for name in node.inputs:
        if not any(a.is_named(name) for a in known):
            yield node.error(
                f"{node.id} has no argument '{name}' in a {graph.level} graph",
                expected=", ".join(a.name for a in known) or "no arguments",
            )
    for argument in known:
        fed = [name for name in node.inputs if argument.is_named(name)]
        for edge in graph.in_edges(node.id):
            if edge.argument in fed:
                yield from _check_fields(graph, node, argument, edge)
        if not fed and argument.required:
            needs = ", ".join(f.name for f in argument.fields)
            yield node.error(f"{node.id} needs '{argument.name}' ({needs}), but nothing feeds it")


def _check_fields(graph: Graph, node: Node, argument: Argument, edge: Edge) -> Iterator[GraphError]:
    source = graph.node(edge.src)
    if edge.carried != argument.carried:
        when = "of the step before" if argument.carried else "of the same step"
        yield node.error(f"argument '{argument.name}' of {node.id} takes a value {when}")
    if graph.is_inner(edge) != argument.inner:
        where = "within its region" if argument.inner else "outside its region"
        yield node.error(f"argument '{argument.name}' of {node.id} takes a value of {where}")
    for wanted in argument.fields:
        if wanted.name not in edge.fields:
            yield node.error(
                f"{node.id} needs '{wanted.name}' {per(wanted)} as '{edge.argument}', "
                f"but '{source.id}' gives {names_of(source.outputs)}",
            )
    for name in edge.fields:
        field, wanted_field = source.output(name), argument.field(name)
        if field is None:
            yield node.error(f"{node.id} reads '{name}' of {source.id}, which does not produce it")
        elif wanted_field is None and not argument.any_fields:
            yield node.error(
                f"argument '{edge.argument}' of {node.id} does not take '{name}'",
                expected=names_of(argument.fields + argument.optional_fields),
            )
        elif wanted_field is not None and not argument.takes(field):
            yield node.error(
                f"{node.id} needs '{name}' {per(wanted_field)} ({wanted_field.dtype}), "
                f"but '{source.id}' gives it {per(field)} ({field.dtype})",
            )


def _check_attrs(level: Level, node: Node, signature: Signature) -> Iterator[GraphError]:
    known = [a for a in signature.rules if _ORDER[a.since] <= _ORDER[level] <= _ORDER[a.until]]
    for name, value in node.attrs:
        rule = next((a for a in known if a.name == name), None)
        if rule is None:
            yield node.error(
                f"{node.id} has no attribute '{name}' in a {level} graph",
                expected=", ".join(a.name for a in known) or "no attributes",
            )
        elif value is None and level is Level.PLACED:
            yield node.error(
                f"attribute '{name}' of {node.id} is open",
                expected="a value; a placed graph leaves out what there is none of",
            )
        elif value is not None and not _is_a(value, rule.types):
            yield node.error(
                f"attribute '{name}' of {node.id} is of the wrong type",
                found=f"{value} ({type(value).__name__})",
                expected=" or ".join(t.__name__ for t in rule.types),
            )
        elif isinstance(value, Spec):
            for field, wrong, allowed in wrong_fields(value):
                yield node.error(
                    f"{name} {called(value)} of {node.id} cannot have this {field}",
                    found=repr(wrong),
                    expected=allowed,
                )
    for rule in known:
        filled = rule.filled is not None and _ORDER[level] >= _ORDER[rule.filled]
        if filled and node.attr(rule.name) in (None, ""):
            yield node.error(f"attribute '{rule.name}' of {node.id} is not filled")


def _is_a(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types)


def _check_outputs(graph: Graph, node: Node, signature: Signature) -> Iterator[GraphError]:
    expected = signature.outputs
    if node.op is Op.SOURCE:
        expected = _SOURCES.get(str(node.attr("data")))
        if expected is None:
            yield node.error(
                f"{node.id} holds an unknown kind of data",
                found=str(node.attr("data")),
                expected=" or ".join(_SOURCES),
            )
            return
    spec = node.attr("spec")
    if isinstance(spec, AdvantageSpec):
        expected = advantage_outputs(spec)
    if isinstance(spec, MapSpec):
        expected = map_outputs(spec)
    if node.op is Op.SCORE:
        expected = score_outputs(node.attr("per"))
    if expected is None:
        read = [name for edge in graph.in_edges(node.id) for name in edge.fields]
        if node.op is Op.PAIR or getattr(spec, "pairs", False):
            read.append(PREFERRED.name)
        if node.op is Op.CONCAT:
            read.append(PART.name)
        for field in node.outputs:
            if field.name not in read:
                yield node.error(f"{node.id} passes on '{field.name}', which it does not read")
    elif node.outputs != expected:
        article = "an" if node.op[0] in "aeiou" else "a"
        yield node.error(
            f"{node.id} does not produce what {article} {node.op} does",
            found=names_of(node.outputs),
            expected="; ".join(str(field) for field in expected),
        )


# One role is one model: the operations of its nodes must not exclude each other.

_POLICY = "a policy, whose model gives logprobs"
_CRITIC = "a critic, whose model gives values"
_REWARD_MODEL = "a reward model, which gives scores"
_RULES = "a reward by rules, without a model"
_ENVIRONMENT = "an environment, without a model"

_BY_OP = {
    Op.GENERATE: _POLICY,
    Op.LOGPROBS: _POLICY,
    Op.VALUES: _CRITIC,
    Op.INTERACT: _ENVIRONMENT,
}
_BY_PREDICTION = {
    "logprobs": _POLICY,
    "values": _CRITIC,
    "scores": _REWARD_MODEL,
    "token_scores": _REWARD_MODEL,
}


def check_role_models(graph: Graph) -> Iterator[GraphError]:
    """Roles that are used for two incompatible models."""
    first: dict[str, tuple[str, Node]] = {}
    for node in graph.nodes:
        kind = _kind(node)
        if node.role is None or kind is None:
            continue
        known, before = first.setdefault(node.role, (kind, node))
        if known != kind:
            where = f" ({before.source})" if before.source is not None else ""
            yield node.error(
                f"role '{node.role}' is used for two incompatible models: "
                f"{node.id} asks for {kind}",
                found=f"{before.id}{where} asks for {known}",
                hint="make them two roles, each with its own entry under roles in the config",
            )


def _kind(node: Node) -> str | None:
    """Returns the kind of role that a node needs; None where any will do."""
    match node.op:
        case Op.SCORE:
            return _REWARD_MODEL if node.attr("by") == "model" else _RULES
        case Op.UPDATE:
            loss = node.attr("loss")
            return _BY_PREDICTION[loss.predicts] if isinstance(loss, LossSpec) else None
        case _:
            return _BY_OP.get(node.op)


# Versions of a role: the weights that each forward pass runs with.


def _check_versions(graph: Graph) -> Iterator[GraphError]:
    """Yields operations that ask for other weights than their role has at their place.

    Nodes run in the order of the graph. A forward pass has the weights of its role's latest update
    before it, and without one those that the step began with, of which rollouts always are. A sync
    with another role takes the weights that a step ends with.
    """
    changed: dict[str, Node] = {}
    taken: dict[str, Node] = {}
    for node in graph.nodes:
        role, edge = str(node.role), graph.feeding(node.id, "weights")
        before = None
        if node.op is Op.UPDATE:
            before = taken.get(role)
            changed[role] = node
        elif node.op is Op.SYNC and edge is not None and graph.node(edge.src).role != node.role:
            taken[str(graph.node(edge.src).role)] = changed[role] = node
        elif node.op is Op.GENERATE:
            before = changed.get(role)
        elif node.op in FORWARD_PASSES:
            latest, read = changed.get(role), None if edge is None else edge.src
            before = latest if latest is not None and latest.id != read else None
        if before is not None:
            where = f" ({before.source})" if before.source is not None else ""
            hint = f"move it before {before.id}"
            if before.op is Op.UPDATE and node.op in FORWARD_PASSES:
                hint += f", or ask the role that it returns: {role}2 = {role}.update(...)"
            yield node.error(
                f"{node.id} comes after {before.id}{where} in the same step",
                expected=_WEIGHTS_OF[node.op],
                hint=hint,
            )


_WEIGHTS_OF: Mapping[Op, str] = {
    Op.GENERATE: "rollouts by the weights that the step begins with; new ones are for the next",
    Op.UPDATE: "an update before another role takes the weights, which are those of the step's end",
    **dict.fromkeys(
        FORWARD_PASSES, "the weights that the step begins with, or of its newest update"
    ),
}
"""The weights that each operation runs with."""


def _check_sums(graph: Graph) -> Iterator[GraphError]:
    """Yields sums whose terms are not one optimizer update: consecutive updates of one role."""
    for terms in sums_of(graph).values():
        first, last = terms[0], terms[-1]
        own = [node for node in graph.of_op(Op.UPDATE) if node.role == first.role]
        place = own.index(first)
        kinds = {(node.role, node.attr("every")) for node in terms}
        read = {edge.src for edge in graph.edges if WEIGHTS.name in edge.fields}
        if (
            tuple(own[place : place + len(terms)]) != terms
            or len(kinds) > 1
            or read & {node.id for node in terms[:-1]}
        ):
            yield last.error(
                f"the terms of {first.attr('sum')} are not one update: they are consecutive "
                "updates of one role in the same steps, and only after the last one are there "
                "new weights",
                found=", ".join(node.id for node in terms),
            )
