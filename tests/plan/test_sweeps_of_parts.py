"""Sweeps and the fewest devices, where a plan uses nodes in part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flowrl.cluster.hardware import device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import make_plan
from flowrl.plan.sizing import Job, Size, fewest, pool_of_devices, sizes
from flowrl.plan.ways.regions import HOST_SHARE
from tests.plan.many_cases import QWEN25_7B, request


def test_a_sweep_uses_parts_of_nodes_as_plans_do(grpo: Graph):
    # 80 layers, 64 heads and 512 samples have no divisor 3:
    # of three devices of a node two are used.
    big = replace(QWEN25_7B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8)
    spec, asked = device_spec("H20-96GB"), request(big, alternatives=0)
    job = Job(graph=grpo, request=asked, spec=spec, cost=AnalyticCost(), node_size=3)
    fits = []
    for number in (3, 6, 12):
        pool = pool_of_devices(spec, number, node_size=3)
        (size,) = sizes(job, [number])
        try:
            plan = make_plan(grpo, asked, pool)
        except PlanError:
            assert size == number
            continue
        assert isinstance(size, Size)
        fits.append(number)
        assert size.step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
        used = {one for work in plan.operations for one in work.devices if "cuda" in one}
        assert size.used == len(used)
    assert fits
    assert fewest(job).devices <= min(fits)


def test_devices_of_a_node_that_idle_leave_its_host_to_the_others_in_sweeps_too(grpo: Graph):
    asked = request(objective="device_time", alternatives=0)
    spec = device_spec("H100-SXM-80GB")
    part = 24 << 30  # of its host, that a device may fill
    job = Job(graph=grpo, request=asked, spec=spec, cost=AnalyticCost(), host=part)
    (size,) = sizes(job, [8])
    pool = pool_of_devices(spec, 8)
    hosts = math.ceil(8 * part / HOST_SHARE)
    pool = replace(pool, nodes=tuple(replace(one, memory_bytes=hosts) for one in pool.nodes))
    plan = make_plan(grpo, asked, pool)
    assert isinstance(size, Size)
    assert size.used < 8
    assert size.step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
