"""A node with more devices and the same host is never slower: those that idle leave it to the
others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import api
from flowrl.cluster import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.many import SIMPLE
from flowrl.plan.priced.anew import priced
from flowrl.plan.show.many import seconds_text
from flowrl.plan.ways.plain_ways import PLAIN
from tests.plan.many_cases import QWEN25_7B, h100, request
from tests.sizes import every

CONFIG = Path(__file__).parents[2] / "configs" / "agent_qwen25_7b.yaml"
DATA = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
GIB = 1 << 30

SLACK = 1 + PLAIN + SIMPLE
"""Of a step's time, for a plainer plan."""


def node_of(devices: int, gib: int = 2048) -> ResourcePool:
    """One node, whose host has 192 cores whatever it has of devices."""
    pool = h100(devices)
    return replace(pool, nodes=tuple(replace(one, memory_bytes=gib * GIB) for one in pool.nodes))


def episodes(devices: int, staleness: int) -> PlacementPlan:
    overrides = [f"data.train={DATA}", f"train.max_staleness={staleness}", "plan.memory_share=0.95"]
    return api.compile(None, CONFIG, overrides=overrides, pool=node_of(devices)).plan


@pytest.mark.parametrize("staleness", every(2, [0, 1]))
def test_episodes_take_no_longer_on_a_node_with_more_devices(staleness: int):
    best = float("inf")
    for devices in range(1, 9):
        seconds = episodes(devices, staleness).prediction.step_s
        assert seconds is not None
        assert seconds <= best, devices
        best = seconds


def test_a_device_that_idles_leaves_its_part_of_the_cores_to_the_others():
    plan = episodes(5, 0)
    interact = plan.operation("world.interact")
    assert interact.environment is not None
    assert len(plan.operation("actor.generate").devices) == 4
    assert interact.environment.at_once == 192.0
    (reason,) = (one for one in plan.reasons if one.subject == "devices")
    assert reason.choice == "4 x H100-SXM-80GB (cuda:[0-3])"
    assert reason.why.startswith("the others idle, so that all cores and all memory of the host")
    assert plan.prediction.step_s is not None
    step = seconds_text(plan.prediction.step_s)
    told = rf"its best step takes no less: [\d.]+ s, the plan's {step}"
    assert re.fullmatch(told, reason.rejected[0].constraint)
    # Priced again from its file it takes as long.
    overrides = [f"data.train={DATA}", "plan.memory_share=0.95"]
    graph, asked, _ = api.ask_for_plan(CONFIG, overrides=overrides)
    again = priced(graph, asked, plan, AnalyticCost())
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s)


def test_a_host_that_holds_a_job_for_few_devices_holds_it_for_more(grpo: Graph):
    # Two devices hold the update of a model of 13.5e9 parameters only with its optimizer in the
    # memory of their host; with a third one, each has a smaller part of it.
    big, best = replace(QWEN25_7B, num_layers=56), float("inf")
    for devices in (2, 3, 4, 8):
        plan = make_plan(grpo, request(big, alternatives=0), node_of(devices, 200))
        assert plan.prediction.step_s is not None
        assert plan.prediction.step_s <= best * SLACK, devices
        best = min(best, plan.prediction.step_s)
        if devices == 3:
            assert len(plan.operation("actor.update").devices) == 2
