"""Conditions between the arguments of a node: the inputs that its specification needs.

`flowrl.graph.signatures` lists the arguments that an operation knows; this says which of them a
given advantage, map or loss needs, and refuses what would be passed and never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from flowrl.errors import GraphError
from flowrl.graph.ir import Edge, Graph, Level, Node, Op, Unit, called, names_of, per
from flowrl.graph.needs import ADVANTAGE_NEEDS, LOSS_NEEDS, check_needs
from flowrl.graph.sample_sets import (
    parents_of,
    replay_before,
    sample_edges,
    sampling_node,
    sampling_nodes,
)
from flowrl.graph.signatures import LOGPROBS, PART, PREFERRED, ROLLOUT_LOGPROBS, SCORE
from flowrl.specs import KL, AdvantageSpec, LossSpec, MapSpec, RowCondition, Sampling
from flowrl.specs.filters import Parsed, Turns
from flowrl.specs.maps import Parse, split_key


def conditions(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Yields the errors between the arguments of a node, each of which is right by itself."""
    rule = _RULES.get(node.op)
    if rule is not None:
        yield from rule(graph, node)
    if graph.level is Level.PLACED:
        yield from _check_replicas(node)


def _check_replicas(node: Node) -> Iterator[GraphError]:
    """Checks that the samples of a step divide evenly among replicas.

    Engines are given samples one by one as slots become free, so some of them may sample one less.
    """
    values = [node.attr(name) for name in ("samples", "replicas", "samples_per_replica")]
    samples, replicas, each = (value if isinstance(value, int) else 0 for value in values)
    even = each * replicas == samples
    if node.op is Op.GENERATE and replicas > 0:
        even = each == -(-samples // replicas)
    if replicas > 0 and not even:
        low = samples // replicas * replicas
        yield node.error(
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
            yield node.error(f"{node.id} needs 'prompts', but nothing feeds it")
        if "observation" in node.inputs:
            yield node.error(f"{node.id} reads an observation, but is in no region")
    elif "observation" not in node.inputs or "prompts" in node.inputs:
        yield node.error(
            f"{node.id} is in region '{node.region}', where it answers observations",
            found=", ".join(node.inputs) or "no arguments",
            expected="observation",
        )


def _check_interact(graph: Graph, node: Node) -> Iterator[GraphError]:
    policies = [g for g in graph.of_op(Op.GENERATE) if g.region == node.region]
    turns = [name for name in node.inputs if name.partition("_")[0] == "turns"]
    if node.region is None or not policies or len(turns) != len(policies):
        yield node.error(
            f"{node.id} needs the turns of each policy that is in its region",
            found=", ".join(policy.id for policy in policies) or "no policy",
        )
    elif len({policy.attr("n") for policy in policies}) > 1:
        yield node.error(
            f"the policies of {node.id} act in the same episodes",
            found=", ".join(f"{policy.id}: n={policy.attr('n')}" for policy in policies),
            expected="one number of episodes for each prompt",
        )
    readers = [e.dst for e in graph.edges if e.src == node.id and not graph.is_inner(e)]
    for reader in map(graph.node, readers) if len(policies) > 1 else ():
        if not isinstance(reader.attr("spec"), Turns):
            yield reader.error(
                f"{reader.id} reads the turns of several policies at once",
                found=", ".join(policy.id for policy in policies),
                hint="use the turns of one of them: (pro, pro_scores), (con, con_scores) = "
                "fl.interact((pro, con), game, prompts)",
            )


def _check_select(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that the turns of a policy are taken of an episode that it acts in."""
    spec, edge = node.attr("spec"), graph.feeding(node.id, "rollout")
    if not isinstance(spec, Turns) or edge is None:
        return
    policies = graph.generators_of(graph.node(edge.src))
    if graph.node(edge.src).op is not Op.INTERACT or len(policies) != spec.of:
        yield node.error(
            f"{node.id} takes turn {spec.policy} of {spec.of} policies of '{edge.src}'",
            found=", ".join(policy.id for policy in policies) or "no policy",
            expected=f"an episode of {spec.of} policies",
        )


# Nodes that split, join and hold sets of samples.


def _check_join(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that logprobs of all samples of a set are computed in one way."""
    samplers = [g for g in sampling_nodes(graph, node) if g is not None]
    samplings = [(g, s) for g in samplers if isinstance(s := g.attr("sampling"), Sampling)]
    if graph.level is Level.TRACED or not samplings:
        return
    # Logprobs of a greedy rollout are those at temperature 1.
    temperatures = {s.temperature or 1.0 for _, s in samplings}
    if len(temperatures) > 1:
        yield node.error(
            f"{node.id} joins samples of several temperatures, and a model reads a set at one",
            found=", ".join(f"{g.id} at {s.temperature:g}" for g, s in samplings),
            hint="generate them at one temperature, or update with each set by itself",
        )
    for generate, sampling in samplings:
        if sampling.logprobs == "sampler":
            yield node.error(
                f"{node.id} joins the samples of {generate.id}, whose logprobs repeat the "
                "truncation of its sampling, with others",
                hint="generate without top_p, top_k, min_p and penalties, or set "
                "train.truncated=ignore",
            )


def _check_concat(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that sets are joined that need it, with the logprobs that they lack."""
    yield from _check_join(graph, node)
    edges = sample_edges(graph, node)
    sampled = [edge for edge in edges if ROLLOUT_LOGPROBS.name in edge.fields]
    if not edges:
        yield node.error(f"{node.id} joins no sets", expected="one or more")
    if node.attr("missing_logprob") is not None and len(sampled) in (0, len(edges)):
        which = "every" if sampled else "no"
        yield node.error(
            f"{node.id} gets missing_logprob=, and {which} set has the logprobs of its tokens",
            hint="leave missing_logprob out",
        )


def _check_where(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that prompts of the data are split, or samples."""
    if ("prompts" in node.inputs) == ("rollout" in node.inputs):
        yield node.error(
            f"{node.id} splits prompts or samples, one of the two",
            found=", ".join(node.inputs) or "no arguments",
        )
    edge = graph.feeding(node.id, "prompts")
    if edge is not None and graph.node(edge.src).op is Op.PROMPTS_OF:
        yield node.error(
            f"{node.id} splits prompts that are made of samples ('{edge.src}')",
            expected="prompts of the data",
            hint="split the samples before: fl.prompts_of(fl.where(rollout, row=...), ...)",
        )
    yield from _check_nested_where(graph, node)


def _check_nested_where(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that a row can meet the condition together with those before it."""
    own, before = node.attr("spec"), node
    if not isinstance(own, RowCondition):
        return
    while edge := graph.feeding(before.id, "rollout") or graph.feeding(before.id, "prompts"):
        before = graph.node(edge.src)
        spec = before.attr("spec")
        if isinstance(spec, RowCondition) and spec.field == own.field and spec.excludes(own):
            yield node.error(
                f"{node.id} keeps no row: it splits rows with {spec.described} "
                f"({before.source or before.id}) by {own.described}",
                expected="a condition that some of these rows meet",
                hint="split what was there before the first condition, or ask for another field",
            )
            return


def _check_replay(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that new samples of one rollout of the data are held."""
    before = replay_before(graph, node)
    if before is not None:
        yield node.error(
            f"{node.id} holds what {before.id} returns, which is held already",
            expected="samples of this step",
            hint="pass the rollout, or what a filter or a selection of it returned",
        )
    if len(samplers := sampling_nodes(graph, node)) > 1:
        yield node.error(
            f"{node.id} holds samples of several sets",
            found=", ".join("data" if each is None else each.id for each in samplers),
            hint="hold those of each rollout by themselves",
        )
    regions = {each.region for each in samplers if each is not None and each.region is not None}
    if any(
        len([g for g in graph.of_op(Op.GENERATE) if g.region == region]) > 1 for region in regions
    ):
        yield node.error(
            f"{node.id} holds turns of an episode in which several policies take turns",
            expected="responses, or episodes of one policy",
            hint="update on these turns in the step that generates them",
        )
    source = graph.feeding(node.id, "rollout")
    if source is not None and parents_of(graph, graph.node(source.src)) is not None:
        yield node.error(
            f"{node.id} holds samples that answer prompts made of other samples",
            expected="samples that answer prompts of the data, which a resumed run reads again",
            hint="hold the samples of actor.generate(prompts)",
        )


# Scores.


def _check_score(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that rules score new samples, and a model samples, tokens or steps."""
    replay = replay_before(graph, node)
    if replay is not None and node.attr("by") != "model":
        yield node.error(
            f"{node.id} scores the samples of {replay.id} by rules once more",
            expected="the scores that they had when they were sampled",
            hint="use those: old, old_scores = fl.replay(rollout, scores, ...)",
        )
    per_part, separator = node.attr("per"), node.attr("separator")
    if per_part is not None and node.attr("by") != "model":
        yield node.error(
            f"{node.id} scores whole responses by rules, and cannot score each {per_part}",
            hint="make it an fl.RewardModel, or a map that gives token_reward",
        )
    if per_part not in (None, "token", "step"):
        yield node.error(
            f"{node.id} cannot score each {per_part}",
            expected='per="token", per="step" with a separator, or neither',
        )
    if (per_part == "step") != bool(separator):
        yield node.error(
            f"{node.id} scores {f'each {per_part}' if per_part else 'whole responses'}",
            found=f"separator={separator!r}",
            expected='a separator with per="step", and only then',
        )


# Advantages.


def _check_advantage(graph: Graph, node: Node) -> Iterator[GraphError]:
    spec = node.attr("spec")
    if not isinstance(spec, AdvantageSpec):
        return  # the signature reports it
    needs = [*(["scores"] if spec.needs_scores else []), *spec.needs]
    if getattr(spec, "kl_coefficient", 0.0):
        needs += ["reference_logprobs", "logprobs"]
    if "sum_pi_squared" in needs:  # of the same weights, as the logprobs then are
        needs.remove("logprobs")
        yield from _check_policy(graph, node)
    yield from check_needs(graph, node, f"advantage {called(spec)}", needs, ADVANTAGE_NEEDS)


def _check_policy(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that the probabilities are those of the role that generated the samples."""
    policy, sampler = graph.feeding(node.id, "policy"), sampling_node(graph, node)
    if policy is None or sampler is None:
        return
    asked = graph.node(policy.src)
    update = graph.feeding(asked.id, "weights")
    if asked.role != sampler.role or update is not None:
        after = "" if update is None else f" after {update.src}"
        before = "" if update is None else " before it"
        yield node.error(
            f"'policy' of the advantage are logprobs of {asked.role or asked.id}{after}, but "
            f"{sampler.role} sampled them{before}",
            hint=f"pass policy={sampler.role}.logprobs(rollout), read before any update",
        )


# Maps.


def _check_map(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that the fields that arguments carry are those that the map reads."""
    spec = node.attr("spec")
    if not isinstance(spec, MapSpec):
        return  # the signature reports it
    edges = [edge for name in node.inputs if (edge := graph.feeding(node.id, name)) is not None]
    read: set[tuple[str, str]] = set()
    for key in spec.reads:
        field, place = split_key(key)
        having = [edge for edge in edges if field in edge.fields]
        if place < len(having):
            read.add((having[place].argument, field))
        else:
            yield node.error(f"map {called(spec)} reads '{key}', which nothing feeds")
    if isinstance(spec, Parse) and spec.otherwise is None:
        yield from _check_parsed(graph, node)
    for edge in edges:
        yield from _check_units(graph, node, edge)
        for name in edge.fields:
            if (edge.argument, name) not in read:
                yield node.error(
                    f"map {called(spec)} does not read '{name}' of its '{edge.argument}'"
                )


def _check_parsed(graph: Graph, node: Node) -> Iterator[GraphError]:
    """Checks that scores that may be missing are read by the selection that leaves these out."""
    for reader in graph.nodes:
        edges = [e for e in graph.in_edges(reader.id) if e.src == node.id]
        if edges and not isinstance(reader.attr("spec"), Parsed):
            yield node.error(
                f"{node.id} gives no score where it finds no number, and {reader.id} needs one of "
                "each sample",
                hint="give the map a number as otherwise=, or select with fl.select.parsed",
            )


def _check_log(graph: Graph, node: Node) -> Iterator[GraphError]:
    for edge in graph.in_edges(node.id):
        yield from _check_units(graph, node, edge)
        if len(edge.fields) != 1:
            yield node.error(f"{node.id} writes one field", found=", ".join(edge.fields) or "none")


def _check_units(graph: Graph, node: Node, edge: Edge) -> Iterator[GraphError]:
    """Checks that a map or log computes with numbers of samples or of tokens."""
    for name in edge.fields:
        field = graph.node(edge.src).output(name)
        if field is not None and field.unit not in (Unit.SAMPLES, Unit.TOKENS):
            yield node.error(
                f"{node.id} cannot compute with '{name}' of {edge.src}, one {per(field)}",
                expected="fields per sample or per token",
            )


# Updates: what the loss and the penalty read.


def _check_update(graph: Graph, node: Node) -> Iterator[GraphError]:
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


_RULES: dict[Op, Callable[[Graph, Node], Iterator[GraphError]]] = {
    Op.GENERATE: _check_generate,
    Op.INTERACT: _check_interact,
    Op.PAIR: _check_join,
    Op.SELECT: _check_select,
    Op.SCORE: _check_score,
    Op.REPLAY: _check_replay,
    Op.CONCAT: _check_concat,
    Op.WHERE: _check_where,
    Op.ADVANTAGE: _check_advantage,
    Op.MAP: _check_map,
    Op.LOG: _check_log,
    Op.UPDATE: _check_update,
}
