"""Whether the fields of a specification hold what their annotations, and the formulas, allow.

A dataclass takes whatever it is given: a misspelt choice or a negative bound would be found when
the formula is computed, in the middle of a run. The verifier of graphs asks here instead.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from flowrl.specs.base import Spec
from flowrl.specs.loss import LossSpec, PolicyLoss

__all__ = ["Wrong", "wrong_fields"]

Wrong: TypeAlias = tuple[str, object, str]
"""A field, its value, and what it may be."""

_Check: TypeAlias = Callable[[object], bool]


def wrong_fields(spec: Spec) -> Iterator[Wrong]:
    """Every field whose value is none that it may have."""
    wrong = False
    for name, fits, expected in _checks(type(spec)):
        value = getattr(spec, name)
        if not fits(value):
            wrong = True
            yield name, value, expected
    if isinstance(spec, LossSpec) and not wrong:
        yield from _out_of_bounds(spec)


_KNOWN: dict[type, tuple[tuple[str, _Check, str], ...]] = {}
"""For each class of specifications, the checks of its fields."""


def _checks(kind: type[Any]) -> tuple[tuple[str, _Check, str], ...]:
    if kind in _KNOWN:
        return _KNOWN[kind]
    hints = get_type_hints(kind)
    found = []
    for field in fields(kind):
        allowed = _allowed(hints[field.name])
        if "user" not in field.metadata and allowed is not None:
            found.append((field.name, _fits(allowed), _said(allowed)))
    _KNOWN[kind] = tuple(found)
    return _KNOWN[kind]


def _allowed(hint: Any) -> tuple[object, ...] | None:
    """Types and single values that an annotation allows; None where it is none of scalars."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_allowed(part) for part in get_args(hint)]
        return None if None in parts else tuple(each for part in parts if part for each in part)
    if hint is type(None):
        return (None,)
    return (hint,) if hint in (float, int, str, bool) else None


def _fits(allowed: tuple[object, ...]) -> _Check:
    kinds = tuple(each for each in allowed if isinstance(each, type))
    values = tuple(each for each in allowed if not isinstance(each, type))

    def fits(value: object) -> bool:
        if any(value is each or (value == each and type(value) is type(each)) for each in values):
            return True
        if isinstance(value, bool):
            return bool in kinds
        if isinstance(value, float) and math.isnan(value):
            return False
        return isinstance(value, (*kinds, int) if float in kinds else kinds)

    return fits


_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def _said(allowed: tuple[object, ...]) -> str:
    said = [_NAMES[each] if isinstance(each, type) else repr(each) for each in allowed]
    return " or ".join(said) if len(said) < 3 else "one of " + ", ".join(said)


_FROM_ZERO = (
    "clip",
    "clip_low",
    "clip_high",
    "limit",
    "tau",
    "coefficient",
    "centering",
    "ratio_low",
    "ratio_high",
    "weights_low",
    "weights_high",
    "positive_low",
    "positive_high",
    "negative_low",
    "negative_high",
    "label_smoothing",
)
_ABOVE: Mapping[str, float] = {
    "dual_clip": 1.0,
    "ratio_cap": 0.0,
    "delta": 0.0,
    "beta": 0.0,
    "tau_positive": 0.0,
    "tau_negative": 0.0,
    "fraction": 0.0,
    "k_positive": 0.0,
    "k_negative": 0.0,
    "lambda_positive": 0.0,
    "lambda_negative": 0.0,
}
_AT_MOST: Mapping[str, float] = {"fraction": 1.0, "label_smoothing": 0.5}
_ORDERED = (
    ("weights_low", "weights_high"),
    ("rejection_low", "rejection_high"),
    ("ratio_low", "ratio_high"),
    ("positive_low", "positive_high"),
    ("negative_low", "negative_high"),
    ("min_log_ratio", "max_log_ratio"),
)


def _out_of_bounds(spec: LossSpec) -> Iterator[Wrong]:
    known = {field.name for field in fields(spec) if "user" not in field.metadata}
    value = {name: getattr(spec, name) for name in known}

    def number(name: str) -> float | None:
        found = value.get(name)
        return None if isinstance(found, bool | str) else found

    for name in _FROM_ZERO:
        if (found := number(name)) is not None and found < 0:
            yield name, found, "a number from 0 up"
    for name, low in _ABOVE.items():
        if (found := number(name)) is not None and found <= low:
            yield name, found, f"a number above {low:g}"
    for name, high in _AT_MOST.items():
        if (found := number(name)) is not None and found > high:
            yield name, found, f"a number of at most {high:g}"
    for name, other in _ORDERED:
        low_bound, high_bound = number(name), number(other)
        if low_bound is not None and high_bound is not None and low_bound > high_bound:
            yield name, low_bound, f"a number of at most {other}={high_bound:g}"
    if isinstance(spec, PolicyLoss):
        if not math.isfinite(spec.entropy):
            yield "entropy", spec.entropy, "a finite number"
        if spec.rejection != "none" and spec.rejection_low is spec.rejection_high is None:
            yield "rejection", spec.rejection, "a bound, low or high, beyond which it removes"
