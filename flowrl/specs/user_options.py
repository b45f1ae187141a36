"""Options of the user's own functions: keyword arguments whose values travel in a specification.

    def my_loss(logprobs, batch, *, beta=0.1): ...     # `beta` is an option, 0.1 unless it is given

A value is a number, a text, a truth value or None, so that a graph can be written and read back.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flowrl.errors import TraceError
from flowrl.specs.base import Scalar
from flowrl.specs.function import caller, definition_of, nearest_hint

__all__ = ["Options", "change_options", "declared_options", "names_among"]

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
