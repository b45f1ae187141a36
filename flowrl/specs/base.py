"""What every specification shares: a kind, plain fields, and a text and a JSON form.

A specification is a frozen dataclass of numbers and strings that *names* a formula. It imports no
torch; `flowrl.algo` holds the tensor functions that it is resolved to when a plan is executed. It
travels in graph nodes, plans and configs, so it must print and parse without loss.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import ClassVar, TypeAlias, TypeVar

__all__ = ["Scalar", "Spec", "format_scalar", "option", "spec_from_json"]

_T = TypeVar("_T")

Scalar: TypeAlias = str | int | float | bool | None

_KINDS: dict[tuple[str, str], type[Spec]] = {}


def option(default: _T) -> _T:
    """A field that the text form leaves out where it has its default.

    For the refinements of a formula that most programs leave alone; the JSON form holds them all,
    so that a stored plan keeps its meaning when a default changes.
    """
    found: _T = field(default=default, metadata={"option": True})
    return found


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
        """`{"kind": ..., field: value, ...}` with every field, in the order of definition."""
        values: dict[str, Scalar] = {"kind": self.kind}
        for f in fields(self):  # type: ignore[arg-type]
            values[f.name] = getattr(self, f.name)
        return values

    def __str__(self) -> str:
        body = ", ".join(
            f"{f.name}={format_scalar(getattr(self, f.name))}"
            for f in fields(self)  # type: ignore[arg-type]
            if not ("option" in f.metadata and getattr(self, f.name) == f.default)
        )
        return f"{self.kind}({body})"


def format_scalar(value: Scalar) -> str:
    """The JSON spelling of a scalar; floats keep the shortest form that reads back equal."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def spec_from_json(family: str, value: dict[str, Scalar]) -> Spec:
    """The specification of `family` that `to_json` wrote.

    Raises:
        KeyError: no such kind in the family.
        TypeError: a field that the kind does not have.
    """
    rest = dict(value)
    kind = rest.pop("kind")
    return _KINDS[family, str(kind)](**rest)
