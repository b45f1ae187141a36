"""Whether a batch waits for a sample that will be too old for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Spec

__all__ = ["DropStragglers", "StragglerPolicy", "WaitForStragglers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy(Spec):
    """Base of straggler policies; they matter only where `max_staleness` is above 0."""

    family: ClassVar[str] = "stragglers"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForStragglers(StragglerPolicy):
    """It waits, and so loses nothing that was begun."""

    kind: ClassVar[str] = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStragglers(StragglerPolicy):
    """It goes on; the sample ages and is dropped.

    What is dropped is long on average, so what is trained on gets shorter than what is drawn.
    """

    kind: ClassVar[str] = "drop"
