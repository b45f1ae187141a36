"""The user's own functions: their options, and the marks that make specifications of them.

`beta` of `def my_loss(logprobs, batch, *, beta=0.1)` is an option, 0.1 by default. The value of an
option is a number, a string, a boolean or None, so that a graph can be written and read back.
`flowrl.user_files` finds a function again by its reference.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from flowrl.errors import TraceError
from flowrl.specs.base import Scalar, Spec
from flowrl.user_files import reference_of
from flowrl.user_lines import definition_of, trace_error, user_line
from flowrl.wording import suggestion

NO_DEBUGGER = (
    "BdbQuit: a breakpoint has no terminal to stop at here, or the debugger was left; "
    "executor=eager stops at breakpoints"
)
"""The message for a debugger without a terminal; rewards, environments and maps share it."""

Options: TypeAlias = tuple[tuple[str, Scalar], ...]
"""Options as pairs of name and value, sorted by name."""


def declared_options(
    function: Callable[..., Any], *, takes: Sequence[str], reserved: Collection[str] = ()
) -> Options:
    """Returns the options of a function, with their defaults.

    Args:
        function: A function `(batch, *, option=default, ...)`.
        takes: The names of its positional arguments, for messages.
        reserved: The names that an option cannot have.

    Raises:
        TraceError: The function has parameters with which flowrl cannot call it.
    """
    where = str(definition_of(function))
    parameters = list(inspect.signature(function).parameters.values())
    wanted = f"({', '.join(takes)}, *, option=default, ...)"
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = parameters[: len(takes)]
    if len(first) < len(takes) or any(p.kind not in by_position for p in first):
        raise TraceError(
            f"{function.__name__} does not take {' and '.join(takes)}",
            where=where,
            found=f"{function.__name__}{inspect.signature(function)}",
            expected=f"{function.__name__}{wanted}",
        )
    options: dict[str, Scalar] = {}
    for p in parameters[len(takes) :]:
        if p.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            problem = "a plan must know its options by name"
        elif p.default is inspect.Parameter.empty:
            problem = "every option has a default"
        elif p.name in reserved:
            problem = f"the name {p.name!r} is reserved"
        else:
            options[p.name] = _scalar(p.default, p.name, where)
            continue
        raise TraceError(
            f"{function.__name__} cannot have the option '{p}': {problem}",
            where=where,
            expected=f"{function.__name__}{wanted}",
        )
    return tuple(sorted(options.items()))


def change_options(name: str, options: Options, given: Mapping[str, object]) -> Options:
    """Returns the options with other values.

    Args:
        name: The name of the function, for messages.
        options: All options of the function.
        given: The values to change, by name.

    Raises:
        TraceError: The function does not have an option, or a value is not a scalar.
    """
    known = dict(options)
    for key, value in given.items():
        if key not in known:
            raise trace_error(
                f"{name} has no option '{key}'",
                expected=", ".join(known) or "no options",
                hint=suggestion(key, known),
            )
        scalar = _scalar(value, key, str(user_line()))
        default = known[key]
        if scalar is not None and default is not None and _type(scalar) != _type(default):
            raise trace_error(
                f"option '{key}' of {name} is {_type(default)}",
                found=repr(value),
                expected=f"{_type(default)}, as its default {default!r}",
            )
        whole = isinstance(scalar, int) and not isinstance(scalar, bool)
        known[key] = float(scalar) if whole and isinstance(default, float) else scalar  # type: ignore[arg-type]
    return tuple(sorted(known.items()))


def _type(value: Scalar) -> str:
    if isinstance(value, bool):
        return "a boolean"
    return "a string" if isinstance(value, str) else "a number"


def _scalar(value: object, name: str, where: str) -> Scalar:
    """Returns the value as one of JSON's scalar types: a numpy float64 becomes a float."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and not math.isnan(value):
        return float(value)
    raise TraceError(
        f"option '{name}' must be a number, a string, a boolean or None",
        where=where,
        found=repr(value),
        hint="several numbers can be several options, or a string that the function splits",
    )


def names_among(
    names: str | Iterable[str],
    known: Collection[str],
    *,
    what: str,
    other: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Returns the names that a decorator was given, without duplicates.

    Args:
        names: One name, or several.
        known: All valid names.
        what: The kind of the names, for messages: `field of an update`.
        other: What to do instead, by names that are not known.

    Raises:
        TraceError: A name is not known.
    """
    unique = tuple(dict.fromkeys((names,) if isinstance(names, str) else names))
    for name in unique:
        if name not in known:
            raise trace_error(
                f"no {what} is called {name!r}",
                expected=", ".join(known),
                hint=other.get(name) or suggestion(str(name), known),
            )
    return unique


_S = TypeVar("_S", bound=Spec)


class MarkedFunction(Generic[_S]):
    """The object that replaces a marked function in the user's module.

    It holds the specification; subclasses define the effect of a call in a program.

    Args:
        function: A function `(batch, *, option=default, ...)`.
        kind: The purpose of the function, for messages: `map`.
        make: The class of the specification, with the fields `function`, `options` and `declared`.
        declared: The arguments of the mark.

    Raises:
        TraceError: No plan can name the function, or it has parameters that it cannot have.
    """

    reserved: ClassVar[frozenset[str]] = frozenset()
    """The names of arguments of a call in a program, which no option may have."""

    def __init__(
        self, function: Callable[..., Any], *, kind: str, make: Callable[..., _S], **declared: Any
    ) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        fields: dict[str, object] = getattr(make, "__dataclass_fields__", {})
        reserved = {*fields, "kind", *self.reserved}
        self._options = declared_options(function, takes=("batch",), reserved=reserved)
        self._make = make
        self._declared = {"function": reference_of(function, kind=kind), **declared}

    def spec(self, **options: Scalar) -> _S:
        """Returns the specification with these options and the defaults of the others.

        Raises:
            TraceError: The function does not have an option.
        """
        changed: Options = change_options(self.__name__, self._options, options)
        return self._make(**self._declared, options=changed)
