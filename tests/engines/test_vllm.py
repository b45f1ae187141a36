"""The plug-in `vllm` with real servers: `make test-engines FLOWRL_VLLM_PYTHON=...`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.observe.display import SilentDisplay
from flowrl.testing import check_backend
from flowrl.testing.reference_model import make_model


@pytest.mark.parametrize("tied", [False, True])
def test_vllm_keeps_the_promises_of_an_engine(vllm_options, tmp_path: Path, tied: bool) -> None:
    # vLLM's attention on a CPU has no heads of 16, and small models are done between two polls.
    model = make_model(tmp_path / "model", tied=tied, hidden_size=128, num_hidden_layers=12)
    check_backend("vllm", options=vllm_options, model=model)


def test_grpo_learns_from_samples_of_vllm(vllm_options, repository: Path, tmp_path: Path) -> None:
    overrides = [
        "roles.actor.engine=vllm",
        f"roles.actor.engine_options={json.dumps(vllm_options)}",
        "roles.actor.model.num_heads=2",
        "roles.actor.num_slots=64",
        "stage.sft.train.steps=150",
        "stage.sft.stop=null",
        "train.steps=6",
        "eval.every=6",
        "eval.num=128",
        "runtime.start_timeout_s=300",
        f"runtime.runs={tmp_path}",
    ]
    source = repository / "configs/quickstart.yaml"
    folder = fl.run(None, source, overrides=overrides, display=SilentDisplay()).folder
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if step["stage"] == "grpo"]
    assert [step["step"] for step in learned] == [1, 2, 3, 4, 5, 6]
    assert all(step["grad_norm"] > 0 for step in learned)
    assert all(step["extra"]["mismatch/abs_max"] < 1e-4 for step in learned)
