"""Conditions between the arguments of a node: what a loss, an advantage or a rollout must be given.

`flowrl.graph.signatures` says which arguments an operation knows; this says which of them a given
loss or specification asks for, and refuses what would be passed and never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Node
from flowrl.graph.signatures import (
    LOGPROBS,
    PREFERRED,
    ROLLOUT_LOGPROBS,
    STATE,
    TOKEN_REWARD,
    TURN,
)
from flowrl.graph.types import Field, Level, Op, Unit
from flowrl.specs import KL, AdvantageSpec, LossSpec, MapSpec
from flowrl.specs.maps import split_key

__all__ = ["conditions", "names_of", "node_error", "per"]

_PER = {
    Unit.PROMPTS: "per prompt",
    Unit.GROUPS: "per group",
    Unit.SAMPLES: "per sample",
    Unit.TOKENS: "per token",
    Unit.ROLES: "per role",
}


def node_error(node: Node, what: str, **more: str | None) -> GraphError:
    """An error at the line that made the node."""
    where = str(node.source) if node.source is not None else f"node {node.id}"
    return GraphError(what, where=where, **more)


def per(field: Field) -> str:
    """`per token`, `per sample`."""
    return _PER[field.unit]


def names_of(fields: Sequence[Field]) -> str:
    """Field names for messages."""
    return ", ".join(field.name for field in fields) or "nothing"


def conditions(graph: Graph, node: Node) -> Iterator[GraphError]:
    """What is wrong between the arguments of a node, each of which is right by itself."""
    rule = _RULES.get(node.op)
    if rule is not None:
        yield from rule(graph, node)
    if graph.level is Level.PLACED:
        yield from _check_replicas(node)


def _check_replicas(node: Node) -> Iterator[GraphError]:
    """The samples of a step must be the sum of what its replicas take, alike."""
    found = [node.attr(name) for name in ("samples", "replicas", "samples_per_replica")]
    samples, replicas, each = (value if isinstance(value, int) else 0 for value in found)
    if replicas > 0 and samples != replicas * each:
        low = samples // replicas * replicas
        yield node_error(
            node,
            f"{samples} samples of {node.id} do not divide among {replicas} replicas",
            found=f"{each} for each",
            expected=f"{low} or {low + replicas} samples a step, or a number of replicas that "
            f"divides {samples}",
            hint="change train.prompts_per_step or train.group_size",
        )


# Rollouts.


def _check_generate(graph: Graph, node: Node) -> Iterator[GraphError]:
    if node.region is None:
        if "prompts" not in node.inputs:
            yield node_error(node, f"{node.id} needs 'prompts', but nothing feeds it")
        if "observation" in node.inputs:
            yield node_error(node, f"{node.id} reads an observation, but is in no region")
    elif "observation" not in node.inputs or "prompts" in node.inputs:
        yield node_error(
            node,
            f"{node.id} is in region '{node.region}', where it answers observations",
            found=", ".join(node.inputs) or "no arguments",
            expected="observation",
        )


def _check_interact(graph: Graph, node: Node) -> Iterator[GraphError]:
    players = [g.id for g in graph.of_op(Op.GENERATE) if g.region == node.region]
    if node.region is None or len(players) != 1:
        yield node_error(
            node,
            f"{node.id} needs one policy that it exchanges turns with, in a region of both",
            found=", ".join(players) or "none",
        )


# Advantages.

_NEEDS: Mapping[str, tuple[str, str, str]] = {
    "mask": (
        "rollout",
        "to know which tokens are a response",
        "pass the rollout that was scored",
    ),
    "logprobs": (
        "rollout",
        "for the logprobs of the tokens",
        "pass the rollout that was scored",
    ),
    "turns": (
        "rollout",
        "to know which turn a token belongs to",
        "pass the rollout that fl.interact returned",
    ),
    "token_rewards": (
        "rollout",
        "for the rewards of its turns",
        "pass the rollout that fl.interact returned",
    ),
    "values": ("values", "of a critic", "pass values=critic.values(rollout)"),
    "baselines": (
        "baseline",
        "of each prompt",
        "pass baseline=verifier.score(actor.generate(prompts, n=1, temperature=0))",
    ),
    "reference_logprobs": (
        "reference",
        "of the other policy",
        "pass what teacher.logprobs(rollout) returned",
    ),
    "rewards": (
        "scores_2",
        "to have several rewards to combine",
        "pass the scores of several rewards",
    ),
}
"""For a field of `AdvantageBatch`: the argument that gives it, what for, and how to give it."""

_FIELDS: Mapping[str, tuple[Field, ...]] = {
    "logprobs": (ROLLOUT_LOGPROBS,),
    "turns": (TURN, TOKEN_REWARD, STATE),
    "token_rewards": (TOKEN_REWARD,),
}
"""Fields that the argument must carry for it."""


def _check_advantage(graph: Graph, node: Node) -> Iterator[GraphError]:
    spec = node.attr("spec")
    if not isinstance(spec, AdvantageSpec):
        return  # said already
    needs = list(spec.needs)
    penalty = bool(getattr(spec, "kl_coefficient", 0.0))
    if penalty:
        needs += ["reference_logprobs", "logprobs"]
    unknown = [name for name in needs if name not in _NEEDS]
    if unknown:
        yield node_error(node, f"no operation gives {spec.kind} its {', '.join(unknown)}")
    if spec.needs_scores and "scores" not in node.inputs:
        yield node_error(
            node,
            f"advantage {spec.kind} needs 'scores', one a sample",
            hint="pass what verifier.score(rollout) returned",
        )
    wanted = {_NEEDS[name][0] for name in needs if name in _NEEDS}
    told: set[str] = set()
    for name in needs:
        argument, why, to_give = _NEEDS.get(name, ("", "", ""))
        if argument and argument not in node.inputs and argument not in told:
            told.add(argument)
            if penalty and name == "reference_logprobs" and name not in spec.needs:
                why = "for its KL penalty"
                to_give = "pass reference=reference.logprobs(rollout), or set kl=0"
            yield node_error(node, f"advantage {spec.kind} needs '{argument}' {why}", hint=to_give)
        edge = graph.feeding(node.id, argument) if argument else None
        if edge is not None:
            yield from _check_carried(node, spec, name, edge)
    yield from _check_unused(node, spec, wanted)


def _check_carried(node: Node, spec: AdvantageSpec, need: str, edge: Edge) -> Iterator[GraphError]:
    missing = [f for f in _FIELDS.get(need, ()) if f.name not in edge.fields]
    if missing:
        penalty = need == "logprobs" and need not in spec.needs
        reader = f"the KL penalty of {spec.kind}" if penalty else f"advantage {spec.kind}"
        yield node_error(
            node,
            f"{reader} needs '{missing[0].name}' per token, "
            f"but '{edge.src}' gives {', '.join(edge.fields)}",
            hint="pass a rollout that a role generated"
            if need == "logprobs"
            else "pass a rollout that fl.interact returned",
        )


_TO_LEAVE = {
    "rollout": "leave rollout out",
    "reference": "leave reference out, or give the penalty a coefficient: kl=0.001",
    "values": "leave values out, or use fl.advantage.gae",
    "baseline": "leave baseline out, or use fl.advantage.remax",
    "scores_2": "add rewards up with fl.weighted_sum, or use fl.advantage.normalise_then_sum",
}


def _check_unused(node: Node, spec: AdvantageSpec, wanted: set[str]) -> Iterator[GraphError]:
    for argument, hint in _TO_LEAVE.items():
        if argument in node.inputs and argument not in wanted:
            yield node_error(
                node, f"advantage {spec.kind} does not use its '{argument}'", hint=hint
            )


# Maps.


def _check_map(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Every key of the map is a field that an argument carries, and nothing else is."""
    spec = node.attr("spec")
    if not isinstance(spec, MapSpec):
        return  # said already
    edges = [edge for name in node.inputs if (edge := graph.feeding(node.id, name)) is not None]
    read: set[tuple[str, str]] = set()
    for key in spec.reads:
        field, place = split_key(key)
        having = [edge for edge in edges if field in edge.fields]
        if place < len(having):
            read.add((having[place].argument, field))
        else:
            yield node_error(node, f"map {spec.kind} reads '{key}', which nothing feeds")
    for edge in edges:
        for name in edge.fields:
            if (edge.argument, name) not in read:
                yield node_error(
                    node, f"map {spec.kind} does not read '{name}' of its '{edge.argument}'"
                )


# Updates.


def _check_update(graph: Graph, node: Node) -> Iterator[GraphError]:
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
    elif not _is_supervised(given) and not {"rewards", "advantages"} & set(node.inputs):
        yield node_error(
            node,
            f"{node.id} gets nothing to learn from",
            hint=f"pass rewards or advantages: {node.role}.update(rollout, rewards)",
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
                yield node_error(node, f"update(loss={loss.kind}) needs {what}, {found}", hint=hint)
        elif name in _LOSS_FIELDS:
            field, hint = _LOSS_FIELDS[name]
            if field.name not in rollout.fields:
                yield node_error(
                    node,
                    f"update(loss={loss.kind}) needs '{field.name}' {per(field)}, "
                    f"but '{given.id}' gives {names_of(given.outputs)}",
                    hint=hint,
                )
        elif name == "old_logprobs":
            needed.add("old")  # inserted where the program does not pass it
        elif name not in loss.extra_fields:
            yield node_error(
                node,
                f"update(loss={loss.kind}) needs {name!r}, which no operation of a program gives",
                expected=", ".join(("old_logprobs", *_LOSS_NEEDS, *_LOSS_FIELDS)),
            )
    yield from _check_extra(graph, node, loss)
    for unused, other in _TO_USE.items():
        if unused in arguments and unused not in needed:
            yield node_error(
                node,
                f"update(loss={loss.kind}) does not use its {unused}",
                hint=f"leave {unused} out, or use loss={other}",
            )


def _check_extra(graph: Graph, node: Node, loss: LossSpec) -> Iterator[GraphError]:
    """Fields of the user's own maps: those that the loss names, and no others."""
    edges = [e for e in graph.in_edges(node.id) if e.argument.partition("_")[0] == "extra"]
    fed = [name for edge in edges for name in edge.fields]
    for name in loss.extra_fields:
        if name not in fed:
            yield node_error(
                node,
                f"update(loss={loss.kind}) needs the field '{name}' of a map",
                found=", ".join(fed) or "no extra fields",
                hint=f"pass extra= what the map that gives '{name}' returned",
            )
    for name in fed:
        if name not in loss.extra_fields:
            yield node_error(
                node,
                f"update(loss={loss.kind}) does not use its extra field '{name}'",
                expected=", ".join(loss.extra_fields) or "no extra fields",
            )


_RULES: dict[Op, Callable[[Graph, Node], Iterator[GraphError]]] = {
    Op.GENERATE: _check_generate,
    Op.INTERACT: _check_interact,
    Op.ADVANTAGE: _check_advantage,
    Op.MAP: _check_map,
    Op.UPDATE: _check_update,
}
