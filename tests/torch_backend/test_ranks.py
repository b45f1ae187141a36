"""A trainer of several ranks against one process: losses, gradients, predictions and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowrl.backend.batch import TrainBatch
from flowrl.backend.protocols import Head, OptimizerStep, PolicyContext, Service
from flowrl.errors import BackendError
from flowrl.runtime.local.ranks import RankProcesses
from flowrl.specs import KL, AdamW, CrossEntropy, LossSpec
from flowrl.specs.loss import PolicyLoss, bradley_terry, dpo, value_clip
from flowrl.testing.backend_check import run_checks
from flowrl_backends.torch.plugin import TorchPlugin
from flowrl_backends.torch.trainer import TorchTrainer
from tests.algo.loss_cases import LOSSES
from tests.torch_backend.test_pairs import pairs
from tests.torch_backend.trainer_fixtures import (
    context,
    folder_of,
    sequences,
    training,
    update_spec,
)

SHARDS = ("optimizer", "gradients", "full")
# Without clipping, the first moment after one update is the gradient times 1 - beta1.
SGD_LIKE = AdamW(learning_rate=1e-2, eps=1e-1, max_grad_norm=0.0)

Open: TypeAlias = Callable[..., Any]


@pytest.fixture
def ranks() -> Iterator[Open]:
    """Opens a trainer of several ranks."""
    opened: list[RankProcesses] = []

    def open_ranks(
        folder: Path, size: int = 2, shard: str = "full", **changes: Any
    ) -> RankProcesses:
        own: PolicyContext = context(
            folder, layout={"dp": size}, options={"shard": shard}, **changes
        )
        opened.append(RankProcesses("torch", own, start_timeout_s=120.0, timeout_s=60.0))
        return opened[-1]

    yield open_ranks
    for each in opened:
        each.close()


def _trained(trainer: Any, batch: TrainBatch, folder: Path, **spec: Any) -> list[OptimizerStep]:
    """Makes one or more updates and saves what came of them."""
    trainer.begin(SGD_LIKE, 10)
    steps: list[OptimizerStep] = trainer.update(batch, update_spec(batch, **spec))
    trainer.save(folder)
    return steps


def _state(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "trainer.safetensors")
    model = load_file(folder / "model/model.safetensors")
    return tensors | {f"model.{name}": tensor for name, tensor in model.items()}


def _assert_close(got: Path, want: Path, rtol: float = 1e-5) -> None:
    """Checks every tensor of two checkpoints, relative to its largest number."""
    found, expected = _state(got), _state(want)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "random.cpu" and rtol:
            continue  # of processes that differ
        gap = (found[name].double() - value.double()).abs().max()
        assert gap <= rtol * value.double().abs().max(), name


def _assert_equal_steps(got: list[OptimizerStep], want: list[OptimizerStep]) -> None:
    for step, other in zip(got, want, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-7)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert step.num_tokens == other.num_tokens
        # Positions count a shared prompt once a rank.
        names = step.metrics.keys() - {"positions"}
        assert names == other.metrics.keys() - {"positions"}
        for name in names:
            assert step.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("shard", SHARDS)
def test_loss_and_gradients_are_those_of_one_process(
    shard: str, qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    batch, kl = training(groups=5), KL(estimator="k3", coefficient=0.1)
    one, several = TorchTrainer(context(qwen)), ranks(qwen, shard=shard)
    want = _trained(one, batch, tmp_path / "one", temperature=0.8, kl=kl, micro_batch=3)
    got = _trained(several, batch, tmp_path / "several", temperature=0.8, kl=kl, micro_batch=3)
    _assert_equal_steps(got, want)
    _assert_close(tmp_path / "several", tmp_path / "one")


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_updates_after_updates_follow_one_process_with_global_clipping(
    shard: str, qwen: Path, ranks: Open
) -> None:
    batch = training(groups=6)
    spec = update_spec(batch, mini_batches=(tuple(range(9)), tuple(range(9, 18))), micro_batch=2)
    one, several = TorchTrainer(context(qwen)), ranks(qwen, shard=shard)
    found = []
    for trainer in (several, one):
        trainer.begin(AdamW(learning_rate=1e-3, max_grad_norm=0.1), 10)
        found.append(trainer.update(batch, spec) + trainer.update(batch, spec))
    _assert_equal_steps(*found)
    assert all(step.grad_norm > 0.1 for step in found[0])
    got, want = several.logprobs(batch.sequences, 1.0), one.logprobs(batch.sequences, 1.0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_more_ranks_than_samples_make_empty_passes(qwen: Path, ranks: Open, tmp_path: Path) -> None:
    batch = training(groups=2)
    spec: dict[str, Any] = {"mini_batches": ((0,), (1, 2, 3, 4, 5)), "micro_batch": 1}
    want = _trained(TorchTrainer(context(qwen)), batch, tmp_path / "one", **spec)
    got = _trained(ranks(qwen, size=3), batch, tmp_path / "several", **spec)
    _assert_equal_steps(got, want)
    _assert_close(tmp_path / "several", tmp_path / "one")


def test_every_loss_of_a_policy_is_that_of_one_process(qwen: Path, ranks: Open) -> None:
    batch, one, several = training(groups=5), TorchTrainer(context(qwen)), ranks(qwen)
    for trainer in (one, several):
        trainer.begin(AdamW(learning_rate=0.0), 1000)
    losses = {n: spec for n, spec in LOSSES.items() if isinstance(spec, PolicyLoss)}
    assert len(losses) > 30
    for loss in losses.values():
        spec = update_spec(batch, loss=loss, micro_batch=3)
        _assert_equal_steps(several.update(batch, spec), one.update(batch, spec))


@pytest.mark.parametrize(("head", "loss"), [("lm", dpo(0.3)), ("value", bradley_terry())])
def test_pairs_stay_on_one_rank(
    head: Head, loss: LossSpec, qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    batch = pairs(groups=5)
    one, several = TorchTrainer(context(qwen, head=head)), ranks(qwen, head=head)
    want = _trained(one, batch, tmp_path / "one", loss=loss, micro_batch=3)
    got = _trained(several, batch, tmp_path / "several", loss=loss, micro_batch=3)
    _assert_equal_steps(got, want)
    _assert_close(tmp_path / "several", tmp_path / "one")


def test_the_same_number_of_ranks_gives_the_same_bits(
    qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    batch = training(groups=5)
    steps = [_trained(ranks(qwen), batch, tmp_path / name, micro_batch=3) for name in ("a", "b")]
    assert steps[0] == steps[1]
    for file in ("trainer.safetensors", "model/model.safetensors", "trainer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(
    before: int, after: int, qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    def opened(size: int) -> Any:
        return TorchTrainer(context(qwen)) if size == 1 else ranks(qwen, size=size)

    batch, first = training(groups=4), opened(before)
    _trained(first, batch, tmp_path / "saved")
    first.update(batch, update_spec(batch))
    first.save(tmp_path / "never stopped")
    second = opened(after)
    second.restore(tmp_path / "saved")
    second.save(tmp_path / "again")
    _assert_close(tmp_path / "again", tmp_path / "saved", rtol=0.0)
    second.update(batch, update_spec(batch))
    second.save(tmp_path / "resumed")
    rtol = 0.0 if before == after else 1e-5
    _assert_close(tmp_path / "resumed", tmp_path / "never stopped", rtol)


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_a_sum_of_objectives_is_that_of_one_process(
    shard: str, qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    first, second = training(0, groups=5), training(1, groups=3, size=2)
    terms = [
        (first, update_spec(first, weight=0.7, micro_batch=2)),
        (second, update_spec(second, loss=0.5 * CrossEntropy(), weight=0.1)),
    ]
    one, several = TorchTrainer(context(qwen)), ranks(qwen, shard=shard)
    found = []
    for name, trainer in (("several", several), ("one", one)):
        trainer.begin(SGD_LIKE, 10)
        found.append([step for steps in trainer.update_sum(terms) for step in steps])
        trainer.save(tmp_path / name)
    _assert_equal_steps(*found)
    _assert_close(tmp_path / "several", tmp_path / "one")


@pytest.mark.parametrize("trainable", [True, False])
def test_predictions_are_gathered_in_order(trainable: bool, qwen: Path, ranks: Open) -> None:
    rows = sequences(5, groups=5)
    one, several = TorchTrainer(context(qwen)), ranks(qwen, trainable=trainable)
    for method in ("logprobs", "distributions", "squares"):
        got, want = getattr(several, method)(rows, 0.7), getattr(one, method)(rows, 0.7)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=method)


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_a_critic_is_that_of_one_process(
    shard: str, models: Path, ranks: Open, tmp_path: Path
) -> None:
    folder, rows = folder_of("llama-gqa", models), sequences(5, groups=5)
    batch = TrainBatch(
        sequences=rows,
        returns=rows.over_tokens(np.arange(len(rows))),
        old_values=rows.over_tokens(np.zeros(len(rows))),
    )
    one = TorchTrainer(context(folder, head="value"))
    several = ranks(folder, shard=shard, head="value")
    spec: dict[str, Any] = {"loss": value_clip(0.2), "micro_batch": 3}
    want = _trained(one, batch, tmp_path / "one", **spec)
    got = _trained(several, batch, tmp_path / "several", **spec)
    _assert_equal_steps(got, want)
    _assert_close(tmp_path / "several", tmp_path / "one")
    for method in ("values", "scores", "token_scores"):
        np.testing.assert_allclose(
            getattr(several, method)(rows), getattr(one, method)(rows), rtol=1e-5, atol=1e-6
        )


def test_gradients_of_bfloat16_are_as_near_to_float32_as_those_of_one_process(
    qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    batch = training(groups=5)
    _trained(TorchTrainer(context(qwen)), batch, tmp_path / "float32", micro_batch=3)
    one = TorchTrainer(context(qwen, dtype="bfloat16"))
    _trained(one, batch, tmp_path / "one", micro_batch=3)
    _trained(ranks(qwen, dtype="bfloat16"), batch, tmp_path / "several", micro_batch=3)

    def distance(name: str) -> float:
        exact, found = _state(tmp_path / "float32"), _state(tmp_path / name)
        moments = [key for key in exact if key.startswith("optimizer.exp_avg.")]
        assert len(moments) > 10
        return max(
            float((found[key] - exact[key]).abs().max() / exact[key].abs().max()) for key in moments
        )

    assert 0 < distance("several") < 1.5 * distance("one") < 0.05


class _TwoRanks(TorchPlugin):
    """The torch trainer as two ranks."""

    capabilities = replace(TorchPlugin.capabilities, services=frozenset({Service.TRAIN}))

    def open_train(self, context: PolicyContext) -> Any:
        own = replace(context, layout={"dp": 2}, options={}, engine_options={})
        return RankProcesses("torch", own, start_timeout_s=120.0, timeout_s=60.0)


@pytest.mark.slow
def test_two_ranks_keep_the_promises_of_a_trainer() -> None:
    results = list(run_checks(_TwoRanks()))
    assert {result.name: result.found for result in results if result.status == "failed"} == {}
    assert {"gradients", "micro-batches", "save and restore", "export"} <= {
        result.name for result in results if result.status == "passed"
    }


def test_recomputed_layers_have_the_same_gradients(qwen: Path, ranks: Open, tmp_path: Path) -> None:
    batch, several = training(groups=4), ranks(qwen)
    _trained(several, batch, tmp_path / "kept")
    several.restore(tmp_path / "kept")
    several.update(batch, update_spec(batch))
    several.save(tmp_path / "two")
    several.restore(tmp_path / "kept")
    several.update(batch, update_spec(batch, recompute="full"))
    several.save(tmp_path / "recomputed")
    _assert_close(tmp_path / "recomputed", tmp_path / "two", rtol=0.0)


def test_loaded_and_averaged_weights_are_those_that_every_rank_computes_with(
    qwen: Path, ranks: Open, tmp_path: Path
) -> None:
    rows = sequences(5)
    one, several = TorchTrainer(context(qwen, seed=7)), ranks(qwen)
    one.export(tmp_path / "other")
    several.logprobs(rows, 1.0)  # so that parameters are gathered once
    several.load(tmp_path / "other")
    np.testing.assert_array_equal(several.logprobs(rows, 1.0), one.logprobs(rows, 1.0))
    mean, several_mean = TorchTrainer(context(qwen)), ranks(qwen)
    for trainer in (mean, several_mean):
        trainer.load(tmp_path / "other", 0.5)
    got, want = several_mean.logprobs(rows, 1.0), mean.logprobs(rows, 1.0)
    np.testing.assert_array_equal(got, want)


def test_an_error_about_a_batch_is_raised_and_the_ranks_go_on(qwen: Path, ranks: Open) -> None:
    batch, several = training(), ranks(qwen)
    several.begin(SGD_LIKE, 10)
    with pytest.raises(BackendError, match="which the update reads"):
        several.update(replace(batch, advantages=None), update_spec(batch))
    assert len(several.update(batch, update_spec(batch))) == 1
