"""`check_loss` passes what is as it was declared, and names what is not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.algo.losses import TokenBatch
from flowrl.errors import TraceError
from flowrl.specs import loss
from flowrl.specs.loss import LossSpec, OwnLoss
from flowrl.testing import check_loss
from flowrl.testing.frozen_factors import FrozenFactors
from tests.algo import own_functions as own
from tests.algo.loss_cases import LOSSES

PAIRS: dict[str, LossSpec] = {
    "dpo": loss.dpo(0.3),
    "ipo": loss.dpo(0.2, form="ipo"),
    "bradley-terry": loss.bradley_terry(margin=0.5, centering=0.01),
}
OUTCOMES: dict[str, LossSpec] = {
    "implicit-reward": loss.implicit_reward(0.3),
    "outcome": loss.outcome(),
    "token-outcome": loss.outcome(per="token"),
}
ALL = LOSSES | PAIRS | OUTCOMES


@pytest.mark.parametrize("name", ALL)
def test_every_loss_of_the_library_is_what_it_declares(name: str) -> None:
    check_loss(ALL[name])


class Halved(torch.autograd.Function):
    """A custom function, as fused kernels are; `wrong` has another slope than its value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wrong: bool) -> torch.Tensor:
        ctx.slope = 1.0 if wrong else 0.5
        return 0.5 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.slope * gradient, None


@loss.own()
def fused(logprobs: torch.Tensor, batch: TokenBatch, *, wrong: bool = False) -> torch.Tensor:
    found: torch.Tensor = Halved.apply(-logprobs, wrong)  # type: ignore[no-untyped-call]
    return found


@loss.own(needs=("advantages", "behaviour_logprobs"), corrects_behaviour=True)
def weighted(logprobs: torch.Tensor, batch: TokenBatch, *, way: str = "detach") -> torch.Tensor:
    """The policy gradient with a clipped ratio held constant, in ways that say so or not."""
    assert batch.advantages is not None
    assert batch.behaviour_logprobs is not None
    if way == "detach":
        weight = (logprobs - batch.behaviour_logprobs).exp().clamp(0.9, 1.1).detach()
    elif way == "data":
        weight = (logprobs.data - batch.behaviour_logprobs).exp().clamp(0.9, 1.1)
    elif way == "in place":
        with torch.no_grad():
            gap = logprobs - batch.behaviour_logprobs
            weight = torch.ones_like(gap)
            weight[gap > 0] += gap[gap > 0]
            weight.clamp_(max=1.2)
    else:
        gaps = (logprobs - batch.behaviour_logprobs).tolist()
        weight = torch.tensor(gaps, dtype=logprobs.dtype).exp()
    return -weight * batch.advantages * logprobs


GOOD = {
    "clipped": own.clipped,
    "with options": own.clipped(low=0.1, high=0.3),
    "extra field": own.with_bonus,
    "pairs": own.likelier,
    "critic": own.absolute,
    "custom function": fused,
    "detach": weighted,
    "data": weighted(way="data"),
    "in place": weighted(way="in place"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_loss_of_a_users_own_passes(name: str) -> None:
    check_loss(GOOD[name])


@loss.own(needs="advantages")
def centred(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.advantages is not None
    return -(batch.advantages - batch.advantages.mean()) * logprobs


@loss.own()
def ordered(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.samples is not None
    return -logprobs * (1 + (batch.samples == batch.samples[0]))


@loss.own()
def numbered(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.samples is not None
    return -logprobs * (1 + batch.samples % 2)


@loss.own(needs="preferred", predicts="scores")
def by_layout(scores: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Takes neighbours for pairs, the first of them for the preferred one."""
    assert batch.preferred is not None
    gaps = scores[::2] - scores[1::2]
    return -torch.nn.functional.logsigmoid(gaps).repeat_interleave(2) * (1 + 1 * batch.preferred)


@loss.own()
def narrow(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return -logprobs.float()


@loss.own()
def noisy(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return -logprobs * torch.rand_like(logprobs)


@loss.own()
def flat(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return 0 * logprobs


@loss.own()
def rough(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return (1e6 * logprobs).sin()


@loss.own(needs=("advantages", "returns"))
def idle(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.advantages is not None
    return -batch.advantages * logprobs


@loss.own(needs=("advantages",), extra="length")
def short_only(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.advantages is not None
    return -batch.advantages * logprobs * (batch.extra["length"] < 100)


@loss.own(needs=("advantages",), proportional=True)
def shifted(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.advantages is not None
    return (0.1 - batch.advantages) * logprobs


@loss.own(needs=("advantages", "behaviour_logprobs"), corrects_behaviour=True)
def masked(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    assert batch.advantages is not None
    assert batch.behaviour_logprobs is not None
    near = (logprobs - batch.behaviour_logprobs).detach().abs() < 0.3
    return torch.where(near, -batch.advantages * logprobs, 0.0 * logprobs)


@loss.own()
def fails(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    raise RuntimeError("out of ideas")


UNSAID: OwnLoss = replace(own.clipped, corrects=False)

BAD: dict[str, tuple[LossSpec, str]] = {
    "wrong backward": (fused(wrong=True), "its gradient is not the slope of its value"),
    "hidden factor": (weighted(way="list"), "its gradient is not the slope of its value"),
    "batch statistic": (centred, "a sample's loss depends on the other samples"),
    "order": (ordered, "its values depend on the order of samples"),
    "numbers": (numbered, "its values depend on the numbers of samples or pairs"),
    "layout": (by_layout, "its values depend on the order of samples"),
    "type": (narrow, "it gives torch.float32 for logprobs in torch.float64"),
    "randomness": (noisy, "it gives other numbers when it is asked again"),
    "no gradient": (flat, "its gradient is 0 everywhere"),
    "no slope": (rough, "its slope could be measured at 0 of 84 tokens only"),
    "unread field": (idle, "it declares 'returns', which it does not read"),
    "undeclared field": (own.undeclared, "it reads 'advantages', which it does not declare"),
    "not proportional": (shifted, "it says that it is proportional to the advantage"),
    "corrects nothing": (masked, "it says that it corrects for the behaviour policy, but does not"),
    "unsaid correction": (UNSAID, "it depends on the behaviour policy, but does not say"),
    "error": (fails, "it raises: .*out of ideas"),
    "wrong shape": (own.summed, "it raises: .*returns the wrong shape"),
}


def test_a_field_counts_as_read_where_its_values_do_not_happen_to_matter() -> None:
    check_loss(short_only)


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_loss_is_named(name: str) -> None:
    spec, message = BAD[name]
    with pytest.raises(TraceError, match=r"fails \d checks?") as caught:
        check_loss(spec)
    assert caught.value.found is not None
    assert re.search(f"\n  - {message}", caught.value.found)


def test_all_failures_are_told_at_once_with_the_functions_line() -> None:
    wrong = replace(own.clipped, corrects=False, reads=own.clipped.reads + ", returns")
    with pytest.raises(TraceError, match="fails 2 checks") as caught:
        check_loss(wrong)
    assert "own_functions.py:" in str(caught.value.where)


def test_a_loss_that_is_nowhere_cannot_be_checked() -> None:
    with pytest.raises(TraceError, match=r"no file nowhere\.py"):
        check_loss(replace(own.clipped, function="nowhere.py:f"))


def test_drawn_batches_can_be_adjusted() -> None:
    seen: list[float] = []

    def large(batch: TokenBatch) -> TokenBatch:
        seen.append(float(batch.extra["bonus"].abs().max()))
        return replace(batch, extra={"bonus": 100 * batch.extra["bonus"]})

    check_loss(own.with_bonus, seeds=(5, 6), adjust=large)
    assert len(set(seen)) == 2


def test_factors_stay_while_the_rest_moves() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first = x.exp()
        return first * x.detach() * x

    x = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    with FrozenFactors() as run:
        before = product(x)
    with FrozenFactors(run) as again:
        after = product(y)
    torch.testing.assert_close(before, x.exp() * x * x)
    torch.testing.assert_close(after, x.exp() * x * y)
    assert y.item() == 2.0
    assert not again.moved


def test_a_decision_that_falls_otherwise_is_noticed() -> None:
    def bent(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1, 2 * x, x)

    with FrozenFactors() as run:
        bent(torch.tensor([0.5, 1.5]))
    for values, moved in (([0.9, 1.1], False), ([0.5, 0.9], True)):
        with FrozenFactors(run) as again:
            bent(torch.tensor(values))
        assert again.moved is moved
