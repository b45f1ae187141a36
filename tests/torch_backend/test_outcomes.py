"""Losses that learn outcomes: gradients of the padded computation, and what they learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.errors import BackendError
from flowrl.specs import AdamW
from flowrl.specs.loss import LossSpec, implicit_reward, outcome
from flowrl_backends.torch.trainer import TorchTrainer
from tests.torch_backend.trainer_fixtures import (
    assert_equal,
    context,
    sequences,
    update_spec,
    watched,
)

CASES: dict[str, tuple[Any, LossSpec]] = {
    "implicit": ("lm", implicit_reward(0.3)),
    "sample": ("value", outcome()),
    "token": ("value", outcome(per="token")),
}


def outcomes(seed: int = 0, **options: int) -> TrainBatch:
    """Samples with outcomes, and reference logprobs near those of a fresh model."""
    rows = sequences(seed, **options)
    score = (np.arange(len(rows)) % 3 == 0).astype(np.float32)
    spread = np.repeat(score, rows.lengths) * rows.response_mask
    reference = np.where(rows.response_mask, -2.5, 0.0).astype(np.float32)
    extra = {"score": spread.astype(np.float32)}
    return TrainBatch(sequences=rows, reference_logprobs=reference, extra=extra)


def whole(model: Any, rows: SequenceBatch, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, or the numbers of a value head, at a sample's tokens; and which are response."""
    span = slice(int(rows.offsets[sample]), int(rows.offsets[sample + 1]))
    ids = torch.from_numpy(rows.tokens[span])[None]
    return model(input_ids=ids).logits[0].float(), torch.from_numpy(rows.response_mask[span])


def plain_loss(model: Any, batch: TrainBatch, loss: LossSpec) -> tuple[float, Any]:
    """The mean over samples, each computed by itself."""
    rows, losses = batch.sequences, []
    assert batch.reference_logprobs is not None
    for sample in range(len(rows)):
        out, mask = whole(model, rows, sample)
        place = int(rows.offsets[sample])
        tokens = torch.from_numpy(rows.tokens[place : place + len(mask)])
        score = torch.tensor(float(batch.extra["score"][place : place + len(mask)].max()))
        if loss.kind == "implicit_reward":
            logprobs = out[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            reference = torch.from_numpy(batch.reference_logprobs[place : place + len(mask)])[1:]
            numbers = 0.3 * (logprobs - reference)[mask[1:]].sum()[None]
        else:
            numbers = out[:, 0][mask] if loss.kind == "token_outcome" else out[-1:, 0]
        right = -score * torch.nn.functional.logsigmoid(numbers)
        wrong = -(1 - score) * torch.nn.functional.logsigmoid(-numbers)
        losses.append((right + wrong).mean())
    total = torch.stack(losses).mean()
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(total.detach()), grads


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_batch", [2, 100])
def test_gradients_of_outcomes_equal_the_computation_sample_by_sample(
    name: str, micro_batch: int, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, loss = CASES[name]
    trainer, watch = watched(qwen, monkeypatch, head=head)
    batch = outcomes(2)
    want_loss, want = plain_loss(trainer.model, batch, loss)
    (step,) = trainer.update(batch, update_spec(batch, loss=loss, micro_batch=micro_batch))
    assert step.loss == pytest.approx(want_loss, abs=1e-5)
    assert_equal(watch.grads, want, 1e-5)
    assert step.num_tokens == batch.sequences.response_mask.sum()


@pytest.mark.parametrize("name", CASES)
def test_outcomes_are_learned(name: str, qwen: Path) -> None:
    head, loss = CASES[name]
    trainer = TorchTrainer(context(qwen, head=head))
    trainer.begin(AdamW(learning_rate=1e-2), 12)
    batch = outcomes(1)
    spec = update_spec(batch, loss=loss)
    steps = [trainer.update(batch, spec)[0] for _ in range(12)]
    assert steps[-1].loss < 0.9 * steps[0].loss
    assert steps[-1].metrics["outcome_accuracy"] >= steps[0].metrics["outcome_accuracy"]


def test_a_sample_without_a_response_has_no_outcome(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    trainer.begin(AdamW(learning_rate=1e-2), 1)
    batch = outcomes(1)
    rows = batch.sequences
    mask = rows.response_mask.copy()
    mask[: int(rows.offsets[1])] = False
    batch = replace(batch, sequences=replace(rows, response_mask=mask))
    with pytest.raises(BackendError, match="without a response has no outcome to learn"):
        trainer.update(batch, update_spec(batch, loss=outcome()))
