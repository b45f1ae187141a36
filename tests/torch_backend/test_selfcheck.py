"""Engine and trainer compute what the model does at every length, or the model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from flowrl.errors import BackendError
from flowrl_backends.torch import fused, plugin
from flowrl_backends.torch.selfcheck import check_packing
from tests.policy_contexts import policy_context
from tests.torch_backend.engine_fixtures import make_engine, make_model, request, run

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
SWITCHING = {
    "llama_longrope": lambda: hf.LlamaConfig(**SHAPE, rope_parameters=LONGROPE),
    "phi3_longrope": lambda: hf.Phi3Config(
        **SHAPE, rope_parameters=LONGROPE, original_max_position_embeddings=24
    ),
    "dynamic": lambda: hf.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 24},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "absolute": lambda: hf.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=24, eos_token_id=None
    ),
}


@pytest.mark.parametrize("kind", SWITCHING)
def test_a_model_that_changes_at_a_length_is_refused_where_samples_are_longer(tmp_path, kind):
    SWITCHING[kind]().save_pretrained(tmp_path)
    long = policy_context(tmp_path, max_length=25)
    for opening in (lambda: plugin.open_train(long), lambda: plugin.open_generate(long, None)):
        with pytest.raises(BackendError, match=r"found: up to 25 tokens; .* is 24 in .*config\.js"):
            opening()
    plugin.open_train(policy_context(tmp_path, max_length=24))
    engine = plugin.open_generate(policy_context(tmp_path, max_length=24, num_slots=2), None)
    prompt = list(range(5))
    assert len(run(engine, [request(1, prompt=prompt, max_tokens=19)])) == 1


def chunked(folder: Path) -> Path:
    hf.Llama4TextConfig(
        **SHAPE, head_dim=8, attention_chunk_size=16, intermediate_size_mlp=32,
        num_local_experts=2, num_experts_per_tok=1, no_rope_layers=[1, 0],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_chunks_of_attention_that_samples_reach_are_not_decoded(tmp_path):
    context = policy_context(chunked(tmp_path), num_slots=2, max_length=40)
    engine = plugin.open_generate(context, None)
    with pytest.raises(BackendError, match=r"window None, row of 19 tokens"):
        run(engine, [request(1, prompt=[1, 2], max_tokens=3)])


def test_an_architecture_whose_own_code_fails_in_the_decoder_is_refused(tmp_path):
    hf.DeepseekV32Config(
        **{**SHAPE, "num_key_value_heads": 4}, moe_intermediate_size=8, n_routed_experts=2,
        n_group=1, topk_group=1, num_experts_per_tok=1, first_k_dense_replace=2, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, index_topk=8,
        index_n_heads=2, index_head_dim=8,
    ).save_pretrained(tmp_path)  # fmt: skip
    engine = plugin.open_generate(policy_context(tmp_path, num_slots=2, max_length=40), None)
    with pytest.raises(BackendError, match=r"cannot decode this architecture[\s\S]*found: Deepsee"):
        run(engine, [request(1, prompt=[1, 2], max_tokens=3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_a_layer_does_not_hand_over_is_noticed_in_any_type(dtype):
    model = make_model("qwen2_window", std=0.02).to(dtype)
    model.config._attn_implementation = "flowrl"
    check_packing(model, "lm", 40)
    model.model.layers[1].self_attn.sliding_window = None
    check_packing(model, "lm", 8)
    for length in (9, 40):
        with pytest.raises(BackendError, match="attends to other tokens than the window"):
            check_packing(model, "lm", length)
    with pytest.raises(BackendError, match="attends to other tokens than the window"):
        run(make_engine(model), [request(1, max_tokens=3)])


def test_a_decoder_that_forgets_a_window_is_noticed_before_the_first_token(monkeypatch):
    monkeypatch.setattr(fused, "_window", lambda attention: None)
    with pytest.raises(BackendError, match="cannot decode this architecture: its numbers differ"):
        run(make_engine(make_model("qwen2_window")), [request(1, prompt=[1, 2], max_tokens=3)])
    short = make_engine(make_model("qwen2_window"), max_length=7)
    assert len(run(short, [request(1, prompt=[1, 2], max_tokens=3)])) == 1


def test_packed_rows_that_forget_a_window_are_noticed(monkeypatch):
    model = make_model("qwen2_window")
    model.config._attn_implementation = "flowrl"
    forget = "flowrl_backends.torch.packed_forward.window_mask"
    monkeypatch.setattr(forget, lambda *_: None)
    with pytest.raises(BackendError, match="trainer cannot compute this architecture"):
        check_packing(model, "lm", 40)


def test_rows_grow_past_what_samples_reach_and_are_short_elsewhere():
    lengths: list[int] = []
    for kind in ("qwen2", "llama3_rope", "qwen2_window"):
        model = make_model(kind)
        model.config._attn_implementation = "flowrl"
        model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        for max_length in (160, 7, 8):
            check_packing(model, "lm", max_length)
            lengths.append(0)
    # Two rows of 6 (or 7, 10) and 3 tokens, packed without their last ones; then each of them.
    short = [7, 5, 2, 0]
    assert lengths == [*short * 6, 11, 9, 2, 0, *short, 9, 7, 2, 0]


def test_a_value_head_is_checked_as_well():
    config = hf.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1, num_labels=1
    )
    model = hf.AutoModelForTokenClassification.from_config(config).eval()
    model.config._attn_implementation = "flowrl"
    check_packing(model, "value", 20)
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(BackendError, match="attends to other tokens"):
        check_packing(model, "value", 20)
