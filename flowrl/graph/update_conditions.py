"""Conditions between the arguments of an update: what a loss must be given, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Node, called, names_of, node_error, per
from flowrl.graph.signatures import LOGPROBS, PREFERRED, ROLLOUT_LOGPROBS
from flowrl.graph.types import Field, Level, Op
from flowrl.specs import KL, LossSpec

__all__ = ["check_update"]


def check_update(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Yields the errors between the arguments of an update."""
    rollout = graph.feeding(node.id, "rollout")
    if rollout is None:
        return  # said already
    given = graph.node(rollout.src)
    loss, kl = node.attr("loss"), node.attr("kl")
    if isinstance(kl, KL) and kl.coefficient != 0 and "reference" not in node.inputs:
        yield node_error(
            node,
            f"update(kl={kl.estimator}) needs 'reference' logprobs {per(LOGPROBS)}, "
            f"but 'rollout' gives {names_of(given.outputs)}",
            hint="pass reference=reference.logprobs(rollout), or set kl=0",
        )
    read_by_loss = isinstance(loss, LossSpec) and "reference_logprobs" in loss.needs
    if "reference" in node.inputs and kl is None and not read_by_loss:
        yield node_error(
            node,
            f"{node.id} gets reference logprobs, but no KL penalty uses them",
            hint="pass kl=fl.kl.k3(0.001), or leave reference out",
        )
    if "rewards" in node.inputs and "advantages" in node.inputs:
        yield node_error(
            node,
            f"{node.id} gets both rewards and advantages",
            hint="pass advantages=, or rewards= and let the config say which advantage",
        )
    yield from _check_own_model(graph, node)
    if graph.level is not Level.TRACED:
        yield from _check_lowered_update(graph, node)
    if isinstance(loss, LossSpec):
        yield from _check_loss(graph, node, loss, given, rollout)
    elif given.output(PREFERRED.name) is not None:
        yield node_error(
            node,
            f"{node.id} learns from pairs, and no loss says how",
            hint="pass loss=fl.loss.dpo(0.1)",
        )
    elif _is_supervised(given) and {"rewards", "advantages"} & set(node.inputs):
        (unused, *_) = [name for name in ("rewards", "advantages") if name in node.inputs]
        yield node_error(
            node,
            f"{node.id} learns samples that no role drew by cross-entropy, which does not use its "
            f"{unused}",
            hint=f"leave {unused} out, or name a loss that does: loss=fl.loss.reinforce()",
        )
    elif not _is_supervised(given) and not {"rewards", "advantages"} & set(node.inputs):
        yield node_error(
            node,
            f"{node.id} gets nothing to learn from",
            hint=f"pass rewards or advantages: {node.role}.update(rollout, rewards)",
        )


_OF_ITSELF: Mapping[str, tuple[Op, str]] = {
    "old": (Op.LOGPROBS, "logprobs"),
    "values": (Op.VALUES, "values"),
}
"""For an argument that says what the model was before the update: what gives it."""


def _check_own_model(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Old logprobs and old values must come from the updated model itself."""
    for argument, (op, call) in _OF_ITSELF.items():
        edge = graph.feeding(node.id, argument)
        source = None if edge is None else graph.node(edge.src)
        if source is not None and source.op is op and source.role != node.role:
            yield node_error(
                node,
                f"{node.id} gets '{argument}' of another model: {source.id} is by {source.role}",
                expected=f"the {call} of {node.role}, as it was before this update",
                hint=f"pass {argument}={node.role}.{call}(rollout)",
            )


def _is_supervised(given: Node) -> bool:
    return given.output(ROLLOUT_LOGPROBS.name) is None


def _check_lowered_update(graph: Graph, node: Node) -> Iterator[GraphError]:
    loss = node.attr("loss")
    needs = loss.needs if isinstance(loss, LossSpec) else ()
    if "behaviour_logprobs" in needs and node.attr("behaviour_logprobs") is None:
        yield node_error(node, f"it is not said where {node.id} takes its behaviour logprobs from")
    old = node.attr("old_logprobs")
    if "old_logprobs" in needs and old is None:
        yield node_error(node, f"it is not said where {node.id} takes its old logprobs from")
    if (old == "forward") != ("old" in node.inputs):
        yield node_error(
            node,
            f"old_logprobs={old} of {node.id} does not fit its arguments",
            found=", ".join(node.inputs),
            expected="an argument 'old' with old_logprobs=\"forward\", and only then",
        )
    generates = [g for g in graph.of_op(Op.GENERATE) if g.role == node.role]
    if generates and not any(sync.role == node.role for sync in graph.of_op(Op.SYNC)):
        yield node_error(
            node, f"weights of {node.id} never reach {generates[0].id}", expected="a sync between"
        )


_LOSS_NEEDS: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "advantages": (
        ("rewards", "advantages"),
        "advantages or rewards per sample",
        "pass advantages=fl.advantage.group_relative(scores), or rewards=scores",
    ),
    "reference_logprobs": (
        ("reference",),
        "'reference' logprobs per token",
        "pass reference=reference.logprobs(rollout)",
    ),
    "returns": (
        ("returns",),
        "'returns' per token",
        "pass returns=returns of advantages, returns = fl.advantage.gae(...)",
    ),
    "old_values": (("values",), "'values' per token", "pass values=critic.values(rollout)"),
}
"""For a field that a loss reads: the arguments that give it, what it is, and how to give it."""

_LOSS_FIELDS: Mapping[str, tuple[Field, str]] = {
    "behaviour_logprobs": (
        ROLLOUT_LOGPROBS,
        "pass a rollout that a role generated, or loss=fl.loss.cross_entropy()",
    ),
    "preferred": (PREFERRED, "pass pairs: fl.Pairs, or what fl.select.best_and_worst returned"),
}
"""For a field that a loss reads: the one of the rollout that it is, and how to give it."""

_TO_USE = {
    "old": "fl.loss.policy_clip(0.2, anchor='old')",
    "rewards": "fl.loss.policy_clip(0.2)",
    "advantages": "fl.loss.policy_clip(0.2)",
    "returns": "fl.loss.value_clip(0.2)",
    "values": "fl.loss.value_clip(0.2)",
}


def _check_loss(
    graph: Graph, node: Node, loss: LossSpec, given: Node, rollout: Edge
) -> Iterator[GraphError]:
    arguments = set(node.inputs)
    needed: set[str] = set()
    for name in loss.needs:
        if name in _LOSS_NEEDS:
            ways, what, hint = _LOSS_NEEDS[name]
            needed.update(ways)
            if not arguments & set(ways):
                found = f"but '{given.id}' gives {names_of(given.outputs)}"
                yield node_error(
                    node, f"update(loss={called(loss)}) needs {what}, {found}", hint=hint
                )
        elif name in _LOSS_FIELDS:
            field, hint = _LOSS_FIELDS[name]
            if field.name not in rollout.fields:
                yield node_error(
                    node,
                    f"update(loss={called(loss)}) needs '{field.name}' {per(field)}, "
                    f"but '{given.id}' gives {names_of(given.outputs)}",
                    hint=hint,
                )
        elif name == "old_logprobs":
            needed.add("old")  # inserted where the program does not pass it
        elif name not in loss.extra_fields:
            yield node_error(
                node,
                f"update(loss={called(loss)}) needs {name!r}, which no operation gives",
                expected=", ".join(("old_logprobs", *_LOSS_NEEDS, *_LOSS_FIELDS)),
            )
    teaches = {"preferred", "advantages", *loss.extra_fields}
    if given.output(PREFERRED.name) is not None and not teaches & set(loss.needs):
        yield node_error(
            node,
            f"update(loss={called(loss)}) learns both samples of a pair alike, and so the one that "
            "is not preferred too",
            expected="a loss of pairs, or advantages",
            hint="pass loss=fl.loss.dpo(0.1), or choose samples with fl.select.top",
        )
    yield from _check_extra(graph, node, loss)
    for unused, other in _TO_USE.items():
        weights = unused in ("rewards", "advantages")
        if unused in arguments and unused not in needed:
            yield node_error(
                node,
                f"update(loss={called(loss)}) does not use its {unused}",
                hint=f"leave {unused} out, or use loss="
                + ("fl.loss.reinforce()" if weights and _is_supervised(given) else other),
            )


def _check_extra(graph: Graph, node: Node, loss: LossSpec) -> Iterator[GraphError]:
    """Fields of the user's own maps: those that the loss names, and no others."""
    edges = [e for e in graph.in_edges(node.id) if e.argument.partition("_")[0] == "extra"]
    fed = [name for edge in edges for name in edge.fields]
    for name in loss.extra_fields:
        if name not in fed:
            yield node_error(
                node,
                f"update(loss={called(loss)}) needs the field '{name}' of a map",
                found=", ".join(fed) or "no extra fields",
                hint=f"pass extra= what the map that gives '{name}' returned",
            )
    for name in fed:
        if name not in loss.extra_fields:
            yield node_error(
                node,
                f"update(loss={called(loss)}) does not use its extra field '{name}'",
                expected=", ".join(loss.extra_fields) or "no extra fields",
            )
