"""Whose efficiencies times are made with, and what plans say where nothing tells it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.cluster.hardware import DeviceSpec, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.efficiency import CURRENT, EARLIER, generation
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.explain.top import fewest_lines, sweep_lines
from flowrl.plan.show.plan import plan_text
from flowrl.plan.sizing import Job, fewest, pool_of_devices, sizes
from tests.plan.many_cases import request

NOTE = (
    "assumed: kernels on mine reach what they reach on Hopper, for its name shows no generation; "
    "efficiencies: ampere (or hopper) of the device in the cluster file says whose hold"
)


def own(name: str, **changes: object) -> DeviceSpec:
    """The figures of an A100 under another name, as a cluster file describes them."""
    bare = replace(device_spec("A100-SXM-80GB"), name=name, aliases=(), efficiencies=None)
    return replace(bare, **changes)  # type: ignore[arg-type]


def planned(grpo: Graph, spec: DeviceSpec) -> PlacementPlan:
    return make_plan(grpo, request(), pool_of_devices(spec, 8))


def test_equal_figures_of_one_generation_take_equally_long_whatever_the_name(grpo: Graph) -> None:
    catalogued = planned(grpo, device_spec("A100-SXM-80GB"))
    for spec in (own("A100-mine"), own("NVIDIA A100-PCIE-40GB"), own("x", efficiencies="ampere")):
        plan = planned(grpo, spec)
        assert plan.prediction == catalogued.prediction
        assert not any("efficiencies" in note for note in plan.notes)


def test_a_plan_says_whose_efficiencies_it_takes_where_nothing_tells(grpo: Graph) -> None:
    plan = planned(grpo, own("mine"))
    assert plan.notes.count(NOTE) == 1
    assert {one.assumed for one in plan.prediction.confidence} == {"hopper's efficiencies"}
    assert (
        "predicted from analytic costs, hopper's efficiencies assumed; bottleneck: "
        in plan_text(plan)
    )
    assert PlacementPlan.from_json(plan.to_json()) == plan
    # The key that the note names is what changes it.
    said = planned(grpo, own("mine", efficiencies="hopper"))
    assert said.prediction.step_s == plan.prediction.step_s
    assert NOTE not in said.notes
    assert {one.assumed for one in said.prediction.confidence} == {""}
    earlier = planned(grpo, own("mine", efficiencies="ampere"))
    assert earlier.prediction.step_s is not None
    assert plan.prediction.step_s is not None
    assert earlier.prediction.step_s > 1.05 * plan.prediction.step_s


def test_sizes_say_it_too(grpo: Graph) -> None:
    job = Job(graph=grpo, request=request(), spec=own("mine"), cost=AnalyticCost())
    least = fewest(job)
    assert f"  {NOTE}" in fewest_lines(least, job)
    assert least.assumed == "hopper's efficiencies"  # what --json has of it
    assert NOTE in sweep_lines(sizes(job, [8]), job)
    known = replace(job, spec=own("A100"))
    assert fewest(known).assumed == ""
    assert not any("efficiencies" in line for line in sweep_lines(sizes(known, [8]), known))


@pytest.mark.parametrize(
    ("spec", "whose"),
    [
        (device_spec("CPU"), CURRENT),
        (device_spec("L40S"), EARLIER),
        (device_spec("GB200"), CURRENT),
        (own("Ascend910B2"), EARLIER),
        (own("mine", type="npu"), EARLIER),
        (own("V100"), CURRENT),
        (own("H100", efficiencies="ampere"), EARLIER),
    ],
)
def test_what_is_said_decides_before_the_name(spec: DeviceSpec, whose: object) -> None:
    assert generation(spec) is whose
