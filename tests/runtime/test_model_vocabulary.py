"""Runs whose model has more tokens than its tokenizer, or not those that its files name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.config.load import load_config
from flowrl.data import prepare_model_folder
from flowrl.files import read_json_lines
from flowrl_backends.torch.trainer import TorchTrainer
from tests.policy_contexts import policy_context
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

ROWS = 64
"""Of the embedding; the tokenizer has 16 tokens."""


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a padded embedding."""
    base = tmp_path_factory.mktemp("padded")
    role = load_config(None, base=tiny_config(base)).config.roles["actor"]
    shape = prepare_model_folder(role, base / "shape", [])
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"vocab_size": ROWS}))
    trainer = TorchTrainer(policy_context(shape, max_length=16))
    (base / "model").mkdir()
    trainer.export(base / "model")
    trainer.close()
    return base / "model"


def run_config(tmp_path: Path, model: Path, **data: object) -> dict[str, Any]:
    config = tiny_config(tmp_path / "runs")
    config["roles"]["actor"] = {"backend": "torch", "model": str(model), "num_slots": 8}
    del config["roles"]["reference"]
    changed = {"stages": ["grpo"], "stage": {}, "args": {}, "eval": {"every": 0, "num": 4}}
    config["train"]["steps"] = 2
    return {**config, **changed, "data": {**config["data"], **data}}


def test_tokens_that_the_tokenizer_does_not_have_reach_rewards_by_name_and_are_counted(
    tmp_path, padded
):
    display = WatchedDisplay()
    fl.compile(None, run_config(tmp_path, padded)).run(display=display)
    (folder,) = (tmp_path / "runs").iterdir()
    samples, metrics = (
        list(read_json_lines(folder / name)) for name in ("samples.jsonl", "metrics.jsonl")
    )
    for row in metrics:
        texts = [str(sample["response"]) for sample in samples if sample["step"] == row["step"]]
        named = sum(text.count("<unused") for text in texts)
        # Tokens 13 to 15 fill up the tokenizer's vocabulary, and are of it.
        own = sum(text.count(f"<unused{i}>") for text in texts for i in range(3))
        assert row["extra"]["unnamed_tokens"] == named - own > 0
        assert any("<unused63>" in text for text in texts)
    (warning,) = (text for text in display.warnings if "unnamed_tokens" in text)
    assert warning.startswith("grpo step 1: ")


def test_an_end_token_that_the_model_does_not_have_leaves_no_run_folder(tmp_path, padded):
    folder = tmp_path / "model"
    shutil.copytree(padded, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    compiled = fl.compile(None, run_config(tmp_path, folder))
    with pytest.raises(fl.DataError, match=r"generation_config\.json: eos_token_id .*[\s\S]*id -1"):
        compiled.run(display=WatchedDisplay())
    assert not (tmp_path / "runs").exists()
