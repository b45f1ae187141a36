"""Tiny random models and requests for the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers as hf

from flowrl.backend.protocols import Finished, GenerateRequest, Progress
from flowrl.ids import SampleId
from flowrl.specs import Sampling
from flowrl_backends.torch.engine import TorchEngine
from tests.policy_contexts import policy_context

VOCAB = 61
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CONFIGS: dict[str, Any] = {
    "qwen2": lambda: hf.Qwen2Config(**_SHAPE, **_IDS, num_key_value_heads=2),
    "qwen2_window": lambda: hf.Qwen2Config(
        **_SHAPE,
        **_IDS,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": lambda: hf.Qwen3Config(**_SHAPE, **_IDS, num_key_value_heads=2, head_dim=16),
    "llama": lambda: hf.LlamaConfig(**_SHAPE, **_IDS, num_key_value_heads=4),
    "llama3_rope": lambda: hf.LlamaConfig(
        **_SHAPE,
        **_IDS,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: hf.MistralConfig(**_SHAPE, **_IDS, num_key_value_heads=2, sliding_window=6),
    "gpt2": lambda: hf.GPT2Config(**_GPT2, **_IDS),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SHAPE, **_IDS),
    "phi": lambda: hf.PhiConfig(**_SHAPE, **_IDS, num_key_value_heads=2),
}


def make_model(kind: str = "qwen2", seed: int = 0, std: float = 0.3) -> hf.PreTrainedModel:
    """A random model; `std` 0.3 gives its greedy choices wide margins."""
    torch.manual_seed(seed)
    model: hf.PreTrainedModel = hf.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config = hf.GenerationConfig()
    return model.eval()


def make_engine(
    model: hf.PreTrainedModel,
    *,
    slots: int = 4,
    max_length: int = 160,
    stop: Sequence[int] = (),
) -> TorchEngine:
    context = policy_context(num_slots=slots, max_length=max_length, stop_token_ids=tuple(stop))
    return TorchEngine(context, model, shares_weights=False)


def request(
    number: int,
    *,
    prompt: Sequence[int] | None = None,
    response: Sequence[int] = (),
    attempt: int = 0,
    group: str = "",
    **sampling: Any,
) -> GenerateRequest:
    """A request whose prompt, unless given, depends on `number` alone."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, VOCAB, rng.integers(1, 20)) if prompt is None else prompt
    return GenerateRequest(
        sample=SampleId(f"0/{number}/0"),
        attempt=attempt,
        prompt=np.asarray(tokens, np.int64),
        response=np.asarray(response, np.int64),
        sampling=Sampling(**sampling),
        seed=1000 + number,
        shares_prompt=group or f"0/{number}",
    )


def collect(engine: TorchEngine, count: int) -> dict[str, Finished]:
    """Polls until `count` requests have ended."""
    ended: dict[str, Finished] = {}
    while len(ended) < count:
        events = engine.poll(60.0)
        assert events, "the engine has nothing to do, and requests are missing"
        for event in events:
            if isinstance(event, Progress):
                continue
            assert event.sample not in ended, "a request ended twice"
            ended[event.sample] = event
    return ended


def run(engine: TorchEngine, requests: Sequence[GenerateRequest]) -> dict[str, Finished]:
    engine.submit(requests)
    return collect(engine, len(requests))


def reference_greedy(model: hf.PreTrainedModel, item: GenerateRequest) -> list[int]:
    """Transformers' own greedy tokens for one request alone."""
    ids = torch.from_numpy(item.prompt)[None]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=item.sampling.max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(item.prompt) :].tolist()
    return tokens


def forward_logprobs(
    model: hf.PreTrainedModel, item: GenerateRequest, response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Logprobs of `response` from one forward pass over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([item.prompt, response]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(item.prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, torch.from_numpy(response)[:, None])[:, 0].numpy()
