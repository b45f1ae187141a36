"""The trainer's gradients against the padded computation, and what an update does and reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.algo.losses import aggregate, sample_weights
from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import TrainBackend, UpdateSpec
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import KL, AdamW, CrossEntropy, LossSpec, PolicyClip
from flowrl.specs.loss import Aggregation, PolicyLoss
from flowrl_backends.torch.packed_forward import supports_packing
from flowrl_backends.torch.packing import micro_batches, pack
from flowrl_backends.torch.trainer import TorchTrainer
from tests.algo import own_functions as own
from tests.algo.loss_cases import LOSSES
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


def straightforward(model: Any, batch: TrainBatch, spec: UpdateSpec) -> tuple[float, Any]:
    """Loss and gradients written out plainly over the padded batch."""
    rows = batch.sequences
    logprobs, _ = padded(model, rows, spec.temperature)
    assert batch.behaviour_logprobs is not None
    assert batch.advantages is not None
    assert batch.reference_logprobs is not None
    live = torch.from_numpy(rows.response_mask)
    new = logprobs[live]
    ratio = (new - torch.from_numpy(batch.behaviour_logprobs)[live]).exp()
    advantage = torch.from_numpy(batch.advantages)[live]
    if isinstance(spec.loss, PolicyClip):
        low, high = 1 - spec.loss.clip_low, 1 + spec.loss.clip_high
        values = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        values = -new
    if spec.kl is not None:
        gap = new - torch.from_numpy(batch.reference_logprobs)[live]
        values = values + spec.kl.coefficient * ((-gap).exp() - 1 + gap)
    aggregation: Aggregation = spec.loss.aggregation  # type: ignore[attr-defined]
    weights = sample_weights(rows.response_lengths, aggregation, max_tokens=spec.max_tokens)
    loss = aggregate(values, torch.from_numpy(np.repeat(weights, rows.response_lengths)))
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return float(loss.detach()), grads


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_equal_the_padded_computation(
    kind: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(folder_of(kind, models), monkeypatch)
    batch = training()
    spec = update_spec(batch, temperature=0.8, kl=KL(estimator="k3", coefficient=0.1))
    assert supports_packing(trainer.model) == (kind != "gemma2-capped")
    want_loss, want = straightforward(trainer.model, batch, spec)
    (step,) = trainer.update(batch, spec)
    assert step.loss == pytest.approx(want_loss, abs=1e-6)
    assert_equal(watch.grads, want, 1e-6)
    assert step.grad_norm == pytest.approx(
        float(torch.stack([g.norm() for g in want.values()]).norm()), rel=1e-4
    )


def test_the_gradient_of_a_sum_is_the_weighted_sum_of_plain_gradients(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(folder_of("qwen2", models), monkeypatch)
    first, second = training(0), training(1, groups=3, size=2)
    penalised = update_spec(first, kl=KL(estimator="k3", coefficient=0.2), weight=0.7)
    imitated = update_spec(second, loss=0.5 * CrossEntropy(), weight=0.1)
    losses, grads = zip(
        *(
            straightforward(trainer.model, b, s)
            for b, s in ((first, penalised), (second, imitated))
        ),
        strict=True,
    )
    ((one, other),) = trainer.update_sum([(first, penalised), (second, imitated)])
    want = {name: 0.7 * g + 0.1 * 0.5 * grads[1][name] for name, g in grads[0].items()}
    assert_equal(watch.grads, want, 1e-6)
    assert one.loss == pytest.approx(losses[0], abs=1e-6)
    assert other.loss == pytest.approx(0.5 * losses[1], abs=1e-6)
    norm = float(torch.stack([g.norm() for g in want.values()]).norm())
    assert one.grad_norm == other.grad_norm == pytest.approx(norm, rel=1e-4)
    assert trainer._optimizer is not None
    assert trainer._optimizer.updates == 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_the_padded_computation(kind: str, models: Path) -> None:
    trainer = TorchTrainer(context(folder_of(kind, models)))
    rows = sequences(5)
    got = trainer.logprobs(rows, 0.7)
    with torch.no_grad():
        want, _ = padded(trainer.model, rows, 0.7)
    np.testing.assert_allclose(got, want.numpy() * rows.response_mask, atol=1e-5)
    assert (got[~rows.response_mask] == 0).all()


@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"],
)
def test_micro_batches_change_neither_loss_nor_gradient(
    aggregation: Aggregation, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch)
    batch = training(groups=6)
    loss = PolicyClip(aggregation=aggregation)
    want_loss, want = straightforward(trainer.model, batch, update_spec(batch, loss=loss))
    for micro_batch in (1, 2, 5, 18, 100):
        spec = update_spec(batch, loss=loss, micro_batch=micro_batch)
        (step,) = trainer.update(batch, spec)
        assert step.loss == pytest.approx(want_loss, abs=1e-6)
        assert_equal(watch.grads, want, 1e-6)


POLICY_LOSSES = {name: spec for name, spec in LOSSES.items() if isinstance(spec, PolicyLoss)}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_micro_batches_change_no_loss(
    name: str, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch)
    batch = training(groups=4)
    (one,) = trainer.update(batch, update_spec(batch, loss=POLICY_LOSSES[name], micro_batch=100))
    want = watch.grads
    for micro_batch in (1, 5):
        spec = update_spec(batch, loss=POLICY_LOSSES[name], micro_batch=micro_batch)
        (step,) = trainer.update(batch, spec)
        assert step.loss == pytest.approx(one.loss, abs=1e-5)
        assert_equal(watch.grads, want, 1e-5)
    assert one.grad_norm > 0


OLD_LOSSES = {n: spec for n, spec in POLICY_LOSSES.items() if "old_logprobs" in spec.needs}


@pytest.mark.parametrize("name", OLD_LOSSES)
def test_the_first_updates_own_forward_pass_stands_for_the_old_policy(
    name: str, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch)
    batch = training()
    old = trainer.logprobs(batch.sequences, 0.9)
    spec = update_spec(batch, loss=OLD_LOSSES[name], temperature=0.9)
    (want,) = trainer.update(replace(batch, old_logprobs=old), spec)
    grads = watch.grads
    for micro_batch in (1, 5):
        own = replace(spec, old_policy="own", micro_batch=micro_batch)
        (step,) = trainer.update(replace(batch, old_logprobs=None), own)
        assert step.loss == pytest.approx(want.loss, abs=1e-5)
        assert_equal(watch.grads, grads, 1e-5)
    assert len(OLD_LOSSES) > 5


def test_a_later_updates_forward_pass_is_not_the_old_policys(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 2)
    batch = replace(training(), old_logprobs=None)
    loss = OLD_LOSSES["tis"]
    with pytest.raises(BackendError, match="no old_logprobs"):
        trainer.update(batch, update_spec(batch, loss=loss))
    halves = (tuple(range(6)), tuple(range(6, 12)))
    with pytest.raises(BackendError, match="only the first update") as caught:
        trainer.update(batch, update_spec(batch, loss=loss, mini_batches=halves, old_policy="own"))
    assert "2 mini-batches" in str(caught.value)


def test_an_entropy_bonus_has_the_gradient_of_the_padded_computation(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch)
    batch = training()
    loss = PolicyClip(clip_low=0.2, clip_high=0.28, entropy=0.3)
    spec = update_spec(batch, loss=replace(loss, entropy=0.0))
    (plain,) = trainer.update(batch, spec)
    want = watch.grads
    _, (_, mask, logits) = padded(trainer.model, batch.sequences, 1.0)
    table = torch.nn.functional.pad(logits[:, :-1].log_softmax(-1), (0, 0, 1, 0))[mask > 0]
    entropy = -(table.exp() * table).sum(-1)[torch.from_numpy(batch.sequences.response_mask)]
    (-0.3 * entropy.mean()).backward()  # type: ignore[no-untyped-call]
    want = {n: g + dict(trainer.model.named_parameters())[n].grad for n, g in want.items()}
    trainer.model.zero_grad()
    (step,) = trainer.update(batch, replace(spec, loss=loss))
    assert step.loss == pytest.approx(plain.loss - 0.3 * float(entropy.mean().detach()), abs=1e-6)
    assert_equal(watch.grads, want, 1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_gradients_do_not_depend_on_the_batch_composition(
    seed: int, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a token sum is the sum of the gradients of any parts."""
    trainer, watch = watched(qwen, monkeypatch)
    batch = training(seed, groups=5, size=2)
    order = np.random.default_rng(seed).permutation(len(batch)).tolist()
    loss = PolicyClip(aggregation="sequence-mean-token-sum")
    trainer.update(batch, update_spec(batch, loss=loss))
    whole = watch.grads
    cut = int(np.random.default_rng(seed).integers(1, len(order)))
    total: dict[str, torch.Tensor] = {n: torch.zeros_like(g) for n, g in whole.items()}
    for part in (sorted(order[:cut]), sorted(order[cut:])):
        trainer.update(batch, update_spec(batch, loss=loss, mini_batches=(tuple(part),)))
        total = {n: t + watch.grads[n] * len(part) / len(order) for n, t in total.items()}
    assert_equal(total, whole, 1e-6)


def test_cross_entropy_equals_the_loss_of_transformers(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch)
    batch = TrainBatch(sequences=sequences(2))
    rows = batch.sequences
    _, (ids, mask, _) = padded(trainer.model, rows, 1.0)
    labels = torch.full_like(ids, -100)
    labels[mask > 0] = torch.where(
        torch.from_numpy(rows.response_mask), torch.from_numpy(rows.tokens), -100
    )
    loss = trainer.model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    want = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    (step,) = trainer.update(batch, update_spec(batch, loss=CrossEntropy()))
    assert step.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert step.num_tokens == int(rows.response_mask.sum())
    assert_equal(watch.grads, want, 1e-6)


def test_shared_prefixes_are_computed_once() -> None:
    rows = SequenceBatch(
        samples=tuple(SampleId(f"0/0/{i}") for i in range(3)),
        tokens=np.array([5, 6, 7, 8, 1, 5, 6, 7, 9, 1, 5, 6, 3]),
        offsets=np.array([0, 5, 10, 13]),
        response_mask=np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1], bool),
        groups=np.zeros(3, np.int64),
    )
    # Inputs: 5, 6, 7 once; 8 and 9; a last answer is no input. Targets: 3, 7, 8, 9 and two ends.
    packed = pack(rows, np.arange(3))
    assert sorted(packed.tokens.tolist()) == [5, 6, 7, 8, 9]
    assert len(packed.target_token) == 6
    assert len(packed.source) == 7
    # The third sample's inputs begin the others: no attention of its own.
    assert sum(block.rows for block in packed.blocks) == 2
    alone = pack(rows, np.arange(3), share_prefixes=False)
    assert len(alone.tokens) == 4 + 4 + 2


def test_groups_stay_whole_in_micro_batches_where_they_fit() -> None:
    rows = sequences(groups=6, size=3)
    pieces = micro_batches(rows, range(18), 7)
    assert sorted(np.concatenate(pieces).tolist()) == list(range(18))
    assert all(len(piece) == 6 for piece in pieces)
    assert max(len(piece) for piece in micro_batches(rows, range(18), 2)) == 2
    for piece in micro_batches(rows, range(18), 18, max_tokens=20):
        assert len(piece) == 1 or rows.lengths[piece].sum() <= 20


def test_skipping_samples_without_advantage_changes_no_gradient(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = training(groups=5)
    assert batch.advantages is not None
    rows = batch.sequences
    advantages = batch.advantages.copy()
    advantages[rows.offsets[3] : rows.offsets[9]] = 0
    batch = replace(batch, advantages=advantages)
    grads, steps = [], []
    for skip in (True, False):
        trainer, watch = watched(qwen, monkeypatch, skip_zero=skip)
        steps += trainer.update(batch, update_spec(batch))
        grads.append(watch.grads)
    assert_equal(grads[0], grads[1], 1e-7)
    assert steps[0].loss == pytest.approx(steps[1].loss, abs=1e-7)
    assert steps[0].num_tokens == steps[1].num_tokens
    assert steps[0].metrics["samples_skipped"] == 6
    assert steps[0].metrics["samples_computed"] == 9
    assert steps[1].metrics["samples_skipped"] == 0
    assert steps[0].metrics["tokens_computed"] < steps[1].metrics["tokens_computed"]


def test_no_sample_is_skipped_where_a_kl_term_pulls_on_it(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 1)
    batch = training()
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    spec = update_spec(batch, kl=KL(estimator="k3", coefficient=0.1))
    (step,) = trainer.update(batch, spec)
    assert step.metrics["samples_skipped"] == 0
    assert step.grad_norm > 0
    assert step.metrics["kl"] > 0


def test_a_mini_batch_without_any_advantage_still_moves_with_its_momentum(qwen: Path) -> None:
    results = []
    batch = training()
    nothing = replace(batch, advantages=np.zeros_like(batch.advantages))
    for skip in (True, False):
        trainer = TorchTrainer(context(qwen), skip_zero=skip)
        trainer.begin(AdamW(learning_rate=1e-2), 10)
        trainer.update(batch, update_spec(batch))
        (step,) = trainer.update(nothing, update_spec(batch))
        assert step.loss == 0
        results.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
    assert_equal(results[0], results[1], 1e-7)


def test_a_gradient_that_is_not_finite_is_reported_and_not_applied(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(learning_rate=1e-2), 10)
    good = training()
    assert good.advantages is not None
    bad_values = good.advantages.copy()
    bad_values[np.argmax(good.sequences.response_mask)] = np.inf
    bad = replace(good, advantages=bad_values)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    (step,) = trainer.update(bad, update_spec(bad))
    assert step.skipped
    assert not np.isfinite(step.grad_norm)
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    (step,) = trainer.update(good, update_spec(good))
    assert not step.skipped
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_metrics_of_an_update_on_its_own_samples(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(learning_rate=0.0), 10)
    batch = training()
    rows = batch.sequences
    batch = replace(batch, behaviour_logprobs=trainer.logprobs(rows, 1.0))
    (step,) = trainer.update(batch, update_spec(batch))
    assert step.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert step.metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert step.metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert step.metrics["clip_fraction_low"] == step.metrics["clip_fraction_high"] == 0
    assert 0 < step.metrics["entropy"] <= np.log(VOCABULARY) + 1e-6
    assert batch.behaviour_logprobs is not None
    assert step.metrics["entropy_estimate"] == pytest.approx(
        -float(batch.behaviour_logprobs[rows.response_mask].mean()), rel=1e-5
    )
    assert step.metrics["positions"] < len(rows.tokens)


def test_metrics_of_some_tokens_are_means_over_those(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(learning_rate=0.0), 10)
    batch = training()
    logprobs = trainer.logprobs(batch.sequences, 1.0)[batch.sequences.response_mask]
    below = float(np.median(logprobs))
    some = logprobs[logprobs < below]
    (step,) = trainer.update(batch, update_spec(batch, loss=own.measured(below=below)))
    assert step.metrics["unlikely"] == pytest.approx(some.mean(), rel=1e-5)
    assert step.metrics["unlikely_max"] == pytest.approx(some.max(), rel=1e-5)
    (step,) = trainer.update(batch, update_spec(batch, loss=own.measured(below=-1e9)))
    assert not {"unlikely", "unlikely_max"} & step.metrics.keys()


def test_temperature_zero_means_logprobs_at_temperature_one(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    rows = sequences()
    np.testing.assert_array_equal(trainer.logprobs(rows, 0.0), trainer.logprobs(rows, 1.0))


def test_mini_batches_are_updates_in_order(qwen: Path) -> None:
    batch = training(groups=4)
    halves = (tuple(range(6)), tuple(range(6, 12)))
    together = TorchTrainer(context(qwen))
    together.begin(AdamW(learning_rate=1e-2), 2)
    steps = together.update(batch, update_spec(batch, mini_batches=halves))
    apart = TorchTrainer(context(qwen))
    apart.begin(AdamW(learning_rate=1e-2), 2)
    again = [
        step
        for half in halves
        for step in apart.update(batch, update_spec(batch, mini_batches=(half,)))
    ]
    assert steps == again
    for mine, other in zip(together.model.parameters(), apart.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_equal_inputs_give_identical_bits(qwen: Path) -> None:
    outcomes: list[Any] = []
    for _ in range(2):
        torch.manual_seed(len(outcomes))
        trainer = TorchTrainer(context(qwen))
        trainer.begin(AdamW(learning_rate=1e-2), 3)
        batch = training()
        steps = [trainer.update(batch, update_spec(batch)) for _ in range(3)]
        outcomes.append((steps, trainer.logprobs(batch.sequences, 1.0).tobytes()))
    assert outcomes[0] == outcomes[1]


def test_updates_raise_the_likelihood_of_what_is_rewarded(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(learning_rate=1e-2), 20)
    assert isinstance(trainer, TrainBackend)
    batch = TrainBatch(sequences=sequences(groups=3, size=1))
    spec = update_spec(batch, loss=CrossEntropy())
    losses = [trainer.update(batch, spec)[0].loss for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("loss", "kl", "field"),
    [
        (PolicyClip(), None, "advantages"),
        (CrossEntropy(), KL(estimator="k3", coefficient=0.1), "reference_logprobs"),
    ],
)
def test_a_field_that_the_update_reads_and_the_batch_lacks_is_named(
    loss: LossSpec, kl: KL | None, field: str, qwen: Path
) -> None:
    trainer = TorchTrainer(context(qwen))
    trainer.begin(AdamW(), 1)
    batch = TrainBatch(sequences=sequences())
    with pytest.raises(BackendError, match=f"no {field}"):
        trainer.update(batch, update_spec(batch, loss=loss, kl=kl))


def test_mistakes_of_the_caller_are_typed_errors(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen))
    batch = TrainBatch(sequences=sequences())
    spec = update_spec(batch, loss=CrossEntropy())
    with pytest.raises(BackendError, match="update before begin"):
        trainer.update(batch, spec)
    trainer.begin(AdamW(), 1)
    rows = batch.sequences
    empty = replace(rows, response_mask=np.zeros_like(rows.response_mask))
    with pytest.raises(BackendError, match="no response token"):
        trainer.update(TrainBatch(sequences=empty), spec)
    unprompted = replace(rows, response_mask=np.ones_like(rows.response_mask))
    with pytest.raises(BackendError, match="first token") as caught:
        trainer.logprobs(unprompted, 1.0)
    assert "sample 0/" in str(caught.value)
    with pytest.raises(BackendError, match="without an optimizer"):
        TorchTrainer(context(qwen, trainable=False)).begin(AdamW(), 1)
    with pytest.raises(BackendError, match="float16"):
        TorchTrainer(context(qwen, dtype="float16"))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_batch_with_a_token_that_the_model_does_not_have_is_refused(
    token: int, qwen: Path
) -> None:
    trainer, rows = TorchTrainer(context(qwen)), sequences()
    trainer.begin(AdamW(), 1)
    tokens = rows.tokens.copy()
    tokens[3] = token
    wrong = TrainBatch(sequences=replace(rows, tokens=tokens))
    expected = rf"roles\.actor: a token id is outside[\s\S]*0 to {VOCABULARY - 1}"
    with pytest.raises(BackendError, match=expected):
        trainer.update(wrong, update_spec(wrong, loss=CrossEntropy()))
    for ask in (trainer.logprobs, trainer.distributions, trainer.squares):
        with pytest.raises(BackendError, match=expected):
            ask(wrong.sequences, 1.0)
    critic = TorchTrainer(context(qwen, head="value"))
    for ask_critic in (critic.values, critic.scores):
        with pytest.raises(BackendError, match=expected):
            ask_critic(wrong.sequences)
