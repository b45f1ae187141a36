"""Losses on pairs in the trainer, mismatch metrics, and loading weights in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.algo.kl import mismatch
from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import Finished, GenerateBackend, GenerateRequest
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import AdamW, Sampling
from flowrl.specs.loss import LossSpec, OwnScoreLoss, bradley_terry, dpo, policy_clip
from flowrl_backends.torch import plugin
from flowrl_backends.torch.packing import micro_batches
from flowrl_backends.torch.ranks import Ranks
from flowrl_backends.torch.trainer import TorchTrainer
from flowrl_backends.torch.updates import Objective, update_together
from tests.policy_contexts import load
from tests.torch_backend.trainer_fixtures import (
    CONFIGS,
    assert_equal,
    context,
    folder_of,
    padded,
    padded_values,
    sequences,
    training,
    update_spec,
    watched,
)


def pairs(seed: int = 0, *, groups: int = 4, size: int = 2) -> TrainBatch:
    """Groups of `size` samples, adjacent ones a pair, with reference logprobs."""
    rows = sequences(seed, groups=groups, size=size)
    reference = training(seed, groups=groups, size=size).reference_logprobs
    preferred = np.arange(len(rows)) % 2 == 0
    return TrainBatch(sequences=rows, preferred=preferred, reference_logprobs=reference)


def sample_sums(values: torch.Tensor, rows: SequenceBatch) -> torch.Tensor:
    """Sums over the response tokens of each sample."""
    number = torch.from_numpy(np.repeat(np.arange(len(rows)), rows.lengths))
    live = torch.from_numpy(rows.response_mask)
    return torch.zeros(len(rows)).index_add(0, number[live], values[live])


def plain_loss(model: Any, batch: TrainBatch, loss: LossSpec) -> tuple[float, Any]:
    """Pair losses and gradients written out over the padded batch."""
    rows = batch.sequences
    if loss.predicts == "scores":
        _, sums = padded_values(model, rows)
        margin = sums[::2] - sums[1::2]
    else:
        logprobs, _ = padded(model, rows, 1.0)
        assert batch.reference_logprobs is not None
        sums = sample_sums(logprobs - torch.from_numpy(batch.reference_logprobs), rows)
        margin = 0.3 * (sums[::2] - sums[1::2])
    total = -torch.nn.functional.logsigmoid(margin).mean()
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return float(total.detach()), grads


CASES = [("lm", dpo(0.3)), ("value", bradley_terry())]


@pytest.mark.parametrize(("head", "loss"), CASES, ids=["dpo", "bradley-terry"])
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "granite-scaled"])
def test_gradients_of_pairs_equal_the_padded_computation(
    kind: str, head: Any, loss: LossSpec, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(folder_of(kind, models), monkeypatch, head=head)
    batch = pairs()
    want_loss, want = plain_loss(trainer.model, batch, loss)
    (step,) = trainer.update(batch, update_spec(batch, loss=loss))
    assert step.loss == pytest.approx(want_loss, abs=1e-5)
    assert_equal(watch.grads, want, 1e-5)
    assert step.grad_norm > 0


@pytest.mark.parametrize(("head", "loss"), CASES, ids=["dpo", "bradley-terry"])
@pytest.mark.parametrize("size", [2, 4])
def test_no_micro_batch_separates_a_pair(
    size: int, head: Any, loss: LossSpec, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch, head=head)
    batch = pairs(5, groups=5, size=size)
    want_loss, want = plain_loss(trainer.model, batch, loss)
    cut: list[list[int]] = []

    def seen(*arguments: Any, **options: Any) -> Any:
        parts = micro_batches(*arguments, **options)
        cut.extend(part.tolist() for part in parts)
        return parts

    monkeypatch.setattr("flowrl_backends.torch.updates.micro_batches", seen)
    for micro_batch in (1, 2, 3, 5, 100):
        cut.clear()
        (step,) = trainer.update(batch, update_spec(batch, loss=loss, micro_batch=micro_batch))
        assert step.loss == pytest.approx(want_loss, abs=1e-5)
        assert_equal(watch.grads, want, 1e-5)
        assert sorted(row for part in cut for row in part) == list(range(len(batch)))
        assert all({row ^ 1 for row in part} == set(part) for part in cut)
        assert all(len(part) <= max(micro_batch, 2) for part in cut)


@pytest.mark.parametrize(("head", "loss"), CASES, ids=["dpo", "bradley-terry"])
def test_metrics_of_pairs_are_means_over_pairs(head: Any, loss: LossSpec, qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head=head))
    trainer.begin(AdamW(learning_rate=0.0), 1)
    batch = pairs(3, groups=6)
    rows = batch.sequences
    if head == "value":
        rewards = trainer.scores(rows)
    else:
        assert batch.reference_logprobs is not None
        gap = torch.from_numpy(trainer.logprobs(rows, 1.0) - batch.reference_logprobs)
        rewards = (0.3 * sample_sums(gap, rows)).numpy()
    chosen, rejected = rewards[::2], rewards[1::2]
    (step,) = trainer.update(batch, update_spec(batch, loss=loss, micro_batch=4))
    found = step.metrics
    assert found["reward_chosen"] == pytest.approx(chosen.mean(), abs=1e-5)
    assert found["reward_rejected"] == pytest.approx(rejected.mean(), abs=1e-5)
    assert found["reward_margin"] == pytest.approx((chosen - rejected).mean(), abs=1e-5)
    assert found["pair_accuracy"] == pytest.approx((chosen > rejected).mean())
    assert found["num_samples"] == found["samples_computed"] == 12
    assert step.num_tokens == rows.response_mask.sum()


@pytest.mark.parametrize(("head", "loss"), CASES, ids=["dpo", "bradley-terry"])
def test_preferences_are_learned(head: Any, loss: LossSpec, qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head=head))
    trainer.begin(AdamW(learning_rate=5e-3), 30)
    batch = pairs(1, groups=6)
    halves = (tuple(range(6)), tuple(range(6, 12)))
    spec = update_spec(batch, loss=loss, mini_batches=halves)
    steps = [step for _ in range(30) for step in trainer.update(batch, spec)]
    assert steps[-1].metrics["pair_accuracy"] == steps[-2].metrics["pair_accuracy"] == 1
    assert steps[-1].loss < 0.5 * steps[1].loss


def test_rows_that_are_no_pairs_are_refused(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 1)
    batch = pairs()

    def refused(changed: TrainBatch, match: str, **changes: Any) -> BackendError:
        with pytest.raises(BackendError, match=match) as caught:
            trainer.update(changed, update_spec(changed, loss=dpo(), **changes))
        return caught.value

    refused(replace(batch, preferred=None), "no preferred")
    refused(batch.select(range(7)), "no partner")
    refused(batch.select([0, 1, 3, 2]), "0/1/1 and 0/1/0 are none")
    error = refused(batch.select([0, 3, 2, 1]), "0/0/0 and 0/1/1 are none")
    assert error.where == "roles.actor"
    assert "groups [0, 1]" in str(error)
    refused(batch, "mini-batch 1 separates a pair", mini_batches=((0, 1), (2, 4, 5)))


def test_a_pair_of_a_policy_needs_response_tokens_and_of_scores_none(qwen: Path) -> None:
    batch = pairs()
    rows = batch.sequences
    mask = rows.response_mask.copy()
    mask[rows.offsets[3] : rows.offsets[4]] = False
    batch = replace(batch, sequences=replace(rows, response_mask=mask))
    policy = TorchTrainer(context(qwen))
    policy.begin(AdamW(), 1)
    with pytest.raises(BackendError, match="sample of a pair has no response token") as caught:
        policy.update(batch, update_spec(batch, loss=dpo()))
    assert "0/1/1" in str(caught.value)
    model = TorchTrainer(context(qwen, head="value"))
    model.begin(AdamW(), 1)
    (step,) = model.update(batch, update_spec(batch, loss=bradley_terry()))
    assert step.metrics["samples_computed"] == len(batch)


def test_a_mini_batch_measures_the_mismatch_of_its_own_forward_pass(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(learning_rate=1e-2), 4)
    batch = training()
    assert batch.behaviour_logprobs is not None
    rows = batch.sequences
    halves = (tuple(range(6)), tuple(range(6, 12)))
    spec = update_spec(batch, loss=policy_clip(0.2), mini_batches=halves, temperature=0.7)
    number = np.repeat(np.arange(len(rows)), rows.lengths)
    live = rows.response_mask & (number < 6)
    new = trainer.logprobs(rows, 0.7)
    want = mismatch(new[live], batch.behaviour_logprobs[live], number[live])
    first, second = trainer.update(batch, spec)
    found = {n: v for n, v in first.metrics.items() if n.startswith("mismatch/")}
    assert found.keys() == want.keys()
    assert found == pytest.approx(want, rel=1e-4, abs=1e-5)
    # The second half is measured after the first update, with weights that have changed.
    live = rows.response_mask & (number >= 6)
    before = mismatch(new[live], batch.behaviour_logprobs[live], number[live])
    assert second.metrics["mismatch/k3"] != pytest.approx(before["mismatch/k3"], rel=1e-3)


def test_nothing_is_measured_without_behaviour_logprobs_or_computed_samples(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 2)
    (step,) = trainer.update(pairs(), update_spec(pairs(), loss=dpo()))
    assert not any(name.startswith("mismatch") for name in step.metrics)
    nothing = replace(training(), advantages=np.zeros_like(training().advantages))
    (step,) = trainer.update(nothing, update_spec(nothing))
    assert step.metrics["samples_computed"] == 0
    assert not any(name.startswith("mismatch") for name in step.metrics)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_loaded_in_place_and_training_goes_on_from_them(
    dtype: str, qwen: Path, tmp_path: Path
) -> None:
    batch = training()
    source, trainer = (TorchTrainer(context(qwen, seed=s, dtype=dtype)) for s in (8, 3))
    source.export(tmp_path / "other")
    trainer.begin(AdamW(learning_rate=1e-2), 5)
    trainer.update(batch, update_spec(batch))
    places = [p.data_ptr() for p in trainer.model.parameters()]
    trainer.load(tmp_path / "other")
    assert [p.data_ptr() for p in trainer.model.parameters()] == places
    assert all(map(torch.equal, trainer.model.parameters(), source.model.parameters()))
    rows = batch.sequences
    np.testing.assert_array_equal(trainer.logprobs(rows, 1.0), source.logprobs(rows, 1.0))
    # In 16 bits the masters must have followed, or the next update would undo the load.
    trainer.update(batch, update_spec(batch))
    for mine, other in zip(trainer.model.parameters(), source.model.parameters(), strict=True):
        assert (mine - other).abs().max() < 0.02


def answer(engine: GenerateBackend, version: int) -> Any:
    """Logprobs of the tokens that an engine draws with the weights it shares."""
    load(engine, version)
    request = GenerateRequest(
        sample=SampleId("0/0/0"),
        attempt=version,
        prompt=np.array([3, 4]),
        response=np.zeros(0, np.int64),
        sampling=Sampling(max_tokens=5),
        seed=1,
        shares_prompt="0/0",
    )
    engine.submit([request])
    events: list[Any] = []
    while not any(isinstance(event, Finished) for event in events):
        events += engine.poll(1.0)
    return events[-1].logprobs


def test_an_engine_that_shares_parameters_sees_loaded_weights(qwen: Path, tmp_path: Path) -> None:
    source, trainer = (TorchTrainer(context(qwen, seed=seed)) for seed in (8, 3))
    source.export(tmp_path / "other")
    engine, other = (plugin.open_generate(context(qwen), t) for t in (trainer, source))
    before = answer(engine, 1)
    trainer.load(tmp_path / "other")
    after = answer(engine, 2)
    np.testing.assert_array_equal(after, answer(other, 2))
    assert before[0] != after[0]


def test_weights_of_another_model_are_refused_and_change_nothing(
    qwen: Path, models: Path, tmp_path: Path
) -> None:
    trainer = TorchTrainer(context(qwen))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    TorchTrainer(context(folder_of("llama-gqa", models))).export(tmp_path / "llama")
    with pytest.raises(BackendError, match="do not belong to this model"):
        trainer.load(tmp_path / "llama")
    TorchTrainer(context(qwen, head="value")).export(tmp_path / "critic")
    with pytest.raises(BackendError, match="do not belong to this model") as caught:
        trainer.load(tmp_path / "critic")
    assert "score" in str(caught.value)
    with pytest.raises(BackendError, match="no weights to load"):
        trainer.load(tmp_path)
    assert all(map(torch.equal, trainer.model.parameters(), before))


def test_a_loss_on_scores_that_reads_fields_of_tokens_is_refused(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    trainer.begin(AdamW(), 1)
    batch = replace(pairs(), advantages=training(groups=4, size=2).advantages)
    loss = OwnScoreLoss(function="mine.py:own", reads="advantages,preferred")
    with pytest.raises(BackendError, match="one number a sample") as caught:
        trainer.update(batch, update_spec(batch, loss=loss))
    assert caught.value.found == "advantages"


def test_extra_fields_reach_the_loss(qwen: Path) -> None:
    """Fields of the user's own maps come by name, at the tokens of each micro-batch."""
    batch = replace(training(), extra={"bonus": np.arange(len(training().sequences.tokens)) * 0.5})
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 1)
    objective = Objective.of(
        batch,
        update_spec(batch),
        trainer.model,
        where="roles.actor",
        skip_zero=True,
        ranks=Ranks(None, torch.device("cpu")),
    )
    found: list[torch.Tensor] = []
    function = objective.loss.function

    def seen(logprobs: torch.Tensor, tokens: Any, spec: LossSpec) -> Any:
        found.append(tokens.extra["bonus"])
        return function(logprobs, tokens, spec)

    changed = replace(objective, loss=replace(objective.loss, function=seen))
    optimizer = trainer._optimizer
    assert optimizer is not None
    update_together(optimizer, [(changed, range(len(batch)))])
    want = np.flatnonzero(batch.sequences.response_mask) * 0.5
    assert sorted(torch.cat(found).tolist()) == sorted(want.tolist())
