"""A profile as the planner's cost: measured where it was measured, and said so in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.errors import ConfigError
from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.sim.profile import (
    PROFILE_VERSION,
    DecodePoint,
    EngineProfile,
    MachineNote,
    Profile,
)
from flowrl.sim.profiled_cost import profiled_cost
from tests.plan.conftest import grpo as graph_of_grpo
from tests.plan.many_cases import h100, pinned, request

grpo = graph_of_grpo

POINTS = tuple(
    DecodePoint(batch=batch, context=context, seconds=0.5)
    for batch in (1, 64)
    for context in (100.0, 4000.0)
)

PROFILE = Profile(
    version=PROFILE_VERSION,
    name="measured",
    engines=(EngineProfile(role="actor", decode=POINTS),),
    machine=MachineNote(devices=("a CPU", "NVIDIA H100 80GB HBM3")),
)


def test_measured_steps_take_the_place_of_estimates_and_the_plan_says_so(grpo: Graph):
    asked = pinned(request(), "rollout.tp=1", "rollout.pp=1")
    cost = profiled_cost(PROFILE, asked, where="profile.json")
    plan = make_plan(grpo, asked, h100(8), cost)
    sources = {one.node: one.source for one in plan.prediction.confidence}
    assert sources == {
        "actor.generate": "measured",
        "reference.logprobs": "analytic",
        "actor.update": "analytic",
    }
    # Half a second a step, whatever the batch: the longest response has at most 2,048 of them.
    # (Unpinned, a layout that nobody measured would be faster.)
    seconds = plan.operation("actor.generate").seconds
    assert seconds is not None
    assert 0.5 * 1000 < seconds < 0.5 * 2048 * 1.1


def test_a_profile_of_an_unknown_device_is_refused():
    unknown = replace(PROFILE, machine=MachineNote(devices=("a CPU",)))
    with pytest.raises(ConfigError, match="no device of the hardware catalogue") as caught:
        profiled_cost(unknown, request(), where="profile.json")
    assert caught.value.where == "profile.json"
