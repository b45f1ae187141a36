"""Policy losses: gradients by finite differences, parts of a mini-batch, numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.algo.corrections import Segments
from flowrl.algo.losses import TokenBatch, aggregate, prepare, prepares, sample_weights
from flowrl.algo.resolve import resolve_loss
from flowrl.errors import TraceError
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.specs import loss, spec_from_json
from flowrl.specs.loss import CISPO, GMPO, SAPO, TOPR, Aggregation, LossSpec, PolicyLoss
from tests.algo.loss_cases import LENGTHS, LOSSES, draw, part
from tests.algo.plain_losses import PlainLoss

Function = Callable[[torch.Tensor], torch.Tensor]


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slopes(function: Function, at: torch.Tensor) -> torch.Tensor:
    """Central differences of a scalar function in float64."""
    step = 1e-6
    rows = [torch.zeros_like(at).index_fill_(0, torch.tensor(i), step) for i in range(len(at))]
    return torch.stack([(function(at + r) - function(at - r)) / (2 * step) for r in rows])


def held(name: str, at: torch.Tensor, batch: TokenBatch) -> Function:
    """The sum of a loss's values with the factors that it detaches held at their values at `at`.

    Losses that detach nothing that depends on the logprobs are taken as they are.
    """
    spec = LOSSES[name]
    a, behaviour = batch.advantages, batch.behaviour_logprobs
    assert a is not None
    assert behaviour is not None
    assert batch.samples is not None
    segments = Segments.of(batch.samples)
    ratio, d = (at - behaviour).exp(), segments.sums(at - behaviour)
    if name == "gspo-token":
        s = segments.means(at - behaviour).exp()

        def token(x: torch.Tensor) -> torch.Tensor:
            r = s * (x - at).exp()
            return torch.maximum(-a * r, -a * r.clamp(0.97, 1.04)).sum()

        return token
    weights = {
        "cispo": ratio.clamp(0.7, 1.2),
        "cispo-cap": ratio.clamp(max=1.1),
        "cispo-masked": ratio * ((ratio >= 0.8) & (ratio <= 1.25)),
        "cispo-sequence": segments.means(at - behaviour).exp().clamp(max=1.02),
        "topr": torch.where(a >= 0, torch.ones_like(d), d.exp().clamp(max=1.0)),
        "topr-bounds": torch.where(a >= 0, d.exp().clamp(0.9, 1.4), d.exp().clamp(0.3, 1.2)),
        "topr-token": torch.where(a >= 0, ratio.clamp(0.5, 1.5), ratio.clamp(0.0, 1.2)),
        "vespo": torch.where(
            a >= 0,
            (2 * d - 3 * (d.exp() - 1)).exp(),
            (3 * d - 2 * (d.exp() - 1)).exp(),
        ),
    }
    if name == "rejected-mean":
        old = batch.old_logprobs
        assert old is not None
        keep = segments.means(behaviour - old).abs() <= 0.1
        weights[name] = (at - old).exp().clamp(max=1.2) * keep
    if name in weights:
        return lambda x: (-weights[name] * a * x).sum()
    function = resolve_loss(spec)
    return lambda x: function(x, batch).values.sum()


POLICY_LOSSES = [name for name, spec in LOSSES.items() if isinstance(spec, PolicyLoss)]


VARIANTS: dict[str, dict[str, Any]] = {
    "behaviour": {"anchor": "behaviour"},
    "old": {"anchor": "old"},
    "clamped": {"min_log_ratio": -0.2, "max_log_ratio": 0.25},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_random_losses_are_those_of_their_formulas(name: str, variant: str) -> None:
    spec = LOSSES[name]
    assert isinstance(spec, PolicyLoss)
    spec = replace(spec, **VARIANTS[variant])
    for seed in range(4):
        at, batch = draw(seed)
        got = resolve_loss(spec)(at, batch).values
        plain = PlainLoss(spec, at, batch)
        torch.testing.assert_close(got, double(*plain.values), rtol=1e-6, atol=1e-9)


def test_unequal_bounds_are_not_exchanged() -> None:
    # Every case with two bounds gives other numbers when they change places.
    pairs = [("clip_low", "clip_high"), ("tau_positive", "tau_negative")]
    pairs += [("k_positive", "k_negative"), ("lambda_positive", "lambda_negative")]
    seen = set()
    for name in POLICY_LOSSES:
        spec = LOSSES[name]
        for one, other in pairs:
            first, second = getattr(spec, one, None), getattr(spec, other, None)
            if first == second:
                continue
            at, batch = draw(1)
            exchanged = replace(spec, **{one: second, other: first})
            got, against = (resolve_loss(each)(at, batch).values for each in (spec, exchanged))
            assert not torch.allclose(got, against), (name, one)
            seen.add((spec.kind, one))
    assert {("gmpo", "clip_low"), ("policy_clip", "clip_low"), ("sapo", "tau_positive")} <= seen
    assert {("vespo", "k_positive"), ("vespo", "lambda_positive")} <= seen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_slope_with_detached_factors_held(name: str, seed: int) -> None:
    at, batch = draw(seed)
    batch = prepare(at, batch, LOSSES[name])
    x = at.clone().requires_grad_()
    values = resolve_loss(LOSSES[name])(x, batch).values
    values.sum().backward()
    assert x.grad is not None
    function = held(name, at, batch)
    torch.testing.assert_close(x.grad, slopes(function, at), rtol=1e-6, atol=1e-7)
    assert x.grad.abs().sum() > 0


def whole(name: str, aggregation: Aggregation, weights: np.ndarray) -> tuple[float, torch.Tensor]:  # type: ignore[type-arg]
    at, batch = draw()
    x = at.clone().requires_grad_()
    spread = torch.from_numpy(np.repeat(weights, LENGTHS))
    total = aggregate(resolve_loss(LOSSES[name])(x, batch).values, spread)
    total.backward()
    assert x.grad is not None
    return float(total.detach()), x.grad


@pytest.mark.parametrize("cut", [[[0], [1, 2], [3, 4], [5]], [[5, 0, 3], [1, 4, 2]]])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_mini_batch(name: str, cut: list[list[int]]) -> None:
    spec = LOSSES[name]
    aggregation: Aggregation = spec.aggregation  # type: ignore[attr-defined]
    weights = sample_weights(LENGTHS, aggregation, max_tokens=9, groups=[0, 0, 1, 1, 2, 2])
    want, want_grad = whole(name, aggregation, weights)
    at, batch = draw()
    # What the trainer does: learn what must be known of the whole, then go through the parts.
    prepared = prepare(at if prepares(spec) == "logprobs" else None, batch, spec)
    x = at.clone().requires_grad_()
    assert batch.samples is not None
    total = 0.0
    for samples in cut:
        chosen = torch.isin(batch.samples, torch.tensor(samples))
        spread = torch.from_numpy(weights)[batch.samples[chosen]]
        value = aggregate(resolve_loss(spec)(x[chosen], part(prepared, chosen)).values, spread)
        value.backward()
        total += float(value.detach())
    assert total == pytest.approx(want, abs=1e-12)
    torch.testing.assert_close(x.grad, want_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize(
    "aggregation",
    [
        "token-mean",
        "sequence-mean-token-mean",
        "sequence-mean-token-sum",
        "constant",
        "prompt-mean-token-mean",
    ],
)
def test_ranks_add_up_to_the_mini_batch_and_average_to_it_with_dp_size(
    aggregation: Aggregation, count_empty: bool
) -> None:
    lengths, groups = np.array(LENGTHS), np.array([0, 0, 1, 1, 2, 2])
    prompts = aggregation == "prompt-mean-token-mean"
    want = sample_weights(
        lengths, aggregation, max_tokens=9, groups=groups, count_empty=count_empty
    )
    present = lengths > 0
    count = len(np.unique(groups)) if prompts else len(lengths) if count_empty else present.sum()
    got = []
    for rank in (slice(0, 2), slice(2, 6)):
        weights = sample_weights(
            lengths[rank],
            aggregation,
            max_tokens=9,
            groups=groups[rank],
            count_empty=count_empty,
            num_tokens=float(lengths.sum()),
            num_samples=float(count),
            dp_size=2,
        )
        got.append(weights)
    np.testing.assert_allclose(np.concatenate(got) / 2, want, rtol=1e-12)


def test_samples_without_tokens_count_or_do_not() -> None:
    lengths = [2, 0, 2]
    counted = sample_weights(lengths, "sequence-mean-token-mean")
    left_out = sample_weights(lengths, "sequence-mean-token-mean", count_empty=False)
    assert counted.tolist() == pytest.approx([1 / 6, 0, 1 / 6])
    assert left_out.tolist() == pytest.approx([1 / 4, 0, 1 / 4])


def test_prompts_weigh_alike_whatever_their_samples() -> None:
    weights = sample_weights(
        [1, 3, 2, 0], "prompt-mean-token-mean", groups=[7, 7, 3, 5], count_empty=False
    )
    assert weights.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 4, 0])
    counted = sample_weights([1, 3, 2, 0], "prompt-mean-token-mean", groups=[7, 7, 3, 5])
    assert counted.tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6, 0])
    with pytest.raises(ValueError, match="groups"):
        sample_weights([1], "prompt-mean-token-mean")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_back_from_its_text_and_its_json(name: str) -> None:
    spec = LOSSES[name]
    assert parse_attr(format_attr(spec)) == spec
    assert spec_from_json("loss", spec.to_json()) == spec


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_no_more_than_it_says(name: str) -> None:
    spec = LOSSES[name]
    at, batch = draw()
    always = {"samples", "entropy"}
    least = TokenBatch(**{field: getattr(batch, field) for field in {*spec.needs, *always}})
    got = resolve_loss(spec)(at, least)
    torch.testing.assert_close(got.values, resolve_loss(spec)(at, batch).values)
    for field in spec.needs:
        lacking = TokenBatch(**{f: getattr(batch, f) for f in {*spec.needs, *always} if f != field})
        with pytest.raises(ValueError, match=field):
            resolve_loss(spec)(at, lacking)


@pytest.mark.parametrize("name", LOSSES)
def test_proportional_losses_are_zero_where_a_samples_advantages_are(name: str) -> None:
    at, batch = draw()
    assert batch.samples is not None
    assert batch.advantages is not None
    still = batch.samples == 3
    zeroed = part(batch, torch.ones_like(still))
    object.__setattr__(zeroed, "advantages", torch.where(still, 0.0, batch.advantages))
    x = at.clone().requires_grad_()
    function = resolve_loss(LOSSES[name])
    values = function(x, zeroed).values
    values.sum().backward()
    assert x.grad is not None
    zero = bool((values[still] == 0).all() and (x.grad[still] == 0).all())
    assert zero == function.proportional


def test_who_corrects_for_the_behaviour_policy() -> None:
    assert loss.policy_clip().corrects_behaviour
    assert not loss.policy_clip(anchor="old").corrects_behaviour
    assert loss.policy_clip(correction=loss.truncate()).corrects_behaviour
    assert not loss.policy_clip(rejection=loss.reject(high=0.1)).corrects_behaviour
    assert not loss.reinforce().corrects_behaviour
    assert loss.reinforce(correction=loss.truncate()).corrects_behaviour
    assert not loss.cross_entropy().corrects_behaviour


def test_weights_on_top_of_a_behaviour_ratio_are_refused() -> None:
    with pytest.raises(TraceError, match="count twice"):
        loss.policy_clip(anchor="behaviour", correction=loss.truncate())


def values_of(spec: LossSpec, ratios: list[float], advantages: list[float]) -> list[float]:
    """The loss of tokens of one sample whose old and behaviour logprobs are -1."""
    anchor = double(*[-1.0] * len(ratios))
    batch = TokenBatch(
        advantages=double(*advantages),
        old_logprobs=anchor,
        behaviour_logprobs=anchor,
        samples=torch.zeros(len(ratios), dtype=torch.int64),
    )
    found: list[float] = resolve_loss(spec)(double(*ratios).log() - 1, batch).values.tolist()
    return found


def test_dual_clip_and_ratio_cap_bound_the_loss_of_negative_advantages() -> None:
    ratios, advantages = [5.0, 5.0, 1.1], [-2.0, 2.0, -1.0]
    want = [6.0, -2.4, 1.1]
    assert values_of(loss.policy_clip(0.2, dual_clip=3.0), ratios, advantages) == pytest.approx(
        want
    )
    assert values_of(loss.policy_clip(0.2, ratio_cap=3.0), ratios, advantages) == pytest.approx(
        want
    )


def test_sequence_ratios_by_hand() -> None:
    # The geometric mean of 2 and 1/8 is 1/2, which the lower bound replaces at A < 0 alone.
    got = values_of(loss.gspo(0.1, 0.2), [2.0, 0.125], [3.0, -3.0])
    assert got == pytest.approx([-1.5, 2.7])


def test_weighted_gradients_by_hand() -> None:
    logprobs = [math.log(2.0) - 1, math.log(0.5) - 1]
    assert values_of(loss.reinforce(), [2.0, 0.5], [1.0, -1.0]) == pytest.approx(
        [-logprobs[0], logprobs[1]]
    )
    assert values_of(loss.cispo(0.2, 0.5), [2.0, 0.5], [1.0, -1.0]) == pytest.approx(
        [-1.5 * logprobs[0], 0.8 * logprobs[1]]
    )
    masked = CISPO(ratio_low=0.4, ratio_high=1.5, outside="zero")
    assert values_of(masked, [2.0, 0.5], [1.0, -1.0]) == pytest.approx([0, 0.5 * logprobs[1]])
    # The sample's ratio is 2 * 0.5 * 0.5 = 0.5.
    third = math.log(0.5) - 1
    assert values_of(loss.topr(), [2.0, 0.5, 0.5], [1.0, -1.0, 0.0]) == pytest.approx(
        [-logprobs[0], 0.5 * logprobs[1], -0.0 * third]
    )
    phi = 0.5**2 * math.exp(3 * 0.5), 0.5**3 * math.exp(2 * 0.5)
    assert values_of(loss.vespo(), [2.0, 0.25], [1.0, -1.0]) == pytest.approx(
        [-phi[0] * logprobs[0], phi[1] * (math.log(0.25) - 1)]
    )


def test_soft_and_geometric_bounds_by_hand() -> None:
    assert values_of(SAPO(tau_positive=2.0), [1.0], [3.0]) == pytest.approx([-3.0])
    gate = 4 / 2 / (1 + math.exp(-2 * 0.5))
    assert values_of(SAPO(tau_positive=2.0), [1.5], [1.0]) == pytest.approx([-gate])
    # log 2 is clipped to 0.3 at A > 0; log 1/2 is not, its clip being above it.
    got = values_of(GMPO(clip_low=0.3, clip_high=0.3), [2.0, 0.5], [1.0, 1.0])
    assert got == pytest.approx([-math.exp((0.3 - math.log(2)) / 2)] * 2)


def test_total_variation_masks_by_probability_and_direction() -> None:
    p = math.exp(-1)
    far = (p + 0.2) / p
    got = values_of(loss.dppo(0.1), [far, far, 1.0], [1.0, -1.0, 1.0])
    assert got == pytest.approx([0.0, far, -1.0])


def test_kl_cov_penalises_the_largest_covariance() -> None:
    # Advantages and logprobs of the first token are both far above their means.
    got = values_of(loss.kl_cov(0.34, 10.0), [2.0, 0.5, 0.5], [4.0, 0.0, 0.1])
    assert got == pytest.approx([-8 + 10 * math.log(2), 0.0, -0.05])


def test_kimi_squares_the_log_ratio_of_the_sample() -> None:
    got = values_of(loss.kimi(2.0), [2.0, 2.0], [1.0, 1.0])
    plain = -(math.log(2) - 1)
    assert sum(got) == pytest.approx(2 * plain + (2 * math.log(2)) ** 2)


def test_an_entropy_bonus_lowers_the_loss() -> None:
    at, batch = draw()
    plain = resolve_loss(loss.policy_clip())(at, batch).values
    bonus = resolve_loss(loss.policy_clip(entropy=0.5))(at, batch).values
    torch.testing.assert_close(plain - bonus, 0.5 * batch.entropy)
    assert not resolve_loss(loss.policy_clip(entropy=0.5)).proportional


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_metrics_are_finite_and_without_gradient(name: str) -> None:
    at, batch = draw()
    terms = resolve_loss(LOSSES[name])(at.requires_grad_(), batch)
    for values in (*terms.means.values(), *terms.maxima.values()):
        assert not values.requires_grad
        assert len(values) in (len(at), sum(length > 0 for length in LENGTHS))
        assert values.isfinite().all()


def metrics_of(
    spec: LossSpec, ratios: list[list[float]], advantages: list[list[float]]
) -> dict[str, float]:
    """Means of the metrics of a loss on samples whose old and behaviour logprobs are -1."""
    flat = double(*[ratio for sample in ratios for ratio in sample])
    anchor = torch.full_like(flat, -1.0)
    batch = TokenBatch(
        advantages=double(*[advantage for sample in advantages for advantage in sample]),
        old_logprobs=anchor,
        behaviour_logprobs=anchor,
        samples=torch.tensor([i for i, sample in enumerate(ratios) for _ in sample]),
    )
    terms = resolve_loss(spec)(flat.log() - 1, batch)
    return {name: float(values.mean()) for name, values in terms.means.items()}


@pytest.mark.parametrize("make", [loss.gspo, loss.luspo])
def test_clip_fractions_of_sequence_ratios_are_shares_of_samples(
    make: Callable[..., LossSpec],
) -> None:
    ratios = [[2.0, 2.0, 2.0], [1.0], [0.5, 0.5], [4.0]]
    advantages = [[1.0, 1.0, 1.0], [1.0], [-1.0, -1.0], [2.0]]
    got = metrics_of(make(0.2, 0.3), ratios, advantages)
    assert got["clip_fraction_high"] == pytest.approx(2 / 4)
    assert got["clip_fraction_low"] == pytest.approx(1 / 4)
    assert got["ratio_mean"] == pytest.approx((2 + 1 + 0.5 + 4) / 4)


def test_clip_fractions_of_token_ratios_are_shares_of_tokens() -> None:
    ratios = [[2.0, 2.0, 2.0], [1.0], [0.5, 0.5], [4.0]]
    advantages = [[1.0, 1.0, -1.0], [1.0], [-1.0, -1.0], [2.0]]
    for spec in (loss.policy_clip(0.2, 0.3), loss.gspo(0.2, 0.3, ratio="sequence-token")):
        got = metrics_of(spec, ratios, advantages)
        assert got["clip_fraction_high"] == pytest.approx(3 / 7)
        assert got["clip_fraction_low"] == pytest.approx(2 / 7)
        assert got["ratio_mean"] == pytest.approx((3 * 2 + 1 + 2 * 0.5 + 4) / 7)


def test_the_dual_clips_fraction_is_of_samples_where_the_ratio_is() -> None:
    ratios, advantages = [[5.0, 5.0, 5.0], [1.0]], [[-1.0, -1.0, -1.0], [-1.0]]
    for level, share in (("token", 3 / 4), ("sequence", 1 / 2)):
        got = metrics_of(loss.policy_clip(0.2, dual_clip=3.0, ratio=level), ratios, advantages)  # type: ignore[arg-type]
        assert got["dual_clip_fraction"] == pytest.approx(share)


def test_metrics_of_the_ratio_have_its_direction() -> None:
    got = metrics_of(loss.dppo(0.5), [[4.0, 1.0], [0.5, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert got["ratio_mean"] == pytest.approx(6.5 / 4)
    assert got["log_ratio"] == pytest.approx(math.log(2) / 4)
    assert got["approx_kl"] == pytest.approx((3 - math.log(4) - 0.5 + math.log(2)) / 4)


def test_clip_fractions_of_other_surrogates_count_the_side_that_acted() -> None:
    # GMPO counts both sides of a token's bounds, by the sign of its advantage.
    ratios = [[math.exp(0.25), math.exp(-0.25), math.exp(0.15)], [math.exp(-0.25), 1.0]]
    got = metrics_of(loss.gmpo(0.2, 0.3), ratios, [[1.0, 1.0, -1.0], [-1.0, -1.0]])
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == pytest.approx((0.2, 0.2))
    got = metrics_of(loss.gmpo(0.3, 0.2), ratios, [[1.0, 1.0, -1.0], [-1.0, -1.0]])
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == pytest.approx((0.0, 0.2))
    # DPPO: p moves by 0.2 up, up, down, down, and by 0.05 up; A says which way counts.
    p = math.exp(-1)
    up, down, near = (p + 0.2) / p, (p - 0.2) / p, (p + 0.05) / p
    got = metrics_of(loss.dppo(0.1), [[up, up, down, down, near]], [[1.0, -1.0, 1.0, -1.0, 1.0]])
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == pytest.approx((0.2, 0.2))
    got = metrics_of(loss.dppo(0.1), [[up, up, down]], [[1.0, 2.0, -1.0]])
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == pytest.approx((1 / 3, 2 / 3))


def test_weights_and_masks_are_measured_over_tokens() -> None:
    old, behaviour = double(-1, -1, -1, -1), double(-1, -1, -1, -1) - double(4, 1, 1, 1).log()
    batch = TokenBatch(
        advantages=torch.ones_like(old),
        old_logprobs=old,
        behaviour_logprobs=behaviour,
        samples=torch.tensor([0, 0, 0, 1]),
    )
    spec = loss.policy_clip(correction=loss.truncate(3.0), rejection=loss.reject(high=1.0))
    terms = resolve_loss(spec)(old, batch)
    assert terms.means["weight_mean"].tolist() == pytest.approx([3, 1, 1, 1])
    assert float(terms.maxima["weight_max"].max()) == pytest.approx(3)
    assert terms.means["kept_fraction"].tolist() == [0, 1, 1, 1]
    assert terms.values.tolist() == pytest.approx([0, -1, -1, -1])


def test_means_of_what_is_one_number_a_sample_are_over_samples() -> None:
    # The samples' ratios are 2, 1/4 and 1; only the second token of the last is out of bounds.
    ratios, advantages = [[2.0, 1.0, 1.0], [0.25], [0.5, 2.0]], [[-1.0] * 3, [-1.0], [-1.0] * 2]
    bounds = {"ratio_low": 0.6, "ratio_high": 1.2}
    got = metrics_of(CISPO(ratio="sequence", **bounds), ratios, advantages)  # type: ignore[arg-type]
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == pytest.approx((1 / 3, 1 / 3))
    got = metrics_of(CISPO(**bounds), ratios, advantages)  # type: ignore[arg-type]
    assert (got["clip_fraction_low"], got["clip_fraction_high"]) == pytest.approx((2 / 6, 2 / 6))
    assert metrics_of(loss.topr(), ratios, advantages)["taper_mean"] == pytest.approx(2.25 / 3)
    by_token = metrics_of(TOPR(level="token"), ratios, advantages)["taper_mean"]
    assert by_token == pytest.approx((1 + 1 + 1 + 0.25 + 0.5 + 1) / 6)
    phi = [w**3 * math.exp(2 * (1 - w)) for w in (2.0, 0.25, 1.0)]
    assert metrics_of(loss.vespo(), ratios, advantages)["phi_mean"] == pytest.approx(sum(phi) / 3)
