"""The plug-in `sglang` with real servers: `make test-engines`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.observe.display import SilentDisplay
from flowrl.testing import check_backend


def test_sglang_keeps_the_promises_of_an_engine(sglang_options) -> None:
    check_backend("sglang", options=sglang_options)


@pytest.mark.parametrize(
    ("config", "stage"), [("quickstart", "grpo"), ("async_grpo", "async_grpo")]
)
def test_grpo_learns_from_samples_of_sglang(
    sglang_options, repository: Path, tmp_path: Path, config: str, stage: str
) -> None:
    overrides = [
        "roles.actor.engine=sglang",
        f"roles.actor.engine_options={json.dumps(sglang_options)}",
        "roles.actor.num_slots=64",
        "stage.sft.train.steps=150",
        "stage.sft.stop=null",
        "train.steps=6",
        "eval.every=6",
        "eval.num=128",
        "runtime.start_timeout_s=300",
        f"runtime.runs={tmp_path}",
    ]
    source = repository / f"configs/{config}.yaml"
    folder = fl.run(None, source, overrides=overrides, display=SilentDisplay()).folder
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if step["stage"] == stage]
    assert [step["step"] for step in learned] == [1, 2, 3, 4, 5, 6]
    assert all(step["grad_norm"] > 0 for step in learned)
    # Samples are of other weights than the trainer's own only where they may be a version old.
    older = [step["extra"]["staleness/max"] for step in learned]
    assert max(older) == (1 if config == "async_grpo" else 0)
    same = [step for step in learned if step["extra"]["staleness/max"] == 0]
    assert all(step["extra"]["mismatch/abs_max"] < 1e-4 for step in same)
