"""What a new model is like before any of its files are written."""

from __future__ import annotations

from flowrl.config.schema import BpeTokenizer, CharTokenizer, FreshModel

__all__ = ["fresh_config_json", "vocabulary_of"]

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# Rows of embedding and output matrices; sizes that are no multiple of 8 are slow on every device.
_MULTIPLE = 8


def vocabulary_of(spec: CharTokenizer | BpeTokenizer) -> tuple[int, int]:
    """`(vocab_size, eos_id)` of the tokenizer that `spec` will make, before any data is read."""
    if isinstance(spec, BpeTokenizer):
        return spec.vocab_size, 0
    used = len(spec.alphabet) + 1
    return -(-used // _MULTIPLE) * _MULTIPLE, len(spec.alphabet)


def fresh_config_json(
    model: FreshModel, vocab_size: int, eos_id: int, dtype: str = "float32"
) -> dict[str, object]:
    """The Hugging Face `config.json` of a new model.

    `vocabulary_of` gives the two numbers before any data is read.
    """
    config: dict[str, object] = {
        "architectures": [_CLASSES[model.architecture]],
        "model_type": model.architecture,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "max_position_embeddings": model.max_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": model.initializer_range,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
        "dtype": dtype,
    }
    if model.architecture != "llama":
        config["use_sliding_window"] = False
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    return config
