"""Workers are opened once, so every stage's plan proves the longest sample of the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flowrl as fl
from tests.runtime.tiny_runs import tiny_config


def lengths(config: dict[str, Any]) -> list[int]:
    return [stage.plan.sizes.max_length for stage in fl.compile(None, config).stages]


def test_every_stage_is_planned_for_the_longest_sample_of_any(tmp_path: Path):
    config = tiny_config(tmp_path)
    config["data"]["max_prompt_tokens"] = 6
    config["stages"] = ["short", "grpo"]
    config["stage"] = {
        "short": {"workflow": "grpo", "train": {"sampling": {"max_tokens": 2}}},
    }
    config["train"]["sampling"] = {"max_tokens": 5}
    assert lengths(config) == [11, 11]


def test_no_sample_is_longer_than_the_model_of_a_folder_takes(tmp_path: Path):
    config = tiny_config(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "vocab_size": 16,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 9,
            }
        )
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    config["roles"]["actor"] = {"model": str(folder)}
    config["data"]["max_prompt_tokens"] = 100
    assert lengths(config) == [9] * len(config["stages"])
