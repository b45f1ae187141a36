"""Full recompute changes what is kept, not what comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl.errors import BackendError
from flowrl.specs.loss import ValueClip
from flowrl_backends.torch.recompute import recomputed_layers
from tests.torch_backend.trainer_fixtures import folder_of, training, update_spec, watched


@pytest.mark.parametrize(
    "kind", ["qwen2", "llama-gqa", "qwen3", "mistral-window", "gpt2-dropout", "gemma2-capped"]
)
def test_gradients_and_metrics_are_those_without_recompute_bit_for_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(folder_of(kind, tmp_path), monkeypatch)
    batch = training()
    (plain,) = trainer.update(batch, update_spec(batch))
    expected = watch.grads
    (again,) = trainer.update(batch, update_spec(batch, recompute="full"))
    assert again == plain
    assert any(bool(gradient.any()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.equal(watch.grads[name], gradient), name


def test_each_layer_runs_twice_in_an_update_and_once_without_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = watched(folder_of("qwen2", tmp_path), monkeypatch)
    batch = training()
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    # Norms are inside of layers, and the last one outside.
    trainer.model.base_model.layers[0].input_layernorm.register_forward_hook(count)
    spec = update_spec(batch, micro_batch=len(batch))
    trainer.update(batch, spec)
    assert runs == 1
    trainer.update(batch, update_spec(batch, micro_batch=len(batch), recompute="full"))
    assert runs == 1 + 2
    with recomputed_layers(trainer.model):
        trainer.logprobs(batch.sequences, 1.0)
    assert runs == 1 + 2 + 1


def test_layers_are_as_before_after_an_update_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = watched(folder_of("qwen2", tmp_path), monkeypatch)
    batch = training()
    with pytest.raises(IndexError):
        trainer.update(batch, update_spec(batch, mini_batches=((10_000,),), recompute="full"))
    assert not any("forward" in module.__dict__ for module in trainer.model.modules())


def test_a_value_head_can_be_trained_with_recompute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(folder_of("llama-gqa", tmp_path), monkeypatch, head="value")
    batch = training()
    returns = batch.advantages
    chosen = update_spec(batch, loss=ValueClip(clip=0.2))
    critic = replace(batch, returns=returns, old_values=returns)
    trainer.update(critic, chosen)
    expected = watch.grads
    trainer.update(critic, replace(chosen, recompute="full"))
    for name, gradient in expected.items():
        assert torch.equal(watch.grads[name], gradient), name


def test_another_kind_of_recompute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = watched(folder_of("qwen2", tmp_path), monkeypatch)
    batch = training()
    with pytest.raises(BackendError, match="no selective recompute") as caught:
        trainer.update(batch, update_spec(batch, recompute="selective"))
    assert caught.value.where == "roles.actor.recompute"


def test_a_model_without_marked_layers_is_refused() -> None:
    with pytest.raises(BackendError, match="cannot be recomputed"):
        recomputed_layers(torch.nn.Linear(1, 1)).__enter__()  # type: ignore[arg-type]
