"""Checks that the models of a compiled run can be opened on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.cluster.discover import discover
from flowrl.compiler.stage import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError, PlanError
from flowrl.plan.names import device_names

__all__ = ["require_here"]


def require_here(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    """Checks that models can be opened on this machine.

    Raises:
        PlanError: the plan is for devices that are not here.
        ConfigError: a model without weights.
    """
    _require_devices(config, stages)
    _require_weights(config)


def _require_weights(config: RunConfig) -> None:
    for name, role in config.roles.items():
        if isinstance(role.model, str) and role.model.endswith(".json"):
            raise ConfigError(
                f"{name} has the shape of a model, and no weights to run",
                where=f"roles.{name}.model",
                found=role.model,
                expected="a Hugging Face model folder, or the fields of a new model",
                hint="`flowrl plan` and `flowrl simulate` need no weights",
            )


def _require_devices(config: RunConfig, stages: Sequence[CompiledStage]) -> None:
    if config.cluster == "auto":  # the plan was made for what is here, but may have been edited
        pools = [stage.local.base.pool for stage in stages if stage.local is not None]
        here = {device.address for pool in pools for device in pool.devices}
    else:
        here = {address for address, _, _ in discover()}
    for stage in stages:
        for i, placement in enumerate(stage.plan.placements):
            missing = [device for device in placement.devices if device not in here]
            if missing:
                edited = config.cluster == "auto"
                where = f"plan of {stage.name!r}: placements.{i}.devices"
                raise PlanError(
                    f"the plan places role {placement.role!r} on devices that are not here",
                    where=where if edited else f"cluster ({config.cluster})",
                    found=device_names(missing),
                    expected=f"devices of this machine: {', '.join(sorted(here))}",
                    hint="name one of them, or make the plan again: flowrl plan CONFIG -o FILE"
                    if edited
                    else "leave cluster=auto to run here; `flowrl plan` works for any cluster",
                )
