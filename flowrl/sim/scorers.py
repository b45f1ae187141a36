"""Rewards on a virtual clock: processes that score one sample at a time, in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowrl.ids import SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.lanes import Lane

__all__ = ["ScoreTimes", "SimScorers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTimes:
    """What a score costs.

    Attributes:
        sample_s: Seconds that a process is busy with a sample.
        latency_s: Seconds that an answer is late beside, on its way.
    """

    sample_s: float = 0.0
    latency_s: float = 0.0

    @property
    def is_free(self) -> bool:
        """Whether answers are there at once."""
        return not self.sample_s and not self.latency_s


@dataclass(slots=True, eq=False, kw_only=True)
class SimScorers:
    """The processes of one reward.

    Attributes:
        lanes: One a process.
        extra_s: Seconds that a sample takes beside the usual ones (slow rewards).
        answer: Called with a sample that is scored, in turn.
    """

    clock: Clock
    lanes: Sequence[Lane]
    times: ScoreTimes
    answer: Callable[[SampleId], None]
    extra_s: Callable[[SampleId], float] | None = None
    _free: list[tuple[float, int]] = field(default_factory=list)

    def submit(self, samples: Sequence[SampleId]) -> None:
        """Takes samples; each goes to the process that is free first."""
        if self.times.is_free and self.extra_s is None:
            for sample in samples:
                self.answer(sample)
            return
        free = self._free
        if not free:
            free.extend((lane.free_s, number) for number, lane in enumerate(self.lanes))
        for sample in samples:
            extra = 0.0 if self.extra_s is None else self.extra_s(sample)
            free_s, number = heapq.heappop(free)
            begin = max(free_s, self.clock.now)
            _, end = self.lanes[number].work("score", begin, self.times.sample_s + extra)
            heapq.heappush(free, (end, number))
            self.clock.at(end + self.times.latency_s, self.answer, sample)
