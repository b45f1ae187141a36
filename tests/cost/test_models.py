"""Shapes and parameter counts, against real Transformers modules and published totals."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.cost import ModelShape
from flowrl.errors import PlanError

# huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
# huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
QWEN3_06B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
# huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
LLAMA32_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
# huggingface.co/mistralai/Mistral-7B-v0.1/blob/main/config.json
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
}


def built_on_meta(config: dict[str, Any]) -> dict[str, int]:
    """Parameter counts by class of the module that Transformers makes from `config`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    # parameters() and named_parameters() name a tied weight once.
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            kind = "embedding"
        elif "norm" in name:
            kind = "norm"
        elif "self_attn" in name:
            kind = "attention"
        elif "mlp" in name:
            kind = "mlp"
        else:
            assert name == "lm_head.weight"
            kind = "head"
        counts[kind] += parameter.numel()
    return counts


def counted(config: dict[str, Any]) -> dict[str, int]:
    counts = ModelShape.from_hf_config(config).parameters
    return {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "mlp": counts.mlp,
        "norm": counts.norm,
        "head": counts.head,
    }


# Totals from the safetensors metadata that the hub shows on each model's page.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        pytest.param(QWEN25_05B, 494_032_768, id="Qwen2.5-0.5B"),
        pytest.param(QWEN3_06B, 596_049_920, id="Qwen3-0.6B"),
        pytest.param(LLAMA32_1B, 1_235_814_400, id="Llama-3.2-1B"),
        pytest.param(MISTRAL_7B, 7_241_732_096, id="Mistral-7B-v0.1"),
    ],
)
def test_published_models_have_their_published_number_of_parameters(
    config: dict[str, Any], total: int
) -> None:
    assert ModelShape.from_hf_config(config).parameters.total == total


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(QWEN25_05B, id="Qwen2.5-0.5B"),
        pytest.param(QWEN3_06B, id="Qwen3-0.6B"),
        pytest.param(LLAMA32_1B, id="Llama-3.2-1B"),
        pytest.param(MISTRAL_7B, id="Mistral-7B"),
        pytest.param({"model_type": "qwen2", **TINY}, id="qwen2"),
        pytest.param({"model_type": "qwen3", **TINY}, id="qwen3, default head_dim"),
        pytest.param({"model_type": "qwen3", **TINY, "attention_bias": True}, id="qwen3, bias"),
        pytest.param({"model_type": "llama", **TINY, "tie_word_embeddings": True}, id="llama"),
        pytest.param(
            {"model_type": "llama", **TINY, "attention_bias": True, "mlp_bias": True},
            id="llama, biases",
        ),
        pytest.param({"model_type": "mistral", **TINY, "head_dim": 16}, id="mistral, head_dim"),
        pytest.param({"model_type": "llama", **TINY, "num_key_value_heads": None}, id="no GQA"),
    ],
)
def test_counts_by_class_equal_the_real_module(config: dict[str, Any]) -> None:
    assert counted(config) == built_on_meta(config)


def test_absent_kv_heads_follow_each_family_s_default() -> None:
    without = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    llama = ModelShape.from_hf_config({"model_type": "llama", **without})
    mistral = ModelShape.from_hf_config(
        {"model_type": "mistral", **without, "num_attention_heads": 16}
    )
    assert (llama.num_kv_heads, mistral.num_kv_heads) == (4, 8)


def test_an_unknown_family_says_what_is_known_and_what_it_would_need() -> None:
    with pytest.raises(PlanError) as caught:
        ModelShape.from_hf_config({"model_type": "qwen3_moe", **TINY}, where="m/config.json")
    text = str(caught.value)
    assert "m/config.json" in text
    assert "'qwen3_moe'" in text
    assert "llama, mistral, qwen2, qwen3 (nearest qwen3)" in text
    assert "experts" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size must be a whole number"),
        ({"hidden_size": 0}, "hidden_size must be a whole number"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
        ({"hidden_size": 50}, "hidden_size 50 is no multiple of num_attention_heads 4"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_impossible_sizes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ModelShape.from_hf_config({"model_type": "llama", **TINY, **change})


def test_a_missing_size_is_named() -> None:
    config = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    with pytest.raises(PlanError, match="no 'intermediate_size'"):
        ModelShape.from_hf_config({"model_type": "llama", **config})
