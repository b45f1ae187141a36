"""Importance weights, rejections and masks; metrics of the mismatch; entropies with gradient."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from flowrl.algo import logprobs as logprobs_module
from flowrl.algo.corrections import (
    Segments,
    gap_statistic,
    importance_weights,
    rejection_mask,
    sequence_mask,
)
from flowrl.algo.kl import mismatch
from flowrl.algo.logprobs import chosen_logprobs
from flowrl.algo.losses import TokenBatch
from flowrl.algo.losses_supervised import value_clip
from flowrl.algo.resolve import resolve_loss
from flowrl.specs import loss
from flowrl.specs.loss import ValueClip
from flowrl.specs.loss.policy import Divergence, RejectionLevel
from flowrl.specs.loss.policy import Estimator as GapEstimator

SAMPLES = torch.tensor([4, 4, 9, 4])
"""Tokens of a sample need not be adjacent."""


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gaps(*ratios: float) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    behaviour = double(*[-2.0] * len(ratios))
    return behaviour + double(*ratios).log(), behaviour, Segments.of(SAMPLES)


def test_sums_means_and_maxima_of_samples() -> None:
    segments = Segments.of(SAMPLES)
    values = double(1, 2, 10, 6)
    assert segments.sums(values).tolist() == [9, 9, 10, 9]
    assert segments.means(values).tolist() == [3, 3, 10, 3]
    assert segments.maxima(-values).tolist() == [-1, -1, -10, -1]


def test_weights_of_each_level_by_hand() -> None:
    old, behaviour, segments = gaps(2.0, 4.0, 0.5, 1.0)
    token = importance_weights(old, behaviour, segments, level="token", high=3.0, low=0.6)
    assert token.tolist() == pytest.approx([2.0, 3.0, 0.6, 1.0])
    zero = importance_weights(
        old, behaviour, segments, level="token", high=3.0, low=0.6, outside="zero"
    )
    assert zero.tolist() == pytest.approx([2.0, 0.0, 0.0, 1.0])
    product = importance_weights(old, behaviour, segments, level="sequence")
    assert product.tolist() == pytest.approx([8.0, 8.0, 0.5, 8.0])
    mean = importance_weights(old, behaviour, segments, level="geometric")
    assert mean.tolist() == pytest.approx([2.0, 2.0, 0.5, 2.0])


def test_weights_carry_no_gradient() -> None:
    old, behaviour, segments = gaps(2.0, 4.0, 0.5, 1.0)
    weights = importance_weights(old.requires_grad_(), behaviour, segments, level="sequence")
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("level", "estimator", "low", "high", "kept"),
    [
        ("token", "k1", -math.log(3), None, [1, 0, 1, 1]),
        ("token", "k2", None, 0.5, [1, 0, 1, 1]),
        ("token", "k3", None, 0.25, [0, 0, 1, 1]),
        ("sequence-mean", "k1", -math.log(1.9), math.log(3), [0, 0, 1, 0]),
        ("sequence-sum", "k1", -math.log(9), math.log(1.5), [1, 1, 0, 1]),
        ("sequence-max", "k2", None, 0.5, [0, 0, 1, 0]),
        ("none", "k3", 5.0, 6.0, [1, 1, 1, 1]),
    ],
)
def test_rejections_by_hand(
    level: str, estimator: str, low: float | None, high: float | None, kept: list[int]
) -> None:
    old, behaviour, segments = gaps(2.0, 4.0, 0.5, 1.0)
    mask = rejection_mask(
        old,
        behaviour,
        segments,
        level=level,
        estimator=estimator,
        low=low,
        high=high,  # type: ignore[arg-type]
    )
    assert mask.tolist() == [bool(k) for k in kept]


@pytest.mark.parametrize("level", ["token", "sequence-mean", "sequence-sum", "sequence-max"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_two_divergences_are_each_others_with_the_policies_exchanged(
    level: RejectionLevel, estimator: GapEstimator
) -> None:
    torch.manual_seed(0)
    old, behaviour = torch.randn(2, 30, dtype=torch.float64)
    segments = Segments.of(torch.randint(0, 5, (30,)))
    where: dict[str, Any] = {"segments": segments, "level": level, "estimator": estimator}
    usual = gap_statistic(old, behaviour, **where)
    other = gap_statistic(old, behaviour, divergence="old-behaviour", **where)
    torch.testing.assert_close(other, gap_statistic(behaviour, old, **where))
    assert bool((usual - other).abs().max() > 0.1) == (estimator != "k2")
    bound = float(other.median())
    keep = rejection_mask(old, behaviour, divergence="old-behaviour", high=bound, **where)
    assert torch.equal(keep, other <= bound)
    assert keep.any()
    assert not keep.all()


def test_a_token_that_got_likelier_is_rejected_by_one_divergence_and_kept_by_the_other() -> None:
    # d = log 2 and log 1/2: exp(d) - 1 - d is 0.307 and 0.193.
    old, behaviour, _ = gaps(2.0, 0.5, 1.0, 1.0)
    kept = {}
    for divergence in get_args(Divergence):
        spec = loss.reinforce(rejection=loss.reject(high=0.25, divergence=divergence))
        batch = TokenBatch(
            advantages=torch.ones_like(old), old_logprobs=old, behaviour_logprobs=behaviour
        )
        kept[divergence] = resolve_loss(spec)(old, batch).means["kept_fraction"].tolist()
    assert kept == {"behaviour-old": [0, 1, 1, 1], "old-behaviour": [1, 0, 1, 1]}


def test_the_sequence_mask_takes_negative_tokens_of_samples_that_moved_away() -> None:
    # The policy is below its anchor in the first sample by log 2 on average, above it in the other.
    anchor, policy, segments = gaps(2.0, 4.0, 0.5, 1.0)
    advantages = double(-1.0, 1.0, -1.0, -1.0)
    keep = sequence_mask(policy, anchor, advantages, segments, 0.5)
    assert keep.tolist() == [False, True, True, False]
    assert sequence_mask(policy, anchor, advantages, segments, 0.7).all()
    small = sequence_mask(policy, anchor, double(-0.1, 0.1, 1.0, 0.0), segments, 0.5)
    assert small.tolist() == [False, True, True, True]
    # A sample that moved by exactly the limit stays.
    at_limit = double(-1.0, -1.0, -1.0, -1.0)
    assert sequence_mask(at_limit - 0.5, at_limit, at_limit, segments, 0.5).all()
    assert not sequence_mask(at_limit - 0.75, at_limit, at_limit, segments, 0.5).any()


def test_bounds_themselves_are_kept() -> None:
    old, behaviour, segments = gaps(2.0, 0.5, 1.0, 4.0)
    low, high = float((old - behaviour)[1].exp()), float((old - behaviour)[0].exp())
    weights = importance_weights(
        old, behaviour, segments, level="token", low=low, high=high, outside="zero"
    )
    assert weights.tolist() == [high, low, 1.0, 0.0]
    statistic = gap_statistic(old, behaviour, segments, level="token", estimator="k1")
    keep = rejection_mask(
        old,
        behaviour,
        segments,
        level="token",
        estimator="k1",
        low=float(statistic[0]),
        high=float(statistic[1]),
    )
    assert keep.tolist() == [True, True, True, False]


def test_the_value_loss_by_hand() -> None:
    batch = TokenBatch(old_values=double(0, 0, 0), returns=double(1, -1, 1))
    values = double(0.5, 0.5, -0.5)
    terms = value_clip(values, batch, ValueClip(clip=0.2))
    # Clipped to 0.2, 0.2 and -0.2; the larger error counts.
    assert terms.values.tolist() == pytest.approx([0.32, 1.125, 1.125])
    assert terms.means["value_clip_fraction"].tolist() == [1, 0, 0]
    huber = value_clip(values, batch, ValueClip(clip=None, form="huber", delta=1.0))
    assert huber.values.tolist() == pytest.approx([0.125, 1.0, 1.0])


@pytest.mark.parametrize("chunk", [1 << 22, 13])
def test_entropies_have_the_gradient_of_log_softmax(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64).requires_grad_()
    rows, tokens = torch.tensor([0, 0, 2, 5]), torch.tensor([3, 4, 10, 0])
    weight, bonus = torch.randn(4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    for use_logprobs in (True, False):
        got, entropy = chosen_logprobs(logits, rows, tokens, 0.7)
        total = (entropy * bonus).sum() + ((got * weight).sum() if use_logprobs else 0)
        (grad,) = torch.autograd.grad(total, logits)
        table = (logits / 0.7).log_softmax(-1)
        want = (-(table.exp() * table).sum(-1) * bonus).sum()
        want = want + ((table[rows, tokens] * weight).sum() if use_logprobs else 0)
        torch.testing.assert_close(grad, torch.autograd.grad(want, logits)[0])


def test_a_token_that_sampling_excludes_has_no_part_in_the_entropy() -> None:
    logits = double(1.0, 2.0, -torch.inf)[None].requires_grad_()
    logprobs, entropy = chosen_logprobs(logits, torch.tensor([0]), torch.tensor([1]), 1.0)
    (logprobs.sum() + entropy.sum()).backward()
    p = 1 / (1 + math.e)
    assert float(entropy.detach()) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert float(logits.grad[0, 2]) == 0


def test_mismatch_by_hand() -> None:
    behaviour = np.log([0.5, 0.25, 0.5])
    trainer = np.log([0.25, 0.5, 0.5])
    got = mismatch(trainer, behaviour, [0, 0, 1])
    assert got["mismatch/k1"] == pytest.approx(0.0)
    assert got["mismatch/k3"] == pytest.approx((0.5 - 1 + math.log(2) + 2 - 1 - math.log(2)) / 3)
    assert got["mismatch/abs_max"] == pytest.approx(math.log(2))
    assert got["mismatch/prob_abs_mean"] == pytest.approx(0.5 / 3)
    assert got["mismatch/ratio_q50"] == pytest.approx(1.0)
    assert got["mismatch/ratio_max"] == pytest.approx(2.0)
    assert got["mismatch/ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert got["mismatch/sequence_k1"] == pytest.approx(0.0)
    assert got["mismatch/sequence_ess"] == pytest.approx(1.0)


def test_mismatch_has_a_direction_and_counts_tokens_and_samples() -> None:
    # d is log 2, log 4, 0 and -log 2; its sums over samples of 3 and 1 tokens are log 8, -log 2.
    d = np.log([2.0, 4.0, 1.0, 0.5])
    got = mismatch(d - 3.0, np.full(4, -3.0), [5, 5, 5, 2])
    one = math.log(2)
    assert got["mismatch/k1"] == pytest.approx(-2 * one / 4)
    assert got["mismatch/k3"] == pytest.approx((7.5 - 4 - 2 * one) / 4)
    assert got["mismatch/abs_mean"] == pytest.approx(4 * one / 4)
    assert got["mismatch/abs_max"] == pytest.approx(2 * one)
    p = math.exp(-3)
    assert got["mismatch/prob_abs_mean"] == pytest.approx(p * (1 + 3 + 0 + 0.5) / 4)
    assert got["mismatch/prob_abs_max"] == pytest.approx(3 * p)
    assert got["mismatch/ratio_min"] == pytest.approx(0.5)
    assert got["mismatch/ratio_max"] == pytest.approx(4)
    assert got["mismatch/ratio_q50"] == pytest.approx(1.5)
    assert got["mismatch/ratio_q90"] == pytest.approx(2 + 0.7 * 2)
    assert got["mismatch/ess"] == pytest.approx(7.5**2 / (4 * 21.25))
    assert got["mismatch/sequence_k1"] == pytest.approx(-2 * one / 2)
    assert got["mismatch/sequence_ess"] == pytest.approx(8.5**2 / (2 * 64.25))


def test_mismatch_of_extreme_gaps_is_finite_and_of_nothing_is_empty() -> None:
    got = mismatch([-1.0, -2000.0], [-2000.0, -1.0], [0, 1])
    assert all(np.isfinite(value) for value in got.values())
    assert mismatch([], [], []) == {}
    with pytest.raises(ValueError, match="differ"):
        mismatch([0.0], [0.0, 1.0], [0])
