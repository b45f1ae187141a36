"""Logprobs behind a sampler's transformation, against plain loops and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algo import logprobs as logprobs_module
from flowrl.algo.logprobs import SamplerTransform, full, sampler_logits, sampler_logprobs

VOCABULARY = 7
NEVER = 1 << 30


class Case:
    """R tokens over K rows of logits, with everything that may be done to them.

    Kept sets hold the drawn token, and at least one more; a token behind which nothing is listed
    keeps all.
    """

    def __init__(self, seed: int, *, penalty: float, stops: bool, cuts: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows = torch.tensor([0, 0, 0, 1, 3, 3])
        count = len(self.rows)
        self.logits = 2 * torch.randn(4, VOCABULARY, generator=draw, dtype=torch.float64)
        self.stops = torch.tensor([1, 4]) if stops else None
        self.early = torch.rand(count, generator=draw) < 0.5
        free = torch.tensor([0, 2, 3, 5, 6])
        self.tokens = free[torch.randint(0, len(free), (count,), generator=draw)]
        self.first = torch.where(
            torch.rand(2, VOCABULARY, generator=draw) < 0.5,
            torch.randint(0, 9, (2, VOCABULARY), generator=draw),
            NEVER,
        )
        self.sample = torch.tensor([0, 1, 0, 1, 1, 0])
        self.place = torch.randint(1, 10, (count,), generator=draw)
        self.penalty = penalty
        self.kept: list[list[int]] = []
        for u in range(count):
            others = torch.rand(VOCABULARY, generator=draw) < 0.4
            kept = {v for v in range(VOCABULARY) if others[v]} | {int(self.tokens[u]), (u + 3) % 3}
            if stops and self.early[u]:
                kept -= {1, 4}
            self.kept.append(sorted(kept) if cuts and u % 5 != 4 else [])
        self.cuts = cuts

    def transform(self) -> SamplerTransform:
        counts = [len(kept) for kept in self.kept]
        flat = [v for kept in self.kept for v in kept]
        return SamplerTransform(
            penalty=self.penalty,
            first=self.first,
            sample=self.sample,
            place=self.place,
            stops=self.stops,
            early=self.early,
            kept_ids=torch.tensor(flat, dtype=torch.int64) if self.cuts else None,
            kept_counts=torch.tensor(counts) if self.cuts else None,
            kept_offsets=tuple(sum(counts[:u]) for u in range(len(counts) + 1)),
        )

    def plain(self, logits: torch.Tensor, temperature: float) -> list[torch.Tensor]:
        """The log-distribution of each token, one number after the other."""
        tables = []
        for u, row in enumerate(self.rows.tolist()):
            values = []
            for v in range(VOCABULARY):
                x = logits[row, v] / (temperature or 1.0)
                if self.penalty != 1.0 and self.first[self.sample[u], v] < self.place[u]:
                    x = x / self.penalty if float(x.detach()) > 0 else x * self.penalty
                banned = self.stops is not None and bool(self.early[u]) and v in (1, 4)
                gone = bool(self.kept[u]) and v not in self.kept[u]
                values.append(x.new_tensor(-math.inf) if banned or gone else x)
            tables.append(torch.stack(values).log_softmax(-1))
        return tables


cases = st.builds(
    Case,
    st.integers(0, 2**16),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    stops=st.booleans(),
    cuts=st.booleans(),
)


def entropy_of(table: torch.Tensor) -> torch.Tensor:
    finite = table[table > -math.inf]
    return -(finite.exp() * finite).sum()


@settings(max_examples=60, deadline=None)
@given(case=cases, temperature=st.sampled_from([1.0, 0.6, 0.0]), chunk=st.sampled_from([7, 15, 99]))
def test_logprobs_and_entropies_are_those_of_the_transformed_distribution(
    case: Case, temperature: float, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk)
        got, entropy = sampler_logprobs(
            case.logits, case.rows, case.tokens, temperature, case.transform()
        )
    tables = case.plain(case.logits, temperature)
    want = torch.stack([table[case.tokens[u]] for u, table in enumerate(tables)])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, torch.stack([entropy_of(table) for table in tables]))


@settings(max_examples=60, deadline=None)
@given(case=cases, temperature=st.sampled_from([1.0, 0.6]), chunk=st.sampled_from([7, 15, 99]))
def test_gradients_are_those_of_finite_differences_with_the_kept_tokens_held_constant(
    case: Case, temperature: float, chunk: int
) -> None:
    # Away from the kink of the penalty at 0, where no derivative exists.
    logits = torch.where(case.logits.abs() < 1e-2, 0.1, case.logits).requires_grad_()
    transform = case.transform()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk)
        assert torch.autograd.gradcheck(
            lambda x: sampler_logprobs(x, case.rows, case.tokens, temperature, transform),
            (logits,),
            eps=1e-6,
            atol=1e-7,
        )


def test_tokens_of_one_row_add_up_their_gradients_before_16_bits_round_them() -> None:
    # 300 equal gradients of about 1 / 3: added one by one in bfloat16 they would stall at 128.
    count = 300
    logits = torch.zeros(1, 3, dtype=torch.bfloat16).requires_grad_()
    transform = SamplerTransform(
        kept_ids=torch.tensor([0, 1, 2] * count),
        kept_counts=torch.full((count,), 3),
        kept_offsets=tuple(range(0, 3 * count + 1, 3)),
    )
    rows = torch.zeros(count, dtype=torch.int64)
    got, _ = sampler_logprobs(logits, rows, rows, 1.0, transform)
    got.sum().backward()  # type: ignore[no-untyped-call]
    assert got.dtype == torch.float32
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) == pytest.approx(2 * count / 3, rel=1e-2)


def test_the_divergence_of_truncated_distributions_has_a_finite_gradient() -> None:
    case = Case(5, penalty=1.3, stops=True, cuts=True)
    logits = case.logits.clone().requires_grad_()
    other = Case(6, penalty=1.3, stops=True, cuts=True).logits
    transform = case.transform()

    def divergence(x: torch.Tensor) -> torch.Tensor:
        left = sampler_logits(x, case.rows, 0.8, transform)
        return full(left, sampler_logits(other, case.rows, 0.8, transform))

    tables = zip(case.plain(case.logits, 0.8), case.plain(other, 0.8), strict=True)
    want = [
        sum(float(p[v].exp() * (p[v] - q[v])) for v in range(VOCABULARY) if p[v] > -math.inf)
        for p, q in tables
    ]
    assert divergence(logits).tolist() == pytest.approx(want)
    assert torch.autograd.gradcheck(divergence, (logits,), eps=1e-6, atol=1e-7)
