"""The planner's plans simulated: that they run, that samples add up, and how near the two are.

What the planner prices in closed form and the simulator plays sample by sample differs, and each
kind of plan has bounds that follow from why:

- Where devices take turns, a step is its parts, and only the rollout is played otherwise: it is
  drawn, where plans have what is expected. Simulated steps are 1 % shorter to 4 % longer.
- Where operations stream, also from one that waits for its batch, the simulation has groups and
  samples complete as they are, and the longest ones last; the plan has them by expectations, chunk
  by chunk. Simulated steps are 3 % shorter to 7 % longer.
- Asynchronous steps are priced as the steady state of batches that overlap as far as ages let them
  (`flowrl.plan.search.overlap`), evenly apart. In truth long and short steps take turns. Simulated
  steps are 2 % shorter to 2 % longer, and up to 5 % longer on mixed devices; without the last one
  of a run, for nothing is drawn ahead of it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.sim.cluster_jobs import Planned, best_plans, simulated, steady_s

MIXED, ASCEND = "h100_2x8_h20_4x8", "ascend_a2_1x8"
CLUSTERS = ("h100_8", "h100_24", "h100_48", "h100_64", "h100_96", "h100_256", MIXED, ASCEND)

# Of the two grids below, what every run of the tests has: each job and each cluster, and so each
# kind of plan with its bounds. The rest is more of the same plans, of which `make bounds` tells
# whether the bounds hold all over.
PART = {
    ("grpo", "h100_24"),
    ("grpo", MIXED),
    ("ppo", "h100_48"),
    ("ppo", ASCEND),
    ("dapo", "h100_8"),
    ("dapo", "h100_96"),
    ("async", "h100_64"),
    ("async", "h100_256"),
}
PART_OF_LARGE = {("grpo", MIXED), ("ppo", "h100_64"), ("dapo", "h100_8")}


def grid(jobs: Sequence[str], clusters: Sequence[str], part: set[tuple[str, str]]) -> list[Any]:
    """Every job on every cluster; what is not of the part is marked."""
    assert part <= set(product(jobs, clusters))
    return [
        pytest.param(*case, marks=() if case in part else pytest.mark.grid)
        for case in product(jobs, clusters)
    ]


def bounds(planned: Planned) -> tuple[float, float]:
    """Least and most seconds of a simulated step."""
    step_s = planned.step_s
    if planned.kind == "asynchronous":
        least, most = 0.97, 1.06
    else:
        least, most = (0.96, 1.08) if planned.streams else (0.98, 1.04)
    return least * step_s, most * step_s


def check(job: str, cluster: str, top: int, **changes: object) -> None:
    plans = best_plans(job, cluster, top, **changes)
    assert len(plans) >= 1
    for planned in plans:
        ahead = planned.kind == "asynchronous"
        report = simulated(planned, steps=9 if ahead else 2)
        assert report.notes == ()
        ends = {end: number for end, number in report.samples.items() if end != "admitted"}
        assert sum(ends.values()) == report.samples["admitted"]
        per_step = planned.stage.plan.operation("actor.generate").num_samples
        assert report.samples["consumed"] == len(report.steps) * per_step
        low, high = bounds(planned)
        seconds = steady_s(report, 4, 1) if ahead else steady_s(report)
        assert low <= seconds <= high, (planned.stage.plan.schedule, planned.step_s, seconds)


@pytest.mark.parametrize(
    ("job", "cluster"),
    [
        ("grpo", "h100_24"),  # the reference waits for its batch, and passes it on in chunks
        ("grpo", "h100_64"),
        ("ppo", MIXED),
        ("dapo", "h100_8"),
        ("async", "h100_8"),
    ],
)
def test_a_plan_is_simulated_near_what_it_predicts(job, cluster):
    check(job, cluster, 1)


def test_so_is_one_whose_engines_divide_experts_over_several_replicas():
    [planned, *_] = best_plans("experts", "h100_16", 1)
    layout = planned.stage.plan.operation("actor.generate").layout
    assert layout.ep > layout.tp
    check("experts", "h100_16", 1)


@pytest.mark.parametrize(("job", "cluster"), grid(["grpo", "ppo", "dapo", "async"], CLUSTERS, PART))
def test_so_are_the_next_best_ones_and_the_best_of_every_kind(job, cluster):
    check(job, cluster, 5)


@pytest.mark.parametrize(
    ("cluster", "staleness"),
    [
        ("h100_16", 2),
        ("h100_64", 1),
        ("h100_64", 2),
        ("h100_64", 3),
        ("h100_64", 4),
        ("h100_256", 1),
    ],
)
def test_so_is_a_plan_whose_batches_overlap(cluster: str, staleness: int):
    """Whatever decides: the trainer, the engines, or the age that samples may have."""
    [planned, *_] = best_plans("async", cluster, 1, **{"train.max_staleness": staleness})
    assert planned.kind == "asynchronous"
    drawn = planned.stage.plan.operation("actor.generate").seconds
    assert drawn is not None
    assert drawn > planned.step_s
    steps = 8 * (staleness + 1)
    low, high = bounds(planned)
    assert low <= steady_s(simulated(planned, steps=steps + 1), steps // 2, 1) <= high


@pytest.mark.parametrize(("cluster", "slots"), [("h100_64", 128), ("h100_128", 64)])
def test_so_is_one_whose_batches_wait_for_slots_that_earlier_ones_have(cluster: str, slots: int):
    """Each batch by itself has slots enough, three of them under way at once have not."""
    [planned, *_] = best_plans(f"async_{slots}_slots", cluster, 1, **{"train.max_staleness": 3})
    engine = planned.stage.plan.operation("actor.generate")
    assert engine.slots == slots >= engine.num_samples / engine.layout.dp > slots / 3
    low, high = bounds(planned)
    assert low <= steady_s(simulated(planned, steps=33), 16, 1) <= high


@pytest.mark.parametrize(
    ("job", "cluster"),
    grid(["grpo", "ppo", "dapo"], ["h100_8", "h100_64", MIXED], PART_OF_LARGE),
)
def test_and_those_of_a_step_as_large_as_people_take(job, cluster):
    check(job, cluster, 1, **{"train.prompts_per_step": 512})
