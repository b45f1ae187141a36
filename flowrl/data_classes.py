"""`dataclass` of the standard library, whose methods are written when they are first used.

    from flowrl.data_classes import dataclass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Size:
        devices: int

The standard library writes six methods as text and compiles them for each class, which takes about
half a millisecond; a command that plans loads some 270 such classes and makes objects of a third of
them. Here `__init__`, `__eq__` and `__hash__` are written and compiled when something asks for
them, and the others are the same functions for all classes. Fields, slots and how classes inherit
them are the standard library's own, and so are messages and signatures. A class with `order`,
`unsafe_hash` or `weakref_slot` is made by the standard library as a whole; `InitVar` is not for
these classes.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


class _Missing:
    """In the place of an argument whose default is made anew for each object."""

    def __repr__(self) -> str:
        return "<factory>"


_MISSING = _Missing()


class _Late:
    """A method that is written when somebody asks for it, and then takes this one's place."""

    __slots__ = ("_name", "_owner", "_write")

    def __init__(self, owner: type, name: str, write: Callable[[type], Any]) -> None:
        self._owner, self._name, self._write = owner, name, write

    def __get__(self, instance: object, of: type | None = None) -> Any:
        method = self._write(self._owner)
        method.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        setattr(self._owner, self._name, method)
        return method if instance is None else method.__get__(instance, of)


def _make(
    cls: type,
    *,
    init: bool = True,
    repr: bool = True,  # noqa: A002  (the standard library's name)
    eq: bool = True,
    frozen: bool = False,
    kw_only: bool = False,
    slots: bool = False,
    **others: bool,
) -> Any:
    """The data class."""
    if others:
        return dataclasses.dataclass(
            init=init, repr=repr, eq=eq, frozen=frozen, kw_only=kw_only, slots=slots, **others
        )(cls)
    own = dict(cls.__dict__)
    # With data classes among the bases, the standard library compares whether these are frozen; and
    # it refuses a class that says itself what an assignment does.
    told_frozen = bool({"__setattr__", "__delattr__"} & own.keys()) or any(
        "__dataclass_fields__" in base.__dict__ for base in cls.__mro__[1:]
    )
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # or the standard library would ask for the signature
    made: Any = dataclasses.dataclass(
        init=False,
        repr=False,
        eq=False,
        frozen=frozen and told_frozen,
        kw_only=kw_only,
        slots=slots,
    )(cls)
    told = made.__dataclass_params__
    told.init, told.repr, told.eq, told.frozen = init, repr, eq, frozen
    if init and "__init__" not in own:
        made.__init__ = _Late(made, "__init__", _init)
    if repr and "__repr__" not in own:
        made.__repr__ = _repr
    if eq:
        if "__eq__" not in own:
            made.__eq__ = _Late(made, "__eq__", _eq)
        # Python puts None there beside an `__eq__`.
        if own.get("__hash__") is None and ("__eq__" in own or "__hash__" not in own):
            made.__hash__ = _Late(made, "__hash__", _hash) if frozen else None
    if frozen:
        _freeze(made)
        if slots:
            for name, method in (("__getstate__", _getstate), ("__setstate__", _setstate)):
                if name not in own:
                    setattr(made, name, method)
    return made


def _init(cls: Any) -> Any:
    """`__init__`: a parameter for each field, those by name last."""
    frozen: bool = cls.__dataclass_params__.frozen
    known = fields(cls)
    mine = "self" if all(f.name != "self" for f in known) else "__self"
    values: dict[str, object] = {"__missing": _MISSING, "__set": object.__setattr__}
    lines = [f"  {line}" for f in known if (line := _assigned(f, mine, frozen, values))]
    if hasattr(cls, "__post_init__"):
        lines.append(f"  {mine}.__post_init__()")
    by_name = [f for f in known if f.init and f.kw_only]
    parameters = [mine, *(_parameter(f) for f in known if f.init and not f.kw_only)]
    parameters += ["*", *(_parameter(f) for f in by_name)] if by_name else []
    method = _compiled(cls, "__init__", parameters, lines or ["  pass"], values)
    method.__annotations__ = {**{f.name: f.type for f in known if f.init}, "return": None}
    return method


def _assigned(f: Field[Any], mine: str, frozen: bool, values: dict[str, object]) -> str:
    """The line that gives a field its value, or nothing; what it takes is put into `values`."""
    value = f.name
    if f.default_factory is not MISSING:
        values[f"__make_{f.name}"] = f.default_factory
        value = f"__make_{f.name}()"
        if f.init:
            value = f"{value} if {f.name} is __missing else {f.name}"
    elif f.default is not MISSING:
        values[f"__default_{f.name}"] = f.default
        if not f.init:
            value = f"__default_{f.name}"
    elif not f.init:
        return ""  # `__post_init__` gives it one
    return f"__set({mine}, {f.name!r}, {value})" if frozen else f"{mine}.{f.name} = {value}"


def _parameter(f: Field[Any]) -> str:
    if f.default is not MISSING:
        return f"{f.name}=__default_{f.name}"
    return f.name if f.default_factory is MISSING else f"{f.name}=__missing"


def _eq(cls: type) -> Any:
    """Objects of one class are equal where all fields are that count."""
    names = [f.name for f in fields(cls) if f.compare]
    line = f"return {_tuple('self', names)} == {_tuple('other', names)}"
    lines = ["  if other.__class__ is self.__class__:", f"   {line}", "  return NotImplemented"]
    return _compiled(cls, "__eq__", ["self", "other"], lines, {})


def _hash(cls: type) -> Any:
    names = [f.name for f in fields(cls) if (f.compare if f.hash is None else f.hash)]
    return _compiled(cls, "__hash__", ["self"], [f"  return hash({_tuple('self', names)})"], {})


def _tuple(of: str, names: Sequence[str]) -> str:
    return f"({''.join(f'{of}.{name}, ' for name in names)})"


def _compiled(
    cls: type, name: str, parameters: Sequence[str], lines: Sequence[str], values: dict[str, object]
) -> Any:
    """The function of this text; `values` are names that it may use."""
    head = f"def make({', '.join(values)}):\n def {name}({', '.join(parameters)}):\n"
    found: dict[str, Any] = {}
    # Of names of fields alone, which Python has read as names before.
    exec(head + "\n".join(lines) + f"\n return {name}", vars(sys.modules[cls.__module__]), found)  # noqa: S102
    return found["make"](**values)


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _freeze(cls: Any) -> None:
    """Refuses to assign fields, and to delete them."""
    names = frozenset(f.name for f in fields(cls))

    def assign(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = assign, delete


def _getstate(self: Any) -> list[object]:
    return [getattr(self, f.name) for f in fields(self)]


def _setstate(self: Any, state: Sequence[object]) -> None:
    for f, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """See the module, and `dataclasses.dataclass`."""
        return (lambda found: _make(found, **options)) if cls is None else _make(cls, **options)
