"""Options of own functions, and the marks (`@fl.map`, `@fl.advantage.own`) that declare them.

    def my_loss(logprobs, batch, *, beta=0.1): ...     # `beta` is an option, 0.1 by default

The value of an option is a number, a string, a boolean or None, so that a graph can be written and
read back.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from flowrl.errors import TraceError
from flowrl.specs.base import Scalar, Spec
from flowrl.specs.function import caller, definition_of, nearest_hint, reference_of

__all__ = [
    "MarkedFunction",
    "Options",
    "change_options",
    "declared_options",
    "names_among",
]


Options: TypeAlias = tuple[tuple[str, Scalar], ...]
"""Pairs of name and value, sorted by name."""


def declared_options(
    function: Callable[..., Any], *, takes: Sequence[str], reserved: Collection[str] = ()
) -> Options:
    """The options of a function, with their defaults.

    Args:
        takes: What it is called with by position, for messages.
        reserved: Names that an option cannot have.

    Raises:
        TraceError: parameters that it cannot be called with.
    """
    where = definition_of(function)
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
    found: dict[str, Scalar] = {}
    for p in parameters[len(takes) :]:
        if p.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            problem = "a plan must know its options by name"
        elif p.default is inspect.Parameter.empty:
            problem = "every option has a default"
        elif p.name in reserved:
            problem = f"{p.name!r} means something else where it is used"
        else:
            found[p.name] = _scalar(p.default, p.name, where)
            continue
        raise TraceError(
            f"{function.__name__} cannot have the option '{p}': {problem}",
            where=where,
            expected=f"{function.__name__}{wanted}",
        )
    return tuple(sorted(found.items()))


def change_options(name: str, options: Options, given: Mapping[str, object]) -> Options:
    """The options with other values.

    Args:
        name: Of the function, for messages.

    Raises:
        TraceError: an option that the function does not have, or a value that is no scalar.
    """
    known = dict(options)
    for key, value in given.items():
        if key not in known:
            raise TraceError(
                f"{name} has no option '{key}'",
                where=caller(),
                expected=", ".join(known) or "no options",
                hint=nearest_hint(key, known),
            )
        scalar = _scalar(value, key, caller())
        if scalar is not None and known[key] is not None and _sort(scalar) != _sort(known[key]):
            raise TraceError(
                f"option '{key}' of {name} is {_sort(known[key])}",
                where=caller(),
                found=repr(value),
                expected=f"{_sort(known[key])}, as its default {known[key]!r}",
            )
        whole = isinstance(scalar, int) and not isinstance(scalar, bool)
        known[key] = float(scalar) if whole and isinstance(known[key], float) else scalar  # type: ignore[arg-type]
    return tuple(sorted(known.items()))


def _sort(value: Scalar) -> str:
    if isinstance(value, bool):
        return "a truth value"
    return "a text" if isinstance(value, str) else "a number"


def _scalar(value: object, name: str, where: str) -> Scalar:
    """The value as one of the very types that text and JSON know: numpy's float64 is a float."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and not math.isnan(value):
        return float(value)
    raise TraceError(
        f"option '{name}' must be a number, a text, a truth value or None",
        where=where,
        found=repr(value),
        hint="several numbers can be several options, or a text that the function splits",
    )


def names_among(
    names: str | Iterable[str], known: Collection[str], *, what: str
) -> tuple[str, ...]:
    """Names that a decorator was given, each once.

    Args:
        names: One or several.
        known: All that there are.
        what: What they name, for messages: `field of an update`.

    Raises:
        TraceError: a name that is not known.
    """
    found = tuple(dict.fromkeys((names,) if isinstance(names, str) else names))
    for name in found:
        if name not in known:
            raise TraceError(
                f"no {what} is called {name!r}",
                where=caller(),
                expected=", ".join(known),
                hint=nearest_hint(str(name), known),
            )
    return found


_S = TypeVar("_S", bound=Spec)


class MarkedFunction(Generic[_S]):
    """What stands under the name of a marked function in the user's module.

    It knows the specification; what calling it in a program does is a subclass's business.

    Args:
        function: `(batch, *, option=default, ...)`.
        kind: What it is for, for messages: `map`.
        make: The specification, whose fields are `function`, `options` and what is `declared`.
        declared: What the mark says.

    Raises:
        TraceError: a function that no plan can name, or with parameters that it cannot have.
    """

    reserved: ClassVar[frozenset[str]] = frozenset()
    """Names of arguments of a call in a program, which no option may have."""

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
        """The specification with these options; the others keep their defaults.

        Raises:
            TraceError: an option that the function does not have.
        """
        changed: Options = change_options(self.__name__, self._options, options)
        return self._make(**self._declared, options=changed)
