"""The memory model against what the torch backend's allocator really does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import Finished, GenerateRequest, PolicyContext, UpdateSpec
from flowrl.cost import ModelShape, Phase, Workload
from flowrl.cost.memory import resident_memory, working_memory
from flowrl.ids import group_id, sample_id
from flowrl.specs import AdamW, PolicyClip, Sampling
from tests.policy_contexts import policy_context

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the rows that pass it, all equally long and without common prefixes.

    Attributes:
        least: MiB that it must allocate at least, so that a case is as large as it is meant to be.
    """

    family: str = "qwen2"
    hidden: int = 128
    intermediate: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 2048
    tied: bool = True
    rows: int = 8
    prompt: int = 32
    response: int = 96
    dtype: str = "float32"
    recompute: str = "none"
    least: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return {
            "model_type": self.family,
            "architectures": [f"{self.family.capitalize()}ForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def context(self, folder: Path) -> PolicyContext:
        (folder / "config.json").write_text(json.dumps(self.config))
        return policy_context(
            folder,
            dtype=self.dtype,
            num_slots=self.rows,
            max_length=self.prompt + self.response,
            trainable=True,
            stop_token_ids=(0,),
        )

    def workload(self, num_slots: int = 0) -> Workload:
        return Workload(
            num_slots=num_slots,
            max_length=self.prompt + self.response,
            max_prompt_tokens=self.prompt,
            max_response_tokens=self.response,
            micro_batch=self.rows,
            num_samples=2 * self.rows,
            dtype=self.dtype,
            trainable=True,
            recompute="full" if self.recompute == "full" else "none",
        )

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_hf_config(self.config)

    def sequences(self) -> SequenceBatch:
        """Two micro-batches."""
        length, count = self.prompt + self.response, 2 * self.rows
        return SequenceBatch(
            samples=tuple(sample_id(group_id(0, i), 0) for i in range(count)),
            tokens=np.random.default_rng(0).integers(1, self.vocabulary, count * length),
            offsets=np.arange(count + 1) * length,
            response_mask=np.tile(np.arange(length) >= self.prompt, count),
            groups=np.arange(count),
        )


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


def update_of(trainer: Any, case: Case) -> Callable[[], object]:
    """One optimizer update over two micro-batches."""
    sequences = case.sequences()
    mask = sequences.response_mask
    batch = TrainBatch(
        sequences=sequences,
        behaviour_logprobs=np.where(mask, -2, 0).astype(np.float32),
        advantages=mask.astype(np.float32),
    )
    spec = UpdateSpec(
        loss=PolicyClip(),
        kl=None,
        temperature=1.0,
        mini_batches=(tuple(range(len(sequences))),),
        micro_batch=case.rows,
        max_tokens=case.response,
        recompute=case.recompute,
    )
    return lambda: trainer.update(batch, spec)


NARROW: dict[str, Any] = {"hidden": 32, "intermediate": 88, "heads": 2, "kv_heads": 1}
LLAMA: dict[str, Any] = {"family": "llama", "heads": 8}
DEEP: dict[str, Any] = {"layers": 8, "vocabulary": 512}
BROAD = LLAMA | {"hidden": 512, "intermediate": 1408, "kv_heads": 4, "rows": 1}
BROADER = BROAD | {"hidden": 1024, "intermediate": 2816, "prompt": 64, "response": 192}
WORDY: dict[str, Any] = {"layers": 2, "vocabulary": 16384, "recompute": "full"}
CACHED = LLAMA | {"layers": 3, "kv_heads": 8, "prompt": 192, "response": 4, "dtype": "bfloat16"}


def large(**values: Any) -> ParameterSet:
    """A case that takes up to a minute; the one before it has the same parts, and is small."""
    return pytest.param(Case(**values), marks=pytest.mark.slow)


UPDATES = [
    Case(),
    Case(recompute="full", rows=16),
    # Activations are most.
    Case(**DEEP, rows=32, least=350),
    Case(**DEEP, **NARROW, rows=16, dtype="bfloat16"),
    large(**DEEP, rows=32, dtype="bfloat16", least=200),
    Case(family="qwen3", hidden=256, intermediate=704, rows=12, tied=False, least=200),
    # Gradients are most.
    Case(**BROAD, prompt=8, response=8, dtype="bfloat16"),
    large(**BROADER, dtype="bfloat16", least=200),
    Case(**BROAD, prompt=64, response=192, recompute="full"),
    large(**BROADER, recompute="full", least=200),
    # Logits are most.
    Case(**WORDY | {"recompute": "none"}, rows=12, least=200),
    Case(**WORDY, rows=12, least=200),
    Case(**WORDY, **NARROW, rows=6, dtype="bfloat16"),
    large(**WORDY, rows=22, dtype="bfloat16", least=200),
]


def named(case: Case) -> str:
    most = "" if not case.least else f", {case.least} MiB"
    return f"{case.family} {case.hidden}x{case.layers}, {case.dtype}, {case.recompute}{most}"


@pytest.mark.parametrize("case", UPDATES, ids=named)
def test_an_update_allocates_what_is_predicted_and_stays_within_the_margin(
    tmp_path: Path, case: Case
) -> None:
    plugin = pytest.importorskip("flowrl_backends.torch").plugin
    trainer = plugin.open_train(case.context(tmp_path))
    trainer.begin(AdamW(), 4)
    update_of(trainer, replace(case, rows=1, prompt=2, response=2))()  # allocates the moments
    measured = peak_bytes(update_of(trainer, case))
    assert measured >= case.least * MIB
    parts = working_memory("actor", case.shape, case.workload(), Phase.UPDATE)
    predicted = sum(part.nbytes for part in parts if part.name != "margin")
    assert predicted == pytest.approx(measured, rel=0.15), (predicted, measured)
    assert measured <= sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    "case",
    [
        Case(layers=2, vocabulary=16384, rows=12, least=200),
        Case(**NARROW, layers=2, vocabulary=32768, rows=4, dtype="bfloat16"),
        large(layers=2, vocabulary=32768, rows=8, dtype="bfloat16", least=150),
        Case(rows=16),
    ],
    ids=named,
)
def test_a_forward_pass_allocates_what_is_predicted(tmp_path: Path, case: Case) -> None:
    plugin = pytest.importorskip("flowrl_backends.torch").plugin
    trainer = plugin.open_train(case.context(tmp_path))
    sequences = case.sequences()
    measured = peak_bytes(lambda: trainer.logprobs(sequences, 1.0))
    assert measured >= case.least * MIB
    parts = working_memory("actor", case.shape, case.workload(), Phase.LOGPROBS)
    predicted = sum(part.nbytes for part in parts if part.name != "margin")
    assert predicted == pytest.approx(measured, rel=0.15), (predicted, measured)
    assert measured <= sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    "case",
    [
        Case(hidden=256, intermediate=704, rows=160, prompt=64, response=8, least=180),
        Case(**CACHED, hidden=128, intermediate=352, rows=32),
        large(**CACHED, hidden=512, intermediate=1408, rows=64, least=200),
    ],
    ids=named,
)
def test_a_rollout_allocates_what_is_predicted(tmp_path: Path, case: Case) -> None:
    """The cache, the engine's stacked weights, and the tensors of a prompt pass."""
    plugin = pytest.importorskip("flowrl_backends.torch").plugin
    context = case.context(tmp_path)
    trainer = plugin.open_train(context)
    requests = [
        GenerateRequest(
            sample=sample_id(group_id(0, i), 0),
            attempt=0,
            prompt=np.random.default_rng(i).integers(1, case.vocabulary, case.prompt),
            response=np.zeros(0, np.int64),
            sampling=Sampling(max_tokens=case.response),
            seed=i,
            shares_prompt=str(i),
        )
        for i in range(case.rows)
    ]

    def roll_out() -> None:
        engine = plugin.open_generate(context, trainer)
        engine.submit(requests)
        left = len(requests)
        while left:
            left -= sum(isinstance(event, Finished) for event in engine.poll(5.0))
        engine.close()

    measured = peak_bytes(roll_out)
    assert measured >= case.least * MIB
    work = case.workload(num_slots=case.rows)
    parts = [
        *working_memory("actor", case.shape, work, Phase.ROLLOUT),
        *resident_memory("actor", case.shape, work),
    ]
    held = ("parameters", "optimizer", "master weights")
    new = {part.name: part.nbytes for part in parts if part.name not in held}
    predicted = sum(new.values()) - new["margin"]
    assert predicted == pytest.approx(measured, rel=0.15), (predicted, measured)
    assert measured <= sum(new.values())
