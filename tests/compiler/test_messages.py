"""What a compiler's message says to change is the key that decides."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fl
from flowrl.cluster import ClusterNode, Device, ResourcePool
from tests.runtime.tiny_runs import tiny_config

NODE = ClusterNode(
    name="small",
    devices=(Device(id="cpu:0", type="cpu", name="CPU", memory_bytes=600 << 20, num_cores=1),),
    memory_bytes=600 << 20,
    num_cores=1,
)


@pytest.mark.parametrize(("stage", "key"), [("sft", "stage.sft.train"), ("grpo", "train")])
def test_a_stage_that_does_not_fit_is_told_its_own_key(tmp_path: Path, stage: str, key: str):
    config = tiny_config(tmp_path)
    large = {**config["train"], "prompts_per_step": 8192, "micro_batch": 8192}
    (config if stage == "grpo" else config["stage"]["sft"])["train"] = large
    config["roles"]["actor"]["model"] |= {"hidden_size": 256, "intermediate_size": 1024}
    with pytest.raises(fl.PlanError, match="does not fit on cpu:0") as caught:
        fl.compile(None, config, pool=ResourcePool(nodes=(NODE,)))
    assert f"set {key}.micro_batch=" in str(caught.value)
