"""The base of all specifications: a kind, plain fields, and a text and a JSON form.

A specification is a frozen dataclass of numbers and strings that *names* a formula. It imports no
torch; `flowrl.algo` holds the tensor functions that it is resolved to when a plan is executed. It
travels in graph nodes, plans and configs, so it must print and parse without loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

__all__ = [
    "USER_OPTIONS",
    "Scalar",
    "Spec",
    "format_list",
    "format_scalar",
    "list_of",
    "option",
    "spec_from_json",
]

_T = TypeVar("_T")

Scalar: TypeAlias = str | int | float | bool | None

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
