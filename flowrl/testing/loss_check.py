"""`check_loss`: proves of a loss what it declares, on small random mini-batches.

    from flowrl.testing import check_loss

    def test_my_loss():
        check_loss(my_loss(beta=0.2))

What is checked, in float64:

- it gives the same numbers when it is asked again;
- its gradient is the slope of its value by finite differences, with factors that it detaches held
  constant, wherever no kink is near;
- its value at a sample is the same whatever other samples (pairs, where it is a loss of pairs)
  stand in its micro-batch, in whatever order samples come, and whatever their numbers are;
- it works with the fields that it declares alone, and reads each of them;
- it declares `corrects_behaviour` exactly if the loss of a token depends on the behaviour policy by
  more than whether the token counts;
- where it says `proportional`, samples whose advantages are 0 have no loss and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flowrl.algo.losses import TokenBatch, prepare
from flowrl.algo.resolve import resolve_loss
from flowrl.errors import FlowError
from flowrl.specs.loss import LossSpec, OutcomeLoss, OwnLoss
from flowrl.specs.loss.own import FIELDS
from flowrl.testing.failed_checks import failed_checks
from flowrl.testing.frozen_factors import FrozenFactors

_LENGTHS = (5, 1, 4, 7, 0, 3, 2, 6)
"""Response tokens of each sample: one has none, one has a single one."""

_STEP = 1e-6
"""Of finite differences."""

_CLOSE = 1e-9
"""Relative and absolute tolerance where the same numbers are computed in another order."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """A mini-batch at random: what the model predicted, without gradient, and everything else."""

    at: torch.Tensor
    batch: TokenBatch
    weights: torch.Tensor


def check_loss(
    loss: LossSpec,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    spread: float = 0.3,
    adjust: Callable[[TokenBatch], TokenBatch] | None = None,
) -> None:
    """Raises unless the loss is what it declares.

    Args:
        loss: One of the library's, or one of `fl.loss.own`.
        seeds: One random mini-batch of 28 tokens in 8 samples is drawn for each.
        spread: How far the policies are apart: standard deviation of log-ratios. Large enough that
            bounds act at some tokens, small enough that they do not at most.
        adjust: Changes a drawn batch, for losses that read fields of maps of a certain kind, which
            are drawn from a normal distribution otherwise.

    Raises:
        TraceError: it is not; all failures are listed.
    """
    resolve_loss(loss)
    failures: list[str] = []
    draws = [_draw(loss, seed, spread, adjust) for seed in seeds]
    problem = _alone_problem(loss, draws[0])
    if problem is not None:
        raise failed_checks(loss, [problem])
    for check in (
        _check_repeats,
        _check_slope,
        _check_parts,
        _check_unread,
        _check_correction,
        _check_proportional,
    ):
        try:
            failures += list(check(loss, draws))
        except (FlowError, ValueError, RuntimeError) as error:
            failures.append(f"it raises: {error}")
    if failures:
        raise failed_checks(loss, failures)


# Batches.


def _draw(
    loss: LossSpec, seed: int, spread: float, adjust: Callable[[TokenBatch], TokenBatch] | None
) -> _Draw:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1] * len(_LENGTHS) if loss.predicts == "scores" else list(_LENGTHS)
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(samples), generator=generator, dtype=torch.float64)

    old = -1.2 + noise(0.4)
    batch = TokenBatch(
        advantages=noise(1.0),
        old_logprobs=old,
        behaviour_logprobs=old + noise(spread / 2),
        reference_logprobs=old + noise(spread),
        entropy=1 + noise(0.2),
        samples=samples,
        old_values=old + noise(spread),
        returns=noise(1.0),
        preferred=samples % 2 == 0,
        pairs=samples // 2,
        extra={name: noise(1.0) for name in loss.extra_fields},
    )
    at = old + noise(spread)
    return _Draw(at, batch if adjust is None else adjust(batch), 1 + noise(0.2).abs())


def _part(batch: TokenBatch, chosen: torch.Tensor) -> TokenBatch:
    """The batch of the tokens `chosen`, in that order; what is one number for all stays."""
    picked = {
        f.name: value[chosen]
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), torch.Tensor) and value.ndim
    }
    return replace(batch, **picked, extra={k: v[chosen] for k, v in batch.extra.items()})


def _values(
    loss: LossSpec, at: torch.Tensor, batch: TokenBatch, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[R]` of a loss, and the gradient `[R]` of their weighted sum."""
    x = at.clone().requires_grad_()
    values = resolve_loss(loss)(x, batch).values
    (gradient,) = torch.autograd.grad(torch.dot(values, weights), x, allow_unused=True)
    return values.detach(), torch.zeros_like(x) if gradient is None else gradient


def _whole(
    loss: LossSpec, draw: _Draw, batch: TokenBatch | None = None
) -> tuple[torch.Tensor, ...]:
    """`_values` of the whole mini-batch, prepared as a trainer prepares it."""
    prepared = prepare(draw.at, draw.batch if batch is None else batch, loss)
    return _values(loss, draw.at, prepared, draw.weights)


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE) for a, b in zip(left, right, strict=True)
    )


# Checks. Each gives a sentence for each failure.


def _check_repeats(loss: LossSpec, draws: Sequence[_Draw]) -> Iterator[str]:
    if not all(_same(_whole(loss, draw), _whole(loss, draw)) for draw in draws):
        yield "it gives other numbers when it is asked again: it must not draw random numbers"


def _check_slope(loss: LossSpec, draws: Sequence[_Draw]) -> Iterator[str]:
    compared = total = 0
    moving = False
    for number, draw in enumerate(draws):
        batch = prepare(draw.at, draw.batch, loss)
        _, gradient = _values(loss, draw.at, batch, draw.weights)
        moving |= bool((gradient != 0).any())
        slopes = _slopes(loss, draw, batch)
        total += len(slopes)
        for token, slope in enumerate(slopes):
            if slope is None:
                continue
            compared += 1
            got = float(gradient[token])
            if abs(got - slope) > 1e-6 + 1e-5 * abs(slope):
                yield (
                    f"its gradient is not the slope of its value: at token {token} of batch "
                    f"{number} it is {got:.6g}, and finite differences give {slope:.6g} (with "
                    "detached factors held). A factor that leaves torch by item(), tolist() or "
                    "numpy() should be detached first; numbers must stay in the logprobs' type"
                )
                return
    if not moving:
        yield "its gradient is 0 everywhere"
    if compared < total / 2:
        yield (
            f"its slope could be measured at {compared} of {total} tokens only: "
            "elsewhere a kink or a jump is near"
        )


def _slopes(loss: LossSpec, draw: _Draw, batch: TokenBatch) -> list[float | None]:
    """Central differences of the weighted sum at each token; None where a kink is near."""
    function = resolve_loss(loss)

    def value(at: torch.Tensor, known: FrozenFactors | None) -> tuple[float, FrozenFactors]:
        # With a gradient, so that the same calls are made as where the gradient is computed.
        x = at.clone().requires_grad_()
        with FrozenFactors(known) as run:
            values = function(x, batch).values
        return float(torch.dot(values.detach(), draw.weights)), run

    middle, known = value(draw.at, None)
    found: list[float | None] = []
    for token in range(len(draw.at)):
        step = torch.zeros_like(draw.at)
        step[token] = _STEP
        (above, up), (below, down) = value(draw.at + step, known), value(draw.at - step, known)
        right, left = (above - middle) / _STEP, (middle - below) / _STEP
        slope = (right + left) / 2
        smooth = not (up.moved or down.moved) and abs(right - left) <= 1e-3 * max(1.0, abs(slope))
        found.append(slope if smooth else None)
    return found


def _check_parts(loss: LossSpec, draws: Sequence[_Draw]) -> Iterator[str]:
    alone = shuffled = renumbered = True
    for draw in draws:
        expected = _whole(loss, draw)
        batch = prepare(draw.at, draw.batch, loss)
        samples = _places(batch.samples)
        for chosen in _places(batch.pairs) if loss.pairs else samples:
            alone &= _same_at(loss, draw, batch, chosen, expected)
        shuffled &= _same_at(
            loss, draw, batch, torch.cat(samples[::-2] + samples[-2::-2]), expected
        )
        everything = torch.arange(len(draw.at))
        renumbered &= _same_at(loss, draw, _renumbered(batch), everything, expected)
    unit = "pair" if loss.pairs else "sample"
    if not alone:
        yield (
            f"a {unit}'s loss depends on the other {unit}s of its micro-batch: leave means over "
            "the batch to the advantage and to `aggregation`"
        )
    if not shuffled:
        yield "its values depend on the order of samples"
    if not renumbered:
        yield "its values depend on the numbers of samples or pairs: these only say what is equal"


def _places(numbers: torch.Tensor | None) -> list[torch.Tensor]:
    """Where each of the numbers stands."""
    assert numbers is not None
    return [torch.nonzero(numbers == each).reshape(-1) for each in sorted(set(numbers.tolist()))]


def _same_at(
    loss: LossSpec,
    draw: _Draw,
    batch: TokenBatch,
    chosen: torch.Tensor,
    expected: Sequence[torch.Tensor],
) -> bool:
    """Whether the tokens `chosen` by themselves have the values and gradients of the whole."""
    got = _values(loss, draw.at[chosen], _part(batch, chosen), draw.weights[chosen])
    return _same(got, [numbers[chosen] for numbers in expected])


def _renumbered(batch: TokenBatch) -> TokenBatch:
    """The batch with other numbers of samples and pairs, equal where they were."""
    assert batch.samples is not None
    assert batch.pairs is not None
    return replace(batch, samples=97 - 3 * batch.samples, pairs=41 - 2 * batch.pairs)


def _declared(loss: LossSpec, batch: TokenBatch) -> TokenBatch:
    """The batch with what every loss gets and what this one declares."""
    names = {"samples", "entropy", *(n for n in loss.needs if n not in loss.extra_fields)}
    names |= {"pairs"} if loss.pairs else set()
    return TokenBatch(extra=batch.extra, **{name: getattr(batch, name) for name in names})


def _alone_problem(loss: LossSpec, draw: _Draw) -> str | None:
    """What is wrong with the loss on the fields that it declares alone."""
    declared = _declared(loss, draw.batch)
    try:
        terms = resolve_loss(loss)(
            draw.at.clone().requires_grad_(), prepare(draw.at, declared, loss)
        )
        if terms.values.dtype != draw.at.dtype:
            return f"it gives {terms.values.dtype} for logprobs in {draw.at.dtype}: keep their type"
        _whole(loss, draw, declared)
    except (FlowError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        for name in FIELDS:
            if name not in loss.needs and _works_with(loss, name, draw):
                return f"it reads '{name}', which it does not declare"
        return f"it raises: {error}"
    return None


def _works_with(loss: LossSpec, name: str, draw: _Draw) -> bool:
    wider = replace(loss, reads=f"{loss.reads}, {name}") if isinstance(loss, OwnLoss) else loss
    batch = replace(_declared(loss, draw.batch), **{name: getattr(draw.batch, name)})
    try:
        _whole(wider, draw, batch)
    except (FlowError, ValueError, RuntimeError, TypeError, AttributeError):
        return False
    return True


_FAR = (0.0, 1e4, -1e4)
"""Shifts of a field's numbers: those far away are beyond the thresholds that a loss may compare
with, which numbers near those drawn need not reach."""


def _changed(batch: TokenBatch, name: str, shift: float = 0.0) -> TokenBatch:
    """The batch with other numbers in one field."""
    generator = torch.Generator().manual_seed(7)
    value: torch.Tensor = batch.extra[name] if name in batch.extra else getattr(batch, name)
    if value.dtype == torch.bool:
        other = ~value
    else:
        other = value + torch.randn(len(value), generator=generator, dtype=value.dtype) + shift
    if name in batch.extra:
        return replace(batch, extra={**batch.extra, name: other})
    named: dict[str, Any] = {name: other}
    return replace(batch, **named)


def _check_unread(loss: LossSpec, draws: Sequence[_Draw]) -> Iterator[str]:
    for draw in draws:
        if not _same(_whole(loss, draw), _whole(loss, draw, _declared(loss, draw.batch))):
            yield "it gives other numbers on the fields that it declares alone"
            return
    for name in loss.needs:
        if not any(_moves(loss, draw, name, shift) for shift in _FAR for draw in draws):
            yield f"it declares '{name}', which it does not read"


def _moves(loss: LossSpec, draw: _Draw, name: str, shift: float) -> bool:
    """True if other numbers in a field change the loss, or are such that it cannot compute."""
    try:
        return not _same(_whole(loss, draw), _whole(loss, draw, _changed(draw.batch, name, shift)))
    except (FlowError, ValueError, RuntimeError):
        return True


def _check_correction(loss: LossSpec, draws: Sequence[_Draw]) -> Iterator[str]:
    if isinstance(loss, OutcomeLoss) or (loss.pairs and "behaviour_logprobs" not in loss.needs):
        return  # pairs and outcomes may come from any policy
    depends = False
    for draw in draws:
        before, after = (
            _whole(loss, draw, batch)
            for batch in (draw.batch, _changed(draw.batch, "behaviour_logprobs"))
        )
        for old, new in zip(before, after, strict=True):
            # A mask makes a token's loss 0; that alone corrects nothing.
            weighed = (old != 0) & (new != 0)
            depends |= not torch.allclose(old[weighed], new[weighed], rtol=_CLOSE, atol=_CLOSE)
    if loss.corrects_behaviour and not depends:
        yield "it says that it corrects for the behaviour policy, but does not depend on it"
    if depends and not loss.corrects_behaviour:
        yield (
            "it depends on the behaviour policy, but does not say that it corrects for it: "
            "corrects_behaviour=True"
        )


def _check_proportional(loss: LossSpec, draws: Sequence[_Draw]) -> Iterator[str]:
    if not resolve_loss(loss).proportional:
        return
    for draw in draws:
        still = torch.as_tensor(draw.batch.samples) % 3 == 0
        advantages = torch.as_tensor(draw.batch.advantages)
        batch = replace(draw.batch, advantages=torch.where(still, 0.0, advantages))
        if any(bool((part[still] != 0).any()) for part in _whole(loss, draw, batch)):
            yield (
                "it says that it is proportional to the advantage, but has a loss or a gradient "
                "where all advantages of a sample are 0"
            )
            return
