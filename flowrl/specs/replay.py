"""The replay buffer by name: earlier groups that a step learns from again.

The function `fl.replay` documents the fields, which are its arguments too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from flowrl.specs.base import Count, Spec, Wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Spec):
    """Holds the groups that it is given, and returns `n` earlier ones a step.

    Attributes:
        n: Groups that a step gets, as long as so many are held.
        capacity: Groups that are held; the oldest go first.
        max_age: Weight publications that a group may be behind when it is returned; older ones are
            forgotten.
        choose: `random` takes each held group with the same probability, without replacement;
            `newest` takes the last ones.
    """

    family: ClassVar[str] = "replay"
    kind: ClassVar[str] = "replay"

    n: Count
    capacity: Count = 512
    max_age: Count = 8
    choose: Literal["random", "newest"] = "random"

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a buffer that is smaller than what a step takes."""
        if self.n > self.capacity:
            yield "n", self.n, f"at most capacity={self.capacity}"
