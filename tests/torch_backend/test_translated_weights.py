"""Weights of architectures that Transformers writes under other names than it keeps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from flowrl.backend.protocols import Head
from flowrl.errors import BackendError
from flowrl.specs import AdamW
from flowrl_backends.torch.trainer import TorchTrainer
from tests.policy_contexts import load
from tests.torch_backend import engine_fixtures as engines
from tests.torch_backend.trainer_fixtures import SHAPE, context, training, update_spec

CONFIGS = {
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    ),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind: str = request.param
    CONFIGS[kind]().save_pretrained(tmp_path / kind)
    return tmp_path / kind


@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_was_exported_is_loaded_in_place(folder: Path, head: Head, tmp_path: Path) -> None:
    batch = training()
    source, trainer = (TorchTrainer(context(folder, seed=s, head=head)) for s in (8, 3))
    source.export(tmp_path / "other")
    places = [p.data_ptr() for p in trainer.model.parameters()]
    before = torch.get_rng_state()
    trainer.load(tmp_path / "other")
    assert torch.equal(torch.get_rng_state(), before)
    assert [p.data_ptr() for p in trainer.model.parameters()] == places
    assert all(map(torch.equal, trainer.model.parameters(), source.model.parameters()))
    for one in (source, trainer):
        one.begin(AdamW(learning_rate=1e-2), 5)
    if head == "lm":
        steps = [one.update(batch, update_spec(batch)) for one in (source, trainer)]
        assert steps[0] == steps[1]
    else:
        rows = batch.sequences
        np.testing.assert_array_equal(trainer.values(rows), source.values(rows))


def test_an_engine_of_its_own_draws_from_published_weights(folder: Path, tmp_path: Path) -> None:
    source = TorchTrainer(context(folder, seed=8))
    source.export(tmp_path / "other")
    model = TorchTrainer(context(folder, seed=3)).model
    engine = engines.make_engine(model, max_length=40)
    shared = engines.make_engine(source.model, max_length=40)
    load(engine, 1, tmp_path / "other")
    asked = [engines.request(0, prompt=(3, 4), max_tokens=5)]
    (one,), (other,) = (engines.run(each, asked).values() for each in (engine, shared))
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_such_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(context(folder))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    TorchTrainer(context(folder, head="value")).export(tmp_path / "critic")
    with pytest.raises(BackendError, match="do not belong to this model"):
        trainer.load(tmp_path / "critic")
    assert all(map(torch.equal, trainer.model.parameters(), before))
