"""Response masks with holes, as episodes with an environment have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.backend.batch import SequenceBatch
from flowrl.ids import SampleId
from flowrl.specs import CrossEntropy
from flowrl_backends.torch.packing import pack
from flowrl_backends.torch.trainer import TorchTrainer
from tests.torch_backend.trainer_fixtures import (
    TrainBatch,
    assert_equal,
    context,
    padded,
    update_spec,
    watched,
)


def batch_of(draw: np.random.Generator, *, groups: int = 3, size: int = 3) -> SequenceBatch:
    """Groups with one prompt each and few tokens, so that members agree for a while; any mask.

    Members that agree in a token may differ in whose it is: drawn by one, said to the other.
    """
    tokens, mask, offsets, numbers = [], [], [0], []
    for group in range(groups):
        prompt = draw.integers(2, 12, draw.integers(1, 4))
        for _ in range(size):
            response = draw.integers(2, 4, draw.integers(0, 9))
            tokens += [prompt, response]
            mask += [np.zeros(len(prompt), bool), draw.random(len(response)) < 0.5]
            offsets.append(offsets[-1] + len(prompt) + len(response))
            numbers.append(group)
    return SequenceBatch(
        samples=tuple(SampleId(f"0/{g}/{i % size}") for i, g in enumerate(numbers)),
        tokens=np.concatenate(tokens).astype(np.int64),
        offsets=np.array(offsets, np.int64),
        response_mask=np.concatenate(mask).astype(bool),
        groups=np.array(numbers, np.int64),
    )


@given(st.integers(0, 10**6), st.booleans())
def test_targets_are_the_tokens_of_the_mask_and_no_others(seed: int, share: bool):
    batch = batch_of(np.random.default_rng(seed))
    packed = pack(batch, np.arange(len(batch)), share_prefixes=share)
    assert sorted(packed.source.tolist()) == np.flatnonzero(batch.response_mask).tolist()
    tokens = packed.target_token[packed.target_of]
    assert tokens.tolist() == batch.tokens[packed.source].tolist()
    # Each is predicted from the place before it, in its own sample.
    node = packed.predicting[packed.target_row[packed.target_of]]
    place = packed.source - batch.offsets[packed.sample]
    assert packed.positions[node].tolist() == (place - 1).tolist()
    assert packed.tokens[node].tolist() == batch.tokens[packed.source - 1].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_logprobs_are_those_of_the_padded_computation(seed: int, qwen: Path):
    trainer = TorchTrainer(context(qwen))
    batch = batch_of(np.random.default_rng(seed), groups=4)
    with torch.no_grad():
        want, _ = padded(trainer.model, batch, 1.0)
    got = trainer.logprobs(batch, 1.0)
    np.testing.assert_allclose(got, want.numpy() * batch.response_mask, atol=1e-5)
    assert (got[~batch.response_mask] == 0).all()


def test_gradients_come_from_the_tokens_of_the_mask_alone(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, watch = watched(qwen, monkeypatch)
    rows = batch_of(np.random.default_rng(1), groups=4)
    batch = TrainBatch(sequences=rows)
    (step,) = trainer.update(
        batch, update_spec(batch, loss=CrossEntropy(aggregation="token-mean"), micro_batch=3)
    )
    logprobs, _ = padded(trainer.model, rows, 1.0)
    loss = -logprobs[torch.from_numpy(rows.response_mask)].mean()
    trainer.model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    want = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert step.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert step.num_tokens == int(rows.response_mask.sum())
    assert_equal(watch.grads, want, 1e-6)
