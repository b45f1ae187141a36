"""What the search finds, or why it finds nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flowrl.plan.search.evaluate import Evaluation
from flowrl.plan.search.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule and what it takes."""

    schedule: Schedule
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A smallest set of tasks that does not fit by itself; without any of them the rest would.

    Attributes:
        tasks: Their ids, in the problem's order.
        over_bytes: Bytes that the best placement of these tasks alone needs beyond the memory of a
            device; None where no amount of memory helps (too few devices, no options).
        reason: One sentence with the numbers.
    """

    tasks: tuple[str, ...]
    over_bytes: int | None
    reason: str


class ChangeKind(StrEnum):
    """What would have to be different."""

    MEMORY = "memory"
    DEVICES = "devices"
    PIN = "pin"
    KINDS = "kinds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A single change that makes the problem feasible; verified by searching again.

    Attributes:
        kind: What changes.
        text: The change as a sentence.
        value: The new number: bytes a device, devices of the pool; None for pins and kinds.
        tasks: The tasks that it concerns.
    """

    kind: ChangeKind
    text: str
    value: int | None = None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Why there is no schedule.

    Attributes:
        bindings: All sets of the smallest size that do not fit by themselves.
        changes: Single changes that help, nearest first of each kind; may be empty.
    """

    bindings: tuple[Binding, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best schedules in order, or why there is none.

    Attributes:
        best: Distinct schedules (`schedule.signature`), best first; fewer than asked for where
            there are no more. Empty exactly when `infeasible` is set.
        infeasible: Why nothing fits.
        num_states: Pairs of a set of tasks and a block size that the search looked into.
        num_points: Partial schedules that it compared.
        thinned: The rule by which device counts were left out, or None: every count was looked at
            and `best` is exact.
        turns: The best schedule in which all take turns, where the search had use for it.
    """

    best: tuple[Found, ...]
    infeasible: Infeasible | None = None
    num_states: int
    num_points: int
    thinned: str | None = None
    turns: Found | None = None
