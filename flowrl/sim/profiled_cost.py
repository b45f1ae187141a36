"""A profile as the planner's cost: what was measured, and estimates for the rest."""

from __future__ import annotations

from flowrl.cluster.hardware import catalogue, find_spec
from flowrl.cost.episodes import CallSeconds
from flowrl.cost.measured import MeasuredCost
from flowrl.cost.source import Cost
from flowrl.errors import ConfigError
from flowrl.plan import PlanRequest
from flowrl.plan.groups import cost_of
from flowrl.sim.cost_steps import measured_models
from flowrl.sim.profile import Profile
from flowrl.wording import listing


def profiled_cost(profile: Profile, request: PlanRequest, *, where: str) -> Cost:
    """The cost of a request's tasks.

    Args:
        where: The profile is named, for messages.

    Raises:
        ConfigError: the profile does not say which device of the catalogue it is of.
    """
    shapes = {
        role.name: shape for role in request.roles if (shape := request.shape_of(role)) is not None
    }
    models = measured_models(profile, shapes, device=_device(profile, where))
    environments = {
        one.role: CallSeconds(
            reset_s=one.times.call_s,
            step_s=one.times.call_s,
            wait_s=one.times.wait_s,
            source="measured",
        )
        for one in profile.environments
    }
    return MeasuredCost(
        models, cost_of(request), group_size=request.group_size, environments=environments
    )


def _device(profile: Profile, where: str) -> str:
    """The catalogue's name of what a profile was measured on: its accelerator, if it has one."""
    specs = [spec for name in profile.machine.devices if (spec := find_spec(name)) is not None]
    specs.sort(key=lambda spec: spec.type == "cpu")
    if specs:
        return specs[0].name
    raise ConfigError(
        "the profile is of no device of the hardware catalogue",
        where=where,
        found=listing(profile.machine.devices),
        expected=f"machine.devices with one of {listing(catalogue())}",
        hint="measure on such a device, or leave plan.profile out",
    )
