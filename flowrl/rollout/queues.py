"""The queued samples that may start, in the order in which they do.

Samples that come back after an abort, a failure or a lost engine enter a queue of their own
that goes first: they are older, and others of their group wait for them. Fresh samples enter one
queue, or in one for each source where sources have shares. A queue is in order of arrival, or of
predicted length.
"""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowrl.rollout.policies.engines import LongestFirst
from flowrl.rollout.policies.prompts import WeightedShares
from flowrl.rollout.states import Group, Sample, State


class FifoQueue:
    """First come, first served. Holds each queued sample once, and ended ones, which it skips.

    `first` returns the next sample, which stays until `pop` removes it.
    """

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


class RankedQueue:
    """The least rank first, then in order of admission.

    An entry counts while its sample is queued, has the entry's rank and, in a queue of fresh
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


class SampleQueues:
    """All queues, and the choice of the next one.

    Args:
        predictor: Ranks samples by length; None leaves them in order of arrival.
        shares: Of sources; None puts them all into one queue.
    """

    __slots__ = ("_current", "_fresh", "_from_returned", "_returned", "_shares", "predictor")

    def __init__(self, predictor: LengthPredictor | None, shares: Shares | None) -> None:
        self.predictor = predictor
        self._shares = shares
        self._returned = self._open(fresh=False)
        self._fresh: dict[str, FifoQueue | RankedQueue] = (
            {"": self._open(fresh=True)} if shares is None else {}
        )
        self._current: str | None = None  # source whose group is being started
        self._from_returned = False  # where `first` last looked

    def _open(self, *, fresh: bool) -> FifoQueue | RankedQueue:
        return FifoQueue() if self.predictor is None else RankedQueue(fresh)

    def add_fresh(self, sample: Sample) -> None:
        """Adds a sample that was never dispatched and may start."""
        if self.predictor is not None:
            sample.rank = self.predictor.rank(sample)
        if self._shares is None:
            self._fresh[""].push(sample)
            return
        source = sample.group.source
        queue = self._fresh.get(source)
        if queue is None:
            queue = self._fresh[source] = self._open(fresh=True)
        if queue.first() is None:
            self._shares.activate(source)
        queue.push(sample)

    def add_returned(self, sample: Sample) -> None:
        """Adds a sample that was dispatched before."""
        if self.predictor is not None:
            sample.rank = self.predictor.rank(sample)
        self._returned.push(sample)

    def update_ranks(self, samples: Iterable[Sample]) -> None:
        """Moves those of the samples that are queued, after more is known about their lengths."""
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
        """Returns the sample that is next; it stays."""
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
            queue = self._fresh[source]
            taken = queue.first()
            queue.pop()
            self._shares.charge(source)
            following = queue.first()
            # A group is started as a whole, so that its members find their prompt in the cache.
            same = following is not None and taken is not None and following.group is taken.group
            self._current = source if same else None

    def _turn(self) -> str | None:
        if self._current is not None and self._fresh[self._current].first() is not None:
            return self._current
        active = [source for source, queue in self._fresh.items() if queue.first() is not None]
        if not active:
            return None
        assert self._shares is not None
        return self._shares.next(active)

    def samples(self) -> Iterator[Sample]:
        """Yields the queued samples that may start, queue by queue."""
        yield from self._returned.samples()
        for queue in self._fresh.values():
            yield from queue.samples()

    def to_json(self) -> dict[str, Any]:
        """Returns the queued samples of each queue as JSON values."""
        return {
            "returned": [sample.id for sample in self._returned.samples()],
            "fresh": {
                source: [sample.id for sample in queue.samples()]
                for source, queue in self._fresh.items()
            },
            "current": self._current,
            "shares": None if self._shares is None else self._shares.to_json(),
        }

    def read(self, obj: dict[str, Any], samples: dict[Any, Sample]) -> None:
        """Restores what `to_json` wrote; the samples have their ranks already."""
        for name in obj["returned"]:
            self._returned.push(samples[name])
        for source, names in obj["fresh"].items():
            queue = self._fresh.setdefault(source, self._open(fresh=True))
            for name in names:
                queue.push(samples[name])
        self._current = obj["current"]
        if self._shares is not None:
            self._shares.read(obj["shares"])


# Predicts how long answers get, from those that finished: by prompt, over all epochs.

_TIER = 1e9
"""Ranks of one tier lie within it; no answer is as long."""

_BEGUN = -1e6 * _TIER
"""First tier of groups that age; there are fewer windows and versions than that."""


class LengthPredictor:
    """Mean lengths of finished answers, by prompt and of all."""

    __slots__ = ("_all", "_count", "_policy", "_prompts", "ages")

    def __init__(self, policy: LongestFirst, *, ages: bool) -> None:
        self._policy = policy
        self.ages = ages  # whether groups that have begun go before others
        # prompt -> (answers, mean tokens); the prompt seen last comes last
        self._prompts: dict[str, tuple[int, float]] = {}
        self._count = 0  # answers of all prompts
        self._all = 0.0  # their mean

    def observe(self, group: Group, num_tokens: int) -> None:
        """Learns from an answer to the group's prompt that finished with so many tokens."""
        self._count += 1
        self._all += (num_tokens - self._all) / self._count
        prompt = _prompt(group)
        count, mean = self._prompts.pop(prompt, (0, 0.0))
        count = min(count + 1, self._policy.memory)
        self._prompts[prompt] = (count, mean + (num_tokens - mean) / count)
        if len(self._prompts) > self._policy.prompts:
            del self._prompts[next(iter(self._prompts))]

    def predict(self, group: Group) -> float:
        """Returns the predicted tokens of an answer to the group's prompt."""
        prior = self._all if group.expected_tokens is None else group.expected_tokens
        count, mean = self._prompts.get(_prompt(group), (0, 0.0))
        shrinkage = self._policy.shrinkage
        return (shrinkage * prior + count * mean) / (shrinkage + count)

    def rank(self, sample: Sample) -> float:
        """Returns a sample's place in a queue, least first: minus the tokens that remain.

        That is within its tier: of groups that have begun, by first version; of others, by window.
        A probe, the first member of a group about whose prompt nothing is known, leads its tier.
        """
        group = sample.group
        if self.ages and group.first_version is not None:
            tier = _BEGUN + group.first_version * _TIER
        else:
            tier = group.seq // self._policy.window * _TIER
        if (
            self._policy.probe
            and sample.member == 0
            and sample.attempt < 0
            and group.expected_tokens is None
            and _prompt(group) not in self._prompts
        ):
            return tier - _TIER / 2
        return tier + sample.kept_tokens - self.predict(group)

    def to_json(self) -> dict[str, Any]:
        """Returns everything that was learned."""
        return {
            "count": self._count,
            "mean": self._all,
            "prompts": [[prompt, *seen] for prompt, seen in self._prompts.items()],
        }

    def read(self, obj: dict[str, Any]) -> None:
        """Restores what `to_json` wrote."""
        self._count, self._all = obj["count"], obj["mean"]
        self._prompts = {prompt: (count, mean) for prompt, count, mean in obj["prompts"]}


def _prompt(group: Group) -> str:
    return group.id.partition("/")[2]


# Stride scheduling: whose turn it is, of several sources with shares.


class Shares:
    """A pass for each source; the source with the least pass is next.

    Passes rise by 1/weight for each unit of work. A source that becomes active gets the pass of
    the one that was served last, so that nothing is saved up while idle.
    """

    __slots__ = ("_clock", "_passes", "_policy")

    def __init__(self, policy: WeightedShares) -> None:
        self._policy = policy
        self._passes: dict[str, float] = {}
        self._clock = 0.0  # pass of the source that was served last, before it was charged

    def activate(self, source: str) -> None:
        """Notes that the source has work again after it had none."""
        self._passes[source] = max(self._passes.get(source, 0.0), self._clock)

    def next(self, sources: Iterable[str]) -> str:
        """Returns the active source whose turn it is; of equals, the first by name."""
        return min(sources, key=lambda source: (self._passes.get(source, 0.0), source))

    def charge(self, source: str, work: float = 1.0) -> None:
        """Notes that the source was served."""
        self._clock = max(self._clock, self._passes.get(source, 0.0))
        self._passes[source] = self._passes.get(source, 0.0) + work / self._policy.weight(source)

    def demand(self, number: int, coming: Mapping[str, int]) -> dict[str, int]:
        """Returns how many of the next `number` turns go to each named source.

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
        """Returns the passes."""
        return {"clock": self._clock, "passes": dict(self._passes)}

    def read(self, obj: dict[str, Any]) -> None:
        """Restores what `to_json` wrote."""
        self._clock, self._passes = obj["clock"], dict(obj["passes"])
