"""Bounds of streams whose first part takes turns: `flowrl.plan.search.stream_rows` of other lines.

A line of such a stream is A + b u2, where A is what has to pass on the first side, from the factors
of `flowrl.plan.search.arrivals.turn_lines` and these bounds: H is at least what the longest of the
tasks in one go takes at its fastest; of q there are bounds as of seconds, and where all of the side
is read, q is its seconds. Nothing is known of h, so it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from flowrl.plan.search.masks import members
from flowrl.plan.search.space import Bools, Floats, Ints, Space
from flowrl.plan.search.stream_rows import (
    BEYOND,
    NEVER,
    StreamRows,
    Way,
    first_within,
    further_chunks,
    rows_of,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRows(StreamRows):
    """Rows of streams from parts that take turns.

    Attributes:
        lines: `[rows, lines, 2]`, the factors of u1 in A, and of u2.
        passed: `[rows, lines, K]`, A by the first side's size.
    """

    passed: Floats

    @classmethod
    def of_turns(
        cls, space: Space, bounds: Floats, ready_s: Floats, owners: Iterable[int]
    ) -> TurnRows:
        """Those of all cuts of some sets.

        Args:
            bounds: `[sets, K]`, of each set on a block of each size.
            ready_s: Likewise of q.
        """
        ways: list[Way] = [
            (owner, number, cut, stream)
            for owner in owners
            for number, cut in enumerate(space.cuts[owner])
            for stream in cut.streams
            if stream.turns
        ]
        rows = rows_of(space, bounds, ways)
        most = max((len(stream.turns) for *_, stream in ways), default=0) + 1
        lines = np.zeros((len(ways), most, 2))
        passed = np.zeros((len(ways), most, len(space.sizes)))
        lines[:, :, 0], passed[:] = 1.0, rows["u1"][:, None]  # the first side, in any case
        over = further_chunks(space, rows["parts"][0], rows["chunks"])
        longest = cache(partial(_longest, space))
        for at, (_, _, cut, stream) in enumerate(ways):
            mask = space.sets[cut.first]
            least = longest(mask & space.in_one)
            every = not mask & space.unread
            own = np.minimum(ready_s[cut.first], BEYOND)
            for line, (_, head, ready, further, second) in enumerate(stream.turns):
                share = ready if every else 0.0
                lines[at, line] = share, second
                passed[at, line] = head * least + share * rows["u1"][at]
                if not share:
                    passed[at, line] += ready * own + further * over[at]
        return cls(lines=lines, passed=passed, **rows)

    def only(self, rows: Bools) -> TurnRows:
        """Some of the rows."""
        return TurnRows(
            space=self.space,
            owner=self.owner[rows],
            number=self.number[rows],
            parts=self.parts[:, rows],
            chunks=self.chunks[rows],
            lines=self.lines[rows],
            u1=self.u1[rows],
            u2=self.u2[rows],
            passed=self.passed[rows],
        )

    def seconds(self, row: Ints, first: Ints, second: Ints) -> Floats:
        """That splits take at least, by the sizes of both sides; infinite where impossible."""
        u2 = self.u2[row, second]
        found: Floats = np.maximum(self.u1[row, first], u2)
        for line in range(self.lines.shape[1]):
            np.maximum(
                found, self.passed[row, line, first] + self.lines[row, line, 1] * u2, out=found
            )
        found[found > NEVER] = np.inf
        return found

    def rooms(self, row: Ints, limit: Floats, first: Ints, second: Ints) -> tuple[Floats, Floats]:
        """Most seconds of each side of splits within limits, given the bounds of the other side,
        and of what else has to pass."""
        further = further_chunks(self.space, self.parts, self.chunks)[:, row]
        u1, u2 = self.u1[row, first], self.u2[row, second]
        rooms: tuple[Floats, Floats] = (limit.copy(), limit.copy())
        for line in range(self.lines.shape[1]):
            a, b = self.lines[row, line].T
            passed = self.passed[row, line, first]
            for room, factor, other in (
                (rooms[0], a, passed - a * u1 + b * u2),
                (rooms[1], b, passed),
            ):
                with np.errstate(divide="ignore", invalid="ignore"):
                    left = np.where(factor > 0, (limit - other) / factor, np.inf)
                np.minimum(room, left, out=room)
        return rooms[0] - further[0], rooms[1] - further[1]

    def _sides(self) -> tuple[Floats, Floats]:
        """The slower side is the one that takes more by itself."""
        return self.u1, self.u2

    def _smallest(self, limit: Floats, left: Ints) -> tuple[Ints, Ints]:
        first = np.zeros(limit.shape, dtype=np.int64)
        room = np.full(limit.shape, np.inf)
        for line in range(self.lines.shape[1]):
            b = self.lines[:, line, 1][:, None]
            passed = self.passed[:, line]
            np.maximum(first, first_within(passed, limit - b * self.u2[:, left]), out=first)
            with np.errstate(divide="ignore", invalid="ignore"):
                own = np.where(b > 0, (limit - passed[:, left]) / b, np.inf)
            np.minimum(room, own, out=room)
        return first, first_within(self.u2, np.minimum(room, limit))


def _longest(space: Space, mask: int) -> Floats:
    """`[K]`: the longest of some tasks, each at its fastest on a block of each size."""
    found: Floats = np.zeros(len(space.sizes))
    for task in members(mask):
        leaves, own = space.leaves[task], np.full(len(space.sizes), BEYOND)
        np.minimum.at(own, leaves.size, leaves.seconds)
        np.maximum(found, np.minimum.accumulate(own), out=found)
    return found
