"""Conditions between the arguments of a node: what an advantage, a map or a rollout must be given.

`flowrl.graph.signatures` says which arguments an operation knows; this says which of them a given
specification asks for, and refuses what would be passed and never read. Updates have a module of
their own, `flowrl.graph.update_conditions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Node, called, node_error, per
from flowrl.graph.signatures import ROLLOUT_LOGPROBS, STATE, TOKEN_REWARD, TURN
from flowrl.graph.types import Field, Level, Op, Unit
from flowrl.graph.update_conditions import check_update
from flowrl.specs import AdvantageSpec, MapSpec
from flowrl.specs.maps import split_key

__all__ = ["conditions"]


def conditions(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Yields the errors between the arguments of a node, each of which is right by itself."""
    rule = _RULES.get(node.op)
    if rule is not None:
        yield from rule(graph, node)
    if graph.level is Level.PLACED:
        yield from _check_replicas(node)


def _check_replicas(node: Node) -> Iterator[GraphError]:
    """The samples of a step must be the sum of what its replicas take, alike.

    Engines are given samples one by one as slots become free, so some of them may sample one less.
    """
    found = [node.attr(name) for name in ("samples", "replicas", "samples_per_replica")]
    samples, replicas, each = (value if isinstance(value, int) else 0 for value in found)
    even = each * replicas == samples
    if node.op is Op.GENERATE and replicas > 0:
        even = each == -(-samples // replicas)
    if replicas > 0 and not even:
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
            hint="let the environment call the other model, or make a region for each policy"
            if len(players) > 1
            else None,
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
    "sum_pi_squared": (
        "policy",
        "for the probabilities that its tokens were sampled with",
        "pass policy=actor.logprobs(rollout)",
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
    if "sum_pi_squared" in needs:  # of the same weights, as the logprobs then are
        needs.remove("logprobs")
        yield from _check_policy(graph, node)
    unknown = [name for name in needs if name not in _NEEDS]
    if unknown:
        yield node_error(node, f"no operation gives {called(spec)} its {', '.join(unknown)}")
    if spec.needs_scores and "scores" not in node.inputs:
        yield node_error(
            node,
            f"advantage {called(spec)} needs 'scores', one a sample",
            hint="pass what verifier.score(rollout) returned",
        )
    wanted = {_NEEDS[name][0] for name in needs if name in _NEEDS}
    reported: set[str] = set()
    for name in needs:
        argument, why, to_give = _NEEDS.get(name, ("", "", ""))
        if argument and argument not in node.inputs and argument not in reported:
            reported.add(argument)
            if penalty and name == "reference_logprobs" and name not in spec.needs:
                why = "for its KL penalty"
                to_give = "pass reference=reference.logprobs(rollout), or set kl=0"
            yield node_error(
                node, f"advantage {called(spec)} needs '{argument}' {why}", hint=to_give
            )
        edge = graph.feeding(node.id, argument) if argument else None
        if edge is not None:
            yield from _check_carried(node, spec, name, edge)
    yield from _check_unused(node, spec, wanted)


def _check_policy(graph: Graph, node: Node) -> Iterator[GraphError]:
    """The probabilities must be those of the role that generated the samples."""
    policy, edge = graph.feeding(node.id, "policy"), graph.feeding(node.id, "rollout")
    while edge is not None and graph.node(edge.src).op in (Op.FILTER, Op.SELECT):
        edge = graph.feeding(edge.src, "rollout")
    if policy is None or edge is None:
        return
    source = graph.node(edge.src)
    generators = [n for n in graph.of_op(Op.GENERATE) if n.region == source.region]
    sampler = (
        source.role if source.op is Op.GENERATE else generators[0].role if generators else None
    )
    found = graph.node(policy.src).role
    if sampler is not None and found != sampler:
        yield node_error(
            node,
            f"'policy' of the advantage are logprobs of {found}, but {sampler} sampled them",
            hint=f"pass policy={sampler}.logprobs(rollout)",
        )


def _check_carried(node: Node, spec: AdvantageSpec, need: str, edge: Edge) -> Iterator[GraphError]:
    missing = [f for f in _FIELDS.get(need, ()) if f.name not in edge.fields]
    if missing:
        penalty = need == "logprobs" and need not in spec.needs
        reader = f"the KL penalty of {called(spec)}" if penalty else f"advantage {called(spec)}"
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
    "policy": "leave policy out, or use fl.advantage.optimal_token_baseline",
    "scores_2": "add rewards up with fl.weighted_sum, or use fl.advantage.normalise_then_sum",
}


def _check_unused(node: Node, spec: AdvantageSpec, wanted: set[str]) -> Iterator[GraphError]:
    for argument, hint in _TO_LEAVE.items():
        if argument in node.inputs and argument not in wanted:
            yield node_error(
                node, f"advantage {called(spec)} does not use its '{argument}'", hint=hint
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
            yield node_error(node, f"map {called(spec)} reads '{key}', which nothing feeds")
    for edge in edges:
        yield from _check_units(graph, node, edge)
        for name in edge.fields:
            if (edge.argument, name) not in read:
                yield node_error(
                    node, f"map {called(spec)} does not read '{name}' of its '{edge.argument}'"
                )


def _check_log(graph: Graph, node: Node) -> Iterator[GraphError]:
    for edge in graph.in_edges(node.id):
        yield from _check_units(graph, node, edge)
        if len(edge.fields) != 1:
            yield node_error(
                node, f"{node.id} writes one field", found=", ".join(edge.fields) or "none"
            )


def _check_units(graph: Graph, node: Node, edge: Edge) -> Iterator[GraphError]:
    """Maps and logs compute with numbers of samples and of tokens."""
    for name in edge.fields:
        field = graph.node(edge.src).output(name)
        if field is not None and field.unit not in (Unit.SAMPLES, Unit.TOKENS):
            yield node_error(
                node,
                f"{node.id} cannot compute with '{name}' of {edge.src}, one {per(field)}",
                expected="fields per sample or per token",
            )


_RULES: dict[Op, Callable[[Graph, Node], Iterator[GraphError]]] = {
    Op.GENERATE: _check_generate,
    Op.INTERACT: _check_interact,
    Op.ADVANTAGE: _check_advantage,
    Op.MAP: _check_map,
    Op.LOG: _check_log,
    Op.UPDATE: check_update,
}
