"""Every error that flowrl raises on purpose.

    FlowError
    |-- ConfigError       a config file, a key=value override or a command-line argument
    |-- TraceError        the user's workflow program
    |-- GraphError        a graph that breaks the specification of its level
    |-- PlanError         a job that does not fit, or a plan that does not belong to its graph
    |-- BackendError      a plug-in that is missing, broken or asked for what it cannot do
    |   `-- WorkerDied    a worker that was running and is gone
    |-- SchedulerError    the rollout scheduler: an impossible transition, or nothing moves any more
    |-- DataError         a data file or a row of it
    |-- RewardError       a reward that raised, hung or returned no number
    `-- CheckpointError   a run folder or checkpoint that cannot be resumed

An error says what, where (the user's file:line, config key or data row), what was found, what was
expected and the way out; `str(error)` is one to four lines. `exit_code` is what the command line
ends with: 2 for a mistake of the user's, 1 for a fault of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
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
]

MAX_OTHERS = 6
"""Of several mistakes, how many are told besides the first."""


class FlowError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: One sentence that says what is wrong.
        where: `file:line`, config key, node or data row; printed in front.
        found: The offending value, as text.
        expected: What would have been accepted.
        hint: What to do about it.

    Attributes:
        others: What else is wrong, which is told in short (`combine`).
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
            lines.append(f"  to fix: {self.hint or 'mend this first'}")
        if self.others:
            lines.append(self._in_short())
        return "\n".join(lines)

    def _in_short(self) -> str:
        """The others in a line."""
        brief = [f"{one.where}: {one.what}" if one.where else one.what for one in self.others]
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
    """The workflow program does something that a traced program cannot do, or raises.

    Attributes:
        user_frames: Where the program raised an error of its own: the traceback as Python prints
            it, without flowrl's frames; empty otherwise.
    """

    user_frames: str = ""


class GraphError(FlowError):
    """The graph breaks the specification of its level."""


class PlanError(FlowError):
    """The job does not fit the machine, or the plan does not belong to the graph."""


class BackendError(FlowError):
    """A plug-in is missing, broken, or asked for something it does not offer."""


class WorkerDied(BackendError):
    """A worker that was running is gone."""

    exit_code = 1


class SchedulerError(FlowError):
    """The scheduler met an impossible transition, or nothing moves any more."""

    exit_code = 1


class DataError(FlowError):
    """A data file, or a row of it, cannot be used."""


class RewardError(FlowError):
    """A reward raised, hung past its time limit, or returned something that is no number."""


class CheckpointError(FlowError):
    """A run folder or a checkpoint cannot be resumed."""


ErrorT = TypeVar("ErrorT", bound=FlowError)


def combine(problems: Sequence[ErrorT]) -> ErrorT:
    """One error for several: the first in full, the others by their place and their first line.

    Of those that say the same of one place the first is kept.
    """
    told: dict[tuple[str | None, str], FlowError] = {}
    for problem in problems:
        every: tuple[FlowError, ...] = (problem, *problem.others)
        for one in every:
            told.setdefault((one.where, one.what), one)
    first = problems[0]
    first.others = tuple(one for one in told.values() if one is not first)
    return first
