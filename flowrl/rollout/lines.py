"""The queued samples that may start, in the order in which they do.

Samples that come back after an abort, a failure or a lost engine stand in a line of their own that
goes first: they are older, and others of their group wait for them. Fresh samples stand in one
line, or in one for each source where sources have shares. A line is in order of arrival, or of
predicted length.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from flowrl.rollout.lengths import LengthPredictor
from flowrl.rollout.records import Sample
from flowrl.rollout.shares import Shares
from flowrl.rollout.states import State

__all__ = ["Lines"]


class Line(Protocol):
    """Samples that wait for an engine."""

    def push(self, sample: Sample) -> None:
        """The sample is queued."""
        ...

    def first(self) -> Sample | None:
        """The sample that is next; it stays in the line."""
        ...

    def pop(self) -> None:
        """Removes the sample that `first` gave."""
        ...

    def samples(self) -> Iterable[Sample]:
        """Queued samples, next one first."""
        ...


class ArrivalLine:
    """First come, first served. Holds each queued sample once, and ended ones, which it skips."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def push(self, sample: Sample) -> None:
        self._samples.append(sample)

    def first(self) -> Sample | None:
        samples = self._samples
        while samples:
            if samples[0].state is State.QUEUED:
                return samples[0]
            samples.popleft()
        return None

    def pop(self) -> None:
        self._samples.popleft()

    def samples(self) -> Iterable[Sample]:
        return (sample for sample in self._samples if sample.state is State.QUEUED)


class RankedLine:
    """The least rank first, then in order of admission.

    An entry counts while its sample is queued, has the entry's rank and, in a line of fresh
    samples, was never dispatched. So a sample whose rank changes is simply pushed again.
    """

    __slots__ = ("_fresh", "_heap", "_pushes")

    def __init__(self, fresh: bool) -> None:
        self._fresh = fresh
        self._heap: list[tuple[float, int, int, int, Sample]] = []
        self._pushes = 0

    def push(self, sample: Sample) -> None:
        # The number of the push breaks ties of a sample with itself; samples have no order.
        self._pushes += 1
        entry = (sample.rank, sample.group.seq, sample.member, self._pushes, sample)
        heapq.heappush(self._heap, entry)

    def first(self) -> Sample | None:
        heap = self._heap
        while heap:
            if self._counts(heap[0]):
                return heap[0][-1]
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        taken = heapq.heappop(self._heap)[-1]
        # A rank that went and came back left the sample here twice, in neighbouring places.
        while self._heap and self._heap[0][-1] is taken:
            heapq.heappop(self._heap)

    def samples(self) -> Iterable[Sample]:
        entries = {
            e[-1].id: e[-1] for e in sorted(self._heap, key=lambda e: e[:3]) if self._counts(e)
        }
        return entries.values()

    def _counts(self, entry: tuple[float, int, int, int, Sample]) -> bool:
        rank, _, _, _, sample = entry
        return (
            sample.state is State.QUEUED
            and sample.rank == rank
            and (sample.attempt < 0) is self._fresh
        )


class Lines:
    """All lines, and whose turn it is.

    Args:
        predictor: Ranks samples by length; None leaves them in order of arrival.
        shares: Of sources; None puts them all into one line.
    """

    __slots__ = ("_current", "_fresh", "_from_returned", "_returned", "_shares", "predictor")

    def __init__(self, predictor: LengthPredictor | None, shares: Shares | None) -> None:
        self.predictor = predictor
        self._shares = shares
        self._returned = self._open(fresh=False)
        self._fresh: dict[str, Line] = {"": self._open(fresh=True)} if shares is None else {}
        self._current: str | None = None  # source whose group is being started
        self._from_returned = False  # where `first` last looked

    def _open(self, *, fresh: bool) -> Line:
        return ArrivalLine() if self.predictor is None else RankedLine(fresh)

    def add_fresh(self, sample: Sample) -> None:
        """A sample that was never dispatched and may start."""
        if self.predictor is not None:
            sample.rank = self.predictor.rank(sample)
        if self._shares is None:
            self._fresh[""].push(sample)
            return
        source = sample.group.source
        line = self._fresh.get(source)
        if line is None:
            line = self._fresh[source] = self._open(fresh=True)
        if line.first() is None:
            self._shares.activate(source)
        line.push(sample)

    def add_returned(self, sample: Sample) -> None:
        """A sample that was dispatched before."""
        if self.predictor is not None:
            sample.rank = self.predictor.rank(sample)
        self._returned.push(sample)

    def rank_anew(self, samples: Iterable[Sample]) -> None:
        """More is known about the lengths of these samples; those that are queued change place."""
        assert self.predictor is not None
        for sample in samples:
            if sample.state is State.QUEUED:
                rank = self.predictor.rank(sample)
                if rank != sample.rank:
                    sample.rank = rank
                    fresh = sample.attempt < 0
                    source = sample.group.source if self._shares is not None else ""
                    (self._fresh[source] if fresh else self._returned).push(sample)

    def first(self) -> Sample | None:
        """The sample that is next; it stays."""
        sample = self._returned.first()
        self._from_returned = sample is not None
        if sample is not None:
            return sample
        if self._shares is None:
            return self._fresh[""].first()
        source = self._turn()
        return None if source is None else self._fresh[source].first()

    def take(self) -> None:
        """Removes the sample that `first` gave."""
        if self._from_returned:
            self._returned.pop()
        elif self._shares is None:
            self._fresh[""].pop()
        else:
            source = self._turn()
            assert source is not None
            line = self._fresh[source]
            taken = line.first()
            line.pop()
            self._shares.charge(source)
            following = line.first()
            # A group is started as a whole, so that its members find their prompt in the cache.
            same = following is not None and taken is not None and following.group is taken.group
            self._current = source if same else None

    def _turn(self) -> str | None:
        if self._current is not None and self._fresh[self._current].first() is not None:
            return self._current
        active = [source for source, line in self._fresh.items() if line.first() is not None]
        if not active:
            return None
        assert self._shares is not None
        return self._shares.next(active)

    def samples(self) -> Iterator[Sample]:
        """Queued samples that may start, line by line."""
        yield from self._returned.samples()
        for line in self._fresh.values():
            yield from line.samples()

    def to_json(self) -> dict[str, Any]:
        """Who stands where."""
        return {
            "returned": [sample.id for sample in self._returned.samples()],
            "fresh": {
                source: [sample.id for sample in line.samples()]
                for source, line in self._fresh.items()
            },
            "current": self._current,
            "shares": None if self._shares is None else self._shares.to_json(),
        }

    def read(self, obj: dict[str, Any], samples: dict[Any, Sample]) -> None:
        """Takes what `to_json` wrote; the samples have their ranks already."""
        for name in obj["returned"]:
            self._returned.push(samples[name])
        for source, names in obj["fresh"].items():
            line = self._fresh.setdefault(source, self._open(fresh=True))
            for name in names:
                line.push(samples[name])
        self._current = obj["current"]
        if self._shares is not None:
            self._shares.read(obj["shares"])
