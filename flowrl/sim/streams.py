"""Operations that work in pieces, on groups or on a batch, or ahead of the trainer.

    group complete -> there for whoever reads the rollout -> a piece of `chunk` groups -> its lanes
    are taken -> done -> there for the operations that wait for that one

A group is complete when the rollout's scheduler has it so: all members ended and scored, and kept
by its filter. Operations that look at one sample at a time take samples in the place of groups, as
they are scored; behind a filter, when their group is kept. A piece is the next `chunk` of them in
the order in which they came; what is left when the batch is delivered is a last piece. Operations
without a chunk take a batch whole, when it is delivered. What reads several rollouts begins on a
prompt's groups when all of them have it. Pieces take their lanes in the order in which they are
cut, so those that share lanes alternate.

An operation on a whole batch finishes it piece by piece, too, and so hands it on:

    batch there, the trainer at it -> dealt into pieces of `chunk` groups -> one after the other

The batch is known, so it is dealt as people would: neighbours in the order in which groups came,
which are alike in length, go to different pieces. The next piece takes its lanes when the one
before is done, so that two such operations alternate. One that reads from another one takes what
that has done.

What a piece costs follows from its samples, so the last piece, which has the longest responses, is
the longest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from flowrl.ids import GroupId, SampleId
from flowrl.sim.clock import Clock
from flowrl.sim.costs import batch_work
from flowrl.sim.model import OpModel, RolloutModel
from flowrl.sim.workload import GroupDraw

TakeLanes = Callable[[OpModel, float, float], tuple[float, float]]
"""Of an operation, from when on and for how long: when it begins, and how long it takes."""

Item = str
"""What a stream is made of: the id of a group, or of a sample."""

_KEPT_BATCHES = 4
"""Delivered batches of a rollout whose groups are remembered."""


@dataclass(slots=True, eq=False)
class _Stream:
    op: OpModel
    inputs: set[str]  # rollouts, and streams that it waits for
    readers: list[_Stream] = field(default_factory=list)
    arrived: dict[Item, set[str]] = field(default_factory=dict)  # inputs that have it, not all
    draws: dict[Item, GroupDraw] = field(default_factory=dict)  # of items that arrived
    there: dict[Item, GroupDraw] = field(default_factory=dict)  # all have it; in no piece yet
    ends: dict[Item, float | None] = field(default_factory=dict)  # in a piece; None: not over
    batches: dict[int, frozenset[Item]] = field(default_factory=dict)  # delivered, not taken
    called: int = 0  # the last batch at which the trainer has come to it
    released: set[int] = field(default_factory=set)  # batches on which it may work, likewise
    begun: Counter[int] = field(default_factory=Counter)  # items of each batch, likewise
    under_way: int = 0  # pieces
    pieces: int = 0  # since the last batch was over
    spent_s: float = 0.0  # likewise

    def is_over(self, batch: int) -> bool:
        """Whether it is done with every item of a batch."""
        return all(self.ends.get(item) is not None for item in self.batches[batch])


@dataclass(slots=True, eq=False, kw_only=True)
class SimStreams:
    """All such operations of a stage; see the module.

    Attributes:
        said: By rollout, tokens of an environment in an episode in which so many are drawn.
    """

    clock: Clock
    ops: Iterable[OpModel]
    rollouts: Iterable[RolloutModel]
    take: TakeLanes
    said: Mapping[str, Callable[[int], int]]
    _streams: dict[str, _Stream] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)  # of a batch, by rollout
    _delivered: Counter[str] = field(default_factory=Counter)  # batches, by rollout
    _members: dict[GroupId, tuple[SampleId, ...]] = field(default_factory=dict)
    _group_of: dict[Item, GroupId] = field(default_factory=dict)
    _remembered: list[tuple[GroupId, ...]] = field(default_factory=list)  # of delivered batches

    def __post_init__(self) -> None:
        self._rows = {one.name: one.groups * one.settings.group_size for one in self.rollouts}
        for op in self.ops:
            if not op.streams:
                continue
            before = [name for name in op.after if name in self._streams]
            stream = _Stream(op, {op.rollout or "", *op.beside, *before})
            self._streams[op.name] = stream
            for name in before:
                self._streams[name].readers.append(stream)

    def __contains__(self, op: str) -> bool:
        return op in self._streams

    @property
    def run_ahead(self) -> bool:
        """Whether something begins on a batch while the trainer is at the one before."""
        return any(stream.op.ahead for stream in self._streams.values())

    # What rollouts tell

    def sample(self, rollout: str, sample: SampleId, draw: GroupDraw) -> None:
        """A sample is scored.

        Args:
            draw: It alone.
        """
        for stream in self._reading(rollout):
            if stream.op.by_sample and not stream.op.kept_only:
                self._arrive(stream, rollout, sample, draw)

    def complete(
        self,
        rollout: str,
        group: GroupId,
        samples: tuple[SampleId, ...],
        draw: GroupDraw,
        *,
        kept: bool,
    ) -> None:
        """A group is complete, or a filter has taken it out; its samples were told before."""
        self._members[group] = samples
        self._group_of.update(dict.fromkeys(samples, group))
        for stream in self._reading(rollout):
            op = stream.op
            if not op.by_sample and (kept or not op.kept_only):
                self._arrive(stream, rollout, group, draw)
            elif op.by_sample and op.kept_only and kept:
                for sample, one in _each(samples, draw):
                    self._arrive(stream, rollout, sample, one)
        self._pass_on_whole(group)

    def delivered(
        self, rollout: str, batch: int, kept: Iterable[GroupId], filtered: Iterable[GroupId]
    ) -> None:
        """A batch is whole: these are its groups, each of which was complete before."""
        self._delivered[rollout] += 1
        learned = tuple(kept)
        everything = (*learned, *filtered)
        for stream in self._streams.values():
            if rollout == stream.op.rollout:
                groups = learned if stream.op.kept_only else everything
                stream.batches[batch] = frozenset(self._items(stream, groups))
                self._cut(stream)
            elif rollout in stream.op.beside:  # what it has not is missing for good
                for item in list(stream.arrived):
                    self._arrive(stream, rollout, item, None)
        self._remembered.append(everything)
        if len(self._remembered) > _KEPT_BATCHES * len(self._rows):
            for group in self._remembered.pop(0):
                for sample in self._members.pop(group, ()):
                    self._group_of.pop(sample, None)

    def _reading(self, rollout: str) -> Iterable[_Stream]:
        return [
            stream
            for stream in self._streams.values()
            if rollout in (stream.op.rollout, *stream.op.beside)
        ]

    def _items(self, stream: _Stream, groups: Iterable[GroupId]) -> Iterable[Item]:
        if not stream.op.by_sample:
            return groups
        return (sample for group in groups for sample in self._members[group])

    # From piece to piece

    def _arrive(self, stream: _Stream, source: str, item: Item, draw: GroupDraw | None) -> None:
        """A source of an operation has an item.

        Args:
            draw: The item as the operation works on it; None of a rollout beside.
        """
        if item in stream.there or item in stream.ends:
            return
        arrived = stream.arrived.setdefault(item, set())
        arrived.add(source)
        if draw is not None and source not in stream.op.beside:
            stream.draws[item] = draw
        if all(name in arrived or self._is_past(stream, name) for name in stream.inputs):
            del stream.arrived[item]
            stream.there[item] = stream.draws.pop(item)
            self._cut(stream)

    def _is_past(self, stream: _Stream, name: str) -> bool:
        """Whether a rollout beside has delivered the batch that is drawn now."""
        own = self._delivered[stream.op.rollout or ""]
        return name in stream.op.beside and self._delivered[name] > own

    def _cut(self, stream: _Stream) -> None:
        """Begins every piece that can be cut of what is there."""
        if stream.op.whole:
            self._cut_batch(stream)
            return
        there, chunk = stream.there, stream.op.chunk
        while chunk and len(there) >= chunk:
            self._begin(stream, list(there)[:chunk])
        for items in stream.batches.values():
            rest = [item for item in items if item not in stream.ends]
            if rest and all(item in there for item in rest):
                self._begin(stream, [item for item in there if item in items])

    def _cut_batch(self, stream: _Stream) -> None:
        """Begins the next piece of a batch that is there, unless one is under way."""
        op, there = stream.op, stream.there
        opened = stream.batches.keys() if op.ahead else stream.released
        left = {number: len(stream.batches[number]) - stream.begun[number] for number in opened}
        number = next((one for one in sorted(left) if left[one]), None)
        if stream.under_way or number is None:
            return
        batch, size = stream.batches[number], min(op.chunk, left[number])
        items = [item for item in there if item in batch] if len(there) >= size else []
        if len(items) == len(batch):
            items = _dealt(items, size)
            stream.there = {item: there[item] for item in dict.fromkeys((*items, *there))}
        if len(items) >= size:
            stream.begun[number] += size
            self._begin(stream, items[:size])

    def _begin(self, stream: _Stream, items: list[Item]) -> None:
        op = stream.op
        draws = {item: stream.there.pop(item) for item in items}
        stream.ends.update(dict.fromkeys(items))
        rollout = op.rollout or ""
        whole = batch_work(draws.values(), self.said[rollout])
        calls = max(1, round(op.calls * whole.rows / self._rows[rollout]))
        work = whole.scaled(op.share, calls=calls, micro_batch=op.micro_batch)
        seconds = op.cost(work) + (op.piece_s if stream.pieces else op.fixed_s)
        begin, took = self.take(op, self.clock.now, seconds)
        stream.pieces += 1
        stream.under_way += 1
        stream.spent_s += took
        self.clock.at(begin + took, self._done, stream, draws)

    def _done(self, stream: _Stream, draws: Mapping[Item, GroupDraw]) -> None:
        stream.ends.update(dict.fromkeys(draws, self.clock.now))
        stream.under_way -= 1
        name, by_sample = stream.op.name, stream.op.by_sample
        for reader in stream.readers:
            if reader.op.by_sample == by_sample:
                for item, draw in draws.items():
                    self._arrive(reader, name, item, draw)
            elif reader.op.by_sample:
                for group, draw in draws.items():
                    for sample, one in _each(self._members[GroupId(group)], draw):
                        self._arrive(reader, name, sample, one)
        if by_sample:
            groups = {self._group_of[item] for item in draws if item in self._group_of}
            for group in groups:
                self._pass_on_whole(group)
        if stream.op.whole:
            self._cut(stream)

    def _pass_on_whole(self, group: GroupId) -> None:
        """Tells those that read groups of one that others have done sample by sample."""
        for stream in self._streams.values():
            readers = [one for one in stream.readers if not one.op.by_sample]
            if readers and stream.op.by_sample:
                ends = [stream.ends.get(sample) for sample in self._members[group]]
                if all(end is not None for end in ends):
                    for reader in readers:
                        self._arrive(reader, stream.op.name, group, None)

    # What the trainer says and asks

    def come_to(
        self, batch: int, ops: Iterable[OpModel], finished: Mapping[str, float], began_s: float
    ) -> None:
        """The trainer comes to those that begin on a batch, which is there.

        Args:
            ops: The operations that it is not done with.
            finished: When each of the others ended; one may begin when those before have, but
                those that hand on pieces.
            began_s: When it came to the batch.
        """
        for op in ops:
            if not op.whole or op.ahead or self._streams[op.name].called >= batch:
                continue
            before = [name for name in op.after if name not in self._streams]
            if all(name in finished for name in before):
                self._streams[op.name].called = batch
                start_s = max((finished[name] for name in before), default=began_s)
                if start_s > self.clock.now:
                    self.clock.at(start_s, self._open, self._streams[op.name], batch)
                else:
                    self._open(self._streams[op.name], batch)

    def _open(self, stream: _Stream, batch: int) -> None:
        if batch in stream.batches:  # it may have had nothing to do
            stream.released.add(batch)
            self._cut(stream)

    def is_over(self, op: str, batch: int) -> bool:
        """Whether an operation has done a batch that was delivered."""
        return self._streams[op].is_over(batch)

    def collect(self, op: str, batch: int) -> tuple[float, float] | None:
        """When an operation was done with a batch, and seconds of its work since the one before.

        None where it had nothing to do. The batch is over, and forgotten.
        """
        stream = self._streams[op]
        ends = [stream.ends.pop(item) for item in stream.batches.pop(batch)]
        spent, stream.spent_s, stream.pieces = stream.spent_s, 0.0, 0
        stream.begun.pop(batch, None)
        stream.released.discard(batch)
        over = [end for end in ends if end is not None]
        return (max(over), spent) if over else None


def _dealt(items: list[Item], size: int) -> list[Item]:
    """In an order in which pieces of so many are alike.

    >>> _dealt(["1", "2", "3", "4", "5", "6"], 2)
    ['1', '4', '2', '5', '3', '6']
    """
    number = -(-len(items) // size)
    return [item for first in range(number) for item in items[first::number]]


def _each(samples: tuple[SampleId, ...], draw: GroupDraw) -> Iterable[tuple[SampleId, GroupDraw]]:
    """The members of a group, each alone."""
    return [
        (sample, replace(draw, lengths=(length,)))
        for sample, length in zip(samples, draw.lengths, strict=True)
    ]
