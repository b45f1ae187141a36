"""The checks that all operations share: argument names and types, at the user's line."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from flowrl.errors import TraceError
from flowrl.program.handles import Advantages, Handle, Mapped, Scores
from flowrl.program.source import user_line
from flowrl.program.tracer import Tracer, active_tracer
from flowrl.specs import Sampling, Spec, grammar, kl, loss
from flowrl.specs.names import argument_hint, arguments_of

__all__ = [
    "bad_call",
    "check_handle",
    "current_tracer",
    "is_number",
    "misused_specification",
    "operation",
    "refuse_argument",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_H = TypeVar("_H", bound=Handle)

_SOURCES = {
    "Samples": "samples come from actor.generate(prompts)",
    "Rollout": "rollouts come from actor.generate(prompts)",
    "Values": "values come from critic.values(rollout)",
    "Returns": "returns come with the advantages: fl.advantage.gae(scores, values, rollout)",
    "Pairs": "pairs are a parameter of the workflow, or come from fl.select.best_and_worst",
    "Scores": "scores come from reward.score(rollout)",
    "Advantages": "advantages come from fl.advantage.group_relative(scores)",
    "Logprobs": "logprobs come from reference.logprobs(rollout)",
    "Prompts": "prompts are a parameter of the workflow: prompts: fl.Prompts",
}
"""The operations that make a handle of each kind."""


def operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes wrong argument names a `TraceError` with the nearest right one."""
    signature = inspect.signature(function)
    name = _public_name(function)
    names = [p for p in signature.parameters if p != "self"]

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            # A function of the user's own is called by its name.
            own = getattr(args[0], "__name__", name) if name.endswith(".__call__") else name
            unknown = [each for each in kwargs if each not in names]
            raise bad_call(str(own), function, str(error), unknown) from None
        return function(*args, **kwargs)

    return checked


def _public_name(function: Callable[..., object]) -> str:
    """Returns the name of an operation: `fl.filter.zero_variance`, `Policy.generate`."""
    if "." in function.__qualname__:
        return function.__qualname__
    parts = function.__module__.removeprefix("flowrl.program.").split(".")
    family = [] if parts[0] in _TOP_LEVEL else parts[:1]
    return ".".join(["fl", *family, function.__qualname__])


_TOP_LEVEL = ("interact", "log", "maps")
"""Modules whose functions are names of `flowrl` itself."""


def bad_call(
    name: str, function: Callable[..., object], problem: str, unknown: Sequence[str]
) -> TraceError:
    """The error of a call with other arguments than a function takes.

    Args:
        name: What a program calls the function.
        problem: What Python says of the call.
        unknown: Names of arguments that it does not take: what is missing may have been given
            by another name.
    """
    short, names = name.rpartition(".")[2], arguments_of(function)
    hint = argument_hint(short, unknown[0], names) if unknown else None
    if hint is None and unknown and "missing" not in problem:
        hint = f"leave {unknown[0]} out"
    elif hint is None:
        called = name if name.startswith("fl.") else short
        hint = f"write {called}({_needed(function)})"
    if unknown:
        problem = f"got an unexpected keyword argument '{unknown[0]}'"
    return TraceError(
        f"{name}: {problem}",
        where=str(user_line()),
        expected=f"arguments {', '.join(names)}",
        hint=hint,
    )


def _needed(function: Callable[..., object]) -> str:
    """The arguments that a call must have, as it is written; the others have a name."""
    written = [
        f"{name}=..." if parameter.kind is parameter.KEYWORD_ONLY else name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return ", ".join(written)


_MISUSED = re.compile(r"(\w+)(?:\.__init__)?\(\) (.+)")


def misused_specification(error: TypeError, call: str) -> TraceError | None:
    """Explains a call of `fl.Sampling`, `fl.loss`, `fl.kl` or `fl.grammar` that Python refused.

    Args:
        call: The line of the program.
    """
    found = _MISUSED.match(str(error))
    if found is None:
        return None
    families = {"fl.loss": loss, "fl.kl": kl, "fl.grammar": grammar}
    functions = {
        f"{family}.{name}": getattr(module, name)
        for family, module in families.items()
        for name in module.__all__
    } | {"fl.Sampling": Sampling}
    name = next((one for one in functions if one.rpartition(".")[2] == found[1]), None)
    if name is None:
        return None
    names = arguments_of(functions[name])
    given = re.findall(r"(\w+)\s*=(?!=)", call.partition(f"{found[1]}(")[2])
    unknown = re.findall(r"keyword argument '(\w+)'", found[2])
    unknown = unknown or [each for each in given if each not in names]
    return bad_call(name, functions[name], found[2], unknown)


def current_tracer(what: str) -> Tracer:
    """The active trace.

    Raises:
        TraceError: no workflow is being traced.
    """
    tracer = active_tracer()
    if tracer is None:
        raise TraceError(
            f"{what} is used outside a workflow",
            where=str(user_line()),
            hint="write it inside a function marked @fl.workflow, and start that with fl.run",
        )
    return tracer


def check_handle(value: object, kind: type[_H], *, operation: str, argument: str) -> _H:
    """`value`, when it is a handle of that kind and of the active trace.

    Raises:
        TraceError: another value; says what was found.
    """
    if not isinstance(value, kind):
        raise TraceError(
            f"{operation} takes {kind.kind} as '{argument}'",
            where=str(user_line()),
            found=_describe(value),
            expected=f"a handle of type fl.{kind.__name__}",
            hint=_way_out(value, kind),
        )
    tracer = active_tracer()
    if value.tracer is not tracer:
        other = value.tracer.name
        when = "has been traced already" if value.tracer.closed else "is being traced around it"
        if tracer is None and not value.tracer.closed:
            when = "is being traced in another thread"
        raise TraceError(
            f"'{argument}' of {operation} is of another trace: {value.kind} of '{value.node}', "
            f"made in workflow '{other}', which {when}",
            where=str(user_line()),
            hint="do not keep handles between calls; make them inside the workflow",
        )
    return value


def _describe(value: object) -> str:
    if isinstance(value, Handle):
        return f"{value.kind} of '{value.node}'"
    if isinstance(value, Spec):
        return str(value)
    if isinstance(value, tuple) and value and all(isinstance(each, Handle) for each in value):
        return " and ".join(map(_describe, value))
    described = getattr(value, "described", None)
    return described if isinstance(described, str) else f"{value!r} ({type(value).__name__})"


def _way_out(value: object, kind: type[Handle]) -> str | None:
    if isinstance(value, Advantages) and kind is Scores:
        return "pass it by name: advantages=..."
    if isinstance(value, tuple) and any(isinstance(each, kind) for each in value):
        names = ", ".join(type(each).__name__.lower() for each in value)
        return f"several things were returned together: write {names} = ..."
    if isinstance(value, Mapped) and kind in (Scores, Advantages):
        name = "score" if kind is Scores else "advantage"
        fields = ", ".join(field.name for field in value.fields)
        return f"it gives {fields}; a map that gives '{name}' alone gives {kind.kind}"
    if isinstance(value, Handle):
        return _SOURCES.get(kind.__name__)
    role = getattr(value, "name", None)
    if kind.__name__ in ("Samples", "Rollout") and hasattr(value, "generate"):
        return f"pass what {role}.generate(prompts) returned"
    if kind.__name__ == "Scores" and hasattr(value, "score"):
        return f"pass what {role}.score(rollout) returned"
    if kind.__name__ == "Logprobs" and hasattr(value, "logprobs"):
        return f"pass what {role}.logprobs(rollout) returned"
    return _SOURCES.get(kind.__name__)


def is_number(value: object) -> bool:
    """True for a finite number from 0 up; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def refuse_argument(
    operation: str, argument: str, value: object, expected: str, hint: str | None = None
) -> TraceError:
    """The error for an argument of the wrong type or value."""
    return TraceError(
        f"{operation} cannot take this '{argument}'",
        where=str(user_line()),
        found=_describe(value),
        expected=expected,
        hint=hint,
    )
