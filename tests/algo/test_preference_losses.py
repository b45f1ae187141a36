"""Losses on pairs: numbers by hand, gradients by finite differences, parts of a mini-batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.algo.losses import TokenBatch, aggregate
from flowrl.algo.losses_supervised import explained_variance
from flowrl.algo.resolve import resolve_loss
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.specs import loss, spec_from_json
from flowrl.specs.loss import DPO, BradleyTerry, PairLoss
from tests.algo.loss_cases import part

LENGTHS = (5, 1, 4, 7, 2, 3)
"""Response tokens of each sample; samples 2k and 2k + 1 are a pair."""

LOSSES: dict[str, PairLoss] = {
    "dpo": loss.dpo(0.3),
    "conservative": loss.dpo(0.3, label_smoothing=0.1),
    "ipo": loss.dpo(0.2, form="ipo"),
    "bradley-terry": loss.bradley_terry(),
    "margin": loss.bradley_terry(margin=0.5, centering=0.01),
}


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def lengths_of(spec: PairLoss) -> tuple[int, ...]:
    """Numbers that the model gives of each sample: its tokens, or its score."""
    return (1,) * len(LENGTHS) if spec.predicts == "scores" else LENGTHS


def draw(spec: PairLoss, seed: int = 0) -> tuple[torch.Tensor, TokenBatch]:
    """Predictions without gradient, and the batch that they belong to."""
    generator = torch.Generator().manual_seed(seed)
    samples = torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), lengths_of(spec)))

    def noise() -> torch.Tensor:
        return torch.randn(len(samples), generator=generator, dtype=torch.float64)

    batch = TokenBatch(
        reference_logprobs=noise() - 2,
        samples=samples,
        pairs=samples // 2,
        preferred=samples % 2 == 0,
    )
    return noise() - 2, batch


def weights(spec: PairLoss) -> np.ndarray:
    function = resolve_loss(spec)
    return function.sample_weights(lengths_of(spec), [0, 0, 1, 1, 2, 2], max_tokens=9)


def total(spec: PairLoss, predicted: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.samples is not None
    spread = torch.from_numpy(weights(spec))[batch.samples]
    return aggregate(resolve_loss(spec)(predicted, batch).values, spread)


def by_pair(spec: PairLoss, predicted: torch.Tensor, batch: TokenBatch) -> list[tuple[float, ...]]:
    """Of each pair, the sums of its two samples: of log-ratios for DPO, else of scores."""
    assert batch.reference_logprobs is not None
    assert batch.samples is not None
    terms = predicted - batch.reference_logprobs if isinstance(spec, DPO) else predicted
    sums = [float(terms[batch.samples == i].sum()) for i in range(len(LENGTHS))]
    return list(zip(sums[::2], sums[1::2], strict=True))


def by_hand(spec: PairLoss, chosen: float, rejected: float) -> float:
    """The loss of one pair."""
    if isinstance(spec, DPO):
        h, beta, e = chosen - rejected, spec.beta, spec.label_smoothing
        if spec.form == "ipo":
            return (h - 1 / (2 * beta)) ** 2
        return -(1 - e) * math.log(sigmoid(beta * h)) - e * math.log(sigmoid(-beta * h))
    assert isinstance(spec, BradleyTerry)
    apart = -math.log(sigmoid(chosen - rejected - spec.margin))
    return apart + spec.centering * (chosen + rejected) ** 2


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_mean_over_pairs_of_the_paper_s_formula(name: str) -> None:
    spec = LOSSES[name]
    predicted, batch = draw(spec)
    wanted = [by_hand(spec, *sums) for sums in by_pair(spec, predicted, batch)]
    assert float(total(spec, predicted, batch)) == pytest.approx(np.mean(wanted))


def test_dpo_of_two_tokens_by_hand() -> None:
    batch = TokenBatch(
        reference_logprobs=double(-2.0, -1.0),
        samples=torch.tensor([0, 1]),
        pairs=torch.tensor([0, 0]),
        preferred=torch.tensor([True, False]),
    )
    # Log-ratios 0.5 and -1: h = 1.5, at beta 0.1 a reward margin of 0.15.
    terms = resolve_loss(loss.dpo(0.1))(double(-1.5, -2.0), batch)
    assert terms.values.tolist() == pytest.approx([0.6209570] * 2, abs=1e-6)
    assert {n: v.tolist() for n, v in terms.means.items()} == {
        "reward_chosen": pytest.approx([0.05]),
        "reward_rejected": pytest.approx([-0.1]),
        "reward_margin": pytest.approx([0.15]),
        "pair_accuracy": [1.0],
        "logprob_chosen": [-1.5],
        "logprob_rejected": [-2.0],
    }


def test_bradley_terry_of_two_pairs_by_hand() -> None:
    batch = TokenBatch(
        pairs=torch.tensor([0, 0, 1, 1]), preferred=torch.tensor([True, False, True, False])
    )
    terms = resolve_loss(loss.bradley_terry())(double(1.0, 0.0, -1.0, 1.0), batch)
    # -log sigmoid(1) and -log sigmoid(-2)
    assert terms.values.tolist() == pytest.approx([0.3132617] * 2 + [2.1269280] * 2, abs=1e-6)
    assert terms.means["pair_accuracy"].tolist() == [1.0, 0.0]
    assert terms.means["reward_margin"].tolist() == [1.0, -2.0]
    assert terms.means["reward_chosen"].tolist() == [1.0, -1.0]
    assert terms.means["reward_rejected"].tolist() == [0.0, 1.0]


def test_an_implicit_reward_of_two_samples_by_hand() -> None:
    batch = TokenBatch(
        reference_logprobs=double(-1.5, -2.5, -3.0),
        samples=torch.tensor([0, 0, 1]),
        extra={"score": double(1.0, 1.0, 0.0)},
    )
    # Log-ratios 1 and 2, times 0.5: -log sigmoid(0.5) of the right one, -log sigmoid(-1).
    terms = resolve_loss(loss.implicit_reward(0.5))(double(-1.0, -2.0, -1.0), batch)
    assert terms.values.tolist() == pytest.approx([0.4740770] * 2 + [1.3132617], abs=1e-6)
    assert terms.means["outcome_reward"].tolist() == [0.5, 1.0]
    assert terms.means["outcome_accuracy"].tolist() == [1.0, 0.0]
    weights = resolve_loss(loss.implicit_reward(0.5)).sample_weights([2, 1], [0, 0], max_tokens=9)
    spread = torch.from_numpy(weights)[batch.samples]
    mean = float(aggregate(terms.values, spread))
    assert mean == pytest.approx((0.4740770 + 1.3132617) / 2, abs=1e-6)


def test_outcomes_of_samples_and_of_tokens_by_hand() -> None:
    batch = TokenBatch(samples=torch.tensor([0, 0, 1]), extra={"score": double(1.0, 1.0, 0.25)})
    terms = resolve_loss(loss.outcome(per="token"))(double(0.0, -2.0, 1.0), batch)
    # log 2, -log sigmoid(-2), and a quarter of -log sigmoid(1) with three of -log sigmoid(-1).
    expected = [0.6931472, 2.1269280, 0.25 * 0.3132617 + 0.75 * 1.3132617]
    assert terms.values.tolist() == pytest.approx(expected, abs=1e-6)
    assert terms.means["outcome_reward"].tolist() == [-1.0, 1.0]
    assert terms.means["outcome_accuracy"].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="outcome needs score"):
        resolve_loss(loss.outcome())(double(0.0), TokenBatch(samples=torch.tensor([0])))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_slope(name: str, seed: int) -> None:
    spec = LOSSES[name]
    at, batch = draw(spec, seed)
    x = at.clone().requires_grad_()
    total(spec, x, batch).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    step = 1e-6

    def slope(i: int) -> float:
        moved = torch.zeros_like(at).index_fill_(0, torch.tensor(i), step)
        ends = [total(spec, at + sign * moved, batch) for sign in (1, -1)]
        return float((ends[0] - ends[1]) / (2 * step))

    want = double(*(slope(i) for i in range(len(at))))
    torch.testing.assert_close(x.grad, want, rtol=1e-6, atol=1e-8)
    # Every token of a pair pulls: the preferred sample's up, the other's down.
    if not spec.to_json().get("centering") and spec.to_json().get("form") != "ipo":
        assert batch.preferred is not None
        assert torch.equal(x.grad < 0, batch.preferred)


@pytest.mark.parametrize("cut", [[[0, 1], [2, 3], [4, 5]], [[4, 5, 0, 1], [2, 3]]])
@pytest.mark.parametrize("name", LOSSES)
def test_pairs_add_up_to_the_mini_batch(name: str, cut: list[list[int]]) -> None:
    spec = LOSSES[name]
    at, batch = draw(spec)
    whole = at.clone().requires_grad_()
    want = total(spec, whole, batch)
    want.backward()  # type: ignore[no-untyped-call]
    x = at.clone().requires_grad_()
    value = 0.0
    assert batch.samples is not None
    for samples in cut:
        chosen = torch.isin(batch.samples, torch.tensor(samples))
        some = total(spec, x[chosen], part(batch, chosen))
        some.backward()  # type: ignore[no-untyped-call]
        value += float(some.detach())
    assert value == pytest.approx(float(want.detach()), abs=1e-12)
    torch.testing.assert_close(x.grad, whole.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_tokens_does_not_matter(name: str) -> None:
    spec = LOSSES[name]
    at, batch = draw(spec)
    order = torch.randperm(len(at), generator=torch.Generator().manual_seed(1))
    assert float(total(spec, at[order], part(batch, order))) == pytest.approx(
        float(total(spec, at, batch)), abs=1e-12
    )


@pytest.mark.parametrize("size", [-1e4, 1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_margins_have_finite_losses_and_gradients(name: str, size: float) -> None:
    spec = LOSSES[name]
    at, batch = draw(spec)
    assert batch.preferred is not None
    x = (at + size * batch.preferred).requires_grad_()
    total(spec, x, batch).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_pair_loss_reads_back_from_json_and_text(name: str) -> None:
    spec = LOSSES[name]
    assert spec_from_json("loss", spec.to_json()) == spec
    assert parse_attr(format_attr(spec)) == spec
    assert spec.pairs
    assert "preferred" in spec.needs


def test_a_missing_reference_is_named() -> None:
    at, batch = draw(LOSSES["dpo"])
    with pytest.raises(ValueError, match="dpo needs reference_logprobs"):
        resolve_loss(loss.dpo())(at, replace(batch, reference_logprobs=None))
    with pytest.raises(ValueError, match="bradley_terry needs preferred"):
        resolve_loss(loss.bradley_terry())(at, replace(batch, preferred=None))


def test_explained_variance_by_hand() -> None:
    returns = double(1.0, 2.0, 3.0, 6.0)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 5, returns) == 1.0
    assert explained_variance(torch.zeros(4), returns) == 0.0
    # Errors 0, 1, 0, -1: variance 0.5 of 3.5.
    assert explained_variance(double(1, 1, 3, 7), returns) == pytest.approx(1 - 0.5 / 3.5)
    assert explained_variance(returns, torch.full((4,), 0.1)) is None
    assert explained_variance(torch.zeros(0), torch.zeros(0)) is None
