"""Losses that functions of the user's own compute; `fl.loss.own` makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flowrl.algo.losses import TokenBatch, TokenLoss
from flowrl.algo.user_function import UserFunction, shape_of
from flowrl.specs.loss import LossSpec, OwnLoss
from flowrl.specs.loss.own import FIELDS

__all__ = ["bind"]


def bind(spec: OwnLoss) -> Callable[[torch.Tensor, TokenBatch, LossSpec], TokenLoss]:
    """Returns the function of an own loss, with checks of each result.

    The user's function gets the logprobs `[R]` (or a critic's values) and a batch with the fields
    that it declares, `samples`, `pairs` and `entropy`; all other fields are None. It returns `[R]`,
    or a `TokenLoss`.

    Raises:
        TraceError: The function does not exist. When called: the function raises an error, or does
            not return a loss of each token; the message names its line.
        ValueError: When called: the batch does not have a declared field.
    """
    function = UserFunction.load("loss", spec.function, spec.options, spec.needs)
    hidden = {name: None for name in FIELDS if name not in spec.needs}

    def loss(logprobs: torch.Tensor, batch: TokenBatch, _: LossSpec) -> TokenLoss:
        missing = [name for name in spec.needs if _lacks(batch, name, spec)]
        if missing:
            raise ValueError(f"loss {spec.function} needs {' and '.join(missing)}")
        extra = {name: batch.extra[name] for name in spec.extra_fields}
        seen = replace(batch, extra=extra, weight_scale=None, penalised=None, **hidden)
        return _checked(function, function(logprobs, seen), logprobs)

    return loss


def _lacks(batch: TokenBatch, name: str, spec: OwnLoss) -> bool:
    return name not in batch.extra if name in spec.extra_fields else getattr(batch, name) is None


def _checked(function: UserFunction, result: object, logprobs: torch.Tensor) -> TokenLoss:
    terms = TokenLoss(values=result) if isinstance(result, torch.Tensor) else result
    expected = f"a tensor {shape_of(logprobs.shape)}, the loss of each response token"
    if not isinstance(terms, TokenLoss):
        raise function.refuse(
            "does not return a tensor",
            found=type(result).__name__,
            expected=f"{expected}, or a TokenLoss",
        )
    values = terms.values
    if values.shape != logprobs.shape:
        summed = "return a number a token; flowrl aggregates" if values.ndim == 0 else None
        raise function.refuse(
            "returns the wrong shape",
            found=shape_of(values.shape),
            expected=expected,
            hint=summed,
        )
    if not values.is_floating_point():
        raise function.refuse("does not return floats", found=str(values.dtype), expected=expected)
    if values.numel() and logprobs.requires_grad and not values.requires_grad:
        raise function.refuse(
            "has no gradient",
            found="values that do not depend on the logprobs",
            expected=expected,
            hint="compute with the logprobs as they are, without detach, .data or numpy",
        )
    wrong = torch.isnan(values.detach())
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise function.refuse(
            "returns NaN",
            found=f"at {int(wrong.sum())} of {len(values)} tokens, first token {place}, where the "
            f"logprob is {float(logprobs.detach()[place]):.6g}",
            expected="numbers",
        )
    return TokenLoss(
        values=values,
        means={name: _metric(function, name, each, values) for name, each in terms.means.items()},
        maxima={name: _metric(function, name, each, values) for name, each in terms.maxima.items()},
    )


def _metric(
    function: UserFunction, name: str, metric: object, values: torch.Tensor
) -> torch.Tensor:
    """Returns a metric without its gradient, which would keep the whole pass in memory."""
    if not isinstance(metric, torch.Tensor):
        kind, hint = type(metric).__name__, None
    elif metric.ndim != 1:
        kind, hint = shape_of(metric.shape), "do not reduce it; flowrl does, over the mini-batch"
    else:
        return metric.detach().to(values.dtype)
    raise function.refuse(
        f"gives a metric '{name}' of the wrong shape",
        found=kind,
        expected="a tensor of one dimension: a number a token, sample or pair",
        hint=hint,
    )
