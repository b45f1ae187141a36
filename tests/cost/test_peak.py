"""The memory model against what the torch backend's allocator really does in an update."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import PolicyContext, UpdateSpec
from flowrl.cost import ModelShape, Phase, Workload
from flowrl.cost.memory import working_memory
from flowrl.ids import RoleName, group_id, sample_id
from flowrl.specs import AdamW, PolicyClip

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROWS, PROMPT, RESPONSE = 8, 32, 96


def peak_bytes(action: Callable[[], object]) -> int:
    """The most that was allocated during `action`, beyond what was there before."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = best = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        best = max(best, held)
    assert best > 0
    return best


def update_of(trainer: Any) -> Callable[[], object]:
    """One optimizer update over two micro-batches of rows that share no prefix."""
    length, count = PROMPT + RESPONSE, 2 * ROWS
    mask = np.tile(np.arange(length) >= PROMPT, count)
    sequences = SequenceBatch(
        samples=tuple(sample_id(group_id(0, i), 0) for i in range(count)),
        tokens=np.random.default_rng(0).integers(1, 2048, count * length),
        offsets=np.arange(count + 1) * length,
        response_mask=mask,
        groups=np.arange(count),
    )
    batch = TrainBatch(
        sequences=sequences,
        behaviour_logprobs=np.where(mask, -2, 0).astype(np.float32),
        advantages=mask.astype(np.float32),
    )
    spec = UpdateSpec(
        loss=PolicyClip(),
        kl=None,
        temperature=1.0,
        mini_batches=(tuple(range(count)),),
        micro_batch=ROWS,
        max_tokens=RESPONSE,
    )
    return lambda: trainer.update(batch, spec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_allocates_what_is_predicted_and_stays_within_the_margin(
    tmp_path: Path, dtype: str
) -> None:
    plugin = pytest.importorskip("flowrl_backends.torch").plugin
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    trainer = plugin.open_train(
        PolicyContext(
            role=RoleName("actor"),
            model=tmp_path,
            fresh=True,
            device="cpu",
            dtype=dtype,
            seed=0,
            num_slots=ROWS,
            max_length=PROMPT + RESPONSE,
            trainable=True,
            stop_token_ids=(0,),
        )
    )
    trainer.begin(AdamW(), 4)
    update = update_of(trainer)
    update()  # The first one allocates the moments, which stay.
    measured = peak_bytes(update)
    work = Workload(
        num_slots=0,
        max_length=PROMPT + RESPONSE,
        max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
        micro_batch=ROWS,
        num_samples=2 * ROWS,
        dtype=dtype,
        trainable=True,
    )
    parts = working_memory("actor", ModelShape.from_hf_config(CONFIG), work, Phase.UPDATE)
    predicted = sum(part.nbytes for part in parts if part.name != "margin")
    assert predicted == pytest.approx(measured, rel=0.15), (predicted, measured)
    assert measured <= sum(part.nbytes for part in parts)
