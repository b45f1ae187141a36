"""Whether this executor can run what was compiled; asked before a run folder is made.

A plan may be for another machine, and a graph may ask for what only another executor does. Both
can be looked at, compared and simulated; neither is run in some other way than it says.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.cluster.discover import discover
from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError, PlanError
from flowrl.graph import Node, Op, sample_sets

__all__ = ["require_runnable"]


def require_runnable(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    """Checks every stage.

    Raises:
        PlanError: the plan is for devices that are not here.
        ConfigError: a stage asks for asynchronous training, generates more than once a step, learns
            from several sets of samples, scores more than once, or generates from or trains a copy
            of another role; or rollouts have no reward to be
            scored with, or different ones.
    """
    if config.cluster != "auto":
        _require_devices(config, stages)
    for stage in stages:
        _require_synchronous(config, stage)
        _require_copies_keep_still(config, stage)
        _require_one_rollout(stage)
        _require_one_sample_set(stage)
        _require_one_score(stage)
        _require_evaluated_policy(config, stage, stages[-1])
    _require_rewards(config, stages)


def _require_rewards(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    roles = {node.role for stage in stages for node in stage.graph.of_op(Op.SCORE)}
    backends = {config.roles[role].backend for role in roles if role is not None}
    if len(backends) > 1:
        raise ConfigError(
            "stages of one run are scored by different backends",
            where=", ".join(f"roles.{role}.backend" for role in sorted(map(str, roles))),
            found=", ".join(sorted(backends)),
            expected="one backend for all rewards with this executor",
            hint="name the same one, or make the last stage a run of its own",
        )
    if config.rewards.terms:
        return
    for stage in stages:
        nodes = stage.graph.of_op(Op.SCORE) or stage.graph.of_op(Op.GENERATE)
        if nodes:
            raise ConfigError(
                f"the rollouts of stage {stage.name!r} are scored, but the config says no reward",
                where="rewards.terms",
                found=f"nothing to score {nodes[0].id} with",
                expected="at least one term, such as {kind: exact_match}",
            )


def _require_devices(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    here = {address for address, _, _ in discover()}
    for stage in stages:
        for placement in stage.plan.placements:
            missing = [device for device in placement.devices if device not in here]
            if missing:
                raise PlanError(
                    f"the plan places role {placement.role!r} on devices that are not here",
                    where=f"cluster ({config.cluster})",
                    found=", ".join(missing),
                    expected=f"devices of this machine: {', '.join(sorted(here))}",
                    hint="leave cluster=auto to run here; `flowrl plan` works for any cluster",
                )


def _require_synchronous(config: RunConfig, stage: CompiledStage) -> None:
    train = stage.config.train
    own = stage.workflow.max_staleness
    staleness = train.max_staleness if own is None else own
    if staleness:
        prefix = "train" if stage.name == config.stages[-1] else f"stage.{stage.name}.train"
        raise ConfigError(
            f"stage {stage.name!r} allows samples of older weights (asynchronous training), and "
            "this executor is synchronous",
            where=f"{prefix}.max_staleness" if own is None else str(stage.workflow.source),
            found=str(staleness),
            expected="0",
            hint="set it to 0 to run here; `flowrl graph` and `flowrl plan` take any value",
        )


def _require_copies_keep_still(config: RunConfig, stage: CompiledStage) -> None:
    for node in stage.graph.of_op(Op.GENERATE, Op.UPDATE):
        source = None if node.role is None else config.roles[node.role].copy_of
        if source is not None:
            raise ConfigError(
                f"{node.id} is of a copy, which only gives logprobs with this executor",
                where=_line(node),
                found=f"roles.{node.role}.copy_of={source}",
                hint=f"give roles.{node.role} a model of its own",
            )


def _require_one_rollout(stage: CompiledStage) -> None:
    generates = stage.graph.of_op(Op.GENERATE)
    if len(generates) > 1:
        raise ConfigError(
            f"stage {stage.name!r} generates {len(generates)} times a step",
            where=_line(generates[1]),
            expected="one generate a workflow with this executor",
        )


def _require_one_sample_set(stage: CompiledStage) -> None:
    """Every step carries one batch: all that comes after the rollout must speak of its samples."""
    made = sample_sets(stage.graph)
    nodes = stage.graph.of_op(Op.LOGPROBS, Op.ADVANTAGE, Op.UPDATE)
    for node in nodes:
        if made[node.id] != made[nodes[0].id]:
            raise ConfigError(
                f"stage {stage.name!r} works on several sets of samples",
                where=_line(node),
                found=f"{nodes[0].id} of {made[nodes[0].id]}, {node.id} of {made[node.id]}",
                expected="one set of samples a step with this executor",
                hint="after a filter, use what it returned everywhere; "
                "learn from examples in a stage of their own",
            )


def _require_one_score(stage: CompiledStage) -> None:
    scores = stage.graph.of_op(Op.SCORE)
    if len(scores) > 1:
        raise ConfigError(
            f"stage {stage.name!r} scores its samples {len(scores)} times",
            where=_line(scores[1]),
            found=", ".join(node.id for node in scores),
            expected="one score a workflow with this executor",
            hint="add the rewards up: several rewards.terms, each with its weight",
        )


def _line(node: Node) -> str:
    return str(node.source or node.id)


def _require_evaluated_policy(config: RunConfig, stage: CompiledStage, last: CompiledStage) -> None:
    """A stop check measures the policy that the last stage updates."""
    if stage.config.stop is None:
        return
    trained = [node.role for node in stage.graph.of_op(Op.UPDATE)]
    evaluated = last.graph.of_op(Op.UPDATE)[-1].role
    if evaluated not in trained:
        prefix = "" if stage.name == config.stages[-1] else f"stage.{stage.name}."
        raise ConfigError(
            f"stage {stage.name!r} stops by a measurement of role {evaluated!r}, which it does not "
            "train",
            where=f"{prefix}stop",
            found=f"it trains {', '.join(map(str, trained))}",
            expected=f"a stage that trains {evaluated!r}, the policy that the last stage updates",
            hint=f"remove {prefix}stop and set {prefix}train.steps",
        )
