"""Calls a function of the user's own, and says which of their lines is to blame."""

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
    nearest_hint,
)
from flowrl.specs.user_options import Options

__all__ = ["UserFunction", "shape_of"]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's own with its options, ready to be called.

    Attributes:
        kind: What it is: `loss`, `advantage`, `map`.
        function: Itself.
        options: Passed by keyword.
        declared: What its declaration says that it reads, for messages.
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
        """By its reference.

        Raises:
            TraceError: there is no such function.
        """
        function = load_function(reference)
        return cls(kind, function, options, declared, definition_of(function))

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"{self.kind} {self.function.__name__}"

    def __call__(self, *arguments: object) -> Any:
        """What it returns.

        Raises:
            TraceError: it raised; the error itself is the cause.
        """
        try:
            return self.function(*arguments, **dict(self.options))
        except FlowError as error:
            if error.where is None:  # of what it was given: a field that it does not declare
                error.where = line_of(error, self.where)
            raise
        except Exception as error:
            raise self._raised(error, arguments) from error

    def _raised(self, error: Exception, arguments: Sequence[object]) -> TraceError:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
        told = TraceError(
            f"{self.title} raised {NO_DEBUGGER if isinstance(error, BdbQuit) else reason}",
            where=line_of(error, self.where),
        )
        declared = f"it declares {', '.join(self.declared) or 'nothing'}"
        if isinstance(error, AttributeError) and any(error.obj is each for each in arguments):
            asked = str(error.name)
            names = [name for name in dir(error.obj) if not name.startswith("_")]
            told.what = f"{self.title} asks for batch.{asked}, which there is not"
            told.found = declared
            told.expected = f"one of {', '.join(names)}"
            told.hint = nearest_hint(asked, names)
            if asked in getattr(error.obj, "fields", ()):
                told.hint = f'write batch["{asked}"]'
            if asked in getattr(error.obj, "extra", ()):
                told.hint = f'write batch.extra["{asked}"]'
        elif isinstance(error, KeyError):
            told.found = declared
            told.hint = nearest_hint(str(error.args[0] if error.args else ""), self.declared)
        elif isinstance(error, TypeError | AttributeError) and "NoneType" in str(error):
            # What was not declared is None, and fails like this.
            told.found = declared
            told.hint = "a field that it does not declare is None; add it"
        return told

    def refuse(
        self, what: str, *, found: str, expected: str, hint: str | None = None
    ) -> TraceError:
        """The error of a result that is of no use."""
        return TraceError(
            f"{self.title} {what}", where=self.where, found=found, expected=expected, hint=hint
        )


def shape_of(shape: Collection[int]) -> str:
    """`[8, 5]`."""
    return "[" + ", ".join(map(str, shape)) + "]"
