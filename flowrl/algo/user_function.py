"""Calls a function of the user's own, and says which of their lines is to blame."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from flowrl.errors import FlowError, TraceError
from flowrl.specs.function import definition_of, line_of, load_function
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
        except FlowError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
            # What was not declared is None, and fails like this.
            blank = isinstance(error, TypeError | AttributeError) and "NoneType" in str(error)
            raise TraceError(
                f"{self.title} raised {reason}",
                where=line_of(error, self.where),
                found=f"it declares {', '.join(self.declared) or 'nothing'}" if blank else None,
                hint="a field that it does not declare is None; add it" if blank else None,
            ) from error

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
