"""What all operations share: the checks of their arguments, at the user's line.

An operation checks a call in this order: `flowrl.specs.names.operation` its argument names,
`current_tracer` that a workflow is being traced, `reads_of` its handles, `check_spec` its numbers
and choices.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from flowrl.errors import TraceError
from flowrl.graph.ir import called
from flowrl.program.handles import (
    Advantages,
    Handle,
    Prompts,
    Rollout,
    Scores,
)
from flowrl.program.tracer import Read, Tracer, active_tracer
from flowrl.specs import Spec
from flowrl.specs.base import refusal, with_floats, wrong_fields
from flowrl.specs.names import operation
from flowrl.user_lines import trace_error
from flowrl.wording import suggestion

_H = TypeVar("_H", bound=Handle)
_S = TypeVar("_S", bound=Spec)


def operation_of(
    kind: Callable[..., Spec], add: Callable[..., Any], module: str, **handles: type[Handle]
) -> Callable[..., Any]:
    """Makes the operation of a kind of specification, whose fields are its arguments and options.

    Args:
        kind: The class of the specification, which documents the operation.
        add: Adds the node of a specification that works on handles.
        module: The operation's module.
        handles: The kind of each handle, by argument; they come before the options.
    """
    first = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=handle)
        for name, handle in handles.items()
    ]
    signature = inspect.Signature([*first, *inspect.signature(kind).parameters.values()])

    def function(*args: object, **kwargs: object) -> object:
        options = signature.bind(*args, **kwargs).arguments
        given = [options.pop(name) for name in handles]
        return add(kind(**options), *given)

    function.__name__ = function.__qualname__ = str(getattr(kind, "kind", ""))
    function.__module__, function.__doc__ = module, kind.__doc__
    vars(function)["__signature__"] = signature
    return operation(function)


def current_tracer(what: str) -> Tracer:
    """Returns the active trace.

    Raises:
        TraceError: No workflow is being traced.
    """
    tracer = active_tracer()
    if tracer is None:
        raise trace_error(
            f"{what} is used outside a workflow",
            hint="write it inside a function marked @fl.workflow, and start that with fl.run",
        )
    return tracer


def check_handle(value: object, kind: type[_H], *, operation: str, argument: str) -> _H:
    """Returns `value`, which must be a handle of that kind and of the active trace.

    Raises:
        TraceError: It is not; the message describes what it is.
    """
    if not isinstance(value, kind):
        raise trace_error(
            f"{operation} takes {kind.kind} as '{argument}'",
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
        raise trace_error(
            f"'{argument}' of {operation} is of another trace: {value.kind} of '{value.node}', "
            f"made in workflow '{other}', which {when}",
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
    described = getattr(value, "described", None)
    if isinstance(described, str):
        return described
    if isinstance(value, tuple | list):
        if value and all(isinstance(each, Handle) for each in value):
            return " and ".join(map(_describe, value))
        if any(isinstance(each, Handle | Spec) or hasattr(each, "described") for each in value):
            parts = (
                repr(each) if isinstance(each, str | int | float) else _describe(each)
                for each in value
            )
            return f"{type(value).__name__} of {', '.join(parts)}"
    return f"{value!r} ({type(value).__name__})"


def _handle_hint(value: object, kind: type[Handle]) -> str | None:
    if isinstance(value, Advantages) and kind is Scores:
        return "pass it by name: advantages=..."
    if isinstance(value, Rollout) and kind is Prompts:
        return 'make prompts of it first: fl.prompts_of(rollout, template="{prompt}{response}...")'
    if isinstance(value, tuple | list) and any(isinstance(each, kind) for each in value):
        return "it takes one of them: unpack what is returned together, or call it for each"
    instead = None if isinstance(value, Handle) else getattr(value, "instead", None)
    return instead if isinstance(instead, str) else kind.comes_from


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
            allowed if argument is None else f"{allowed}, as {field} of {called(spec)}",
            suggestion(value, choices) if isinstance(value, str) else None,
        )
    return with_floats(spec)


def check_value(
    operation: str, argument: str, value: object, allowed: object, hint: str | None = None
) -> None:
    """Checks an argument against an annotation such as `Count`.

    Raises:
        TraceError: The annotation does not allow the value.
    """
    expected = refusal(value, allowed)
    if expected is not None:
        raise refuse_argument(operation, argument, value, expected, hint)


def refuse_argument(
    operation: str, argument: str, value: object, expected: str, hint: str | None = None
) -> TraceError:
    """Returns the error for an argument of the wrong type or value."""
    return trace_error(
        f"{operation} cannot take this '{argument}'",
        found=_describe(value),
        expected=expected,
        hint=hint,
    )
