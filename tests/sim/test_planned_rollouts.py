"""Rollouts as they are planned, beside the scheduler and engines that draw their samples."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import Lengths, lognormal_before_cut
from flowrl.cost.models import ModelShape
from flowrl.cost.occupancy import reserve_tokens
from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.cost_steps import AnalyticStep
from flowrl.sim.lengths import Lognormal
from flowrl.sim.model import EngineModel, LaneModel, OpModel, RolloutModel, SimModel
from flowrl.sim.run import simulate
from flowrl.sim.workload import Assumed, PromptLengths

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
COST = AnalyticCost()
GROUP, PROMPT, MEAN, LONGEST = 8, 256, 1000.0, 8192
UNLIMITED = 10**6


@lru_cache
def shape(name: str) -> ModelShape:
    return ModelShape.from_hf_config(json.loads((MODELS / f"{name}.json").read_text("utf-8")))


@lru_cache
def step(name: str, device: str) -> AnalyticStep:
    return AnalyticStep(COST, shape(name), Layout(), machine(device))


@lru_cache
def machine(device: str) -> Machine:
    return Machine(spec=device_spec(device), node_size=8)


def lengths_of(sigma: float) -> Lengths:
    return lognormal_before_cut(mean=MEAN, sigma=sigma, maximum=LONGEST)


def simulated(
    name: str, device: str, *, replicas: int, groups: int, slots: int, sigma: float, kv_tokens: int
) -> list[float]:
    """Seconds of some rollouts."""
    names = [f"engine[{i}]" for i in range(replicas)]
    engines = tuple(
        EngineModel(
            name=engine,
            role="actor",
            lane=engine,
            times=step(name, device),
            num_slots=slots,
            capacity=GIVEN_PER_SLOT * slots,
            kv_tokens=kv_tokens,
            keeps_prefixes=True,
            reserve=round(reserve_tokens(lengths_of(sigma).mean)),
        )
        for engine in names
    )
    model = SimModel(
        name="rollout",
        lanes=tuple(LaneModel(name=lane, device=lane) for lane in (*names, "driver")),
        engines=engines,
        rollouts=(
            RolloutModel(
                name="generate",
                role="actor",
                groups=groups,
                settings=SchedulerSettings(group_size=GROUP),
            ),
        ),
        ops=(OpModel(name="update", op="update", lanes=tuple(names), rollout="generate"),),
        driver="driver",
    )

    def one(seed: int) -> float:
        drawn = Assumed(
            Lognormal(mean=MEAN, sigma=sigma),
            seed=seed,
            prompts=PromptLengths(values=(PROMPT,)),
            longest=LONGEST,
        )
        return simulate(model, steps=1, workloads={"generate": drawn}).sim_s

    return [one(seed) for seed in range(max(6, 4096 // (groups * GROUP)))]


def planned_s(
    name: str, device: str, *, replicas: int, groups: int, slots: int, sigma: float, kv_tokens: int
) -> float:
    return COST.rollout(
        shape(name),
        Layout(dp=replicas),
        machine(device),
        samples=groups * GROUP,
        group_size=GROUP,
        prompt_tokens=PROMPT,
        lengths=lengths_of(sigma),
        slots=slots,
        kv_tokens=kv_tokens,
    ).seconds


def check(within: float, name: str, device: str = "H100-SXM-80GB", **case: float) -> None:
    """Also by twice the standard error of what was drawn."""
    seconds = simulated(name, device, **case)
    mean = float(np.mean(seconds))
    error = float(np.std(seconds)) / math.sqrt(len(seconds))
    assert planned_s(name, device, **case) == pytest.approx(mean, rel=within, abs=2 * error)


@pytest.mark.parametrize(
    ("name", "replicas", "groups", "slots", "sigma"),
    [
        ("qwen2.5-7b", 1, 16, 16, 0.5),
        ("qwen2.5-7b", 1, 64, 64, 1.0),
        ("qwen2.5-7b", 8, 32, 8, 0.3),
        ("qwen2.5-7b", 8, 128, 16, 0.1),
        ("qwen2.5-7b", 32, 128, 16, 0.3),
        ("qwen2.5-7b", 32, 128, 8, 1.5),
        ("qwen2.5-7b", 8, 128, 64, 1.0),
        ("qwen2.5-1.5b", 8, 128, 16, 0.3),
        ("qwen2.5-14b", 32, 128, 8, 1.0),
        ("qwen2.5-7b", 32, 128, 1000, 0.3),
        ("qwen2.5-7b", 8, 8, 1000, 1.0),
    ],
)
def test_where_slots_decide_a_rollout_takes_what_is_planned(name, replicas, groups, slots, sigma):
    check(
        0.03,
        name,
        replicas=replicas,
        groups=groups,
        slots=slots,
        sigma=sigma,
        kv_tokens=slots * (PROMPT + LONGEST + 100),
    )


def test_so_does_one_of_a_14b_model_on_twelve_a100():
    check(
        0.03,
        "qwen2.5-14b",
        "A100-SXM-80GB",
        replicas=12,
        groups=120,
        slots=32,
        sigma=0.8,
        kv_tokens=32 * (PROMPT + LONGEST + 100),
    )


@pytest.mark.parametrize(
    ("replicas", "groups", "slots", "sigma", "kv_tokens"),
    [
        (1, 64, 16, 0.3, 9_000),  # prompts of neighbours in the line
        (8, 256, 16, 0.3, 9_000),  # groups that are torn apart
        (8, 32, 32, 0.5, 10_000),
        (32, 128, 16, 0.3, 9_000),
        (24, 504, 168, 0.8, 40_000),  # the fullest of many
    ],
)
def test_where_the_cache_decides_it_is_near(replicas, groups, slots, sigma, kv_tokens):
    check(
        0.08,
        "qwen2.5-7b",
        replicas=replicas,
        groups=groups,
        slots=slots,
        sigma=sigma,
        kv_tokens=kv_tokens,
    )


@pytest.mark.parametrize(("replicas", "groups"), [(8, 10), (4, 9), (12, 16), (8, 4)])
def test_replicas_with_unequal_numbers_of_groups_end_with_the_fullest(replicas, groups):
    check(
        0.06,
        "qwen2.5-14b",
        replicas=replicas,
        groups=groups,
        slots=8,
        sigma=0.3,
        kv_tokens=8 * (PROMPT + LONGEST + 100),
    )
