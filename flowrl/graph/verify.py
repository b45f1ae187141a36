"""The verifier: proves that a graph keeps the specification of its level.

`problems` lists everything wrong, first things first; `verify` raises the first. Every error names
the line of the user's program that made the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Node
from flowrl.graph.signatures import (
    COMMON_ATTRS,
    LOGPROBS,
    PROMPT,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    SIGNATURES,
    TOKENS,
    Argument,
    Signature,
    advantage_outputs,
)
from flowrl.graph.types import Field, Level, Op, Unit
from flowrl.specs import KL, AdvantageSpec, LossSpec

__all__ = ["problems", "sample_sets", "verify"]

_ORDER = {level: i for i, level in enumerate(Level)}
_SOURCES = {"prompts": (PROMPT,), "examples": (TOKENS, RESPONSE_MASK)}
_PER = {
    Unit.PROMPTS: "per prompt",
    Unit.GROUPS: "per group",
    Unit.SAMPLES: "per sample",
    Unit.TOKENS: "per token",
    Unit.ROLES: "per role",
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
    yield from _check_sample_sets(graph)
    if not graph.of_op(Op.UPDATE):
        yield GraphError(
            f"workflow '{graph.name}' updates nothing",
            expected="at least one update, such as actor.update(rollout, rewards)",
        )


def _error(node: Node, what: str, **more: str | None) -> GraphError:
    where = str(node.source) if node.source is not None else f"node {node.id}"
    return GraphError(what, where=where, **more)


# Structure: ids, edges, order.


def _check_structure(graph: Graph) -> Iterator[GraphError]:
    by_id: dict[str, Node] = {}
    for node in graph.nodes:
        if node.id in by_id:
            yield _error(node, f"two nodes have the id '{node.id}'")
        by_id[node.id] = node
        if node.op not in SIGNATURES:
            yield _error(
                node,
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
                yield _error(node, f"{many} argument '{name}' of {node.id}")
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
        yield _error(node, f"{node.id} reads '{edge.src}', which is not a node")
    if edge.argument not in node.inputs:
        yield _error(
            node,
            f"an edge feeds argument '{edge.argument}' of {node.id}, which it does not list",
            expected=", ".join(node.inputs) or "no arguments",
        )


def _check_order(graph: Graph, by_id: dict[str, Node]) -> Iterator[GraphError]:
    cycle = _find_cycle(graph)
    if cycle:
        yield _error(
            by_id[cycle[0]], "the graph has a cycle", found=" -> ".join([*cycle, cycle[0]])
        )
        return
    place = {node.id: i for i, node in enumerate(graph.nodes)}
    for edge in graph.edges:
        if not edge.carried and place[edge.src] > place[edge.dst]:
            yield _error(by_id[edge.dst], f"{edge.dst} stands before {edge.src}, which it reads")


def _find_cycle(graph: Graph) -> list[str]:
    """Ids on a cycle of edges within a step; empty where there is none."""
    reads = {
        node.id: [e.src for e in graph.in_edges(node.id) if not e.carried] for node in graph.nodes
    }
    left = {node_id: len(sources) for node_id, sources in reads.items()}
    ready = [node_id for node_id, count in left.items() if count == 0]
    while ready:
        done = ready.pop()
        del left[done]
        for node_id, sources in reads.items():
            if node_id in left and done in sources:
                left[node_id] -= sources.count(done)
                if left[node_id] == 0:
                    ready.append(node_id)
    if not left:
        return []
    # Every node that is left reads one that is left; walking back must meet itself.
    path = [next(node.id for node in graph.nodes if node.id in left)]
    while True:
        before = next(src for src in reads[path[-1]] if src in left)
        if before in path:
            return [str(node_id) for node_id in reversed(path[path.index(before) :])]
        path.append(next(node.id for node in graph.nodes if node.id == before))


# A node against its signature.


def _check_node(graph: Graph, node: Node, signature: Signature) -> Iterator[GraphError]:
    if signature.has_role and node.role is None:
        yield _error(node, f"{node.id} needs a role to perform it")
    if not signature.has_role and node.role is not None:
        yield _error(node, f"{node.id} is performed by no role", found=f"role '{node.role}'")
    yield from _check_arguments(graph, node, signature)
    yield from _check_attrs(graph.level, node, signature)
    yield from _check_outputs(graph, node, signature)
    rule = _RULES.get(node.op)
    if rule is not None:
        yield from rule(graph, node)


def _known(argument: Argument, level: Level) -> bool:
    return _ORDER[level] <= _ORDER[argument.until]


def _check_arguments(graph: Graph, node: Node, signature: Signature) -> Iterator[GraphError]:
    known = [a for a in signature.arguments if _known(a, graph.level)]
    for name in node.inputs:
        if name not in [a.name for a in known]:
            yield _error(
                node,
                f"{node.id} has no argument '{name}' in a {graph.level} graph",
                expected=", ".join(a.name for a in known) or "no arguments",
            )
    for argument in known:
        edge = graph.feeding(node.id, argument.name)
        if edge is not None:
            yield from _check_fields(graph, node, argument, edge)
        elif argument.required:
            needs = ", ".join(f.name for f in argument.fields)
            yield _error(node, f"{node.id} needs '{argument.name}' ({needs}), but nothing feeds it")


def _check_fields(graph: Graph, node: Node, argument: Argument, edge: Edge) -> Iterator[GraphError]:
    source = graph.node(edge.src)
    if edge.carried != argument.carried:
        when = "of the step before" if argument.carried else "of the same step"
        yield _error(node, f"argument '{argument.name}' of {node.id} takes a value {when}")
    for wanted in argument.fields:
        if wanted.name not in edge.fields:
            yield _error(
                node,
                f"{node.id} needs '{wanted.name}' {_PER[wanted.unit]} as '{argument.name}', "
                f"but '{source.id}' gives {_names(source.outputs)}",
            )
    for name in edge.fields:
        field, wanted_field = source.output(name), argument.field(name)
        if field is None:
            yield _error(
                node, f"{node.id} reads '{name}' of {source.id}, which does not produce it"
            )
        elif wanted_field is None:
            yield _error(
                node,
                f"argument '{argument.name}' of {node.id} does not take '{name}'",
                expected=_names(argument.fields + argument.optional_fields),
            )
        elif not argument.takes(field):
            yield _error(
                node,
                f"{node.id} needs '{name}' {_PER[wanted_field.unit]} ({wanted_field.dtype}), "
                f"but '{source.id}' gives it {_PER[field.unit]} ({field.dtype})",
            )


def _article(op: Op) -> str:
    return f"an {op}" if op[0] in "aeiou" else f"a {op}"


def _names(fields: Sequence[Field]) -> str:
    return ", ".join(field.name for field in fields) or "nothing"


def _check_attrs(level: Level, node: Node, signature: Signature) -> Iterator[GraphError]:
    known = [a for a in signature.attrs if _ORDER[level] <= _ORDER[a.until]]
    for name, value in node.attrs:
        rule = next((a for a in (*known, *COMMON_ATTRS) if a.name == name), None)
        if rule is None:
            yield _error(
                node,
                f"{node.id} has no attribute '{name}' in a {level} graph",
                expected=", ".join(a.name for a in known) or "no attributes",
            )
        elif value is not None and not _is_a(value, rule.types):
            yield _error(
                node,
                f"attribute '{name}' of {node.id} is of the wrong type",
                found=f"{value} ({type(value).__name__})",
                expected=" or ".join(t.__name__ for t in rule.types),
            )
    for rule in known:
        filled = rule.filled is not None and _ORDER[level] >= _ORDER[rule.filled]
        if filled and node.attr(rule.name) is None:
            yield _error(node, f"attribute '{rule.name}' of {node.id} is not filled")


def _is_a(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types)


def _check_outputs(graph: Graph, node: Node, signature: Signature) -> Iterator[GraphError]:
    expected = signature.outputs
    if node.op is Op.SOURCE:
        expected = _SOURCES.get(str(node.attr("data")))
        if expected is None:
            yield _error(
                node,
                f"{node.id} holds an unknown kind of data",
                found=str(node.attr("data")),
                expected=" or ".join(_SOURCES),
            )
            return
    spec = node.attr("spec")
    if isinstance(spec, AdvantageSpec):
        expected = advantage_outputs(spec)
    if expected is None:
        read = [name for edge in graph.in_edges(node.id) for name in edge.fields]
        for field in node.outputs:
            if field.name not in read:
                yield _error(node, f"{node.id} passes on '{field.name}', which it does not read")
    elif node.outputs != expected:
        yield _error(
            node,
            f"{node.id} does not produce what {_article(node.op)} does",
            found=_names(node.outputs),
            expected="; ".join(str(field) for field in expected),
        )


# Conditions between arguments.


def _check_update(graph: Graph, node: Node) -> Iterator[GraphError]:
    rollout = graph.feeding(node.id, "rollout")
    if rollout is None:
        return  # said already
    given = graph.node(rollout.src)
    loss, kl = node.attr("loss"), node.attr("kl")
    if isinstance(kl, KL) and kl.coefficient != 0 and "reference" not in node.inputs:
        yield _error(
            node,
            f"update(kl={kl.estimator}) needs 'reference' logprobs {_PER[LOGPROBS.unit]}, "
            f"but 'rollout' gives {_names(given.outputs)}",
            hint="pass reference=reference.logprobs(rollout), or set kl=0",
        )
    if "reference" in node.inputs and kl is None:
        yield _error(
            node,
            f"{node.id} gets reference logprobs, but no KL penalty uses them",
            hint="pass kl=fl.kl.k3(0.001), or leave reference out",
        )
    if "rewards" in node.inputs and "advantages" in node.inputs:
        yield _error(
            node,
            f"{node.id} gets both rewards and advantages",
            hint="pass advantages=, or rewards= and let the config say which advantage",
        )
    if graph.level is not Level.TRACED:
        yield from _check_lowered_update(graph, node)
    supervised = given.output(ROLLOUT_LOGPROBS.name) is None
    if isinstance(loss, LossSpec):
        yield from _check_loss(node, loss, given, rollout)
    elif not supervised and not {"rewards", "advantages"} & set(node.inputs):
        yield _error(
            node,
            f"{node.id} gets nothing to learn from",
            hint=f"pass rewards or advantages: {node.role}.update(rollout, rewards)",
        )


def _check_lowered_update(graph: Graph, node: Node) -> Iterator[GraphError]:
    loss = node.attr("loss")
    needs = loss.needs if isinstance(loss, LossSpec) else ()
    if "behaviour_logprobs" in needs and node.attr("behaviour_logprobs") is None:
        yield _error(node, f"it is not said where {node.id} takes its behaviour logprobs from")
    generates = [g for g in graph.of_op(Op.GENERATE) if g.role == node.role]
    if generates and not any(sync.role == node.role for sync in graph.of_op(Op.SYNC)):
        yield _error(
            node, f"weights of {node.id} never reach {generates[0].id}", expected="a sync between"
        )


_FED_TO_LOSSES = ("advantages", "behaviour_logprobs")
"""What an update can give to its loss beside tokens, mask and reference logprobs."""


def _check_loss(node: Node, loss: LossSpec, given: Node, rollout: Edge) -> Iterator[GraphError]:
    arguments = set(node.inputs)
    if "advantages" in loss.needs and not arguments & {"rewards", "advantages"}:
        yield _error(
            node,
            f"update(loss={loss.kind}) needs advantages or rewards per sample, "
            f"but '{given.id}' gives {_names(given.outputs)}",
            hint="pass advantages=fl.advantage.group_relative(scores), or rewards=scores",
        )
    if "behaviour_logprobs" in loss.needs and ROLLOUT_LOGPROBS.name not in rollout.fields:
        yield _error(
            node,
            f"update(loss={loss.kind}) needs '{ROLLOUT_LOGPROBS.name}' per token, "
            f"but '{given.id}' gives {_names(given.outputs)}",
            hint="pass a rollout that a role generated, or loss=fl.loss.cross_entropy()",
        )
    unfed = [name for name in loss.needs if name not in _FED_TO_LOSSES]
    if unfed:
        yield _error(
            node,
            f"update(loss={loss.kind}) needs {' and '.join(map(repr, unfed))} per token, which no "
            "operation of a program gives",
            expected=f"a loss of {' and '.join(_FED_TO_LOSSES)}",
            hint="leave out what asks for it, such as correction=, rejection= or anchor='old'",
        )
    unused = "rewards" if "rewards" in arguments else "advantages"
    if "advantages" not in loss.needs and unused in arguments:
        yield _error(
            node,
            f"update(loss={loss.kind}) does not use its {unused}",
            hint=f"leave {unused} out, or use loss=fl.loss.policy_clip(0.2)",
        )


def _check_advantage(graph: Graph, node: Node) -> Iterator[GraphError]:
    spec = node.attr("spec")
    if not isinstance(spec, AdvantageSpec):
        return  # said already
    missing = [name for name in spec.needs if name != "mask"]
    if missing:
        yield _error(node, f"no operation gives {spec.kind} its {', '.join(missing)}")
    penalty = bool(getattr(spec, "kl_coefficient", 0.0))
    for argument, wanted, why, to_give, to_leave in (
        (
            "rollout",
            "mask" in spec.needs,
            "to know which tokens are a response",
            "pass the rollout that was scored",
            "leave rollout out",
        ),
        (
            "reference",
            penalty,
            "for its KL penalty",
            "pass reference=reference.logprobs(rollout), or set kl=0",
            "leave reference out, or give the penalty a coefficient: kl=0.001",
        ),
    ):
        if wanted and argument not in node.inputs:
            yield _error(node, f"advantage {spec.kind} needs '{argument}' {why}", hint=to_give)
        if not wanted and argument in node.inputs:
            yield _error(
                node, f"advantage {spec.kind} does not use its '{argument}'", hint=to_leave
            )
    rollout = graph.feeding(node.id, "rollout")
    if penalty and rollout is not None and ROLLOUT_LOGPROBS.name not in rollout.fields:
        yield _error(
            node,
            f"the KL penalty of {spec.kind} needs '{ROLLOUT_LOGPROBS.name}' per token, "
            f"but '{rollout.src}' gives {', '.join(rollout.fields)}",
            hint="pass a rollout that a role generated",
        )


_RULES: dict[Op, Callable[[Graph, Node], Iterator[GraphError]]] = {
    Op.ADVANTAGE: _check_advantage,
    Op.UPDATE: _check_update,
}


# Sample sets: a filter makes a smaller set; arguments of one node must speak of the same samples.


def sample_sets(graph: Graph) -> dict[str, str]:
    """For each node, the node that made the set of samples (or prompts) that it speaks of."""
    made: dict[str, str] = {}
    for node in graph.nodes:
        edges = [e for e in graph.in_edges(node.id) if not e.carried and e.src in made]
        starts = node.op in (Op.SOURCE, Op.GENERATE, Op.FILTER, Op.SELECT, Op.INTERACT)
        made[node.id] = node.id if starts or not edges else made[edges[0].src]
    return made


def _check_sample_sets(graph: Graph) -> Iterator[GraphError]:
    made = sample_sets(graph)
    for node in graph.nodes:
        edges = [edge for edge in graph.in_edges(node.id) if not edge.carried]
        for edge in edges[1:]:
            first, other = made[edges[0].src], made[edge.src]
            if first != other:
                yield _error(
                    node,
                    f"{node.id} gets '{edges[0].argument}' for the samples of '{first}', "
                    f"but '{edge.argument}' for the samples of '{other}'",
                    hint="after a filter, use what it returned everywhere: "
                    "rollout, scores = fl.filter.zero_variance(rollout, scores)",
                )
