"""Decoding speed on this machine: the torch engine, a plain static-KV loop, Transformers.

Uniform: B equal prompts' worth of work, every response `--tokens` long. `plain` is the loop a
person would write: the model's own forward pass over a preallocated `StaticCache`, sampling at
temperature 1 with logprobs. `generate` is `model.generate` with sampling and without logprobs
(it has the easier task). Varied: response lengths as training meets them (log-normal); the engine
refills slots, the plain loop decodes each batch until its longest response ends, because it cannot
refill; both count only tokens that were asked for. General path: the uniform case with an
architecture that the engine runs through Transformers' own layers (GPT-NeoX).

The contenders run alternately; a ratio is the median over repetitions of ratios within one.

    python benchmarks/decoder.py --repetitions 5 --output benchmarks/results/decoder_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import transformers
from transformers import (
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from arguments import json_file
from flowrl.backend.protocols import Finished, GenerateRequest, PolicyContext
from flowrl.files import write_result
from flowrl.ids import RoleName, SampleId
from flowrl.specs import Sampling
from flowrl_backends.torch.engine import TorchEngine

Model = TypeVar("Model", bound=PreTrainedModel)

Prompts = np.ndarray
"""int64 `[B, P]`."""


def make_model(vocab_size: int) -> Qwen2ForCausalLM:
    """Qwen2 of about a million parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=352,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return _without_stops(Qwen2ForCausalLM(config))


def make_general_model(vocab_size: int) -> GPTNeoXForCausalLM:
    """GPT-NeoX of the same width and depth: no fast path of the engine knows it."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=512,
    )
    return _without_stops(GPTNeoXForCausalLM(config))


def _without_stops(model: Model) -> Model:
    """The model for decoding that only its length ends."""
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig()
    return model.eval()


def make_engine(model: PreTrainedModel, slots: int, max_length: int) -> TorchEngine:
    """An engine without stop tokens."""
    context = PolicyContext(
        role=RoleName("actor"),
        model=Path(),
        fresh=True,
        device="cpu",
        dtype="float32",
        seed=0,
        num_slots=slots,
        max_length=max_length,
        trainable=False,
        stop_token_ids=(),
    )
    return TorchEngine(context, model, shares_weights=False)


def run_engine(engine: TorchEngine, prompts: Prompts, lengths: list[int]) -> int:
    """Tokens generated."""
    engine.submit(
        [
            GenerateRequest(
                sample=SampleId(f"0/{i}/0"),
                attempt=0,
                prompt=prompt,
                response=np.zeros(0, np.int64),
                sampling=Sampling(max_tokens=length),
                seed=i,
                shares_prompt=f"0/{i}",
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
    )
    left, tokens = len(lengths), 0
    while left:
        for event in engine.poll(60.0):
            if isinstance(event, Finished):
                left -= 1
                tokens += len(event.tokens)
    return tokens


@torch.inference_mode()
def run_plain(model: PreTrainedModel, prompts: Prompts, num_tokens: int) -> int:
    """The plain loop; every row `num_tokens` long."""
    ids = torch.from_numpy(prompts)
    batch, num_prompt = ids.shape
    cache = StaticCache(config=model.config, max_cache_len=num_prompt + num_tokens)
    tokens = torch.empty(batch, num_tokens, dtype=torch.int64)
    logprobs = torch.empty(batch, num_tokens)
    name = "cache" if int(transformers.__version__.split(".")[0]) >= 5 else "past_key_values"
    for step in range(num_tokens):
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
        probs = torch.softmax(out.logits[:, -1].float(), -1)
        ids = torch.multinomial(probs, 1)
        tokens[:, step : step + 1] = ids
        logprobs[:, step : step + 1] = probs.gather(-1, ids).log()
    return batch * num_tokens


@torch.inference_mode()
def run_hand_written(model: Qwen2ForCausalLM, prompts: Prompts, num_tokens: int) -> int:
    """A leaner plain loop: modules called directly, one slice of a preallocated cache a step."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    inner, config = model.model, model.config
    batch, num_prompt = prompts.shape
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    shape = (batch, heads, num_prompt + num_tokens, dim)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in inner.layers]
    positions = torch.arange(num_prompt + num_tokens)[None]
    cos_all, sin_all = inner.rotary_emb(torch.empty(0), positions)
    tokens = torch.empty(batch, num_tokens, dtype=torch.int64)
    logprobs = torch.empty(batch, num_tokens)
    ids, begin = torch.from_numpy(prompts), 0
    for step in range(num_tokens):
        end = begin + ids.shape[1]
        x = inner.embed_tokens(ids)
        cos, sin = cos_all[:, begin:end], sin_all[:, begin:end]
        for layer, (keys, values) in zip(inner.layers, caches, strict=True):
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            q, k, v = (
                p(h).view(batch, -1, heads, dim).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys[:, :, begin:end], values[:, :, begin:end] = k, v
            out = torch.nn.functional.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], is_causal=begin == 0
            )
            x = x + attention.o_proj(out.transpose(1, 2).reshape(batch, end - begin, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = model.lm_head(inner.norm(x[:, -1]))
        probs = torch.softmax(logits, -1)
        ids = torch.multinomial(probs, 1)
        tokens[:, step : step + 1] = ids
        logprobs[:, step : step + 1] = probs.gather(-1, ids).log()
        begin = end
    return batch * num_tokens


@torch.inference_mode()
def run_generate(model: PreTrainedModel, prompts: Prompts, num_tokens: int) -> int:
    """Transformers' sampling loop."""
    ids = torch.from_numpy(prompts)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )
    return len(prompts) * num_tokens


def alternate(
    contenders: dict[str, Callable[[], int]], repetitions: int, seconds: float
) -> dict[str, list[float]]:
    """Tokens per second of each contender in each repetition; the order turns round."""
    calls: dict[str, int] = {}
    for name, run in contenders.items():
        run()
        begin = time.perf_counter()
        run()
        calls[name] = max(1, round(seconds / (time.perf_counter() - begin)))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        names = list(contenders) if repetition % 2 == 0 else list(contenders)[::-1]
        for name in names:
            begin = time.perf_counter()
            tokens = sum(contenders[name]() for _ in range(calls[name]))
            rates[name].append(tokens / (time.perf_counter() - begin))
    return rates


def summary(rates: dict[str, list[float]]) -> dict[str, float]:
    """Median rates, and the engine's median ratio to every other."""
    row = {f"{name}_tok_s": round(statistics.median(values)) for name, values in rates.items()}
    for name, values in rates.items():
        if name != "engine":
            ratios = [a / b for a, b in zip(rates["engine"], values, strict=True)]
            row[f"engine_over_{name}"] = round(statistics.median(ratios), 2)
    return row


def uniform(arguments: argparse.Namespace, model: Qwen2ForCausalLM, batch: int) -> dict[str, float]:
    """All responses equally long, every row present from the first step."""
    rng = np.random.default_rng(batch)
    prompts = rng.integers(0, arguments.vocab, (batch, arguments.prompt))
    num_tokens = arguments.tokens
    engine = make_engine(model, batch, arguments.prompt + num_tokens)
    contenders: dict[str, Callable[[], int]] = {
        "engine": lambda: run_engine(engine, prompts, [num_tokens] * batch),
        "plain": lambda: run_plain(model, prompts, num_tokens),
        "hand_written": lambda: run_hand_written(model, prompts, num_tokens),
        "generate": lambda: run_generate(model, prompts, num_tokens),
    }
    return {"batch": batch, **summary(alternate(contenders, arguments.repetitions, 0.5))}


def general(arguments: argparse.Namespace, model: PreTrainedModel, batch: int) -> dict[str, float]:
    """The uniform case on the engine's general path."""
    rng = np.random.default_rng(batch)
    prompts = rng.integers(0, arguments.vocab, (batch, arguments.prompt))
    num_tokens = arguments.tokens
    engine = make_engine(model, batch, arguments.prompt + num_tokens)
    contenders: dict[str, Callable[[], int]] = {
        "engine": lambda: run_engine(engine, prompts, [num_tokens] * batch),
        "plain": lambda: run_plain(model, prompts, num_tokens),
        "generate": lambda: run_generate(model, prompts, num_tokens),
    }
    return {"batch": batch, **summary(alternate(contenders, arguments.repetitions, 0.5))}


def varied(arguments: argparse.Namespace, model: Qwen2ForCausalLM, batch: int) -> dict[str, float]:
    """256 responses of varied length through `batch` slots."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, arguments.vocab, (256, arguments.prompt))
    lengths = np.clip(rng.lognormal(3.1, 0.8, 256), 1, 128).astype(int).tolist()
    engine = make_engine(model, batch, arguments.prompt + 128)

    def in_batches() -> int:
        for begin in range(0, len(lengths), batch):
            part = slice(begin, begin + batch)
            run_hand_written(model, prompts[part], max(lengths[part]))
        return sum(lengths)

    contenders: dict[str, Callable[[], int]] = {
        "engine": lambda: run_engine(engine, prompts, lengths),
        "hand_written": in_batches,
    }
    rates = alternate(contenders, arguments.repetitions, 0.5)
    return {"slots": batch, "mean_length": round(float(np.mean(lengths)), 1), **summary(rates)}


def main() -> None:
    """Measures, prints a line a case and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=json_file)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(arguments.vocab)
    result: dict[str, object] = {
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "threads": 1,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": {"architecture": "Qwen2", "parameters": model.num_parameters()},
        "workload": {
            "prompt_tokens": arguments.prompt,
            "response_tokens": arguments.tokens,
            "vocabulary": arguments.vocab,
            "repetitions": arguments.repetitions,
        },
    }
    rows = []
    for batch in arguments.batches:
        rows.append(uniform(arguments, model, batch))
        print(rows[-1], flush=True)
    result["uniform"] = rows
    rows = []
    for batch in (32, 64):
        rows.append(varied(arguments, model, batch))
        print(rows[-1], flush=True)
    result["varied"] = rows
    rows = []
    other = make_general_model(arguments.vocab)
    for batch in arguments.batches:
        rows.append(general(arguments, other, batch))
        print({"general path": True, **rows[-1]}, flush=True)
    result["general_path"] = {"architecture": "GPT-NeoX", "uniform": rows}
    # Other work on the machine lowers the rates; the ratios, taken side by side, hold.
    result["load_average"] = round(os.getloadavg()[0], 1)
    if arguments.output:
        write_result(arguments.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
