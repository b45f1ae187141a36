"""Critics and reward models in the trainer: heads, values, scores, and updates on them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from flowrl.algo.losses import aggregate, sample_weights
from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import Capabilities
from flowrl.errors import BackendError
from flowrl.specs import KL, AdamW, CrossEntropy, LossSpec, PolicyClip
from flowrl.specs.loss import Aggregation, ValueClip, value_clip
from flowrl_backends.torch import plugin
from flowrl_backends.torch.model import load_model
from flowrl_backends.torch.packed_forward import supports_packing, value_head
from flowrl_backends.torch.packing import pack
from flowrl_backends.torch.predict import closed
from flowrl_backends.torch.trainer import TorchTrainer
from tests.torch_backend.trainer_fixtures import (
    CONFIGS,
    assert_equal,
    context,
    folder_of,
    padded_values,
    sequences,
    training,
    update_spec,
    watched,
)

HEADED = [kind for kind in CONFIGS if kind != "granite-scaled"]


def saved_policy(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder with the weights of a language model."""
    TorchTrainer(context(folder, **changes)).export(target)
    return target


def value_batch(seed: int = 0, **options: int) -> TrainBatch:
    """Returns and old values near those of a fresh critic."""
    rows = sequences(seed, **options)
    draw = np.random.default_rng(seed + 7)
    returns, old = (draw.normal(0, s, len(rows.tokens)) * rows.response_mask for s in (1.0, 0.3))
    return TrainBatch(
        sequences=rows, returns=returns.astype(np.float32), old_values=old.astype(np.float32)
    )


def plain_value_loss(model: Any, batch: TrainBatch, loss: ValueClip) -> tuple[float, Any]:
    """The clipped value loss and its gradients over the padded batch, written out."""
    rows = batch.sequences
    assert batch.returns is not None
    assert batch.old_values is not None
    assert loss.clip is not None
    live = torch.from_numpy(rows.response_mask)
    values = padded_values(model, rows)[0][live]
    wanted, old = (torch.from_numpy(x)[live] for x in (batch.returns, batch.old_values))
    clipped = old + (values - old).clamp(-loss.clip, loss.clip)
    errors = 0.5 * torch.maximum((values - wanted) ** 2, (clipped - wanted) ** 2)
    weights = sample_weights(rows.response_lengths, loss.aggregation, max_tokens=16)
    total = aggregate(errors, torch.from_numpy(np.repeat(weights, rows.response_lengths)))
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return float(total.detach()), grads


@pytest.mark.parametrize("kind", HEADED)
def test_values_and_scores_equal_the_padded_computation(kind: str, models: Path) -> None:
    trainer = TorchTrainer(context(folder_of(kind, models), head="value"))
    assert supports_packing(trainer.model) == (kind != "gemma2-capped")
    rows = sequences(5)
    with torch.no_grad():
        values, scores = padded_values(trainer.model, rows)
    got = trainer.values(rows)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, values.numpy() * rows.response_mask, atol=1e-6)
    assert (got[~rows.response_mask] == 0).all()
    np.testing.assert_allclose(trainer.scores(rows), scores.numpy(), atol=1e-6)


def test_scores_of_tokens_are_the_scores_of_the_samples_that_end_there(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    rows = sequences(3)
    mask = rows.response_mask.copy()
    mask[np.flatnonzero(mask)[1::3]] = False  # words of an environment
    rows = replace(rows, response_mask=mask)
    got = trainer.token_scores(rows)
    assert (got[~mask] == 0).all()
    first = int(rows.offsets[1])
    for place in np.flatnonzero(mask[:first]).tolist():
        begun = SequenceBatch(
            samples=rows.samples[:1],
            tokens=rows.tokens[: place + 1],
            offsets=np.array([0, place + 1]),
            response_mask=mask[: place + 1],
            groups=rows.groups[:1],
        )
        np.testing.assert_allclose(trainer.scores(begun), got[[place]], atol=1e-6)
    last = rows.offsets[1:] - 1
    live = mask[last]
    np.testing.assert_allclose(got[last][live], trainer.scores(rows)[live], atol=1e-6)


def test_a_score_stands_at_the_last_token_whatever_the_mask_says(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    rows = sequences(2)
    unmasked = replace(rows, response_mask=np.zeros_like(rows.response_mask))
    np.testing.assert_array_equal(trainer.scores(unmasked), trainer.scores(rows))
    np.testing.assert_array_equal(trainer.values(unmasked), np.zeros(len(rows.tokens)))


def test_scores_of_shared_prefixes_compute_each_prefix_once() -> None:
    rows = sequences(1, groups=1, size=3)
    packed = pack(closed(rows), np.arange(3))
    samples = [rows.tokens[a:b].tolist() for a, b in pairwise(rows.offsets)]
    prefixes = {tuple(s[:n]) for s in samples for n in range(1, len(s) + 1)}
    assert len(packed.tokens) == len(prefixes)
    assert len(packed.source) == 3


@pytest.mark.parametrize("kind", HEADED)
def test_a_critics_gradient_equals_the_padded_computation(
    kind: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(folder_of(kind, models), monkeypatch, head="value")
    batch, loss = value_batch(), value_clip(0.2)
    want_loss, want = plain_value_loss(trainer.model, batch, loss)
    (step,) = trainer.update(batch, update_spec(batch, loss=loss))
    assert step.loss == pytest.approx(want_loss, abs=1e-6)
    assert_equal(watch.grads, want, 1e-6)
    assert step.grad_norm > 0


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]
)
def test_micro_batches_change_no_critics_gradient(
    aggregation: Aggregation, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, watch = watched(qwen, monkeypatch, head="value")
    batch, loss = value_batch(3, groups=5), value_clip(0.2, aggregation=aggregation)
    want_loss, want = plain_value_loss(trainer.model, batch, loss)
    metrics = []
    for micro_batch in (1, 2, 5, 100):
        (step,) = trainer.update(batch, update_spec(batch, loss=loss, micro_batch=micro_batch))
        assert step.loss == pytest.approx(want_loss, abs=1e-6)
        assert_equal(watch.grads, want, 1e-6)
        metrics.append({n: v for n, v in step.metrics.items() if n != "positions"})
    assert all(m == pytest.approx(metrics[0], abs=1e-5) for m in metrics)


def test_metrics_of_a_critics_update(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    trainer.begin(AdamW(learning_rate=0.0), 5)
    batch = value_batch()
    live = batch.sequences.response_mask
    values = trainer.values(batch.sequences)[live]
    assert batch.returns is not None
    assert batch.old_values is not None
    returns, old = batch.returns[live], batch.old_values[live]
    (step,) = trainer.update(batch, update_spec(batch, loss=value_clip(0.2)))
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert step.metrics["value_explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert step.metrics["value_mean"] == pytest.approx(values.mean(), abs=1e-6)
    assert step.metrics["return_mean"] == pytest.approx(returns.mean(), abs=1e-6)
    clipped = np.clip(values, old - np.float32(0.2), old + np.float32(0.2))
    share = np.mean((clipped - returns) ** 2 > (values - returns) ** 2)
    assert 0 < step.metrics["value_clip_fraction"] == pytest.approx(share)
    assert "entropy" not in step.metrics
    assert not any(name.startswith("mismatch") for name in step.metrics)
    constant = replace(batch, returns=np.where(live, np.float32(0.1), np.float32(0)))
    (step,) = trainer.update(constant, update_spec(batch, loss=value_clip(0.2)))
    assert "value_explained_variance" not in step.metrics


def test_a_critic_learns_its_returns(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    trainer.begin(AdamW(learning_rate=1e-2), 60)
    rows = sequences(1, groups=3)
    # A return that the prefix tells: the sum of the tokens before, scaled.
    before = np.cumsum(rows.tokens) - rows.tokens
    before -= np.repeat(before[rows.offsets[:-1]], rows.lengths)
    returns = (before / 20 * rows.response_mask).astype(np.float32)
    batch = TrainBatch(sequences=rows, returns=returns)
    spec = update_spec(batch, loss=value_clip(None))
    steps = [trainer.update(batch, spec)[0] for _ in range(60)]
    assert steps[-1].loss < 0.1 * steps[0].loss
    assert steps[-1].metrics["value_explained_variance"] > 0.8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_is_made_for_the_body_of_a_language_model(
    dtype: str, qwen: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved_policy(qwen, tmp_path / "policy", dtype=dtype)
    body = load_model(context(folder, fresh=False, dtype=dtype)).base_model.state_dict()
    options: dict[str, Any] = {"fresh": False, "head": "value", "dtype": dtype}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    critic = TorchTrainer(context(folder, **options))
    assert torch.equal(torch.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")
    for name, tensor in critic.model.base_model.state_dict().items():
        assert torch.equal(tensor, body[name])
    head = value_head(critic.model)
    assert head.weight.dtype == next(critic.model.parameters()).dtype
    assert torch.equal(head.bias, torch.zeros_like(head.bias))
    assert 0.25 < float(head.weight.detach().std()) / critic.model.config.initializer_range < 4
    torch.manual_seed(2)
    again = value_head(TorchTrainer(context(folder, **options)).model)
    other = value_head(TorchTrainer(context(folder, **options | {"seed": 4})).model)
    assert torch.equal(head.weight, again.weight)
    assert not torch.equal(head.weight, other.weight)


def test_a_fresh_critic_depends_on_its_seed_alone(qwen: Path) -> None:
    models = [load_model(context(qwen, head="value", seed=seed)) for seed in (3, 3, 4)]
    first, again, other = ([p.detach() for p in m.parameters()] for m in models)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_an_exported_critic_opens_again_here_and_with_transformers(
    qwen: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    critic = TorchTrainer(context(qwen, head="value"))
    critic.begin(AdamW(learning_rate=1e-2), 1)
    batch = value_batch()
    critic.update(batch, update_spec(batch, loss=value_clip(0.2)))
    critic.export(tmp_path / "critic")
    again = TorchTrainer(context(tmp_path / "critic", fresh=False, head="value", seed=77))
    np.testing.assert_array_equal(again.values(batch.sequences), critic.values(batch.sequences))
    assert capfd.readouterr() == ("", "")
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    assert config["classifier_dropout"] == 0.0
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    ids = torch.tensor([[2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, critic.model(ids).logits)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2-dropout"])
def test_a_sequence_classifier_is_taken_as_a_reward_model(
    kind: str, models: Path, tmp_path: Path
) -> None:
    """Reward models are published as such: the same linear map, without a bias.

    GPT-2's is called otherwise than the head of its token classifier.
    """
    config = transformers.AutoConfig.from_pretrained(folder_of(kind, models))
    config.num_labels = 1
    torch.manual_seed(0)
    published = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(published.score.weight)
    published.save_pretrained(tmp_path / "rm")
    trainer = TorchTrainer(context(tmp_path / "rm", fresh=False, head="value"))
    rows = sequences(4, groups=3, size=1)
    with torch.no_grad():
        want = [
            published(torch.from_numpy(rows.tokens[a:b])[None]).logits.item()
            for a, b in pairwise(rows.offsets)
        ]
    np.testing.assert_allclose(trainer.scores(rows), want, atol=1e-6)


def test_a_restored_critic_goes_on_bit_for_bit(qwen: Path, tmp_path: Path) -> None:
    batch = value_batch()
    spec = update_spec(batch, loss=value_clip(0.2))
    critic = TorchTrainer(context(qwen, head="value"))
    critic.begin(AdamW(learning_rate=1e-2), 4)
    critic.update(batch, spec)
    critic.save(tmp_path / "saved")
    want = critic.update(batch, spec)
    other = TorchTrainer(context(qwen, head="value", seed=9))
    other.restore(tmp_path / "saved")
    assert other.update(batch, spec) == want


def test_an_architecture_without_a_value_head_is_refused(models: Path) -> None:
    with pytest.raises(BackendError, match="no value head") as caught:
        TorchTrainer(context(folder_of("granite-scaled", models), head="value"))
    assert "granite" in str(caught.value)
    assert caught.value.where == "roles.actor.model"


@pytest.mark.parametrize(
    ("kind", "message"), [("qwen2", "cannot be loaded"), ("gpt2-dropout", "several numbers")]
)
def test_a_head_with_several_outputs_is_refused(
    kind: str, message: str, models: Path, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(folder_of(kind, models))
    config.num_labels = 3
    published = transformers.AutoModelForSequenceClassification.from_config(config)
    published.save_pretrained(tmp_path / "three")
    with pytest.raises(BackendError, match=message):
        TorchTrainer(context(tmp_path / "three", fresh=False, head="value"))


@pytest.mark.parametrize(
    ("head", "loss"), [("lm", value_clip(0.2)), ("value", CrossEntropy()), ("value", PolicyClip())]
)
def test_a_loss_that_the_head_cannot_feed_is_refused(head: Any, loss: LossSpec, qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head=head))
    trainer.begin(AdamW(), 1)
    values = value_batch()
    batch = replace(training(), returns=values.returns, old_values=values.old_values)
    with pytest.raises(BackendError, match=f"gives no {loss.predicts}"):
        trainer.update(batch, update_spec(batch, loss=loss))


def test_what_a_head_does_not_give_is_refused(qwen: Path) -> None:
    rows = sequences()
    critic, policy = (TorchTrainer(context(qwen, head=head)) for head in ("value", "lm"))
    with pytest.raises(BackendError, match="no logprobs"):
        critic.logprobs(rows, 1.0)
    with pytest.raises(BackendError, match="no values"):
        policy.values(rows)
    with pytest.raises(BackendError, match="no scores"):
        policy.scores(rows)
    with pytest.raises(BackendError, match="cannot generate"):
        plugin.open_generate(context(qwen, head="value"), None)


def test_a_critic_takes_no_kl_term_and_needs_its_returns(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    trainer.begin(AdamW(), 1)
    batch = replace(value_batch(), reference_logprobs=training().reference_logprobs)
    kl = KL(estimator="k3", coefficient=0.1)
    with pytest.raises(BackendError, match="KL term needs a policy"):
        trainer.update(batch, update_spec(batch, loss=value_clip(0.2), kl=kl))
    with pytest.raises(BackendError, match="no old_values"):
        trainer.update(replace(batch, old_values=None), update_spec(batch, loss=value_clip(0.2)))


def test_the_plugin_declares_both_heads() -> None:
    assert plugin.capabilities.heads == {"lm", "value"}
    assert Capabilities(services=frozenset(), devices=frozenset()).heads == {"lm"}


def test_empty_batches_have_no_scores(qwen: Path) -> None:
    trainer = TorchTrainer(context(qwen, head="value"))
    none = SequenceBatch(
        samples=(),
        tokens=np.zeros(0, np.int64),
        offsets=np.zeros(1, np.int64),
        response_mask=np.zeros(0, bool),
        groups=np.zeros(0, np.int64),
    )
    assert trainer.scores(none).shape == (0,)
    assert trainer.token_scores(none).shape == (0,)
    assert trainer.values(none).shape == (0,)
