"""Tiny models, ragged batches and the padded computation, for the tests of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import Head, PolicyContext, UpdateSpec
from flowrl.ids import SampleId
from flowrl.specs import AdamW, PolicyClip
from flowrl_backends.torch.trainer import TorchTrainer
from tests.policy_contexts import policy_context

VOCABULARY = 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": 1, "resid_pdrop": 0.5, "attn_pdrop": 0.5,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "llama-gqa": lambda: transformers.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "mistral-window": lambda: transformers.MistralConfig(
        **SHAPE, num_key_value_heads=2, sliding_window=4
    ),
    "gpt2-dropout": lambda: transformers.GPT2Config(**GPT2),
    "gemma2-capped": lambda: transformers.Gemma2Config(
        **SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=4
    ),
    "granite-scaled": lambda: transformers.GraniteConfig(**SHAPE, logits_scaling=3.0),
}


def context(folder: Path, **changes: Any) -> PolicyContext:
    trained = {"seed": 3, "num_slots": 4, "max_length": 64, "trainable": True}
    return policy_context(folder, **{**trained, "stop_token_ids": (1,), **changes})


def folder_of(kind: str, base: Path) -> Path:
    folder = base / kind
    if not folder.exists():
        CONFIGS[kind]().save_pretrained(folder)
    return folder


def sequences(seed: int = 0, *, groups: int = 4, size: int = 3) -> SequenceBatch:
    """Ragged groups with shared prompts, shared first answers, and one mask with a hole."""
    draw = np.random.default_rng(seed)
    tokens, mask, offsets, numbers = [], [], [0], []
    for group in range(groups):
        prompt = draw.integers(2, VOCABULARY, draw.integers(1, 6))
        for member in range(size):
            # A small alphabet makes members agree in their first answers.
            answer = draw.integers(2, 4, draw.integers(1, 10))
            masked = np.ones(len(answer), bool)
            if member == 0 and len(answer) > 3:
                masked[1:3] = False
            tokens += [prompt, answer]
            mask += [np.zeros(len(prompt), bool), masked]
            offsets.append(offsets[-1] + len(prompt) + len(answer))
            numbers.append(group)
    return SequenceBatch(
        samples=tuple(SampleId(f"0/{g}/{i % size}") for i, g in enumerate(numbers)),
        tokens=np.concatenate(tokens).astype(np.int64),
        offsets=np.array(offsets, np.int64),
        response_mask=np.concatenate(mask),
        groups=np.array(numbers, np.int64),
    )


def training(seed: int = 0, **options: int) -> TrainBatch:
    """A batch with behaviour and reference logprobs near those of a fresh model."""
    rows = sequences(seed, **options)
    draw = np.random.default_rng(seed + 100)
    per_sample = draw.normal(size=len(rows))

    def noise() -> Any:
        values = draw.normal(-np.log(VOCABULARY), 0.3, len(rows.tokens)) * rows.response_mask
        return values.astype(np.float32)

    advantages = np.repeat(per_sample, rows.lengths) * rows.response_mask
    return TrainBatch(
        sequences=rows,
        behaviour_logprobs=noise(),
        old_logprobs=noise(),
        reference_logprobs=noise(),
        advantages=advantages.astype(np.float32),
    )


def update_spec(batch: TrainBatch, **changes: Any) -> UpdateSpec:
    return replace(
        UpdateSpec(
            loss=PolicyClip(clip_low=0.2, clip_high=0.28),
            kl=None,
            temperature=1.0,
            mini_batches=(tuple(range(len(batch))),),
            micro_batch=4,
            max_tokens=16,
        ),
        **changes,
    )


def padded_rows(rows: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[N, L]`, padded on the right, and their mask."""
    width = int(rows.lengths.max())
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i in range(len(rows)):
        sample = rows.tokens[rows.offsets[i] : rows.offsets[i + 1]]
        ids[i, : len(sample)] = torch.from_numpy(sample)
        mask[i, : len(sample)] = 1
    return ids, mask


def padded(model: Any, rows: SequenceBatch, temperature: float) -> tuple[torch.Tensor, Any]:
    """Transformers' own forward over one padded batch with its mask; logprobs `[T]`."""
    ids, mask = padded_rows(rows)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    table = (logits[:, :-1] / temperature).log_softmax(-1)
    chosen = table.gather(-1, ids[:, 1:, None])[..., 0]
    chosen = torch.nn.functional.pad(chosen, (1, 0))
    return chosen[mask > 0], (ids, mask, logits)


def padded_values(model: Any, rows: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a value head: values before each token `[T]`, scores at the last `[N]`."""
    ids, mask = padded_rows(rows)
    numbers = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[..., 0]
    before = torch.nn.functional.pad(numbers[:, :-1], (1, 0))[mask > 0]
    last = torch.from_numpy(rows.lengths - 1)
    return before, numbers[torch.arange(len(rows)), last]


class Watch:
    """Keeps the gradients that the trainer hands to its optimizer, and makes no step."""

    def __init__(self, trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grads: dict[str, torch.Tensor] = {}
        optimizer = trainer._optimizer
        assert optimizer is not None
        step = optimizer.step

        def keep() -> Any:
            self.grads = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for n, p in trainer.model.named_parameters()
            }
            return step()

        monkeypatch.setattr(optimizer, "step", keep)


def watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, head: Head = "lm", **options: Any
) -> tuple[TorchTrainer, Watch]:
    trainer = TorchTrainer(context(folder, head=head), **options)
    # A rate of 0 leaves the weights as they are, so that updates can be compared.
    trainer.begin(AdamW(learning_rate=0.0), num_updates=10)
    return trainer, Watch(trainer, monkeypatch)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=atol, msg=name)
