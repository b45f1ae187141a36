"""Every error that flowrl raises on purpose.

    FlowError
    |-- ConfigError       a config file, a key=value override or a command-line argument
    |-- TraceError        the user's workflow program
    |-- GraphError        a graph that breaks the specification of its level
    |-- PlanError         a job that does not fit, or a plan that does not belong to its graph
    |-- BackendError      a plug-in that is missing, broken or without a requested ability
    |   `-- WorkerDied    a worker that ended while it was in use
    |-- SchedulerError    the rollout scheduler: an impossible transition, or no progress
    |-- DataError         a data file or a row of it
    |-- RewardError       a reward that raised an error, timed out or did not return a number
    `-- CheckpointError   a run folder or checkpoint that cannot be resumed

An error says what, where (the user's file:line, config key or data row), what was found, what was
expected and how to fix it; `str(error)` is one to four lines. `exit_code` is the exit status of the
command line: 2 for the user's mistakes, 1 for faults of flowrl.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FlowError",
    "GraphError",
    "PlanError",
    "RewardError",
    "SchedulerError",
    "TraceError",
    "WorkerDied",
    "combine",
    "raise_all",
]

MAX_OTHERS = 6
"""The number of mistakes that a combined error reports besides the first."""


class FlowError(Exception):
    """The base of all errors raised on purpose.

    Args:
        what: One sentence that describes the mistake.
        where: The `file:line`, config key, node or data row; printed first.
        found: The invalid value, as text.
        expected: A description of valid values.
        hint: The action that fixes the mistake.

    Attributes:
        others: Further mistakes, which the message lists briefly (`combine`).
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.found = found
        self.expected = expected
        self.hint = hint
        self.others: tuple[FlowError, ...] = ()
        super().__init__(what)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        middle = [
            f"{label}: {text}"
            for label, text in (("found", self.found), ("expected", self.expected))
            if text
        ]
        if middle:
            lines.append("  " + "; ".join(middle))
        if self.hint or self.others:
            lines.append(f"  to fix: {self.hint or 'fix this first'}")
        if self.others:
            lines.append(self._in_short())
        return "\n".join(lines)

    def _in_short(self) -> str:
        """Returns the other mistakes in one line."""
        brief = [f"{e.where}: {e.what}" if e.where else e.what for e in self.others]
        more = f"; and {len(brief) - MAX_OTHERS} more" if len(brief) > MAX_OTHERS else ""
        noun = "mistake" if len(brief) == 1 else "mistakes"
        return f"  and {len(brief)} more {noun}: " + "; ".join(brief[:MAX_OTHERS]) + more

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.what, self.where, self.found, self.expected, self.hint)
        return (_rebuild, (type(self), *state))


def _rebuild(
    kind: type[FlowError],
    what: str,
    where: str | None,
    found: str | None,
    expected: str | None,
    hint: str | None,
) -> FlowError:
    return kind(what, where=where, found=found, expected=expected, hint=hint)


class ConfigError(FlowError):
    """A config file, a `key=value` override or a command-line argument is wrong."""


class TraceError(FlowError):
    """The workflow program does something that a traced program cannot do, or raises an error.

    Attributes:
        user_frames: The traceback of an error that the program itself raised, as Python prints it,
            without flowrl's frames; else empty.
    """

    user_frames: str = ""


class GraphError(FlowError):
    """The graph breaks the specification of its level."""


class PlanError(FlowError):
    """The job does not fit the machine, or the plan does not belong to the graph."""


class BackendError(FlowError):
    """A plug-in is missing or broken, or does not have a requested ability."""


class WorkerDied(BackendError):
    """A worker ended while it was in use."""

    exit_code = 1


class SchedulerError(FlowError):
    """The scheduler met an impossible transition, or can make no progress."""

    exit_code = 1


class DataError(FlowError):
    """A data file, or a row of it, cannot be used."""


class RewardError(FlowError):
    """A reward raised an error, exceeded its time limit, or did not return a number."""


class CheckpointError(FlowError):
    """A run folder or a checkpoint cannot be resumed."""


ErrorT = TypeVar("ErrorT", bound=FlowError)


def combine(problems: Sequence[ErrorT]) -> ErrorT:
    """Combines errors into one: the first in full, the others by their place and first line.

    Of errors with the same message at one place, the first is kept.
    """
    distinct: dict[tuple[str | None, str], FlowError] = {}
    for problem in problems:
        errors: tuple[FlowError, ...] = (problem, *problem.others)
        for error in errors:
            distinct.setdefault((error.where, error.what), error)
    first = problems[0]
    first.others = tuple(error for error in distinct.values() if error is not first)
    return first


def raise_all(problems: Iterable[FlowError]) -> None:
    """Raises one error for all problems, if there are any."""
    if found := list(problems):
        raise combine(found)
