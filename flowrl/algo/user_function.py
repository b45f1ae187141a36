"""Calls of the user's own functions, with errors that name the line of the user's code."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.errors import FlowError, TraceError
from flowrl.specs.function import (
    NO_DEBUGGER,
    definition_of,
    line_of,
    load_function,
)
from flowrl.specs.user_options import Options
from flowrl.wording import suggestion

__all__ = ["UserFunction", "shape_of"]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's own with its options, ready to be called.

    Attributes:
        kind: The purpose of the function: `loss`, `advantage`, `map`.
        function: The function itself.
        options: The options, passed by keyword.
        declared: The fields that the function declares to read, for messages.
        where: `file:line` of its `def`.
    """

    kind: str
    function: Callable[..., Any]
    options: Options
    declared: tuple[str, ...]
    where: str

    @classmethod
    def load(
        cls, kind: str, reference: str, options: Options, declared: tuple[str, ...]
    ) -> UserFunction:
        """Loads the function of a reference.

        Raises:
            TraceError: The function does not exist.
        """
        function = load_function(reference)
        return cls(kind, function, options, declared, definition_of(function))

    @property
    def title(self) -> str:
        """The name of the function in messages."""
        return f"{self.kind} {self.function.__name__}"

    def __call__(self, *arguments: object) -> Any:
        """Calls the function and returns its result.

        Raises:
            TraceError: The function raised an error, which is the cause.
        """
        try:
            return self.function(*arguments, **dict(self.options))
        except FlowError as error:
            if error.where is None:  # raised by an argument: a field that is not declared
                error.where = line_of(error, self.where)
            raise
        except Exception as error:
            raise self._raised(error, arguments) from error

    def _raised(self, error: Exception, arguments: Sequence[object]) -> TraceError:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
        report = TraceError(
            f"{self.title} raised {NO_DEBUGGER if isinstance(error, BdbQuit) else reason}",
            where=line_of(error, self.where),
        )
        declared = f"it declares {', '.join(self.declared) or 'nothing'}"
        if isinstance(error, AttributeError) and any(error.obj is each for each in arguments):
            attribute = str(error.name)
            names = [name for name in dir(error.obj) if not name.startswith("_")]
            report.what = f"{self.title} reads batch.{attribute}, which does not exist"
            report.found = declared
            report.expected = f"one of {', '.join(names)}"
            report.hint = suggestion(attribute, names)
            if attribute in getattr(error.obj, "fields", ()):
                report.hint = f'write batch["{attribute}"]'
            if attribute in getattr(error.obj, "extra", ()):
                report.hint = f'write batch.extra["{attribute}"]'
        elif isinstance(error, KeyError):
            report.found = declared
            report.hint = suggestion(str(error.args[0] if error.args else ""), self.declared)
        elif isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
            # A field that was not declared is None, and causes such an error.
            report.found = declared
            report.hint = "a field that is not declared is None; declare it"
        return report

    def refuse(
        self, what: str, *, found: str, expected: str, hint: str | None = None
    ) -> TraceError:
        """Returns the error for an invalid result of the function."""
        return TraceError(
            f"{self.title} {what}", where=self.where, found=found, expected=expected, hint=hint
        )


def shape_of(shape: Collection[int]) -> str:
    """Formats a shape as `[8, 5]`."""
    return "[" + ", ".join(map(str, shape)) + "]"
