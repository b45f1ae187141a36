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
from flowrl.graph import Op

__all__ = ["require_runnable"]


def require_runnable(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    """Checks every stage.

    Raises:
        PlanError: the plan is for devices that are not here.
        ConfigError: a stage asks for asynchronous training, generates more than once a step, or
            has roles to score and no reward to score with.
    """
    if config.cluster != "auto":
        _require_devices(config, stages)
    for stage in stages:
        _require_synchronous(config, stage)
        _require_one_rollout(stage)
    scorers = [node for stage in stages for node in stage.graph.of_op(Op.SCORE)]
    if scorers and not config.rewards.terms:
        raise ConfigError(
            f"role {scorers[0].role!r} scores, but the config says no reward",
            where="rewards.terms",
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


def _require_one_rollout(stage: CompiledStage) -> None:
    generates = stage.graph.of_op(Op.GENERATE)
    if len(generates) > 1:
        raise ConfigError(
            f"stage {stage.name!r} generates {len(generates)} times a step",
            where=str(generates[1].source or generates[1].id),
            expected="one generate a workflow with this executor",
        )
