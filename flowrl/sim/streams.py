"""Operations that do not wait for the trainer: they begin on groups, or ahead of it on a batch.

    group complete -> there for whoever reads the rollout -> a piece of `chunk` groups -> its lanes
    are taken -> done -> there for the operations that wait for that one

A group is complete when the rollout's scheduler has it so: all members ended and scored, and kept
by its filter. A piece is the next `chunk` groups in the order in which they came; what is left when
the batch is delivered is a last piece. Operations without a chunk take a batch whole, when it is
delivered. What reads several rollouts begins on a prompt's groups when all of them have it. Pieces
take their lanes in the order in which they are cut, so those that share lanes alternate.

What a piece costs follows from its groups, so the last piece, which has the longest responses, is
the longest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flowrl.ids import GroupId
from flowrl.sim.clock import Clock
from flowrl.sim.costs import batch_work
from flowrl.sim.model import OpModel, RolloutModel
from flowrl.sim.workload import GroupDraw

__all__ = ["SimStreams", "TakeLanes"]

TakeLanes = Callable[[OpModel, float, float], tuple[float, float]]
"""Of an operation, from when on and for how long: when it begins, and how long it takes."""


@dataclass(slots=True, eq=False)
class _Stream:
    op: OpModel
    inputs: set[str]  # rollouts, and streams that it waits for
    readers: list[_Stream] = field(default_factory=list)
    arrived: dict[GroupId, set[str]] = field(default_factory=dict)  # inputs that have it, not all
    draws: dict[GroupId, GroupDraw] = field(default_factory=dict)  # of groups that arrived
    there: dict[GroupId, GroupDraw] = field(default_factory=dict)  # all have it; in no piece yet
    ends: dict[GroupId, float | None] = field(default_factory=dict)  # in a piece; None: not over
    batches: dict[int, frozenset[GroupId]] = field(default_factory=dict)  # delivered, not taken
    pieces: int = 0  # since the last batch was over
    spent_s: float = 0.0  # likewise

    def is_over(self, batch: int) -> bool:
        """Whether it is done with every group of a batch."""
        return all(self.ends.get(group) is not None for group in self.batches[batch])


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
    _groups: dict[str, int] = field(default_factory=dict)
    _delivered: Counter[str] = field(default_factory=Counter)  # batches, by rollout

    def __post_init__(self) -> None:
        self._groups = {rollout.name: rollout.groups for rollout in self.rollouts}
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

    def complete(self, rollout: str, group: GroupId, draw: GroupDraw, *, kept: bool) -> None:
        """A group is complete, or a filter has taken it out."""
        for stream in self._streams.values():
            op = stream.op
            if rollout in (op.rollout, *op.beside) and (kept or not op.kept_only):
                own = draw if rollout == op.rollout else None
                self._arrive(stream, rollout, group, own)

    def delivered(
        self, rollout: str, batch: int, kept: Iterable[GroupId], filtered: Iterable[GroupId]
    ) -> None:
        """A batch is whole: these are its groups, each of which was complete before."""
        self._delivered[rollout] += 1
        learned = frozenset(kept)
        everything = learned | frozenset(filtered)
        for stream in self._streams.values():
            if rollout == stream.op.rollout:
                stream.batches[batch] = learned if stream.op.kept_only else everything
                self._cut(stream)
            elif rollout in stream.op.beside:  # groups that it has not are missing for good
                for group in list(stream.arrived):
                    self._arrive(stream, rollout, group, None)

    # From piece to piece

    def _arrive(self, stream: _Stream, source: str, group: GroupId, draw: GroupDraw | None) -> None:
        """A source of an operation has a group.

        Args:
            draw: The group as the operation works on it; None of a rollout beside.
        """
        arrived = stream.arrived.setdefault(group, set())
        arrived.add(source)
        if draw is not None:
            stream.draws[group] = draw
        if all(name in arrived or self._is_past(stream, name) for name in stream.inputs):
            del stream.arrived[group]
            stream.there[group] = stream.draws.pop(group)
            self._cut(stream)

    def _is_past(self, stream: _Stream, name: str) -> bool:
        """Whether a rollout beside has delivered the batch that is drawn now."""
        own = self._delivered[stream.op.rollout or ""]
        return name in stream.op.beside and self._delivered[name] > own

    def _cut(self, stream: _Stream) -> None:
        """Begins every piece that can be cut of what is there."""
        there, chunk = stream.there, stream.op.chunk
        while chunk and len(there) >= chunk:
            self._begin(stream, list(there)[:chunk])
        for groups in stream.batches.values():
            rest = [group for group in groups if group not in stream.ends]
            if rest and all(group in there for group in rest):
                self._begin(stream, [group for group in there if group in groups])

    def _begin(self, stream: _Stream, groups: list[GroupId]) -> None:
        op = stream.op
        draws = {group: stream.there.pop(group) for group in groups}
        stream.ends.update(dict.fromkeys(groups))
        rollout = op.rollout or ""
        calls = max(1, round(op.calls * len(groups) / self._groups[rollout]))
        work = batch_work(draws.values(), self.said[rollout]).scaled(
            op.share, calls=calls, micro_batch=op.micro_batch
        )
        seconds = op.cost(work) + (op.piece_s if stream.pieces else op.fixed_s)
        begin, took = self.take(op, self.clock.now, seconds)
        stream.pieces += 1
        stream.spent_s += took
        self.clock.at(begin + took, self._done, stream, draws)

    def _done(self, stream: _Stream, draws: Mapping[GroupId, GroupDraw]) -> None:
        stream.ends.update(dict.fromkeys(draws, self.clock.now))
        for reader in stream.readers:
            for group, draw in draws.items():
                self._arrive(reader, stream.op.name, group, draw)

    # What the trainer asks

    def is_over(self, op: str, batch: int) -> bool:
        """Whether an operation has done a batch that was delivered."""
        return self._streams[op].is_over(batch)

    def collect(self, op: str, batch: int) -> tuple[float, float] | None:
        """When an operation was done with a batch, and seconds of its work since the one before.

        None where it had nothing to do. The batch is over, and forgotten.
        """
        stream = self._streams[op]
        ends = [stream.ends.pop(group) for group in stream.batches.pop(batch)]
        spent, stream.spent_s, stream.pieces = stream.spent_s, 0.0, 0
        over = [end for end in ends if end is not None]
        return (max(over), spent) if over else None
