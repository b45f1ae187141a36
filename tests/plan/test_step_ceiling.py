"""Ways that take longer than a step are not priced, and nothing that a plan tells changes by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.lengths import LognormalLengths
from flowrl.graph import Graph
from flowrl.plan import PlanRequest
from flowrl.plan.many import GroupJob, Searched, search_group
from flowrl.plan.pins import read_pins
from flowrl.plan.ways.tasks import tasks_of
from tests.plan.many_cases import h100, options, parts_of, pinned, request

CEILING = "flowrl.plan.problem_of.step_ceiling"


def job_of(graph: Graph, wanted: PlanRequest, devices: int) -> GroupJob:
    (part,) = parts_of(h100(devices))
    pins = read_pins(wanted.options, tasks_of(graph, wanted), part.numbering)
    return GroupJob(graph=graph, request=wanted, cost=AnalyticCost(), part=part, pins=pins)


def shown(found: Searched) -> list[tuple[object, ...]]:
    return [(one.step_s, *one.shape()) for one in (found.best, *found.others)]


def num_ways(found: Searched) -> int:
    return sum(len(ways) for ways in found.posed.ways.values())


CASES = {
    "short": (request(), 16),
    "long": (request(lengths=LognormalLengths(mean=1500.0, sigma=1.0, maximum=2048.0)), 64),
    "many prompts": (replace(request(), prompts_per_step=1024), 32),
    "odd nodes": (request(), 24),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_tells_the_same_without_them(name, grpo, monkeypatch):
    wanted, devices = CASES[name]
    job = job_of(grpo, wanted, devices)
    fewer = search_group(job, alternatives=0)
    assert fewer.slowest_s <= fewer.posed.candidates.ceiling < math.inf

    monkeypatch.setattr(CEILING, lambda *_: math.inf)
    every = search_group(job, alternatives=0)
    assert num_ways(fewer) < num_ways(every)
    assert shown(fewer) == shown(every)


def test_a_ceiling_that_does_not_hold_is_dropped(grpo, monkeypatch):
    job = job_of(grpo, request(), 16)
    right = shown(search_group(job, alternatives=0))
    for wrong in (0.0, 0.9 * right[-1][0]):
        monkeypatch.setattr(CEILING, lambda *_, wrong=wrong: wrong)
        found = search_group(job, alternatives=0)
        assert shown(found) == right
        assert found.posed.candidates.ceiling == math.inf


def test_where_longer_ways_may_be_of_use_all_are_there(grpo):
    jobs = (
        job_of(grpo, request(max_staleness=1), 16),
        job_of(grpo, request(objective="device_time"), 16),
        job_of(grpo, pinned(request(), "rollout.tp=2"), 16),
        job_of(grpo, request(), 8),
    )
    for job in jobs:
        assert job.posed(all_ways=False).candidates.ceiling == math.inf
    # Next best plans that are asked for may take longer.
    assert search_group(jobs[-1], alternatives=3).posed.candidates.ceiling == math.inf
    ask = job_of(grpo, replace(request(), options=options(alternatives=3)), 16)
    assert search_group(ask).posed.candidates.ceiling == math.inf
