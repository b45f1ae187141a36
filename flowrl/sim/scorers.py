"""Rewards on a virtual clock: processes that score in batches, as the pool of a run does.

    submit -> queue -> a batch of a process -> answers -> taken by the driver, which sends the next

A process that has done its batch gets another one when the driver takes the answers, so a driver
that is busy elsewhere keeps it waiting. Answers leave at the end of a batch; those of slow samples
leave one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowrl.ids import SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.driver import SimDriver
from flowrl.sim.lanes import Lane

BATCH = 128
"""Samples of a batch at most (`flowrl.runtime.scoring.pool`)."""

SLOW_S = 0.003
"""A sample that takes so long is told of at once."""


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
        driver: Takes the answers.
        answer_s: Seconds of the driver for each.
        extra_s: Seconds that a sample takes beside the usual ones (slow rewards).
        answer: Called with samples that are scored, in turn.
    """

    clock: Clock
    lanes: Sequence[Lane]
    times: ScoreTimes
    driver: SimDriver
    answer: Callable[[Sequence[SampleId]], None]
    answer_s: float = 0.0
    extra_s: Callable[[SampleId], float] | None = None
    _queue: deque[SampleId] = field(default_factory=deque)
    _busy: set[int] = field(default_factory=set)  # processes with a batch, by number

    def submit(self, samples: Sequence[SampleId]) -> None:
        """Takes samples."""
        if self.times.is_free and self.extra_s is None:
            self._take(samples, None)
            return
        self._queue.extend(samples)
        self._send()

    def _send(self) -> None:
        """A batch for every process that has none."""
        idle = [number for number in range(len(self.lanes)) if number not in self._busy]
        for num_left, number in zip(range(len(idle), 0, -1), idle, strict=True):
            if not self._queue:
                return
            size = min(BATCH, -(-len(self._queue) // num_left))
            self._busy.add(number)
            self._score(number, self._parts([self._queue.popleft() for _ in range(size)]))

    def _parts(self, batch: Sequence[SampleId]) -> deque[tuple[list[SampleId], float]]:
        """What is told of together, and the seconds that it takes."""
        parts: deque[tuple[list[SampleId], float]] = deque()
        for sample in batch:
            seconds = self.times.sample_s + (0.0 if self.extra_s is None else self.extra_s(sample))
            if parts and seconds < SLOW_S and parts[-1][1] < SLOW_S * len(parts[-1][0]):
                samples, spent = parts.pop()
                parts.append(([*samples, sample], spent + seconds))
            else:
                parts.append(([sample], seconds))
        return parts

    def _score(self, number: int, parts: deque[tuple[list[SampleId], float]]) -> None:
        samples, seconds = parts.popleft()
        self.driver.beside(
            self.lanes[number], "score", seconds, lambda: self._scored(number, samples, parts)
        )

    def _scored(
        self, number: int, samples: list[SampleId], parts: deque[tuple[list[SampleId], float]]
    ) -> None:
        is_last = not parts
        if parts:
            self._score(number, parts)
        told_s = self.clock.now + self.times.latency_s
        self.clock.at(told_s, self._take, samples, number if is_last else None)

    def _take(self, samples: Sequence[SampleId], idle: int | None) -> None:
        """The driver takes answers, once it is free.

        Args:
            idle: The process that has done its batch with them.
        """

        def begun() -> None:
            if idle is not None:
                self._busy.discard(idle)
                self._send()

        self.driver.work(
            "assemble", self.answer_s * len(samples), lambda: self.answer(samples), begun=begun
        )
