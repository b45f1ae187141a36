"""Advantages that functions of the user's own compute; `fl.advantage.own` makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult, check_scores, field_of
from flowrl.algo.user_function import UserFunction, shape_of
from flowrl.specs.advantage import AdvantageSpec
from flowrl.specs.own_advantage import OwnAdvantage

__all__ = ["own"]


def own(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """What the user's function gives, checked.

    The function is called with a batch that holds scores, groups and what it declares; everything
    else is None. It returns an array, `[N]`, or `[N, T]` where it is one number a token, or an
    `AdvantageResult` (it must, where it declares returns). Both are 0 off the mask afterwards.

    Raises:
        ValueError: the batch lacks what it declares.
        TraceError: the function raises, or returns something else; the message names its line.
    """
    assert isinstance(spec, OwnAdvantage)
    check_scores(batch.scores, batch.groups)
    missing = [name for name in spec.needs if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the advantage {spec.function} needs {' and '.join(missing)}")
    function = UserFunction.load("advantage", spec.function, spec.options, spec.needs)
    found = function(_seen(batch, spec))
    given = found.advantages if isinstance(found, AdvantageResult) else found
    mask = None if "mask" not in spec.needs else field_of(batch, "mask", spec.kind) > 0
    live = mask if spec.per_token else None
    shape = np.shape(batch.scores) if live is None else live.shape
    advantages = _checked(function, given, shape, "advantages", live)
    if not spec.returns:
        return AdvantageResult(advantages=advantages)
    if mask is None or not isinstance(found, AdvantageResult) or found.returns is None:
        raise function.refuse(
            "gives no returns, which it declares",
            found=type(found).__name__,
            expected="AdvantageResult(advantages=..., returns=...)",
        )
    returns = _checked(function, found.returns, mask.shape, "returns", mask)
    return AdvantageResult(advantages=advantages, returns=returns)


def _seen(batch: AdvantageBatch, spec: OwnAdvantage) -> AdvantageBatch:
    """The batch with nothing but scores, groups and what is declared."""
    kept: dict[str, Any] = {name: getattr(batch, name) for name in spec.needs}
    return AdvantageBatch(scores=batch.scores, groups=batch.groups, **kept)


def _checked(
    function: UserFunction,
    found: object,
    shape: tuple[int, ...],
    what: str,
    mask: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float32]:
    """Numbers of that shape, finite, and 0 off the mask, where anything may stand before."""
    expected = f"{what} {shape_of(shape)}"
    try:
        values = np.asarray(found, np.float32)
    except (TypeError, ValueError):
        raise function.refuse(
            "returns no numbers", found=f"{type(found).__name__}", expected=expected
        ) from None
    if values.shape != shape:
        raise function.refuse(
            "returns the wrong shape", found=shape_of(values.shape), expected=expected
        )
    if mask is not None:
        values = np.where(mask, values, np.float32(0))
    if not np.isfinite(values).all():
        place = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        raise function.refuse(
            "returns something that is not finite",
            found=f"{values[tuple(place)]} at {place}",
            expected=expected,
        )
    return values
