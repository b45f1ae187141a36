"""Stride scheduling: whose turn it is, of several sources with shares."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from flowrl.rollout.policies import WeightedShares

__all__ = ["Shares"]


class Shares:
    """A pass for each source; the source with the least pass is next.

    Passes rise by 1/weight for each unit of work. A source that becomes active starts where the
    last one that was served stood, so that nothing is saved up while idle.
    """

    __slots__ = ("_clock", "_passes", "_policy")

    def __init__(self, policy: WeightedShares) -> None:
        self._policy = policy
        self._passes: dict[str, float] = {}
        self._clock = 0.0  # pass of the source that was served last, before it was charged

    def activate(self, source: str) -> None:
        """The source has work again after it had none."""
        self._passes[source] = max(self._passes.get(source, 0.0), self._clock)

    def next(self, sources: Iterable[str]) -> str:
        """The active source whose turn it is; of equals, the one that comes first by name."""
        return min(sources, key=lambda source: (self._passes.get(source, 0.0), source))

    def charge(self, source: str, work: float = 1.0) -> None:
        """The source was served."""
        self._clock = max(self._clock, self._passes.get(source, 0.0))
        self._passes[source] = self._passes.get(source, 0.0) + work / self._policy.weight(source)

    def demand(self, number: int, coming: Mapping[str, int]) -> dict[str, int]:
        """How many of the next `number` turns go to each named source.

        Args:
            coming: Turns that are already taken by what waits or is under way.
        """
        ahead = copy.copy(self)
        ahead._passes = dict(self._passes)
        sources = [source for source, _ in self._policy.shares] or [""]
        for source in sources:
            ahead.activate(source)
        for source, turns in sorted(coming.items()):
            ahead.charge(source, turns)
        wanted: dict[str, int] = {}
        for _ in range(number):
            source = ahead.next(sources)
            ahead.charge(source)
            wanted[source] = wanted.get(source, 0) + 1
        return wanted

    def to_json(self) -> dict[str, Any]:
        """The passes."""
        return {"clock": self._clock, "passes": dict(self._passes)}

    def read(self, obj: dict[str, Any]) -> None:
        """Takes what `to_json` wrote."""
        self._clock, self._passes = obj["clock"], dict(obj["passes"])
