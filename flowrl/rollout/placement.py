"""Assigns queued samples to engines.

Invariant: after `place`, no sample that may start is queued while an engine has a free slot. That
is list scheduling, so on K slots a batch takes at most sum(lengths)/K + max(length) decode steps
(Graham, 1966), in whatever order samples start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from flowrl.ids import EngineId
from flowrl.rollout.actions import Dispatch, Submit
from flowrl.rollout.policies.engines import LongestFirst, PromptAffinity
from flowrl.rollout.policies.prompts import WeightedShares
from flowrl.rollout.queues import LengthPredictor, SampleQueues, Shares
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import Engine, Sample


class Placement:
    """The engines, and the queued samples that wait for them."""

    __slots__ = ("_affinity", "_dirty", "_heap", "engines", "num_joins", "queues")

    def __init__(self, settings: SchedulerSettings) -> None:
        order, fairness = settings.order, settings.fairness
        predictor = None
        if isinstance(order, LongestFirst):
            predictor = LengthPredictor(order, ages=settings.max_staleness > 0)
        # With an age budget it is admissions that are shared out, and one queue follows them.
        shares = (
            Shares(fairness)
            if isinstance(fairness, WeightedShares) and settings.budget is None
            else None
        )
        self.queues = SampleQueues(predictor, shares)
        self.engines: dict[EngineId, Engine] = {}  # those that joined and were not lost
        self.num_joins = 0  # engines that ever joined
        self._affinity = isinstance(settings.routing, PromptAffinity)
        self._heap: list[tuple[float, int, int, Engine]] = []  # (load, order, stamp, engine)
        self._dirty: dict[EngineId, Engine] = {}  # engines whose heap entry is out of date

    # Effects of transitions: the only places where samples enter and leave queues and engines.

    def occupy(self, sample: Sample) -> None:
        """Puts a sample into its engine: QUEUED to RUNNING."""
        engine = sample.engine
        assert engine is not None
        engine.held[sample.id] = sample
        self._dirty[engine.id] = engine

    def release(self, sample: Sample) -> None:
        """Takes a sample out of its engine, whose slot is free at once."""
        engine = sample.engine
        assert engine is not None
        del engine.held[sample.id]
        sample.engine = None
        sample.aborting = ""
        self._dirty[engine.id] = engine

    def requeue(self, sample: Sample) -> None:
        """Queues a sample again: PARTIAL to QUEUED."""
        self.queues.add_returned(sample)

    def release_and_requeue(self, sample: Sample) -> None:
        """Takes a sample out of its engine and queues it again."""
        self.release(sample)
        self.queues.add_returned(sample)

    # Engines

    def add(self, engine: Engine) -> None:
        """Adds an engine's record; its name is free."""
        self.engines[engine.id] = engine
        self._dirty[engine.id] = engine

    def limit(self, engine: Engine, limit: int) -> None:
        """Changes the number of samples that the engine may hold."""
        if engine.limit != limit:
            engine.limit = limit
            self._dirty[engine.id] = engine

    def lose(self, engine: Engine) -> list[Sample]:
        """Removes the engine; the samples it still holds, in offer order, are to be moved."""
        del self.engines[engine.id]
        self._dirty.pop(engine.id, None)
        engine.limit = 0
        engine.stamp += 1
        return in_order(engine)

    # Starts

    def place(self, start: Callable[[Sample, Engine], None]) -> list[Submit]:
        """Gives queued samples to engines with free slots, until one or the other runs out.

        Args:
            start: Makes the sample RUNNING on the engine.
        """
        batches: dict[EngineId, list[Dispatch]] = {}
        queues = self.queues
        while (sample := queues.first()) is not None:
            engine = self._choose(sample)
            if engine is None:
                break
            queues.take()
            start(sample, engine)
            batches.setdefault(engine.id, []).append(
                Dispatch(sample=sample.id, attempt=sample.attempt, kept_tokens=sample.kept_tokens)
            )
        return [Submit(engine=engine, samples=tuple(items)) for engine, items in batches.items()]

    def _choose(self, sample: Sample) -> Engine | None:
        home = sample.group.home
        if self._affinity and home is not None and home.limit > len(home.held):
            best: Engine | None = home
        else:
            best = self._least_loaded()
        if best is not None and best is sample.avoids:
            others = [e for e in self.engines.values() if e is not best and e.free > 0]
            best = min(others, key=_load, default=best)
        return best

    def _least_loaded(self) -> Engine | None:
        heap = self._heap
        if self._dirty:
            if len(heap) > 64 + 4 * len(self.engines):
                heap.clear()
                self._dirty = dict(self.engines)
            for engine in self._dirty.values():
                engine.stamp += 1
                if engine.free > 0:
                    load = len(engine.held) / engine.limit
                    heapq.heappush(heap, (load, engine.order, engine.stamp, engine))
            self._dirty.clear()
        while heap:
            _, _, stamp, engine = heap[0]
            if stamp == engine.stamp:
                return engine
            heapq.heappop(heap)
        return None


def _load(engine: Engine) -> tuple[float, int]:
    return (len(engine.held) / engine.limit, engine.order)


def in_order(engine: Engine) -> list[Sample]:
    """Returns the samples that the engine holds, in the order of admission."""
    return sorted(engine.held.values(), key=lambda s: (s.group.seq, s.member))
