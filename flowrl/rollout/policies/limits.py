"""Limits of a run: retries of samples and rewards, timeouts of engines, waiting for stragglers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flowrl.errors import SchedulerError
from flowrl.specs.base import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries(Spec):
    """A sample is dropped when so many of its attempts, or of its rewards, have failed.

    The loss of an engine fails the attempts on it; an abort that was asked for fails none.

    Attributes:
        attempts: Of a sample, that may be made.
        rewards: Of a sample, that may be asked for.
    """

    family: ClassVar[str] = "retries"
    kind: ClassVar[str] = "retries"

    attempts: int = 3
    rewards: int = 1

    def __post_init__(self) -> None:
        require_at_least(self, 1, "attempts", "rewards")


# How long silence is borne.


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience(Spec):
    """Deadlines, in seconds of the time that events carry.

    The caller must put the time into its events (`at_s`) and answer `Wake` with
    `DeadlineReached`.

    Attributes:
        heartbeat_s: An engine whose heartbeat was lost gets no samples, and so long after it is
            given up like one that died. Any sign of life from it before then opens it again. 0
            gives it up at once.
        stall_s: An attempt that made no token for so long has failed: it is aborted and starts
            again, on another engine if there is one. An abort that is not answered counts as
            a failure too. 0 waits for ever. An engine may hold samples that it does not decode yet;
            then it must be longer than they wait there. Looked at every `stall_s / 8`, so it takes
            up to an eighth longer.
    """

    family: ClassVar[str] = "patience"
    kind: ClassVar[str] = "patience"

    heartbeat_s: float = 0.0
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "heartbeat_s", "stall_s")


# Whether a batch waits for a sample that will be too old for the next one.


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy(Spec):
    """Base of straggler policies; they matter only where `max_staleness` is above 0."""

    family: ClassVar[str] = "stragglers"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForStragglers(StragglerPolicy):
    """The batch waits, so no started sample is lost."""

    kind: ClassVar[str] = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStragglers(StragglerPolicy):
    """The batch does not wait; the sample becomes too old and is dropped.

    What is dropped is long on average, so what is trained on gets shorter than what is sampled.
    """

    kind: ClassVar[str] = "drop"


# Checks that policies share: a number that makes no sense is refused when the policy is made.


def require_at_least(policy: Spec, least: float, *names: str) -> None:
    """Checks that the named options are finite numbers of at least `least`.

    Raises:
        SchedulerError: naming policy and option.
    """
    for name in names:
        value: float = getattr(policy, name)
        if not (math.isfinite(value) and value >= least):
            raise SchedulerError(
                f"{name} is out of range",
                where=f"{policy.family} policy {policy.kind}",
                found=repr(value),
                expected=f"a number of at least {least:g}",
            )
