"""KL estimators: values by hand, gradients against finite differences, expectations."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from flowrl.algo.kl import adapted, estimate
from flowrl.algo.logprobs import full
from flowrl.algo.resolve import resolve_kl
from flowrl.specs.kl import KL, Estimator, k1, k2, k3, kl_abs

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_estimates_by_hand() -> None:
    new, other = tensor(-1.0, -2.0, -0.5), tensor(-2.0, -1.0, -0.5)  # d = 1, -1, 0
    e = np.e
    want = {
        "k1": [1, -1, 0],
        "abs": [1, 1, 0],
        "k2": [0.5, 0.5, 0],
        "k3": [1 / e, e - 2, 0],
    }
    for estimator in ESTIMATORS:
        np.testing.assert_allclose(estimate(new, other, estimator), want[estimator], atol=1e-12)


def test_clamps_bound_the_log_ratio_and_the_result() -> None:
    new, other = tensor(5.0, -5.0), tensor(0.0, 0.0)
    got = estimate(new, other, "k1", clamp_input=3.0)
    assert got.tolist() == [3, -3]
    got = estimate(new, other, "k2", clamp_input=3.0, clamp_output=4.0)
    assert got.tolist() == [4, 4]
    assert estimate(new, other, "k3", clamp_output=10.0)[1] == 10


@pytest.mark.parametrize("bounds", [(None, None), (2.0, None), (None, 1.5), (2.0, 1.0)])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_equal_finite_differences(
    estimator: Estimator, bounds: tuple[float | None, float | None]
) -> None:
    # No gap lies at a kink: d = 0, a clamp of the input, or of any estimator's output.
    new = tensor(-0.1, -1.3, -4.0, -0.7, -2.2).requires_grad_()
    other = tensor(-0.9, -0.6, -0.3, -3.4, -2.3)
    weights = tensor(1.0, 0.5, 2.0, 1.25, 0.75)

    def value(x: torch.Tensor) -> torch.Tensor:
        kl = estimate(x, other, estimator, clamp_input=bounds[0], clamp_output=bounds[1])
        return (weights * kl).sum()

    value(new).backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    step = 1e-6
    for i in range(len(new)):
        shift = torch.zeros_like(new)
        shift[i] = step
        with torch.no_grad():
            slope = (value(new + shift) - value(new - shift)) / (2 * step)
        np.testing.assert_allclose(new.grad[i], slope, rtol=1e-6, atol=1e-8)


def test_k3_keeps_its_digits_for_policies_that_are_close() -> None:
    gap = torch.tensor([1e-4], dtype=torch.float32)
    got = estimate(gap, torch.zeros(1), "k3")
    np.testing.assert_allclose(got, 0.5e-8, rtol=1e-3)


def test_estimates_average_to_the_whole_divergence() -> None:
    logits, other = tensor(0.3, -1.0, 2.0, 0.0), tensor(0.5, 0.1, 0.9, -0.4)
    p, q = logits.log_softmax(0), other.log_softmax(0)
    whole = full(logits[None], other[None])[0]
    for estimator in ("k1", "k3"):
        mean = (p.exp() * estimate(p, q, estimator)).sum()  # type: ignore[arg-type]
        np.testing.assert_allclose(mean, whole)


def test_the_gradient_of_weighted_k3_is_the_divergences_under_another_policys_samples() -> None:
    behaviour = tensor(0.0, 0.4, -0.2).log_softmax(0)
    logits, other = tensor(0.3, -1.0, 1.0).requires_grad_(), tensor(0.5, 0.1, 0.9)
    (want,) = torch.autograd.grad(full(logits[None], other[None]).sum(), logits)
    p, q = logits.log_softmax(0), other.log_softmax(0)
    weights = (p - behaviour).exp()
    mean = (behaviour.exp() * weights * estimate(p, q, "k3")).sum()
    (got,) = torch.autograd.grad(mean, logits)
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_the_whole_divergence_passes_over_impossible_tokens() -> None:
    logits = tensor(0.0, 0.0, -torch.inf)
    np.testing.assert_allclose(full(logits[None], tensor(0.0, 0.0, 0.0)[None]), np.log(1.5))


def test_penalties_resolve_with_their_clamps() -> None:
    function = resolve_kl(k3(0.1, clamp_input=20.0, clamp_output=10.0))
    assert function(tensor(0.0), tensor(30.0)).item() == 10
    assert resolve_kl(k1(0.1))(tensor(0.0), tensor(30.0)).item() == -30
    assert resolve_kl(kl_abs(0.1))(tensor(0.0), tensor(30.0)).item() == 30
    assert resolve_kl(k2(0.1))(tensor(0.0), tensor(2.0)).item() == 2


def test_a_clamp_shows_in_the_text_only_where_it_is_set() -> None:
    assert str(k3(0.1)) == 'kl(estimator="k3", coefficient=0.1)'
    assert "clamp_output=10.0" in str(k3(0.1, clamp_output=10.0))


def test_the_coefficient_follows_the_divergence_by_at_most_its_clip() -> None:
    spec = k3(0.2, target=0.1, horizon=1000)
    assert adapted(0.2, 0.1, 64, spec) == 0.2
    assert adapted(0.2, 0.11, 100, spec) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert adapted(0.2, 9.0, 100, spec) == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert adapted(0.2, 0.0, 100, spec) == pytest.approx(0.2 * (1 - 0.2 * 0.1))
    with pytest.raises(ValueError, match="above 0"):
        adapted(0.2, 0.1, 64, KL(estimator="k3", coefficient=0.2, target=0.0))
