"""Jobs of a 7B model on clusters, planned and simulated, for the tests of such plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import yaml

from flowrl import api
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.compiler import CompiledStage
from flowrl.config.schema import PlanConfig
from flowrl.plan import groups
from flowrl.plan.sizing import pool_of_devices
from flowrl.plan.write.many import write_plan
from flowrl.sim.model import SimModel
from flowrl.sim.of_plan import longest_response, model_of_stage, rollout_nodes
from flowrl.sim.planned_times import planned_lengths, planned_times
from flowrl.sim.report import SimReport
from flowrl.sim.run import simulate
from flowrl.sim.workload import open_workload

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

EXPERTS = {"model": str(CONFIGS / "models" / "qwen3-30b-a3b.json"), "num_slots": 256}
QWEN = str(CONFIGS / "models" / "qwen2.5-7b.json")

JOBS = {
    "grpo": ("grpo_qwen25_7b", {}),
    "ppo": ("ppo_qwen25_7b", {}),
    "dapo": ("grpo_qwen25_7b", {"stages": ["dapo"], "args": None, "train.refill": True}),
    "async": ("grpo_qwen25_7b", {"train.max_staleness": 1}),
    "async_64_slots": ("grpo_qwen25_7b", {"roles.actor": {"model": QWEN, "num_slots": 64}}),
    "async_128_slots": ("grpo_qwen25_7b", {"roles.actor": {"model": QWEN, "num_slots": 128}}),
    "experts": ("grpo_qwen25_7b", {"roles.actor": EXPERTS}),
}
"""By name: a config, and what is changed in it."""


@dataclass(frozen=True)
class Planned:
    """A stage by one of the planner's plans, with the `plan` section that it was made by."""

    stage: CompiledStage
    config: PlanConfig

    @property
    def step_s(self) -> float:
        predicted = self.stage.plan.prediction.step_s
        assert predicted is not None
        return predicted

    @property
    def kind(self) -> str:
        return self.stage.plan.kind

    @property
    def streams(self) -> bool:
        operations = self.stage.plan.operations
        return any(one.chunk and one.op != "generate" for one in operations)


def pool(name: str) -> ResourcePool | None:
    """`h100_64`: so many of them; None for a file of configs/clusters."""
    kind, _, number = name.rpartition("_")
    if kind != "h100" or not number.isdecimal():
        return None
    return pool_of_devices(device_spec("H100-SXM-80GB"), int(number))


def config_of(job: str, cluster: str, changes: dict[str, object]) -> dict[str, object]:
    name, own = JOBS[job]
    config: dict[str, object] = {}
    for part in ("grpo_qwen25_7b", name):
        for key, value in yaml.safe_load((CONFIGS / f"{part}.yaml").read_text()).items():
            old = config.get(key)
            config[key] = {**old, **value} if isinstance(old, dict) else value
    config.pop("extends", None)
    config["data"] = {"train": "tests/data/gsm8k_test.jsonl", "max_prompt_tokens": 1024}
    for key, value in {**own, **changes}.items():
        section, dot, inner = key.partition(".")
        if value is None:
            config.pop(section)
        elif dot:
            config[section] = {**config.get(section, {}), inner: value}  # type: ignore[dict-item]
        else:
            config[section] = value
    if config["stages"] == ["dapo"]:
        config["roles"] = {k: v for k, v in config["roles"].items() if k != "reference"}  # type: ignore[attr-defined]
    if pool(cluster) is None:
        config["cluster"] = str(CONFIGS / "clusters" / f"{cluster}.yaml")
    return config


@lru_cache
def best_plans(job: str, cluster: str, top: int = 1, **changes: object) -> tuple[Planned, ...]:
    """The planner's plan, its next best ones, and the best of every other kind."""
    made: list[tuple[object, ...]] = []

    def spied(*words):
        made.append(words)
        return write_plan(*words)

    wanted = {"train.prompts_per_step": 128, "plan.alternatives": top - 1}
    config = config_of(job, cluster, {**wanted, **changes})
    with patch.object(groups, "write_plan", spied):
        compiled = api.compile(None, config, pool=pool(cluster))
    stage, section = compiled.stages[-1], compiled.config.plan
    graph, request, on, searched, hosted = made[-1]
    others = [
        write_plan(graph, request, on, replace(searched, best=one, others=()), hosted)
        for one in searched.others
    ]
    stages = [stage, *(stage.with_plan(plan) for plan in others)]
    return tuple(Planned(stage=one, config=section) for one in stages)


def model_of(planned: Planned) -> SimModel:
    return model_of_stage(planned.stage, planned_times(planned.stage, planned.config))


def simulated(planned: Planned, *, steps: int = 2, lengths: str | None = None) -> SimReport:
    stage, times = planned.stage, planned_times(planned.stage, planned.config)
    workloads = {}
    for node in rollout_nodes(stage.graph):
        longest = longest_response(stage, node)
        played = stage.plan.operation(node.id).environment
        workloads[node.id] = open_workload(
            lengths or planned_lengths(planned.config, longest, played),
            stage=stage.name,
            rollout=node.id,
            seed=0,
            prompts=times.prompts,
            longest=longest,
        )
    return simulate(model_of_stage(stage, times), steps=steps, workloads=workloads)


def steady_s(report: SimReport, first: int = 0, last: int = 0) -> float:
    """Mean seconds of a step, some of the first ones and of the last ones aside."""
    walls = [step.wall_s for step in report.steps[first : len(report.steps) - last]]
    return sum(walls) / len(walls)
