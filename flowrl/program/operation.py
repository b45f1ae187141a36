"""What all operations share: the checks of their arguments, at the user's line.

An operation checks a call in this order: `flowrl.specs.names.operation` its argument names, a
`Call` that a workflow is traced (`trace`), its handles (`reads`), its numbers and choices (`spec`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation, whose arguments it checks: every error is at the user's line.

    Attributes:
        name: The name of the operation, for messages.
    """

    name: str

    def trace(self) -> Tracer:
        """Returns the active trace.

        Raises:
            TraceError: No workflow is being traced.
        """
        tracer = active_tracer()
        if tracer is None:
            raise trace_error(
                f"{self.name} is used outside a workflow",
                hint="write it inside a function marked @fl.workflow, and start that with fl.run",
            )
        return tracer

    def handle(self, argument: str, value: object, kind: type[_H]) -> _H:
        """Returns `value`, which must be a handle of that kind and of the active trace.

        Raises:
            TraceError: It is not; the message describes what it is.
        """
        if not isinstance(value, kind):
            raise trace_error(
                f"{self.name} takes {kind.kind} as '{argument}'",
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
                f"'{argument}' of {self.name} is of another trace: {value.kind} of "
                f"'{value.node}', made in workflow '{other}', which {when}",
                hint="do not keep handles between calls; make them inside the workflow",
            )
        return value

    def reads(
        self,
        required: Mapping[str, tuple[object, type[Handle]]] = MappingProxyType({}),
        *,
        optional: Mapping[str, tuple[object, type[Handle]]] = MappingProxyType({}),
    ) -> dict[str, Read]:
        """Returns what feeds each argument: by argument, a handle of a kind.

        Args:
            required: The handle and its kind by argument.
            optional: The same; an argument whose value is None is left out.
        """
        self.trace()
        given = {name: pair for name, pair in optional.items() if pair[0] is not None}
        return {
            argument: self.handle(argument, value, kind).read()
            for argument, (value, kind) in (dict(required) | given).items()
        }

    def spec(self, spec: _S, *, argument: str | None = None) -> _S:
        """Returns a specification whose values its formula takes, with floats for whole numbers.

        Args:
            spec: The specification.
            argument: The argument that holds it; None where its fields are the arguments.
        """
        for field, value, allowed in wrong_fields(spec):
            choices = re.findall(r"'([^']*)'", allowed)
            raise self.refuse(
                argument or _ARGUMENTS.get(field, field),
                value,
                allowed if argument is None else f"{allowed}, as {field} of {called(spec)}",
                suggestion(value, choices) if isinstance(value, str) else None,
            )
        return with_floats(spec)

    def check(self, argument: str, value: object, allowed: object, hint: str | None = None) -> None:
        """Checks an argument against an annotation such as `Count`."""
        expected = refusal(value, allowed)
        if expected is not None:
            raise self.refuse(argument, value, expected, hint)

    def refuse(
        self, argument: str, value: object, expected: str, hint: str | None = None
    ) -> TraceError:
        """Returns the error for an argument of the wrong type or value."""
        return trace_error(
            f"{self.name} cannot take this '{argument}'",
            found=_describe(value),
            expected=expected,
            hint=hint,
        )


_ARGUMENTS = {"kl_coefficient": "kl", "text": "template"}
"""Fields of specifications, and the arguments of operations that have another name."""


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
