"""Which engine runs which sample, and who waits for one.

Members of a group go to the engine of the member before them while it has room, because engines
compute a prompt that they share once; otherwise to the least loaded engine (held / capacity, ties
by order of joining). Samples that come back after an abort, a failure or a lost engine go before
fresh ones: they are older, and others of their group wait for them.

Invariant: after `place`, no sample is queued while an engine has room. That is list scheduling, so
on K slots a batch takes at most sum(lengths)/K + max(length) decode steps (Graham, 1966).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from flowrl.ids import EngineId
from flowrl.rollout.actions import Dispatch, Submit
from flowrl.rollout.records import Engine, Sample
from flowrl.rollout.states import State

__all__ = ["Placement"]


class Placement:
    """The engines, and the queue of samples that wait for them."""

    __slots__ = ("_dirty", "_heap", "engines", "fresh", "num_joins", "returned")

    def __init__(self) -> None:
        self.engines: dict[EngineId, Engine] = {}  # those that joined and were not lost
        self.num_joins = 0  # engines that ever joined
        self.fresh: deque[Sample] = deque()  # never dispatched, in offer order
        self.returned: deque[Sample] = deque()  # dispatched before, in order of return
        # Both queues hold every QUEUED sample once, and ended ones, which are skipped.
        self._heap: list[tuple[float, int, int, Engine]] = []  # (load, order, stamp, engine)
        self._dirty: dict[EngineId, Engine] = {}  # engines whose heap entry is out of date

    # Effects of transitions: the only places where samples enter and leave queue and engines.

    def occupy(self, sample: Sample) -> None:
        """QUEUED -> RUNNING on `sample.engine`."""
        engine = sample.engine
        assert engine is not None
        engine.held[sample.id] = sample
        self._dirty[engine.id] = engine

    def release(self, sample: Sample) -> None:
        """RUNNING -> anything: the slot is free at once."""
        engine = sample.engine
        assert engine is not None
        del engine.held[sample.id]
        sample.engine = None
        sample.aborting = False
        self._dirty[engine.id] = engine

    def requeue(self, sample: Sample) -> None:
        """PARTIAL -> QUEUED."""
        self.returned.append(sample)

    def release_and_requeue(self, sample: Sample) -> None:
        """RUNNING -> QUEUED."""
        self.release(sample)
        self.returned.append(sample)

    # Engines

    def join(self, engine: EngineId, capacity: int) -> None:
        """Adds an engine; its name is free."""
        self.add(Engine(id=engine, capacity=capacity, order=self.num_joins))
        self.num_joins += 1

    def add(self, engine: Engine) -> None:
        """Adds an engine's record."""
        self.engines[engine.id] = engine
        self._dirty[engine.id] = engine

    def resize(self, engine: Engine, capacity: int) -> None:
        """Changes the number of samples the engine takes."""
        engine.capacity = capacity
        self._dirty[engine.id] = engine

    def lose(self, engine: Engine) -> list[Sample]:
        """Removes the engine; the samples it still holds, in offer order, are to be moved."""
        del self.engines[engine.id]
        engine.capacity = 0
        engine.stamp += 1
        return sorted(engine.held.values(), key=lambda s: (s.group.seq, s.member))

    # The queue

    def place(self, start: Callable[[Sample, Engine], None]) -> list[Submit]:
        """Gives queued samples to engines with room, until one or the other runs out.

        Args:
            start: Makes the sample RUNNING on the engine.
        """
        batches: dict[EngineId, list[Dispatch]] = {}
        for queue in (self.returned, self.fresh):
            while queue:
                sample = queue[0]
                if sample.state is not State.QUEUED:
                    queue.popleft()
                    continue
                engine = sample.group.home
                if engine is None or engine.capacity <= len(engine.held):
                    engine = self._least_loaded()
                    if engine is None:
                        return _submits(batches)
                queue.popleft()
                start(sample, engine)
                batches.setdefault(engine.id, []).append(
                    Dispatch(
                        sample=sample.id, attempt=sample.attempt, kept_tokens=sample.kept_tokens
                    )
                )
        return _submits(batches)

    def queued(self) -> Iterable[Sample]:
        """Queued samples, next one first."""
        for queue in (self.returned, self.fresh):
            for sample in queue:
                if sample.state is State.QUEUED:
                    yield sample

    def _least_loaded(self) -> Engine | None:
        heap = self._heap
        if self._dirty:
            if len(heap) > 64 + 4 * len(self.engines):
                heap.clear()
                self._dirty = dict(self.engines)
            for engine in self._dirty.values():
                engine.stamp += 1
                if engine.free > 0:
                    load = len(engine.held) / engine.capacity
                    heapq.heappush(heap, (load, engine.order, engine.stamp, engine))
            self._dirty.clear()
        while heap:
            _, _, stamp, engine = heap[0]
            if stamp == engine.stamp:
                return engine
            heapq.heappop(heap)
        return None


def _submits(batches: dict[EngineId, list[Dispatch]]) -> list[Submit]:
    return [Submit(engine=engine, samples=tuple(items)) for engine, items in batches.items()]
