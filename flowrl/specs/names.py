"""Public names of `fl.`, and the errors for names that it does not have.

The error for an unknown name suggests a public one: by its name in papers and other libraries
(`fl.loss.ppo`, `fl.Actor`), else by its spelling (`fl.loss.polcy_clip`).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar, Unpack, get_args, get_origin, get_type_hints

from flowrl.errors import TraceError
from flowrl.synonyms import meanings
from flowrl.user_lines import trace_error
from flowrl.wording import nearest

MODULES: Mapping[str, str] = {
    "flowrl": "fl",
    **{f"flowrl.specs.{name}": f"fl.{name}" for name in ("loss", "kl", "grammar", "cut")},
    **{
        f"flowrl.program.{name}": f"fl.{name}"
        for name in ("advantage", "filter", "select", "shaping")
    },
}
"""The public name of each module."""

_PUBLIC = {"own_advantage": "fl.advantage.own", "map_of": "fl.map"}
"""Functions that modules give under another name than they are defined with."""

_FAMILIES = tuple(module for module in MODULES if module != "flowrl")


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


@functools.cache
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


_P = ParamSpec("_P")
_R = TypeVar("_R")


def operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function of programs: other arguments than its own are a `TraceError`."""
    signature = inspect.signature(function)
    own = function.__qualname__
    if "." not in own:
        module = next((m for m in _FAMILIES if function.__module__.startswith(m)), "flowrl")
        own = _PUBLIC.get(own, f"{MODULES[module]}.{own}")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        name, problem = own, None
        unknown = [each for each in kwargs if each not in signature.parameters]
        if own.endswith(".__call__"):  # a function of the user's own is called by its name
            name = str(getattr(args[0], "__name__", own))
        elif unknown:
            unknown = [each for each in unknown if each not in arguments_of(function)]
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            problem = str(error)
        if problem is not None or (unknown and not own.endswith(".__call__")):
            decorates = bool(args) and inspect.isfunction(args[0])
            raise _bad_call(name, function, problem, unknown, decorates=decorates)
        return function(*args, **kwargs)

    vars(checked)["is_operation"] = True
    return checked


def _bad_call(
    name: str,
    function: Callable[..., Any],
    problem: str | None,
    unknown: Sequence[str],
    *,
    decorates: bool,
) -> TraceError:
    """Returns the error of a call with other arguments than a function takes.

    Args:
        name: The name of the function in a program.
        problem: Python's message.
        unknown: Names of given arguments that it does not take; one of them may stand for an
            argument that is missing.
        decorates: True if a function was given first, as by a decorator without parentheses.
    """
    names, hint = arguments_of(function), None
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    missing = re.fullmatch("missing a required .*: ('.*')", problem or "")
    if problem == "too many positional arguments":
        positions = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY)
        hint = f"by position it takes {', '.join(names[:positions])}; the others have names"
        if positions == 0:
            hint = "pass each by its name: " + ", ".join(f"{each}=..." for each in names)
            if decorates:
                hint = f"as a decorator it has parentheses: @{name}(...)"
    for argument in unknown[:1]:
        problem = f"got an unexpected keyword argument '{argument}'"
        meant = next(iter(meanings(f"{name.rpartition('.')[2]}()", argument)), None)
        match = nearest(argument, names, cutoff=0.7)
        hint = f"leave {argument} out" if match is None else f"did you mean '{match}'?"
        if match is None and missing is not None:
            hint += f", and pass {missing[1]}"
        if meant is not None:
            hint = f"write {meant}=..." if meant in names else f"write {meant}"
    return trace_error(f"{name}: {problem}", expected=f"arguments {', '.join(names)}", hint=hint)


def refusing_others(module: str, own: Collection[str]) -> Callable[[str], NoReturn]:
    """Returns a module's `__getattr__`, which raises an AttributeError with a suggestion."""

    def refuse(name: str) -> NoReturn:
        owner = sys.modules.get(module)
        text = f"module '{module}' has no attribute '{name}'"
        if not name.startswith("_"):  # protocols that Python and libraries probe for
            missing = missing_name(module, name, own)
            text = missing.what if missing.hint is None else f"{missing.what}: {missing.hint}"
        raise AttributeError(text, name=name, obj=owner)

    return refuse


def _is_written(called: str, name: str) -> bool:
    """Returns True for public names of programs: functions, and in `fl` all except errors."""
    if called == "fl":
        return not name.endswith(("Error", "Died")) and not name.startswith("_")
    return name.islower()


def _form(name: str, called: str) -> str:
    form = name.lower().replace("-", "_")
    return form.replace("_", "") if called == "fl" else form
