"""Losses, aggregation, KL estimators and chosen logprobs: by hand and by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from flowrl.algo import logprobs as logprobs_module
from flowrl.algo.kl import estimate
from flowrl.algo.logprobs import chosen_logprobs
from flowrl.algo.losses import TokenBatch, aggregate, sample_weights
from flowrl.algo.resolve import resolve_kl, resolve_loss
from flowrl.specs import KL, CrossEntropy, PolicyClip
from flowrl.specs.kl import Estimator
from flowrl.specs.loss import Aggregation


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slopes(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Central differences of a scalar function in float64."""
    step = 1e-6
    rows = [torch.zeros_like(at).index_fill_(0, torch.tensor(i), step) for i in range(len(at))]
    return torch.stack([(function(at + r) - function(at - r)) / (2 * step) for r in rows])


def test_the_clipped_objective_by_hand() -> None:
    ratio = double(1.5, 1.5, 0.5, 0.5, 1.1)
    advantages = double(2.0, -2.0, 2.0, -2.0, 3.0)
    loss = resolve_loss(PolicyClip(clip_low=0.2, clip_high=0.3))
    batch = TokenBatch(advantages=advantages, behaviour_logprobs=double(*[-1.0] * 5))
    terms = loss(ratio.log() - 1.0, batch)
    # min(1.5 A, 1.3 A), min(.5 A, .8 A): A > 0 is capped above, A < 0 below.
    torch.testing.assert_close(terms.values, -double(2.6, -3.0, 1.0, -1.6, 3.3))
    assert terms.means["clip_fraction_high"].tolist() == [1, 0, 0, 0, 0]
    assert terms.means["clip_fraction_low"].tolist() == [0, 0, 0, 1, 0]
    assert float(terms.maxima["ratio_max"].max()) == pytest.approx(1.5)
    torch.testing.assert_close(terms.means["approx_kl"], ratio - 1 - ratio.log())


def test_the_clipped_objective_has_the_slope_of_its_value() -> None:
    torch.manual_seed(0)
    new = (torch.randn(40, dtype=torch.float64) * 0.5 - 1).requires_grad_()
    batch = TokenBatch(
        advantages=torch.randn(40, dtype=torch.float64),
        behaviour_logprobs=torch.randn(40, dtype=torch.float64) * 0.5 - 1,
    )
    loss = resolve_loss(PolicyClip(clip_low=0.2, clip_high=0.28))
    loss(new, batch).values.sum().backward()
    assert new.grad is not None
    want = slopes(lambda x: loss(x, batch).values.sum(), new.detach())
    torch.testing.assert_close(new.grad, want, rtol=1e-6, atol=1e-7)
    assert (new.grad == 0).any()


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="behaviour_logprobs"):
        resolve_loss(PolicyClip())(double(0.0), TokenBatch(advantages=double(1.0)))


def test_cross_entropy_is_the_negative_logprob() -> None:
    terms = resolve_loss(CrossEntropy())(double(-1.0, -2.0), TokenBatch())
    assert terms.values.tolist() == [1.0, 2.0]


def test_a_scaled_loss_is_the_loss_times_its_factor_entropy_bonus_included() -> None:
    torch.manual_seed(0)
    logprobs, advantages, entropy = torch.randn(3, 7, dtype=torch.float64)
    batch = TokenBatch(advantages=advantages, behaviour_logprobs=logprobs - 0.1, entropy=entropy)
    spec = PolicyClip(entropy=0.3)
    plain, scaled = resolve_loss(spec)(logprobs, batch), resolve_loss(0.25 * spec)(logprobs, batch)
    torch.testing.assert_close(scaled.values, 0.25 * plain.values)
    torch.testing.assert_close(scaled.means["ratio_mean"], plain.means["ratio_mean"])


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token-mean", (1 + 2 + 3 + 4) / 4),
        ("sequence-mean-token-mean", (1 + (2 + 3 + 4) / 3 + 0) / 3),
        ("sequence-mean-token-sum", (1 + 9 + 0) / 3),
        ("constant", 10 / (3 * 8)),
    ],
)
def test_each_aggregation_by_hand(aggregation: Aggregation, want: float) -> None:
    lengths = [1, 3, 0]
    weights = sample_weights(lengths, aggregation, max_tokens=8)
    tokens = torch.from_numpy(np.repeat(weights, lengths))
    assert float(aggregate(double(1, 2, 3, 4), tokens)) == pytest.approx(want)


def test_a_mini_batch_without_response_tokens_has_no_loss() -> None:
    with pytest.raises(ValueError, match="without response tokens"):
        sample_weights([0, 0], "token-mean", max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens > 0"):
        sample_weights([1], "constant", max_tokens=0)


def test_kl_estimators_by_hand() -> None:
    d = math.log(2.0)
    new, old = double(-1.0), double(-1.0 - d)
    assert float(estimate(new, old, "k1")) == pytest.approx(d)
    assert float(estimate(new, old, "k2")) == pytest.approx(d * d / 2)
    assert float(estimate(new, old, "k3")) == pytest.approx(0.5 - 1 + d)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_slope_of_their_value(estimator: Estimator) -> None:
    torch.manual_seed(0)
    new = torch.randn(9, dtype=torch.float64).requires_grad_()
    old = torch.randn(9, dtype=torch.float64)
    function = resolve_kl(KL(estimator=estimator, coefficient=0.1))
    function(new, old).sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(
        new.grad, slopes(lambda x: function(x, old).sum(), new.detach()), rtol=1e-6, atol=1e-7
    )


def test_k3_is_never_negative_for_near_policies() -> None:
    new = -torch.rand(1000)
    assert (estimate(new, new + 1e-6 * torch.randn(1000), "k3") >= -1e-12).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk", [1 << 22, 13])
def test_chosen_logprobs_equal_log_softmax(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64).requires_grad_()
    rows, tokens = torch.tensor([0, 0, 2, 5]), torch.tensor([3, 4, 10, 0])
    weight = double(1.0, -2.0, 0.5, 3.0)
    got, entropy = chosen_logprobs(logits, rows, tokens, temperature)
    (got * weight).sum().backward()
    got_grad = logits.grad
    logits.grad = None
    table = (logits / (temperature or 1.0)).log_softmax(-1)
    want = table[rows, tokens]
    (want * weight).sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_grad, logits.grad)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1))


def test_chosen_logprobs_of_16_bit_logits_are_computed_in_float32() -> None:
    # The chosen token has probability near 1: its gradient, 1 - p, must survive the 16-bit type.
    logits = torch.tensor([[9.0, 0.0, 0.0]], dtype=torch.bfloat16).requires_grad_()
    got, _ = chosen_logprobs(logits, torch.tensor([0]), torch.tensor([0]), 1.0)
    got.sum().backward()
    assert got.dtype == torch.float32
    assert logits.grad is not None
    p = math.exp(9) / (math.exp(9) + 2)
    assert float(logits.grad[0, 0]) == pytest.approx(1 - p, rel=1e-2)
