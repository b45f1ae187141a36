"""The shapes in configs/models count as many parameters as the models have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cost import ModelShape

MODELS = Path(__file__).parents[2] / "configs" / "models"

# From the safetensors metadata that the hub shows on each model's page; of DeepSeek-V3 without the
# biases of its routers, which are no parameters, and the layer that predicts a second token.
PUBLISHED = {
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    # The checkpoint holds the tied table twice: 2,031,739,904.
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2_048,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


def test_every_file_is_compared() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_describes_a_model_with_its_published_number_of_parameters(name: str) -> None:
    config = json.loads((MODELS / f"{name}.json").read_text())
    shape = ModelShape.from_hf_config(config, where=name)
    assert shape.parameters.total == PUBLISHED[name]
    # What else a plan reads: the longest sample, and the class that a backend would build.
    assert config["max_position_embeddings"] >= 32_768
    assert config["architectures"][0].lower().startswith(shape.family.replace("_", ""))
