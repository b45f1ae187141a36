"""What all operations share: the checks of their arguments, at the user's line.

An operation checks a call in this order: `operation` its argument names, `current_tracer` that a
workflow is being traced, `reads_of` its handles, `check_spec` its numbers and choices.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from flowrl.errors import TraceError
from flowrl.graph.ir import called
from flowrl.program.handles import (
    Advantages,
    Handle,
    Logprobs,
    Mapped,
    Prompts,
    Rollout,
    Samples,
    Scores,
    TokenRewards,
)
from flowrl.program.source import user_line
from flowrl.program.tracer import Read, Tracer, active_tracer
from flowrl.specs import Spec
from flowrl.specs.base import with_floats, wrong_fields
from flowrl.specs.names import MODULES, argument_hint, arguments_of
from flowrl.wording import suggestion

__all__ = [
    "bad_call",
    "check_handle",
    "check_spec",
    "check_whole",
    "current_tracer",
    "operation",
    "reads_of",
    "refuse_argument",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_H = TypeVar("_H", bound=Handle)
_S = TypeVar("_S", bound=Spec)

_MOST_OTHERS = 3
"""Functions that a hint names."""


def operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates an operation: wrong argument names are a `TraceError` with the nearest one."""
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
    return f"{MODULES.get(function.__module__, 'fl')}.{function.__qualname__}"


def bad_call(
    name: str, function: Callable[..., object], problem: str, unknown: Sequence[str]
) -> TraceError:
    """Returns the error of a call with other arguments than a function takes.

    Args:
        name: The name of the function in a program.
        problem: Python's message.
        unknown: Names of given arguments that it does not take; one of them may stand for an
            argument that is missing.
    """
    short, names = name.rpartition(".")[2], arguments_of(function)
    hint = argument_hint(short, unknown[0], names) if unknown else None
    if hint is None and unknown and "missing" not in problem:
        hint = f"leave {unknown[0]} out" + _others_with(function, unknown[0])
    elif hint is None:
        written = name if name.startswith("fl.") else short
        hint = f"write {written}({_needed(function)})"
    if unknown:
        problem = f"got an unexpected keyword argument '{unknown[0]}'"
    return TraceError(
        f"{name}: {problem}",
        where=str(user_line()),
        expected=f"arguments {', '.join(names)}",
        hint=hint,
    )


def _others_with(function: Callable[..., object], argument: str) -> str:
    """Returns the functions of the same family that take an argument, where they are few."""
    module = function.__module__
    own: dict[str, Any] = vars(sys.modules[module]) if module in MODULES else {}
    names = [name for name in own.get("__all__", ()) if inspect.isfunction(own.get(name))]
    others = [f"{MODULES[module]}.{name}" for name in names if argument in arguments_of(own[name])]
    return f", or use {' or '.join(others)}" if 0 < len(others) <= _MOST_OTHERS else ""


def _needed(function: Callable[..., object]) -> str:
    """Returns the arguments that a call must have, as they are written."""
    written = [
        f"{name}=..." if parameter.kind is parameter.KEYWORD_ONLY else name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return ", ".join(written)


def current_tracer(what: str) -> Tracer:
    """Returns the active trace.

    Raises:
        TraceError: No workflow is being traced.
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
    """Returns `value`, which must be a handle of that kind and of the active trace.

    Raises:
        TraceError: It is not; the message describes what it is.
    """
    if not isinstance(value, kind):
        raise TraceError(
            f"{operation} takes {kind.kind} as '{argument}'",
            where=str(user_line()),
            found=_describe(value),
            expected=f"a handle of type fl.{kind.__name__}",
            hint=_handle_hint(value, kind),
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


def reads_of(
    operation: str,
    required: Mapping[str, tuple[object, type[Handle]]] = MappingProxyType({}),
    *,
    optional: Mapping[str, tuple[object, type[Handle]]] = MappingProxyType({}),
) -> dict[str, Read]:
    """Returns what feeds each argument of an operation.

    Args:
        operation: The name of the operation, for messages.
        required: The handle and its kind by argument.
        optional: The same; an argument whose value is None is left out.

    Raises:
        TraceError: A handle is of another kind or of another trace, or there is no trace.
    """
    current_tracer(operation)
    given = {name: pair for name, pair in optional.items() if pair[0] is not None}
    return {
        argument: check_handle(value, kind, operation=operation, argument=argument).read()
        for argument, (value, kind) in (dict(required) | given).items()
    }


def _describe(value: object) -> str:
    if isinstance(value, Handle):
        return f"{value.kind} of '{value.node}'"
    if isinstance(value, Spec):
        return str(value)
    if (
        isinstance(value, tuple | list)
        and value
        and all(isinstance(each, Handle) for each in value)
    ):
        return " and ".join(map(_describe, value))
    described = getattr(value, "described", None)
    return described if isinstance(described, str) else f"{value!r} ({type(value).__name__})"


_BY_ROLE: Mapping[type[Handle], str] = {
    Samples: "generate(prompts)",
    Rollout: "generate(prompts)",
    Scores: "score(rollout)",
    Logprobs: "logprobs(rollout)",
}
"""The call of a role that gives each kind of handle."""


_MAPPED: Mapping[type[Handle], str] = {
    Scores: "score",
    Advantages: "advantage",
    Logprobs: "logprobs",
    TokenRewards: "token_reward",
}
"""The field by which a map gives each kind of handle."""


def _handle_hint(value: object, kind: type[Handle]) -> str | None:
    if isinstance(value, Advantages) and kind is Scores:
        return "pass it by name: advantages=..."
    if isinstance(value, Rollout) and kind is Scores:
        return (
            "scores come from reward.score(rollout); those that a judge's answers state, from "
            "fl.parse(rollout, regex=..., otherwise=0.0)"
        )
    if isinstance(value, list) and value and all(isinstance(each, kind) for each in value):
        return "it takes one of them: call it once for each"
    if isinstance(value, Rollout) and kind is Prompts:
        return (
            "to answer samples, make prompts of them: "
            'fl.prompts_of(rollout, template="{prompt}{response}...")'
        )
    if isinstance(value, tuple) and any(isinstance(each, kind) for each in value):
        names = ", ".join(type(each).__name__.lower() for each in value)
        return f"several things were returned together: write {names} = ..."
    if isinstance(value, TokenRewards) and kind in (Scores, Advantages):
        return (
            "fl.advantage.gae and reinforce_pp make advantages of them: token_rewards=...; one "
            "score a sample is a map of theirs that gives score"
        )
    if isinstance(value, Mapped) and (name := _MAPPED.get(kind)) is not None:
        fields = ", ".join(field.name for field in value.fields)
        return f"it gives {fields}; a map that gives '{name}' alone gives {kind.kind}"
    instead = None if isinstance(value, Handle) else getattr(value, "instead", None)
    if isinstance(instead, str):
        return instead
    call = _BY_ROLE.get(kind, "")
    if call and not isinstance(value, Handle) and hasattr(value, call.partition("(")[0]):
        return f"pass what {getattr(value, 'name', None)}.{call} returned"
    return kind.comes_from


_ARGUMENTS = {"kl_coefficient": "kl", "text": "template"}
"""Fields of specifications, and the arguments of operations that have another name."""


def check_spec(operation: str, spec: _S, *, argument: str | None = None) -> _S:
    """Returns a specification whose values its formula takes, with floats for whole numbers.

    Args:
        operation: The name of the operation, for messages.
        spec: The specification.
        argument: The argument that holds it; None where its fields are the arguments.

    Raises:
        TraceError: A field has another value.
    """
    for field, value, allowed in wrong_fields(spec):
        choices = re.findall(r"'([^']*)'", allowed)
        raise refuse_argument(
            operation,
            argument or _ARGUMENTS.get(field, field),
            value,
            allowed if argument is None else f"{field} of {called(spec)} to be {allowed}",
            suggestion(value, choices) if isinstance(value, str) else None,
        )
    return with_floats(spec)


def check_whole(
    operation: str, argument: str, value: object, expected: str = "a whole number from 1 up"
) -> None:
    """Checks that an argument is a whole number from 1 up.

    Raises:
        TraceError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse_argument(operation, argument, value, expected)


def refuse_argument(
    operation: str, argument: str, value: object, expected: str, hint: str | None = None
) -> TraceError:
    """Returns the error for an argument of the wrong type or value."""
    return TraceError(
        f"{operation} cannot take this '{argument}'",
        where=str(user_line()),
        found=_describe(value),
        expected=expected,
        hint=hint,
    )
