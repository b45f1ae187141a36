"""Servers of models with experts: one for all replicas that hold a layer's experts together."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from flowrl.cost.models import Experts, ModelShape
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.check.predicted import check_predicted
from tests.plan.many_cases import h100, pinned, request

MOE = ModelShape(
    family="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    tied=False,
    qk_norm=True,
    experts=Experts(num_experts=128, num_active=8, expert_size=768),
)


def served(grpo: Graph, engine: str, *pins: str) -> tuple[PlacementPlan, Mapping[str, str]]:
    asked = pinned(request(MOE, engine=engine), *pins)
    plan = make_plan(grpo, asked, h100(16))
    (flags,) = plan.engine_flags
    return plan, dict(flags.flags)


def test_one_sglang_server_has_all_replicas_that_share_experts(grpo: Graph):
    plan, flags = served(grpo, "sglang", "rollout.tp=2", "rollout.ep=8", "rollout.devices=0-15")
    generate = plan.operation("actor.generate")
    assert (generate.layout.dp, generate.slots) == (8, 64)
    # --ep-size divides --tp-size, the devices of a stage; each of the 4 replicas attends on 2.
    assert (flags["--tp-size"], flags["--dp-size"], flags["--ep-size"]) == ("8", "4", "8")
    assert "--enable-dp-attention" in flags
    assert flags["--max-running-requests"] == str(4 * 64)
    assert flags["--max-total-tokens"] == str(generate.kv_tokens)


def test_one_vllm_server_has_all_replicas_that_share_experts(grpo: Graph):
    _, flags = served(grpo, "vllm", "rollout.tp=2", "rollout.ep=8", "rollout.devices=0-15")
    assert (flags["--tensor-parallel-size"], flags["--data-parallel-size"]) == ("2", "4")
    assert "--enable-expert-parallel" in flags
    assert flags["--max-num-seqs"] == "64"  # of a replica


def test_a_replica_that_has_its_experts_alone_has_a_server_of_its_own(grpo: Graph):
    _, flags = served(grpo, "sglang", "rollout.tp=4", "rollout.ep=2", "rollout.devices=0-15")
    assert (flags["--tp-size"], flags["--ep-size"]) == ("4", "2")
    assert not {"--dp-size", "--enable-dp-attention"} & flags.keys()
    _, flags = served(grpo, "vllm", "rollout.tp=4", "rollout.ep=4", "rollout.devices=0-15")
    assert flags["--tensor-parallel-size"] == "4"
    assert "--data-parallel-size" not in flags


def test_vllm_does_not_divide_experts_twice(grpo: Graph):
    with pytest.raises(PlanError, match="tp=4 ep=2 would divide experts twice"):
        served(grpo, "vllm", "rollout.tp=4", "rollout.ep=2", "rollout.devices=0-15")


@pytest.mark.parametrize(
    ("engine", "name", "shared"),
    [
        ("sglang", "--tp-size", "8"),
        ("sglang", "--dp-size", "4"),
        ("vllm", "--data-parallel-size", "4"),
    ],
)
def test_a_server_that_would_hold_all_experts_on_a_replica_is_refused(
    grpo: Graph, engine: str, name: str, shared: str
):
    plan, flags = served(grpo, engine, "rollout.tp=2", "rollout.ep=8", "rollout.devices=0-15")
    assert flags[name] == shared
    check_predicted(plan, "p.json")
    raw = plan.to_dict()
    given = raw["engine_flags"][0]["flags"]
    raw["engine_flags"][0]["flags"] = [
        flag for flag in given if flag[0] != name or name == "--tp-size"
    ]
    if name == "--tp-size":
        next(flag for flag in given if flag[0] == name)[1] = "2"
    with pytest.raises(PlanError, match=f"{name} {shared}"):
        check_predicted(PlacementPlan.from_json(json.dumps(raw), where="p.json"), "p.json")


def test_a_server_gives_all_of_its_devices_back_when_something_follows_on_one(grpo: Graph):
    # Two servers of eight devices, of which the second one has the trainer beside it.
    plan, _ = served(
        grpo,
        "sglang",
        "rollout.tp=2",
        "rollout.ep=8",
        "rollout.devices=0-15",
        "actor.devices=8-15",
        "reference.devices=14-15",
    )
    released = [one for one in plan.residency if one.action == "release" and "engine" in one.what]
    assert {one.device for one in released} == {"node-1/cuda:[0-7]"}
