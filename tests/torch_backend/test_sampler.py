"""The sampler against plain reference implementations, and the uniformity of its noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.specs import Sampling
from flowrl_backends.torch.noise import uniforms
from flowrl_backends.torch.sampler import draw, inverse_cdf, row_options, truncate


def reference_distribution(
    logits: list[float], sampling: Sampling, seen: set[int], forbidden: set[int]
) -> list[float]:
    """The distribution that a token is drawn from, token by token, in Python floats."""
    values = []
    for token, logit in enumerate(logits):
        value = logit
        if token in seen:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value = -math.inf if token in forbidden else value / (sampling.temperature or 1.0)
        values.append(value)
    kept = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.top_k:
        edge = values[kept[min(sampling.top_k, len(kept)) - 1]]
        kept = [token for token in kept if values[token] >= edge]
    top = values[kept[0]]
    weights = {token: math.exp(values[token] - top) for token in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        if nucleus and reached / total >= sampling.top_p and sampling.top_p < 1.0:
            break
        nucleus.append(token)
        reached += weights[token]
    final = {t: weights[t] for t in nucleus if weights[t] >= sampling.min_p}
    total = sum(final.values())
    return [final.get(token, 0.0) / total for token in range(len(logits))]


CASES = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(top_k=4),
    Sampling(top_k=1),
    Sampling(top_k=1000),
    Sampling(top_p=0.7),
    Sampling(top_p=0.01),
    Sampling(min_p=0.15),
    Sampling(repetition_penalty=1.5),
    Sampling(repetition_penalty=0.8, temperature=1.3),
    Sampling(min_tokens=5),
    Sampling(temperature=1.4, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.2, min_tokens=3),
]


@pytest.mark.parametrize("vocab_size", [12, 700])
@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_each_option_draws_the_token_of_the_reference_distribution(sampling, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    n = 200
    logits = torch.randn(n, vocab_size, generator=generator) * 2
    seen = torch.rand(n, vocab_size, generator=generator) < 0.3
    forbidden = torch.zeros(n, vocab_size, dtype=torch.bool)
    forbidden[:, 2:5] = sampling.min_tokens > 0
    uniform = torch.from_numpy(uniforms(list(range(n)), [0] * n, 1)[:, 0])
    options = row_options([sampling] * n, vocab_size)
    tokens, logprobs, _ = draw(logits, options, uniform, seen=seen, forbidden=forbidden)
    plain = torch.log_softmax(logits.double() / (sampling.temperature or 1.0), -1)
    for i in range(n):
        penalised = set(seen[i].nonzero().flatten().tolist())
        banned = {2, 3, 4} if sampling.min_tokens else set()
        weights = reference_distribution(logits[i].tolist(), sampling, penalised, banned)
        token, u = int(tokens[i]), float(uniform[i])
        below = sum(weights[:token])
        assert weights[token] > 0
        assert below - 1e-5 <= u <= below + weights[token] + 1e-5
        assert float(logprobs[i]) == pytest.approx(float(plain[i, token]), abs=1e-5)
    assert_sampler_reports_its_own_distribution(
        logits, sampling, tokens, uniform, seen=seen, forbidden=forbidden
    )


def assert_sampler_reports_its_own_distribution(
    logits: torch.Tensor,
    sampling: Sampling,
    drawn: torch.Tensor,
    uniform: torch.Tensor,
    *,
    seen: torch.Tensor,
    forbidden: torch.Tensor,
) -> None:
    """With `logprobs="sampler"` the same tokens come with what they were really drawn from."""
    sampling = replace(sampling, logprobs="sampler")
    options = row_options([sampling] * len(logits), logits.shape[1])
    tokens, logprobs, left = draw(logits, options, uniform, seen=seen, forbidden=forbidden)
    assert tokens.tolist() == drawn.tolist()
    assert (left is not None) == sampling.reports_kept
    for i in range(len(logits)):
        penalised = set(seen[i].nonzero().flatten().tolist())
        banned = set(forbidden[i].nonzero().flatten().tolist())
        weights = reference_distribution(logits[i].tolist(), sampling, penalised, banned)
        assert float(logprobs[i]) == pytest.approx(math.log(weights[int(tokens[i])]), abs=1e-5)
        if left is not None:
            assert left[i].tolist() == [weight > 0 for weight in weights]


def test_rows_with_different_options_draw_what_each_draws_alone():
    n = len(CASES)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(n + 1, 90, generator=generator) * 2
    seen = torch.rand(n + 1, 90, generator=generator) < 0.3
    uniform = torch.rand(n + 1, generator=generator)
    # Some rows report the sampler's distribution, and some the model's.
    rows = [replace(row, logprobs="sampler") if i % 2 else row for i, row in enumerate(CASES)]
    rows.append(Sampling(temperature=0.0))
    forbidden = torch.zeros(n + 1, 90, dtype=torch.bool)
    together = draw(logits, row_options(rows, 90), uniform, seen=seen, forbidden=forbidden)
    for i, row in enumerate(rows):
        part = slice(i, i + 1)
        alone = draw(
            logits[part],
            row_options([row], 90),
            uniform[part],
            seen=seen[part],
            forbidden=forbidden[part],
        )
        assert int(alone[0]) == int(together[0][i])
        torch.testing.assert_close(alone[1], together[1][part], atol=1e-6, rtol=0)
        if alone[2] is not None and row.reports_kept:
            assert together[2] is not None
            assert torch.equal(alone[2], together[2][part])
    assert int(together[0][-1]) == int(logits[-1].argmax())


def test_greedy_takes_the_likeliest_token_with_logprobs_at_temperature_one():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    greedy = Sampling(temperature=0.0)
    tokens, logprobs, left = draw(logits, row_options([greedy] * 5, 40), torch.zeros(5))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))
    assert left is None


def test_greedy_rows_report_the_truncated_distribution_at_temperature_one():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    greedy = Sampling(temperature=0.0, top_k=3, logprobs="sampler")
    tokens, logprobs, left = draw(logits, row_options([greedy] * 5, 40), torch.zeros(5))
    best = logits.topk(3, -1)
    assert tokens.tolist() == best.indices[:, 0].tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(best.values, -1)[:, 0])
    assert left is not None
    assert left.sum(-1).tolist() == [3] * 5


def test_ties_at_the_edge_of_top_k_are_kept_and_of_top_p_cut_at_the_lower_id():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = truncate(logits, row_options([Sampling(top_k=2)], 5))
    assert kept.isfinite().tolist() == [[False, True, True, True, False]]
    equal = torch.zeros(1, 4)
    kept = truncate(equal, row_options([Sampling(top_p=0.5)], 4))
    assert kept.isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("vocab_size", [1, 7, 256, 257, 1000, 4096])
def test_the_extremes_of_the_noise_stay_on_tokens_of_non_zero_probability(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    probs = torch.softmax(torch.randn(400, vocab_size, generator=generator) * 6, -1)
    keep = torch.rand(400, vocab_size, generator=generator) < 0.1
    keep[:, vocab_size // 2] = True
    probs = torch.where(keep, probs, 0.0)
    probs[200:] /= probs[200:].sum(-1, keepdim=True)
    for u in (0.0, 2.0**-24, 0.5, 1.0 - 2.0**-24):
        tokens = inverse_cdf(probs, torch.full((400,), u))
        assert bool((probs.gather(-1, tokens[:, None]) > 0).all())
    first = inverse_cdf(probs, torch.zeros(400))
    assert first.tolist() == (probs > 0).int().argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [10, 600])
def test_frequencies_of_drawn_tokens_fit_the_distribution(vocab_size):
    """Pearson's chi-square over bins that expect at least 20; the bound is 5 sigma."""
    probs = torch.softmax(torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)), -1)
    n = 40_000
    uniform = torch.from_numpy(uniforms([77], [0], n)[0])
    tokens = inverse_cdf(probs.expand(n, -1), uniform)
    expected = probs.double().numpy() * n
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    use = expected >= 20
    statistic = float(((counts[use] - expected[use]) ** 2 / expected[use]).sum())
    degrees = int(use.sum()) - 1
    assert abs(statistic - degrees) < 5 * math.sqrt(2 * degrees)


def test_noise_is_uniform_and_independent_between_tokens_and_seeds():
    draws = uniforms(list(range(400)), [0] * 400, 400)
    assert draws.dtype == np.float32
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=64, range=(0, 1))[0]
    expected = draws.size / 64
    assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 5 * math.sqrt(2 * 63)
    for other in (draws[:, 1:], draws[1:, :], np.diagonal(draws, 1)):
        one = draws[:, :-1] if other.shape == (400, 399) else draws[:-1, :]
        pair = (np.diagonal(draws)[:-1], other) if other.ndim == 1 else (one.ravel(), other.ravel())
        correlation = np.corrcoef(*pair)[0, 1]
        assert abs(correlation) < 5 / math.sqrt(other.size)


def test_noise_of_a_token_depends_on_seed_and_place_alone():
    whole = uniforms([5, -3, 2**70 + 1], [0, 0, 0], 50)
    assert np.array_equal(uniforms([5], [20], 10)[0], whole[0, 20:30])
    assert np.array_equal(uniforms([1], [7], 3)[0], whole[2, 7:10])
    assert not np.array_equal(whole[0], whole[1])
    assert np.array_equal(whole * 2**24, np.round(whole * 2**24))


def test_noise_follows_its_published_formula():
    """SplitMix64's first outputs for state 0 begin with e220a8397b1dcdaf (Vigna's reference)."""
    from flowrl_backends.torch.noise import _GOLDEN, _mix

    first = _mix(np.array([_GOLDEN], dtype=np.uint64))
    assert int(first[0]) == 0xE220A8397B1DCDAF


def test_rows_that_are_not_finite_give_a_token_inside_the_vocabulary():
    for vocab_size in (20, 300):
        logits = torch.full((2, vocab_size), torch.nan)
        options = row_options([Sampling()] * 2, vocab_size)
        tokens, logprobs, _ = draw(logits, options, torch.zeros(2))
        assert bool((tokens < vocab_size).all())
        assert bool(logprobs.isnan().all())
