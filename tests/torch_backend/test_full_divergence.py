"""The KL term over whole distributions: what a trainer gives, and what it minimises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.algo import logprobs as logprobs_module
from flowrl.algo.logprobs import full, full_in_chunks
from flowrl.algo.losses import aggregate, sample_weights
from flowrl.algo.resolve import resolve_kl
from flowrl.backend.batch import TrainBatch
from flowrl.errors import BackendError, GraphError
from flowrl.specs import AdamW, CrossEntropy, PolicyClip
from flowrl.specs import kl as penalties
from flowrl_backends.torch.trainer import TorchTrainer
from tests.torch_backend.trainer_fixtures import (
    CONFIGS,
    VOCABULARY,
    assert_equal,
    context,
    folder_of,
    padded,
    sequences,
    training,
    update_spec,
    watched,
)


def tables(model: Any, batch: TrainBatch, temperature: float) -> torch.Tensor:
    """Log-distributions `[R, V]` at response tokens, over the padded batch."""
    _, (_, mask, logits) = padded(model, batch.sequences, temperature)
    table = (logits[:, :-1] / temperature).log_softmax(-1)
    table = torch.nn.functional.pad(table, (0, 0, 1, 0))[mask > 0]
    return table[torch.from_numpy(batch.sequences.response_mask)]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2-capped"])
def test_distributions_equal_the_padded_computation(kind: str, models: Path) -> None:
    trainer = TorchTrainer(context(folder_of(kind, models)))
    batch = training(2)
    got = trainer.distributions(batch.sequences, 0.7)
    assert got.dtype == np.float32
    with torch.no_grad():
        np.testing.assert_allclose(got, tables(trainer.model, batch, 0.7).numpy(), atol=1e-5)
    live = batch.sequences.response_mask
    chosen = got[np.arange(len(got)), batch.sequences.tokens[live]]
    np.testing.assert_allclose(chosen, trainer.logprobs(batch.sequences, 0.7)[live], atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_gradient_of_the_divergence_equals_the_padded_computation(
    kind: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(kind, models)
    trainer, watch = watched(folder, monkeypatch)
    reference = TorchTrainer(context(folder, seed=9))
    batch = training(1)
    rows = batch.sequences
    other = reference.distributions(rows, 0.8)
    spec = update_spec(
        batch,
        loss=CrossEntropy(aggregation="sequence-mean-token-mean"),
        kl=penalties.full(0.5),
        temperature=0.8,
    )
    # The divergence alone: what the loss adds is the same with and without it.
    (plain,) = trainer.update(batch, replace(spec, kl=None))
    without = watch.grads
    log_p = tables(trainer.model, batch, 0.8)
    divergence = (log_p.exp() * (log_p - torch.from_numpy(other))).sum(-1)
    weights = sample_weights(rows.response_lengths, "sequence-mean-token-mean", max_tokens=16)
    term = 0.5 * aggregate(divergence, torch.from_numpy(np.repeat(weights, rows.response_lengths)))
    trainer.model.zero_grad()
    term.backward()  # type: ignore[no-untyped-call]
    own = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    for micro_batch in (1, 5, 100):
        whole = replace(batch, reference_distributions=other, reference_logprobs=None)
        (step,) = trainer.update(whole, replace(spec, micro_batch=micro_batch))
        assert step.loss == pytest.approx(plain.loss + float(term.detach()), abs=1e-5)
        assert step.metrics["kl"] == pytest.approx(float(divergence.mean().detach()), abs=1e-5)
        assert_equal(watch.grads, {n: own[n] + without[n] for n in own}, 1e-5)
    assert float(divergence.mean().detach()) > 1e-3


def test_a_policy_that_is_its_reference_has_no_divergence(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(learning_rate=0.0), 1)
    batch = training()
    own = trainer.distributions(batch.sequences, 1.0)
    spec = update_spec(batch, kl=penalties.full(1.0))
    (step,) = trainer.update(replace(batch, reference_distributions=own), spec)
    assert step.metrics["kl"] == pytest.approx(0, abs=1e-6)


def test_the_divergence_pulls_a_policy_to_its_reference(qwen: Path) -> None:
    trainer, reference = (TorchTrainer(context(qwen, seed=seed)) for seed in (3, 9))
    trainer.begin(AdamW(learning_rate=1e-2), 40)
    batch = training()
    assert batch.advantages is not None
    batch = replace(
        batch,
        advantages=np.zeros_like(batch.advantages),
        reference_distributions=reference.distributions(batch.sequences, 1.0),
    )
    spec = update_spec(batch, loss=PolicyClip(), kl=penalties.full(1.0))
    steps = [trainer.update(batch, spec)[0] for _ in range(40)]
    assert steps[-1].metrics["kl"] < 0.05 * steps[0].metrics["kl"]


def test_distributions_are_selected_with_their_samples(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    batch = training()
    whole = replace(batch, reference_distributions=trainer.distributions(batch.sequences, 1.0))
    chosen = whole.select([7, 2, 3])
    want = trainer.distributions(chosen.sequences, 1.0)
    assert chosen.reference_distributions is not None
    np.testing.assert_allclose(chosen.reference_distributions, want, atol=1e-5)


def test_distributions_that_are_missing_or_of_another_shape_are_refused(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 1)
    batch = training()
    spec = update_spec(batch, kl=penalties.full(0.1))
    with pytest.raises(BackendError, match="no reference_distributions"):
        trainer.update(batch, spec)
    count = int(batch.sequences.response_mask.sum())
    wrong = replace(batch, reference_distributions=np.zeros((count, 5), np.float32))
    with pytest.raises(BackendError, match="not of these tokens") as caught:
        trainer.update(wrong, spec)
    assert f"[{count}, {VOCABULARY}]" in str(caught.value)
    with pytest.raises(BackendError, match="no distributions"):
        TorchTrainer(context(qwen, head="value")).distributions(sequences(), 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk", [1 << 22, 13])
def test_chunks_change_neither_value_nor_gradient(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64).requires_grad_()
    other = torch.randn(6, 11, dtype=torch.float64).log_softmax(-1)
    weight = torch.arange(6, dtype=torch.float64)
    (full_in_chunks(logits, other, temperature) * weight).sum().backward()  # type: ignore[no-untyped-call]
    got = logits.grad
    logits.grad = None
    want = full(logits / (temperature or 1.0), other)
    (want * weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(full_in_chunks(logits, other, temperature), want)
    torch.testing.assert_close(got, logits.grad)


def test_the_full_divergence_takes_no_clamp_and_is_no_estimate() -> None:
    assert str(penalties.full(0.1)) == 'kl(estimator="full", coefficient=0.1)'
    [(name, value, _)] = penalties.full(0.1, clamp_output=10.0).conflicts()
    assert (name, value) == ("clamp_output", 10.0)
    with pytest.raises(GraphError, match="not computed from logprobs"):
        resolve_kl(penalties.full(0.1))
