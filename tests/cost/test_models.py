"""Shapes and parameter counts, against real Transformers modules and published totals."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.cost import ModelShape
from flowrl.cost.models.counts import count_tensors
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
# huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
# huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
LLAMA31_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
# huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
# huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
# huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without its quantization_config
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
TINY = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
}
TINY_EXPERTS = {
    "model_type": "qwen3_moe",
    **TINY,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
TINY_LATENT = {
    "model_type": "deepseek_v3",
    **TINY,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "topk_group": 1,
    "v_head_dim": 5,
}
KINDS = ("embedding", "attention", "mlp", "norm", "head", "router", "experts")


def built_on_meta(config: dict[str, Any]) -> dict[str, int]:
    """Parameter counts by class of the module that Transformers makes from `config`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    counts = dict.fromkeys(KINDS, 0)
    # parameters() and named_parameters() name a tied weight once.
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            kind = "embedding"
        elif "norm" in name:
            kind = "norm"
        elif "self_attn" in name:
            kind = "attention"
        elif "mlp.gate." in name:
            kind = "router"
        elif "mlp.experts" in name:
            kind = "experts"
        elif "mlp" in name:
            kind = "mlp"
        else:
            assert name == "lm_head.weight"
            kind = "head"
        counts[kind] += parameter.numel()
    return counts


def counted(config: dict[str, Any]) -> dict[str, int]:
    counts = ModelShape.from_hf_config(config).parameters
    return {kind: getattr(counts, kind) for kind in KINDS}


# Totals from the safetensors metadata that the hub shows on each model's page.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        pytest.param(QWEN25_05B, 494_032_768, id="Qwen2.5-0.5B"),
        pytest.param(QWEN3_06B, 596_049_920, id="Qwen3-0.6B"),
        pytest.param(LLAMA32_1B, 1_235_814_400, id="Llama-3.2-1B"),
        pytest.param(MISTRAL_7B, 7_241_732_096, id="Mistral-7B-v0.1"),
        pytest.param(QWEN25_7B, 7_615_616_512, id="Qwen2.5-7B"),
        pytest.param(LLAMA31_8B, 8_030_261_248, id="Llama-3.1-8B"),
        pytest.param(QWEN3_30B_A3B, 30_532_122_624, id="Qwen3-30B-A3B"),
        pytest.param(QWEN3_235B_A22B, 235_093_634_560, id="Qwen3-235B-A22B"),
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
        pytest.param(QWEN3_30B_A3B, id="Qwen3-30B-A3B"),
        pytest.param({**DEEPSEEK_V3, "num_nextn_predict_layers": 0}, id="DeepSeek-V3"),
        pytest.param(TINY_EXPERTS, id="qwen3_moe, default head_dim"),
        pytest.param({**TINY_EXPERTS, "attention_bias": True}, id="qwen3_moe, bias"),
        pytest.param({**TINY_EXPERTS, "decoder_sparse_step": 2}, id="qwen3_moe, every other layer"),
        pytest.param({**TINY_EXPERTS, "mlp_only_layers": [0, 2]}, id="qwen3_moe, named layers"),
        pytest.param(TINY_LATENT, id="deepseek_v3"),
        pytest.param({**TINY_LATENT, "attention_bias": True}, id="deepseek_v3, bias"),
        pytest.param({**TINY_LATENT, "q_lora_rank": None}, id="deepseek_v3, queries without rank"),
        pytest.param({**TINY_LATENT, "first_k_dense_replace": 9}, id="deepseek_v3, all dense"),
    ],
)
def test_counts_by_class_equal_the_real_module(config: dict[str, Any]) -> None:
    assert counted(config) == built_on_meta(config)


# Numbers active for a token: the models' pages (Qwen), and README_WEIGHTS.md of the DeepSeek-V3
# repository, which counts both tables of the vocabulary.
@pytest.mark.parametrize(
    ("config", "active"),
    [
        pytest.param(QWEN3_30B_A3B, 3.3e9, id="Qwen3-30B-A3B"),
        pytest.param(QWEN3_235B_A22B, 22e9, id="Qwen3-235B-A22B"),
        pytest.param(DEEPSEEK_V3, 37e9, id="DeepSeek-V3"),
    ],
)
def test_active_parameters_are_as_published(config: dict[str, Any], active: float) -> None:
    counts = ModelShape.from_hf_config(config).parameters
    assert counts.active == pytest.approx(active, rel=0.03)
    assert counts.total - counts.active == counts.experts - counts.active_experts


def test_deepseek_v3_has_its_published_parameters_and_a_layer_more_that_is_counted_apart() -> None:
    """671B without and 11.5B in the layer that predicts a second token (README_WEIGHTS.md).

    The checkpoint's 671,026,419,200 numbers hold the bias of each router, which is no parameter.
    """
    counts = ModelShape.from_hf_config(DEEPSEEK_V3).parameters
    assert counts.total == 671_026_419_200 - 58 * 256
    assert counts.mtp == pytest.approx(11.5e9, rel=0.01)
    # 2.4B with the two tables of the vocabulary that it shares.
    assert counts.active_mtp + counts.embedding + counts.head == pytest.approx(2.4e9, rel=0.06)
    without = ModelShape.from_hf_config({**DEEPSEEK_V3, "num_nextn_predict_layers": 0}).parameters
    assert (without.total, without.mtp) == (counts.total, 0)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        # The number of entries of `model.safetensors.index.json`, or of the one file.
        pytest.param(QWEN25_05B, 290, id="Qwen2.5-0.5B"),
        pytest.param(QWEN3_30B_A3B, 18_867, id="Qwen3-30B-A3B"),
        # 3 dense layers and 58 with 256 experts: MLA has 7 tensors, the router and shared ones 4.
        pytest.param(DEEPSEEK_V3, 61 * (7 + 2) + 3 * 3 + 58 * (4 + 3 * 256) + 3, id="DeepSeek-V3"),
    ],
)
def test_every_matrix_of_every_expert_is_a_tensor(config: dict[str, Any], tensors: int) -> None:
    assert count_tensors(ModelShape.from_hf_config(config)) == tensors


def test_dense_models_are_active_as_a_whole() -> None:
    counts = ModelShape.from_hf_config(QWEN3_06B).parameters
    assert (counts.active, counts.mtp) == (counts.total, 0)


def test_a_latent_cache_holds_the_latent_and_one_rotary_key() -> None:
    assert ModelShape.from_hf_config(DEEPSEEK_V3).cache_size == 512 + 64
    assert ModelShape.from_hf_config(QWEN3_06B).cache_size == 2 * 8 * 128


def test_quantised_weights_can_be_counted_where_that_is_asked_for() -> None:
    config = {**DEEPSEEK_V3, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(PlanError, match="quantised"):
        ModelShape.from_hf_config(config)
    shape = ModelShape.from_hf_config(config, allow_quantised=True)
    assert shape == ModelShape.from_hf_config(DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "7 experts are active, but a layer has 6"),
        ({"num_experts": 0}, "num_experts must be a whole number from 1"),
        ({"mlp_only_layers": 2}, "mlp_only_layers must be a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
    ],
)
def test_impossible_experts_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ModelShape.from_hf_config({**TINY_EXPERTS, **change})


def test_absent_kv_heads_follow_each_family_s_default() -> None:
    without = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    llama = ModelShape.from_hf_config({"model_type": "llama", **without})
    mistral = ModelShape.from_hf_config(
        {"model_type": "mistral", **without, "num_attention_heads": 16}
    )
    assert (llama.num_kv_heads, mistral.num_kv_heads) == (4, 8)


def test_an_unknown_family_says_what_is_known_and_what_to_take_in_its_place() -> None:
    with pytest.raises(PlanError) as caught:
        ModelShape.from_hf_config({"model_type": "qwen2_moe", **TINY}, where="m/config.json")
    text = str(caught.value)
    assert "m/config.json" in text
    assert "'qwen2_moe'" in text
    assert "llama, mistral, qwen2, qwen3, qwen3_moe (nearest qwen3_moe)" in text
    assert "write model_type qwen3_moe, if it is that one, or take a model of one of these" in text
    assert "flowrl/" not in text


@pytest.mark.parametrize(
    ("family", "more", "nearest"),
    [
        ("Qwen3", {}, "qwen3"),
        ("lama", {}, "llama"),
        ("mixtral", {"num_local_experts": 8}, None),  # no misspelt mistral
        ("qwen3_next", {"num_experts": 512}, None),
        ("mamba", {}, None),
        # The class that `architectures` names, in the wrong place.
        ("LlamaForCausalLM", {}, "llama"),
        ("Qwen3MoeForCausalLM", {"num_experts": 8}, "qwen3_moe"),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 8}, "deepseek_v3"),
        ("MixtralForCausalLM", {"num_local_experts": 8}, None),
    ],
)
def test_only_a_family_that_is_another_misspelt_is_taken_for_it(
    family: str, more: dict[str, object], nearest: str | None
) -> None:
    with pytest.raises(PlanError) as caught:
        ModelShape.from_hf_config({"model_type": family, **TINY, **more}, where="m/config.json")
    said = f"write model_type {nearest}" in (caught.value.hint or "")
    assert said or (nearest is None and "model_type" not in (caught.value.hint or ""))


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_value_head_is_that_of_a_token_classifier_with_one_label(tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "qwen2", **TINY, "tie_word_embeddings": tied}
    rest = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model("qwen2", num_labels=1, **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForTokenClassification.from_config(made)
    shape = ModelShape.from_hf_config(config).with_value_head()
    assert shape.parameters.total == sum(p.numel() for p in model.parameters())
    assert shape.parameters.head == config["hidden_size"] + 1
    assert shape.output_size == 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tie_word_embeddings", "yes", "tie_word_embeddings must be true or false"),
        ("attention_bias", 1, "attention_bias must be true or false"),
        ("hidden_size", "2048", "hidden_size must be a whole number from 1 to 2,147,483,648"),
        ("hidden_size", True, "hidden_size must be a whole number"),
        ("num_attention_heads", 3.0, "num_attention_heads must be a whole number"),
        ("vocab_size", 10**400, "vocab_size must be a whole number"),
        ("num_hidden_layers", 10_001, "num_hidden_layers must be a whole number from 1 to 10,000"),
        ("mlp_only_layers", [True], "mlp_only_layers must be a list of layers"),
    ],
)
def test_a_value_of_another_type_is_told_with_its_file(key: str, value: object, said: str) -> None:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ModelShape.from_hf_config(config, where="model/config.json")
    with pytest.raises(PlanError, match=said) as caught:
        ModelShape.from_hf_config(config | {key: value}, where="model/config.json")
    assert caught.value.where == "model/config.json"
    assert caught.value.hint
