"""Public names of `fl.`, and the errors for names that it does not have.

The error for an unknown name suggests a public one: by its name in papers and other libraries
(`fl.loss.ppo`, `fl.Actor`), else by its spelling (`fl.loss.polcy_clip`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack, get_args, get_origin, get_type_hints

from flowrl.errors import TraceError
from flowrl.specs.user_functions import caller
from flowrl.synonyms import meanings
from flowrl.wording import nearest

__all__ = [
    "MODULES",
    "Missing",
    "argument_hint",
    "arguments_of",
    "check_options",
    "kind_called",
    "missing_name",
    "raise_missing",
]

MODULES: Mapping[str, str] = {
    "flowrl": "fl",
    **{f"flowrl.specs.{name}": f"fl.{name}" for name in ("loss", "kl", "grammar", "cut")},
    **{
        f"flowrl.program.{name}": f"fl.{name}"
        for name in ("advantage", "filter", "select", "shaping")
    },
}
"""The public name of each module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A name that a module of flowrl does not have.

    Attributes:
        what: The error in one sentence.
        names: The public names of the module.
        hint: The suggestion; None if no name is similar.
    """

    what: str
    names: tuple[str, ...]
    hint: str | None


def missing_name(module: str, name: str, own: Collection[str]) -> Missing:
    """Describes the error of `module.name`.

    Args:
        own: The module's `__all__`, including names that programs do not write.
    """
    called = MODULES.get(module, module)
    names = tuple(each for each in own if _is_written(called, each))
    meant = meanings(called, name)
    hint = f"write {meant[0]}" if meant else None
    if hint is None:
        forms = {_form(each, called): each for each in names}
        match = nearest(_form(name, called), forms)
        hint = None if match is None else f"did you mean '{forms[match]}'?"
    return Missing(what=f"{called} has no '{name}'", names=names, hint=hint)


def kind_called(name: str, kinds: Collection[str]) -> str | None:
    """Returns the usual kind of role or data of a parameter with this name: `fl.Prompts`.

    Args:
        name: The name of the parameter.
        kinds: The kinds that a parameter may have: `Policy`, `Prompts`, ...
    """
    words = name.lower().split("_")
    for part in (name, *reversed(words)):
        called = next(iter(meanings("fl", part)), "").split(" ")[0]
        if called.removeprefix("fl.") in kinds:
            return called
        meant = nearest(part.replace("_", ""), kinds, cutoff=0.85)
        if meant is not None:
            return f"fl.{meant}"
    return None


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's arguments, including those in an unpacked `**options`."""
    names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = get_type_hints(function)[name]
            is_unpacked = get_origin(hint) is Unpack
            names += get_args(hint)[0].__annotations__ if is_unpacked else [name]
        elif name != "self":
            names.append(name)
    return names


def argument_hint(function: str, unknown: str, names: Sequence[str]) -> str | None:
    """Suggests what to write in place of an unknown argument; None without a suggestion.

    Args:
        function: The name of the function without its module: `generate`.
        unknown: The name of the unknown argument.
        names: The arguments of the function.
    """
    for meant in meanings(f"{function}()", unknown):
        return f"write {meant}=..." if meant in names else f"write {meant}"
    match = nearest(unknown, names, cutoff=0.7)
    return None if match is None else f"did you mean '{match}'?"


def check_options(function: Callable[..., Any], options: Collection[str]) -> None:
    """Checks the names in `**options` of a function of `fl.loss` or `fl.kl`.

    Raises:
        TraceError: The function does not have one of the options.
    """
    names = arguments_of(function)
    for name in options:
        if name not in names:
            family = function.__module__.removeprefix("flowrl.specs.").partition(".")[0]
            raise TraceError(
                f"fl.{family}.{function.__name__} does not have the option '{name}'",
                where=caller(),
                expected=", ".join(names),
                hint=argument_hint(function.__name__, name, names),
            )


def raise_missing(module: str, name: str, own: Collection[str]) -> NoReturn:
    """Raises the error of a module's `__getattr__`.

    Raises:
        AttributeError: The error, with a suggestion.
    """
    owner = sys.modules.get(module)
    if name.startswith("_"):  # protocols that Python and libraries probe for
        raise AttributeError(f"module '{module}' has no attribute '{name}'", name=name, obj=owner)
    missing = missing_name(module, name, own)
    text = missing.what if missing.hint is None else f"{missing.what}: {missing.hint}"
    raise AttributeError(text, name=name, obj=owner)


def _is_written(called: str, name: str) -> bool:
    """Returns True for public names of programs: functions, and in `fl` all except errors."""
    if called == "fl":
        return not name.endswith(("Error", "Died")) and not name.startswith("_")
    return name.islower()


def _form(name: str, called: str) -> str:
    form = name.lower().replace("-", "_")
    return form.replace("_", "") if called == "fl" else form
