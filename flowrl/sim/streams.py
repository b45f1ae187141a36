"""Operations that do not wait for the trainer: they begin on groups, or ahead of it on a batch.

    group complete -> there for whoever reads the rollout -> a piece of `chunk` groups -> its lanes
    are taken -> done -> there for the operations that wait for that one

A group is complete when the rollout's scheduler has it so: all members ended and scored, and kept
by its filter. A piece is the next `chunk` groups in the order in which they came; what is left when
the batch is delivered is a last piece. Operations without a chunk take a batch whole, when it is
delivered. Pieces take their lanes in the order in which they are cut, so those that share lanes
alternate.

What a piece costs follows from its groups, so the last piece, which has the longest responses, is
the longest one.
"""

from __future__ import annotations

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
    readers: list[_Stream] = field(default_factory=list)
    num_inputs: int = 1  # the rollout, and streams that it waits for
    arrived: dict[GroupId, int] = field(default_factory=dict)  # inputs that have it, not all yet
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

    def __post_init__(self) -> None:
        self._groups = {rollout.name: rollout.groups for rollout in self.rollouts}
        for op in self.ops:
            if not op.streams:
                continue
            stream = self._streams[op.name] = _Stream(op)
            for before in op.after:
                if before in self._streams:
                    self._streams[before].readers.append(stream)
                    stream.num_inputs += 1

    def __contains__(self, op: str) -> bool:
        return op in self._streams

    @property
    def run_ahead(self) -> bool:
        """Whether something begins on a batch while the trainer is at the one before."""
        return any(stream.op.ahead for stream in self._streams.values())

    # What rollouts tell

    def complete(self, rollout: str, group: GroupId, draw: GroupDraw, *, kept: bool) -> None:
        """A group is complete, or a filter has taken it out."""
        for stream in self._of(rollout):
            if kept or not stream.op.kept_only:
                self._arrive(stream, group, draw)

    def delivered(
        self, rollout: str, batch: int, kept: Iterable[GroupId], filtered: Iterable[GroupId]
    ) -> None:
        """A batch is whole: these are its groups, each of which was complete before."""
        learned = frozenset(kept)
        everything = learned | frozenset(filtered)
        for stream in self._of(rollout):
            stream.batches[batch] = learned if stream.op.kept_only else everything
            self._cut(stream)

    def _of(self, rollout: str) -> Iterable[_Stream]:
        return (stream for stream in self._streams.values() if stream.op.rollout == rollout)

    # From piece to piece

    def _arrive(self, stream: _Stream, group: GroupId, draw: GroupDraw) -> None:
        inputs = stream.arrived.get(group, 0) + 1
        if inputs < stream.num_inputs:
            stream.arrived[group] = inputs
            return
        stream.arrived.pop(group, None)
        stream.there[group] = draw
        self._cut(stream)

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
                self._arrive(reader, group, draw)

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
