"""Checks that the fields of a specification have values that annotations and formulas allow.

A dataclass does not check its fields: without these checks, a misspelt choice or a negative bound
would raise an error when the formula is computed, in the middle of a run. The operations of the
workflow language and the verifier of graphs use them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from flowrl.specs.attributes import MIN_TEMPERATURE, Sampling
from flowrl.specs.base import Spec
from flowrl.specs.filters import Difficulty
from flowrl.specs.loss import PolicyLoss

__all__ = ["Wrong", "with_floats", "wrong_fields"]

_S = TypeVar("_S", bound=Spec)

Wrong: TypeAlias = tuple[str, object, str]
"""The name of a field, its value, and a description of the allowed values."""

_Check: TypeAlias = Callable[[object], bool]


def wrong_fields(spec: Spec) -> Iterator[Wrong]:
    """Yields every field whose value is not allowed."""
    wrong = False
    for name, fits, expected in _checks(type(spec)):
        value = getattr(spec, name)
        if not fits(value):
            wrong = True
            yield name, value, expected
    if not wrong:
        yield from _contradictions(spec)


def with_floats(spec: _S) -> _S:
    """Returns the specification with floats for whole numbers in its fields of floats."""
    whole = {
        name: float(getattr(spec, name))
        for name, hint in get_type_hints(type(spec)).items()
        if float in (hint, *get_args(hint)) and type(getattr(spec, name)) is int
    }
    return replace(spec, **whole)  # type: ignore[type-var]


_KNOWN: dict[type, tuple[tuple[str, _Check, str], ...]] = {}
"""The checks of the fields of each class of specifications."""


def _checks(kind: type[Any]) -> tuple[tuple[str, _Check, str], ...]:
    if kind in _KNOWN:
        return _KNOWN[kind]
    hints = get_type_hints(kind)
    checks = []
    for field in fields(kind):
        allowed = _allowed(hints[field.name])
        if "user" not in field.metadata and allowed is not None:
            bounds = _BOUNDS.get(kind.family, {}).get(field.name, _ANY)
            checks.append((field.name, _fits(allowed, bounds), _describe(allowed, bounds)))
    _KNOWN[kind] = tuple(checks)
    return _KNOWN[kind]


def _allowed(hint: Any) -> tuple[object, ...] | None:
    """Returns the types and values that an annotation allows; None if it is not of scalars."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_allowed(part) for part in get_args(hint)]
        return None if None in parts else tuple(each for part in parts if part for each in part)
    if hint is type(None):
        return (None,)
    return (hint,) if hint in (float, int, str, bool) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """A range of numbers from `low` to `high`; `above` excludes `low` itself."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    finite: bool = False

    def holds(self, value: float) -> bool:
        from_low = value > self.low if self.above else value >= self.low
        return from_low and value <= self.high and (math.isfinite(value) or not self.finite)

    def describe(self, noun: str) -> str:
        below = math.isfinite(self.high)
        if not math.isfinite(self.low):
            return f"{noun} of at most {self.high:g}" if below else noun
        if self.above:
            at_most = f" and of at most {self.high:g}" if below else ""
            return f"{noun} above {self.low:g}{at_most}"
        return f"{noun} from {self.low:g} " + (f"to {self.high:g}" if below else "up")


_ANY = _Range()


def _fits(allowed: tuple[object, ...], bounds: _Range) -> _Check:
    kinds = tuple(each for each in allowed if isinstance(each, type))
    values = tuple(each for each in allowed if not isinstance(each, type))

    def fits(value: object) -> bool:
        if any(value is each or (value == each and type(value) is type(each)) for each in values):
            return True
        if isinstance(value, bool):
            return bool in kinds
        if not isinstance(value, (*kinds, int) if float in kinds else kinds):
            return False
        # No range holds a number that is not one.
        return not isinstance(value, int | float) or bounds.holds(value)

    return fits


def _describe(allowed: tuple[object, ...], bounds: _Range) -> str:
    names: dict[object, str] = {
        float: bounds.describe("a finite number" if bounds.finite else "a number"),
        int: bounds.describe("a whole number"),
        str: "a string",
        bool: "True or False",
    }
    texts = [names[each] if isinstance(each, type) else repr(each) for each in allowed]
    return " or ".join(texts) if len(texts) < 3 else "one of " + ", ".join(texts)


_FROM_ZERO = _Range(low=0.0)
_ABOVE_ZERO = _Range(low=0.0, above=True)
_NOT_NEGATIVE = _Range(low=0.0, finite=True)
_FINITE = _Range(finite=True)
_SHARE = _Range(low=0.0, high=1.0)
_COUNT = _Range(low=1.0)

_LOSS = {
    **dict.fromkeys(("clip", "clip_low", "clip_high", "limit", "tau", "coefficient"), _FROM_ZERO),
    **dict.fromkeys(("ratio_low", "ratio_high", "weights_low", "weights_high"), _FROM_ZERO),
    **dict.fromkeys(("positive_low", "positive_high"), _FROM_ZERO),
    **dict.fromkeys(("negative_low", "negative_high", "centering"), _FROM_ZERO),
    **dict.fromkeys(("ratio_cap", "delta", "beta", "tau_positive", "tau_negative"), _ABOVE_ZERO),
    **dict.fromkeys(("k_positive", "k_negative"), _ABOVE_ZERO),
    **dict.fromkeys(("lambda_positive", "lambda_negative"), _ABOVE_ZERO),
    "dual_clip": _Range(low=1.0, above=True),
    "fraction": _Range(low=0.0, high=1.0, above=True),
    "label_smoothing": _Range(low=0.0, high=0.5),
    "entropy": _FINITE,
}
_ADVANTAGE = {
    **dict.fromkeys(("gamma", "lam", "lam_value", "discount"), _SHARE),
    **dict.fromkeys(("ddof", "whiten_ddof"), _SHARE),
    **dict.fromkeys(("eps", "batch_eps", "whiten_eps", "variance_floor"), _NOT_NEGATIVE),
    **dict.fromkeys(("length_alpha", "kl_coefficient"), _NOT_NEGATIVE),
    **dict.fromkeys(("coefficient", "score_weight", "weight"), _FINITE),
    "norm": _ABOVE_ZERO,
}
_BOUNDS: Mapping[str, Mapping[str, _Range]] = {
    "loss": _LOSS,
    "advantage": _ADVANTAGE,
    "kl": {
        "coefficient": _NOT_NEGATIVE,
        **dict.fromkeys(("clamp_input", "clamp_output", "target", "step_clip"), _ABOVE_ZERO),
        "horizon": _COUNT,
    },
    "sampling": {
        "temperature": _NOT_NEGATIVE,
        "top_p": _Range(low=0.0, high=1.0, above=True),
        "min_p": _SHARE,
        "repetition_penalty": _Range(low=0.0, above=True, finite=True),
        **dict.fromkeys(("top_k", "min_tokens"), _FROM_ZERO),
        "max_tokens": _COUNT,
    },
    "filter": {"tolerance": _FROM_ZERO, "low": _FINITE, "high": _FINITE},
    "select": {"tolerance": _FROM_ZERO, "k": _COUNT, "at_least": _FINITE},
    "map": {
        **dict.fromkeys(("max_tokens", "ngram"), _COUNT),
        "buffer": _FROM_ZERO,
        "max_penalty": _Range(high=0.0),
        **dict.fromkeys(("factor", "coefficient", "correct_above"), _FINITE),
        **dict.fromkeys(("wrong_short", "wrong_long", "correct_short", "correct_long"), _FINITE),
    },
}
"""The ranges of numbers by family and field."""
_ORDERED = (
    ("weights_low", "weights_high"),
    ("rejection_low", "rejection_high"),
    ("ratio_low", "ratio_high"),
    ("positive_low", "positive_high"),
    ("negative_low", "negative_high"),
    ("min_log_ratio", "max_log_ratio"),
)


def _contradictions(spec: Spec) -> Iterator[Wrong]:
    """Yields the fields that contradict another field."""
    for name, other in _ORDERED:
        low, high = getattr(spec, name, None), getattr(spec, other, None)
        if low is not None and high is not None and low > high:
            yield name, low, f"a number of at most {other}={high:g}"
    if isinstance(spec, Difficulty) and not spec.low < spec.high:
        yield "low", spec.low, f"a number below high={spec.high:g}"
    if isinstance(spec, Sampling) and 0 < spec.temperature < MIN_TEMPERATURE:
        expected = f"0 (greedy) or a number from {MIN_TEMPERATURE:g} up"
        yield "temperature", spec.temperature, expected
    unbound = isinstance(spec, PolicyLoss) and spec.rejection_low is spec.rejection_high is None
    if isinstance(spec, PolicyLoss) and unbound and spec.rejection != "none":
        yield "rejection", spec.rejection, "a bound, low or high, beyond which it removes"
