"""Conditions between the arguments of an update: what its loss and its penalty read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.errors import GraphError
from flowrl.graph.ir import (
    Graph,
    Level,
    Node,
    Op,
    called,
    names_of,
    per,
)
from flowrl.graph.needs import LOSS_NEEDS, check_needs
from flowrl.graph.sample_sets import sampling_nodes
from flowrl.graph.signatures import (
    LOGPROBS,
    PART,
    PREFERRED,
    ROLLOUT_LOGPROBS,
    SCORE,
)
from flowrl.specs import KL, LossSpec


def check_update(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Yields the errors between the arguments of an update."""
    rollout = graph.feeding(node.id, "rollout")
    if rollout is None:
        return  # the signature reports it
    given = graph.node(rollout.src)
    loss, kl = node.attr("loss"), node.attr("kl")
    if isinstance(kl, KL) and kl.coefficient != 0 and "reference" not in node.inputs:
        yield node.error(
            f"update(kl={kl.estimator}) needs 'reference' logprobs {per(LOGPROBS)}, "
            f"but 'rollout' gives {names_of(given.outputs)}",
            hint="pass reference=reference.logprobs(rollout), or set kl=0",
        )
    read_by_loss = isinstance(loss, LossSpec) and "reference_logprobs" in loss.needs
    is_unsaid = loss is None and given.output(PREFERRED.name) is not None  # reported below
    if "reference" in node.inputs and kl is None and not read_by_loss and not is_unsaid:
        yield node.error(
            f"{node.id} gets reference logprobs, but no KL penalty uses them",
            hint="pass kl=fl.kl.k3(0.001), or leave reference out",
        )
    reference = graph.feeding(node.id, "reference")
    if (
        isinstance(kl, KL)
        and kl.estimator == "full"
        and reference is not None
        and graph.node(reference.src).op is not Op.LOGPROBS
    ):
        yield node.error(
            f"update(kl=full) needs the reference's whole distributions, and {reference.src} gives "
            "logprobs of tokens",
            hint="pass reference=reference.logprobs(rollout), or another estimator: kl=fl.kl.k3",
        )
    if "rewards" in node.inputs and "advantages" in node.inputs:
        yield node.error(
            f"{node.id} gets both rewards and advantages",
            hint="pass advantages=, or rewards= and let the config say which advantage",
        )
    yield from _check_own_model(graph, node)
    if graph.level is not Level.TRACED:
        yield from _check_lowered_update(graph, node)
    if isinstance(loss, LossSpec):
        yield from _check_loss(graph, node, loss, given)
    elif given.output(PREFERRED.name) is not None:
        yield node.error(
            f"{node.id} learns from pairs, and no loss says how",
            hint="pass loss=fl.loss.dpo(0.1)",
        )
    elif _is_supervised(given) and {"rewards", "advantages"} & set(node.inputs):
        unused = "rewards" if "rewards" in node.inputs else "advantages"
        hint = f"leave {unused} out, or name a loss that does: loss=fl.loss.reinforce()"
        if any(sampling_nodes(graph, node)):
            hint = (
                "say which logprobs the samples have that no role generated: "
                "fl.concat(..., missing_logprob=0.0), or name a loss that needs none: "
                "loss=fl.loss.reinforce()"
            )
        yield node.error(
            f"{node.id} imitates samples, as they have no logprobs of a policy that sampled them, "
            f"and does not use its {unused}",
            hint=hint,
        )
    elif not _is_supervised(given) and not {"rewards", "advantages"} & set(node.inputs):
        yield node.error(
            f"{node.id} gets nothing to learn from",
            hint=f"pass rewards or advantages: {node.role}.update(rollout, rewards); or imitate "
            "the samples: loss=fl.loss.cross_entropy()",
        )


_OF_ITSELF: Mapping[str, tuple[Op, str]] = {
    "old": (Op.LOGPROBS, "logprobs"),
    "values": (Op.VALUES, "values"),
}
"""For each argument that is of the model before the update: the operation that gives it."""


def _check_own_model(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that old logprobs and old values come from the updated model itself."""
    for argument, (op, call) in _OF_ITSELF.items():
        edge = graph.feeding(node.id, argument)
        source = None if edge is None else graph.node(edge.src)
        if source is not None and source.op is op and source.role != node.role:
            yield node.error(
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
        yield node.error(f"it is not said where {node.id} takes its behaviour logprobs from")
    old = node.attr("old_logprobs")
    if "old_logprobs" in needs and old is None:
        yield node.error(f"it is not said where {node.id} takes its old logprobs from")
    if (old == "forward") != ("old" in node.inputs):
        yield node.error(
            f"old_logprobs={old} of {node.id} does not fit its arguments",
            found=", ".join(node.inputs),
            expected="an argument 'old' with old_logprobs=\"forward\", and only then",
        )
    generates = [g for g in graph.of_op(Op.GENERATE) if g.role == node.role]
    if generates and not any(sync.role == node.role for sync in graph.of_op(Op.SYNC)):
        yield node.error(
            f"weights of {node.id} never reach {generates[0].id}", expected="a sync between"
        )


def _check_loss(graph: Graph, node: Node, loss: LossSpec, given: Node) -> Iterator[GraphError]:
    reader = f"update(loss={called(loss)})"
    needs = [name for name in loss.needs if name not in loss.extra_fields]
    if "reference" in node.inputs:  # read by the penalty, if not by the loss
        needs.append("reference_logprobs")
    yield from check_needs(graph, node, reader, needs, LOSS_NEEDS)
    teaches = {"preferred", "advantages", *loss.extra_fields}
    if given.output(PREFERRED.name) is not None and not teaches & set(loss.needs):
        yield node.error(
            f"{reader} learns both samples of a pair alike, and so the one that is not preferred",
            expected="a loss of pairs, or advantages",
            hint="pass loss=fl.loss.dpo(0.1), or choose samples with fl.select.top",
        )
    yield from _check_extra(graph, node, loss)


def _check_extra(graph: Graph, node: Node, loss: LossSpec) -> Iterator[GraphError]:
    """Checks that the fields of the user's own maps are those that the loss names."""
    edges = [e for e in graph.in_edges(node.id) if e.argument.partition("_")[0] == "extra"]
    fed = [name for edge in edges for name in edge.fields]
    rollout = graph.feeding(node.id, "rollout")
    if rollout is not None and PART.name in rollout.fields and PART.name in loss.extra_fields:
        fed.append(PART.name)
    for name in loss.extra_fields:
        if name not in fed:
            yield node.error(
                f"update(loss={called(loss)}) needs the field '{name}' of a map",
                found=", ".join(fed) or "no extra fields",
                hint=f"pass extra= what the map that gives '{name}' returned"
                if name != SCORE.name
                else "pass the scores: update(rollout, scores, ...)",
            )
    for name in fed:
        if name not in loss.extra_fields:
            yield node.error(
                f"update(loss={called(loss)}) does not use its extra field '{name}'",
                expected=", ".join(loss.extra_fields) or "no extra fields",
            )
