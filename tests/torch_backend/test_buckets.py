"""Weights of several buckets: exporter and engine need memory for one of them at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
import transformers as hf

from flowrl.runtime.transfer.weight_folders import WeightFolders
from flowrl_backends.torch import trainer as trainer_module
from flowrl_backends.torch.trainer import TorchTrainer
from flowrl_backends.torch.weights import load_weights
from tests.torch_backend.trainer_fixtures import SHAPE, context

BUCKET = 600_000


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TorchTrainer]:
    monkeypatch.setattr(trainer_module, "_BUCKET_BYTES", BUCKET)
    shape = {**SHAPE, "hidden_size": 128, "num_hidden_layers": 12, "intermediate_size": 512}
    hf.Qwen2Config(**shape, num_key_value_heads=2).save_pretrained(tmp_path / "model")
    return [TorchTrainer(context(tmp_path / "model", seed=seed)) for seed in (8, 3)]


def test_the_publication_of_many_buckets_needs_memory_for_a_few(
    trainers: list[TorchTrainer], tmp_path: Path
):
    source, other = trainers
    nbytes = sum(p.nbytes for p in source.model.parameters())
    source.export(tmp_path / "before")  # imports what it needs
    folders = WeightFolders(tmp_path, shared_memory=tmp_path)
    tracemalloc.start()
    try:
        weights = folders.written(1, source.export)
        published = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        checksum = load_weights(other.model, weights.handle, role="actor")
        loaded = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    files = list(weights.handle)
    folders.close()
    assert len(files) > 10
    assert max(len(file) for file in files) < BUCKET + 20_000
    assert checksum == weights.checksum
    assert published < 3 * BUCKET < nbytes
    assert loaded < 3 * BUCKET
    assert all(map(torch.equal, source.model.parameters(), other.model.parameters()))
