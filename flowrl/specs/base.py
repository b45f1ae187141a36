"""The base of all specifications: a kind, plain fields, and a text and a JSON form.

A specification is a frozen dataclass of numbers and strings that *names* a formula. It imports no
torch; `flowrl.algo` holds the tensor functions that it is resolved to when a plan is executed. It
travels in graph nodes, plans and configs, so it must print and parse without loss. Annotations say
which values are allowed; `wrong_fields` checks them.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

_T = TypeVar("_T")
_S = TypeVar("_S", bound="Spec")

Scalar: TypeAlias = str | int | float | bool | None

Wrong: TypeAlias = tuple[str, object, str]
"""The name of a field, its value, and a description of the allowed values."""

_KINDS: dict[tuple[str, str], type[Spec]] = {}

USER_OPTIONS: Mapping[str, bool] = MappingProxyType({"user": True})
"""Metadata of a field that holds the options of an own function as pairs of name and value. Each
pair is written and read as if it were a field of the specification."""


def option(default: _T) -> _T:
    """Declares a field that the text form omits when it has its default.

    It is for refinements of a formula that most programs do not change. The JSON form always holds
    them, so that a stored plan keeps its meaning when a default changes.
    """
    declared: _T = field(default=default, metadata={"option": True})
    return declared


class Spec:
    """Base of all specifications. Subclasses are frozen dataclasses that set `family` and `kind`.

    >>> from flowrl.specs.loss import PolicyClip
    >>> str(PolicyClip(clip_low=0.2, clip_high=0.28))
    'policy_clip(clip_low=0.2, clip_high=0.28, aggregation="token-mean")'
    """

    __slots__ = ()

    family: ClassVar[str]
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # dataclass(slots=True) makes the class a second time; the later definition wins.
        if "kind" in cls.__dict__:
            _KINDS[cls.family, cls.kind] = cls

    def to_json(self) -> dict[str, Scalar]:
        """Returns `{"kind": ..., field: value, ...}`: every field, in the order of definition."""
        return {"kind": self.kind, **{name: value for name, value, _ in self.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Scalar]) -> Self:
        """Returns the specification with these fields.

        Raises:
            TypeError: The kind does not have one of the fields, or a field is missing.
        """
        known = fields(cls)  # type: ignore[arg-type]
        user = next((f.name for f in known if "user" in f.metadata), None)
        named: dict[str, Any] = dict(values)
        if user is not None:
            names = {f.name for f in known}
            options = {name: named.pop(name) for name in values if name not in names}
            named[user] = tuple(options.items())
        return cls(**named)

    def conflicts(self) -> Iterator[Wrong]:
        """Yields the fields whose values contradict those of other fields."""
        yield from ()

    def __str__(self) -> str:
        body = ", ".join(
            f"{name}={format_scalar(value)}"
            for name, value, declared in self.items()
            if not ("option" in declared.metadata and value == declared.default)
        )
        return f"{self.kind}({body})"

    def items(self) -> Iterator[tuple[str, Scalar, Field[Any]]]:
        """Yields the name, value and dataclass field of everything that is written, in order."""
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if "user" in f.metadata:
                yield from ((name, each, f) for name, each in value)
            else:
                yield f.name, value, f


_BREAKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""Characters that end a line for Python and that JSON does not escape."""


def format_scalar(value: Scalar) -> str:
    """Returns the JSON spelling of a scalar on one line; floats in the shortest exact form."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).translate(_BREAKS)
    # Not `repr`: numpy's numbers and enumerations are numbers whose `repr` is not JSON.
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


def format_list(values: Iterable[str] | Iterable[float]) -> str:
    """Joins names or numbers to one string, which a specification can hold; `list_of` reads it."""
    return ", ".join(value if isinstance(value, str) else repr(float(value)) for value in values)


def list_of(text: str) -> tuple[str, ...]:
    """Returns the names that `format_list` wrote; numbers are returned as strings."""
    return tuple(part for part in map(str.strip, text.split(",")) if part)


def spec_from_json(family: str, value: dict[str, Scalar]) -> Spec:
    """Returns the specification of `family` that `to_json` wrote.

    Raises:
        KeyError: The family has no such kind.
        TypeError: The kind does not have one of the fields.
    """
    rest = dict(value)
    kind = rest.pop("kind")
    return _KINDS[family, str(kind)].from_json(rest)


# Allowed values. A dataclass does not check its fields: without these checks, a misspelt choice or
# a negative bound would raise an error when the formula is computed, in the middle of a run. The
# operations of the workflow language and the verifier of graphs use them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a field may hold, as metadata of its annotation.

    Attributes:
        low, high: The bounds, both included.
        above, below: True to exclude `low` itself, or `high`.
        finite: True to exclude the infinities.
        at_most: The name of a field whose value is an upper bound too, unless it is None.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    finite: bool = False
    at_most: str = ""

    def holds(self, value: float) -> bool:
        """Returns True if the value is in the range; `at_most` is not considered."""
        from_low = value > self.low if self.above else value >= self.low
        to_high = value < self.high if self.below else value <= self.high
        return from_low and to_high and (math.isfinite(value) or not self.finite)

    def describe(self, noun: str) -> str:
        """Returns `a number from 0 up`."""
        bounded = math.isfinite(self.high)
        if not math.isfinite(self.low):
            return f"{noun} of at most {self.high:g}" if bounded else noun
        if self.above:
            at_most = f" and of at most {self.high:g}" if bounded else ""
            return f"{noun} above {self.low:g}{at_most}"
        to = "to below" if self.below else "to"
        return f"{noun} from {self.low:g} " + (f"{to} {self.high:g}" if bounded else "up")


_ANY = Range()
FromZero: TypeAlias = Annotated[float, Range(low=0.0)]
Positive: TypeAlias = Annotated[float, Range(low=0.0, above=True)]
FiniteFromZero: TypeAlias = Annotated[float, Range(low=0.0, finite=True)]
Finite: TypeAlias = Annotated[float, Range(finite=True)]
Share: TypeAlias = Annotated[float, Range(low=0.0, high=1.0)]
Count: TypeAlias = Annotated[int, Range(low=1.0)]
CountFromZero: TypeAlias = Annotated[int, Range(low=0.0)]

_Allowed: TypeAlias = tuple[tuple[object, ...], Range]
"""The types and values that an annotation allows, and the range of its numbers."""


def wrong_fields(spec: Spec) -> Iterator[Wrong]:
    """Yields every field whose value its annotation does not allow, or else which conflicts."""
    allowed = _allowed_in(type(spec))  # type: ignore[arg-type]
    values = {name: getattr(spec, name) for name in allowed}
    wrong = {name for name in allowed if not _fits(values[name], *allowed[name])}
    for name in allowed:
        if name in wrong:
            yield name, values[name], _describe(*allowed[name])
    if wrong:
        return
    for name, (_, bounds) in allowed.items():
        low, high = values[name], values.get(bounds.at_most)
        if low is not None and high is not None and low > high:
            yield name, low, f"a number of at most {bounds.at_most}={high:g}"
    yield from spec.conflicts()


def refusal(value: object, annotation: object) -> str | None:
    """Returns the values that an annotation allows, in words; None if it allows this one."""
    allowed = _allowed(annotation)
    return None if _fits(value, *allowed) else _describe(*allowed)


def with_floats(spec: _S) -> _S:
    """Returns the specification with floats for whole numbers in its fields of floats."""
    whole = {
        name: float(getattr(spec, name))
        for name, (choices, _) in _allowed_in(type(spec)).items()  # type: ignore[arg-type]
        if float in choices and type(getattr(spec, name)) is int
    }
    return replace(spec, **whole)  # type: ignore[type-var]


@cache
def _allowed_in(kind: type[Any]) -> dict[str, _Allowed]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: _allowed(hints[f.name]) for f in fields(kind) if "user" not in f.metadata}


def _allowed(hint: Any) -> _Allowed:
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return (kind,), bounds
    if get_origin(hint) is Literal:
        return get_args(hint), _ANY
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_allowed(part) for part in get_args(hint)]
        bounds = next((bounds for _, bounds in parts if bounds is not _ANY), _ANY)
        return tuple(each for choices, _ in parts for each in choices), bounds
    return (None if hint is types.NoneType else hint,), _ANY


def _fits(value: object, choices: tuple[object, ...], bounds: Range) -> bool:
    if any(value is each or (value == each and type(value) is type(each)) for each in choices):
        return True
    kinds = tuple(each for each in choices if isinstance(each, type))
    if isinstance(value, bool):
        return bool in kinds
    if not isinstance(value, (*kinds, int) if float in kinds else kinds):
        return False
    # No range holds NaN.
    return not isinstance(value, int | float) or bounds.holds(value)


def _describe(choices: tuple[object, ...], bounds: Range) -> str:
    names: dict[object, str] = {
        float: bounds.describe("a finite number" if bounds.finite else "a number"),
        int: bounds.describe("a whole number"),
        str: "a string",
        bool: "True or False",
    }
    texts = [
        names.get(each, f"an fl.{each.__name__}") if isinstance(each, type) else repr(each)
        for each in choices
    ]
    return " or ".join(texts) if len(texts) < 3 else "one of " + ", ".join(texts)
