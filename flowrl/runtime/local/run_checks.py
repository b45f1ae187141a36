"""Checks, before a run folder is made, that this executor can run the compiled stages.

A plan may be for another machine, and a graph may need another executor. Both can be looked at,
compared and simulated; neither is run in another way than it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.compiler import CompiledStage
from flowrl.compiler.stage import require_here
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError
from flowrl.graph import Node, Op
from flowrl.graph.streaming import is_rule_score
from flowrl.rollout.policies.prompts import AskByKeepRate
from flowrl.runtime.driver.graph_parts import GraphParts, RoleUse, RolloutPart, role_of
from flowrl.runtime.local.plan_checks import require_local_plan, require_plan_for_one
from flowrl.runtime.setup.evaluation import held_out_score
from flowrl.runtime.setup.rollouts import settings_of, train_key

__all__ = ["require_here", "require_runnable"]


def require_runnable(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    """Checks every stage.

    Raises:
        PlanError: the plan is for devices that this machine lacks, or has what this executor lacks.
        ConfigError: a model without weights; a stage generates ahead, refills batches or has
            policies of the scheduler where they cannot be, has a reward without terms,
            or stops by a policy that it does not train; what scores held-out samples
            is ambiguous.
    """
    for stage in stages:
        if config.cluster == "auto":  # a plan over many devices is of another cluster
            require_plan_for_one(stage.plan, f"plan of {stage.name!r}")
    require_here(config, stages)
    use = RoleUse(config, [stage.graph for stage in stages])
    for stage in stages:
        _require_schedulable(config, stage)
        _require_refillable(config, stage)
        _require_terms(config, stage)
        _require_evaluated_policy(config, stage, use)
        require_local_plan(stage)
    if use.policy is not None and (config.data.eval is not None or config.eval.sets):
        held_out_score(config, use.policy, [GraphParts(stage.graph) for stage in stages])


def _require_terms(config: RunConfig, stage: CompiledStage) -> None:
    for node in stage.graph.of_op(Op.SCORE):
        terms, key = config.terms_of(role_of(node))
        if is_rule_score(node) and not terms:
            raise ConfigError(
                f"the rollouts of stage {stage.name!r} are scored, but the config has no reward",
                where=key,
                found=f"nothing to score with at {_line(node)}",
                expected="at least one term, such as {kind: exact_match}",
            )


def _require_schedulable(config: RunConfig, stage: CompiledStage) -> None:
    """Policies are such, and what they ask for can be done here."""
    parts, key = GraphParts(stage.graph).rollouts, train_key(config, stage)
    all_settings = [settings_of(config, stage, part) for part in parts]
    if any(settings.runs_ahead for settings in all_settings):
        _require_streaming(config, stage, parts)
    for part, settings in zip(parts, all_settings, strict=True):
        if config.executor == "eager" and settings.over_sampling.members:
            raise ConfigError(
                "a program that runs line by line generates exactly what its lines ask for",
                where=f"{key}.policies.over_sampling",
                found=f"members={settings.over_sampling.members}",
                expected="0",
            )
        if part.node.op is Op.INTERACT and settings.publication.aborts:
            raise ConfigError(
                "an episode that is stopped starts again, so long ones would never end",
                where=f"{key}.policies.publication",
                found=f"{settings.publication.kind}, for {part.node.id} ({_line(part.node)})",
                expected="keep or finish",
            )


def _require_streaming(
    config: RunConfig, stage: CompiledStage, rollouts: Sequence[RolloutPart]
) -> None:
    """Checks that the rollouts can generate ahead of the trainer."""
    roots = [part for part in rollouts if part.parent is None]
    roles = [role_of(part.generate_node) for part in rollouts]
    if config.executor == "eager":
        problem = "a program that runs line by line generates what its lines ask for, when they do"
    elif any(len(part.turn_nodes) > 1 for part in rollouts):
        (part, *_) = [part for part in rollouts if len(part.turn_nodes) > 1]
        problem = f"several policies take turns in {part.node.id} ({_line(part.node)})"
    elif roots[0].by_rows and (chosen := _chooses_prompts(stage)):
        nodes = ", ".join(f"{part.node.id} ({_line(part.node)})" for part in roots)
        problem = f"each of its steps has the rows of {nodes}, and {chosen} would take others"
    elif len(set(roles)) < len(roles) and settings_of(config, stage, roots[0]).publication.empties:
        problem = (
            "an engine is emptied for new weights (policies.publication), and several rollouts "
            f"of {', '.join(sorted({r for r in roles if roles.count(r) > 1}))} share theirs"
        )
    else:
        return
    staleness, own = stage.context.max_staleness, stage.workflow.max_staleness
    key = train_key(config, stage)
    where, found = f"{key}.policies.over_sampling", "spare prompts"
    if staleness:
        where = f"{key}.max_staleness" if own is None else str(stage.workflow.source)
        found = str(staleness)
    raise ConfigError(
        f"stage {stage.name!r} is to generate ahead of the trainer: {problem}",
        where=where,
        found=found,
        expected="0",
        hint="set it to 0 to run here; `flowrl graph` and `flowrl plan` take any value",
    )


def _chooses_prompts(stage: CompiledStage) -> str:
    """Returns what has batches take other prompts than those of the step; "" without any."""
    train = stage.config.train
    spare = train.policies.get("over_sampling")
    chosen = {
        "train.refill": train.refill,
        "policies.admission": "admission" in train.policies,
        "policies.stragglers": "stragglers" in train.policies,
        "policies.over_sampling.prompts": isinstance(spare, Mapping) and bool(spare.get("prompts")),
    }
    return ", ".join(name for name, chooses in chosen.items() if chooses)


def _require_refillable(config: RunConfig, stage: CompiledStage) -> None:
    """Checks that filters judge groups as they are scored, so that a batch can be refilled."""
    if not stage.config.train.refill:
        return
    parts = GraphParts(stage.graph)
    judging = {node.id for part in parts.rollouts for node in part.filters}
    replayed = {node.id for node in stage.graph.of_op(Op.REPLAY)}
    late = [
        node
        for node in stage.graph.of_op(Op.FILTER)
        if node.id not in judging and parts.origin(node.id) not in replayed
    ]
    sources = [part.source for part in parts.rollouts if part.parent is None]
    if config.executor == "eager":
        problem = "a program that runs line by line has no line that takes further prompts"
    elif splits := [n for n in map(stage.graph.node, sources) if n.op is Op.WHERE]:
        problem = (
            f"{splits[0].id} ({_line(splits[0])}) takes some of a step's prompts, and further ones "
            "may be others"
        )
    elif not sources:
        problem = "it generates nothing"
    elif len(set(sources)) < len(sources):
        problem = "several of its rollouts answer the same prompts, and each would take others"
    elif len(parts.rollouts) > len(sources) and _asks_by_rate(config, stage, parts):
        problem = (
            "prompts that are made of samples are answered in the step of these, and "
            "policies.refill=ask_by_keep_rate leaves some for later steps"
        )
    elif late:
        problem = f"{late[0].id} reads what is known of whole batches only ({_line(late[0])})"
    else:
        return
    raise ConfigError(
        f"the batches of stage {stage.name!r} cannot be refilled: {problem}",
        where=f"{train_key(config, stage)}.refill",
        found="true",
        expected="false",
    )


def _asks_by_rate(config: RunConfig, stage: CompiledStage, parts: GraphParts) -> bool:
    settings = (settings_of(config, stage, part) for part in parts.rollouts)
    return any(isinstance(each.refill_by, AskByKeepRate) for each in settings)


def _line(node: Node) -> str:
    return str(node.source or node.id)


def _require_evaluated_policy(config: RunConfig, stage: CompiledStage, use: RoleUse) -> None:
    """Checks that a stop check measures the policy that the run trains last."""
    if stage.config.stop is None:
        return
    trained = [node.role for node in stage.graph.of_op(Op.UPDATE)]
    if use.policy in trained:
        return
    prefix = "" if stage.name == config.stages[-1] else f"stage.{stage.name}."
    measured = (
        "no policy" if use.policy is None else f"role {use.policy!r}, which it does not train"
    )
    raise ConfigError(
        f"stage {stage.name!r} stops by a measurement of {measured}",
        where=f"{prefix}stop",
        found=f"it trains {', '.join(map(str, trained)) or 'nothing'}",
        expected="a stage that trains the policy that the run updates last",
        hint=f"remove {prefix}stop and set {prefix}train.steps",
    )
