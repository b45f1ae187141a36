"""The critic's loss."""

from __future__ import annotations

import torch

from flowrl.algo.losses import TokenBatch, TokenLoss, given
from flowrl.specs.loss import LossSpec, ValueClip

__all__ = ["explained_variance", "value_clip"]


def value_clip(values: torch.Tensor, batch: TokenBatch, spec: LossSpec) -> TokenLoss:
    """Half the squared error of a value, pessimistic about large steps.

    With the return R, the value v and the value v_old before the step::

        L = max(e(v - R), e(clip(v, v_old - clip, v_old + clip) - R))

    where e(x) = x^2 / 2, or Huber's e(x) = x^2 / 2 for |x| <= delta and delta * (|x| - delta / 2)
    beyond. R and v_old carry no gradient. (From the reference code of PPO, 2017; not in the paper;
    Huang et al., "The 37 implementation details of PPO", 2022, detail 9.)

    Args:
        values: `[R]`, the critic's value at each response token, with gradient.

    Metrics: `value_mean`, `return_mean`; `value_clip_fraction`, the share of tokens whose clipped
    error is larger.
    """
    assert isinstance(spec, ValueClip)
    returns = given(batch, "returns", spec.kind)
    plain = _error(values - returns, spec)
    means = {"value_mean": values.detach(), "return_mean": returns}
    if spec.clip is None:
        return TokenLoss(values=plain, means=means)
    old = given(batch, "old_values", spec.kind)
    clipped = _error(values.clamp(old - spec.clip, old + spec.clip) - returns, spec)
    removed = clipped > plain
    means["value_clip_fraction"] = removed.to(values.dtype)
    return TokenLoss(values=torch.where(removed, clipped, plain), means=means)


def _error(x: torch.Tensor, spec: ValueClip) -> torch.Tensor:
    square = 0.5 * x.square()
    if spec.form == "square":
        return square
    size = x.abs()
    return torch.where(size <= spec.delta, square, spec.delta * (size - 0.5 * spec.delta))


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """The share of the returns' variance that a critic explains: 1 - Var(R - v) / Var(R).

    1 is perfect, 0 is what a constant does, and below 0 is worse than that. It does not see an
    error that is the same everywhere. None where the returns do not vary.
    """
    if not len(returns) or returns.min() == returns.max():
        return None
    wanted = returns.double()
    left = (wanted - values.double()).var(correction=0)
    return float(1 - left / wanted.var(correction=0))
