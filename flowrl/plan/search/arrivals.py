"""When a task's results are there for those that read them in chunks.

Chunk k of c is there after a share a_k of the first side's time; that chunk and those behind it are
a share b_k of the second side's work. The second side cannot end before a_k u1 + b_k u2, and with
the largest of these over all chunks it does: that is the seconds of a stream. c chunks of equal
work at even intervals have a_k = k / c and b_k = (c - k + 1) / c, of which the first and the last
give the largest: max(u1, u2) + min(u1, u2) / c.

Of tasks that take turns, those that are done in one go come first (`Task.in_one`), then the others
with every chunk in turn, and those that nobody reads at last. H after the part began the first ones
are over, of which the last one began at h; after q all is over that somebody reads; y is what
further chunks cost. What follows from the others is there chunk by chunk from H on, evenly:

    H + k / c (q + y - H) + (c - k + 1) / c u2

What follows from the first ones alone comes with the last of them that is read, as it has it: after
h + a_k (H + y - h), or a_k (h + y) where that is an earlier one. Where others are read that it does
not follow from, its order says nothing of their samples' work, which is spread evenly. That is the
stream's second side; the first one takes u1 in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import assert_never

from flowrl.errors import PlanError

Line = tuple[float, float]
"""(a, b): the stream takes at least a u1 + b u2."""

TurnLine = tuple[float, float, float, float, float]
"""Factors of h, H, q, y and u2, whose sum a stream from a part in turns takes at least."""


class Reads(StrEnum):
    """What a stream from a part in turns waits for.

    `OTHERS`: tasks that take turns with every chunk. `LAST`: of those done in one go, the last one.
    `EARLIER`: of those only others than the last.
    """

    OTHERS = "others"
    LAST = "last"
    EARLIER = "earlier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How results come, in equal steps of their number, the last one at the end.

    Attributes:
        ready: The share of the task's time after which so many are there.
        work: The share of the reader's work that they are.
    """

    ready: tuple[float, ...]
    work: tuple[float, ...]

    def __post_init__(self) -> None:
        for shares in (self.ready, self.work):
            rises = list(shares) == sorted(shares)
            if not rises or not shares or shares[0] < 0 or shares[-1] != 1.0:
                raise PlanError(
                    "shares of arrivals rise from at least 0 to 1",
                    found=", ".join(f"{share:g}" for share in shares),
                )
        if len(self.ready) != len(self.work):
            raise PlanError(
                "arrivals have a time and a share of work for each step",
                found=f"{len(self.ready)} and {len(self.work)}",
            )

    def at(self, share: float) -> tuple[float, float]:
        """Time and work at a share of the results, linear between the steps."""
        whole, part = divmod(share * len(self.ready), 1.0)
        at = int(whole)
        low = (self.ready[at - 1], self.work[at - 1]) if at else (0.0, 0.0)
        if not part:
            return low
        high = (self.ready[at], self.work[at])
        return (low[0] + part * (high[0] - low[0]), low[1] + part * (high[1] - low[1]))

    def until(self, time: float) -> tuple[float, float]:
        """Shares of the results and of the work that are there after a share of the time."""
        steps = len(self.ready)
        before = sum(ready <= time for ready in self.ready)
        if before == steps:
            return 1.0, 1.0
        low = self.ready[before - 1] if before else 0.0
        share = (before + (time - low) / (self.ready[before] - low)) / steps
        return share, self.at(share)[1]

    def of_others_work(self) -> Arrivals:
        """Where the reader's work is in what was there before: it is spread evenly."""
        steps = len(self.ready)
        return Arrivals(ready=self.ready, work=tuple((at + 1) / steps for at in range(steps)))

    def chunk_lines(self, chunks: int) -> tuple[Line, ...]:
        """(a_k, b_k) of each of equally many results."""
        there = [self.at(chunk / chunks) for chunk in range(chunks + 1)]
        return tuple((there[chunk][0], 1.0 - there[chunk - 1][1]) for chunk in range(1, chunks + 1))


@lru_cache(maxsize=4096)
def stream_lines(arrivals: frozenset[Arrivals], chunks: int) -> tuple[Line, ...]:
    """The lines that some stream may be on, first chunks first.

    Args:
        arrivals: Of the tasks of the first side that are read; none = they come evenly. Of several
            each chunk waits for the latest.
        chunks: How many; 0 = nothing passes, and the slower side is all that counts.
    """
    if not chunks:
        return ((0.0, 1.0), (1.0, 0.0))
    if not arrivals:
        share = 1.0 / chunks
        return ((share, 1.0), (1.0, share)) if chunks > 1 else ((1.0, 1.0),)
    return _hull(line for one in arrivals for line in one.chunk_lines(chunks))


def even_lines(chunks: int) -> tuple[Line, ...]:
    """(a_k, b_k) of chunks of equal work at even intervals."""
    return tuple(((at + 1) / chunks, (chunks - at) / chunks) for at in range(chunks))


@lru_cache(maxsize=4096)
def turn_lines(reads: Reads, arrivals: frozenset[Arrivals], chunks: int) -> tuple[TurnLine, ...]:
    """The lines of a stream whose first part takes turns.

    Args:
        arrivals: Of what is waited for, a task done in one go; none = it comes evenly.
        chunks: How many, at least 1.
    """
    lines = stream_lines(arrivals, chunks)
    return tuple((*_passed(reads, a), b) for a, b in lines)


def turn_chunks(reads: Reads, arrivals: frozenset[Arrivals], chunks: int) -> tuple[TurnLine, ...]:
    """Of every chunk of such a stream: when it is there, and the share of the work left then."""
    lines = [one.chunk_lines(chunks) for one in arrivals]
    if reads is Reads.OTHERS or not lines:
        lines = [even_lines(chunks)]
    return tuple((*_passed(reads, a), b) for a, b in lines[0])


def _passed(reads: Reads, a: float) -> tuple[float, float, float, float]:
    """Factors of h, H, q and y in the time after which a chunk is there."""
    match reads:
        case Reads.OTHERS:
            return 0.0, 1.0 - a, a, a
        case Reads.LAST:
            return 1.0 - a, a, 0.0, a
        case Reads.EARLIER:
            return a, 0.0, 0.0, a
        case _:
            assert_never(reads)


def _hull(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those of which one is the largest for some u1 and u2 that are not negative."""
    kept: list[Line] = []
    for a, b in sorted(set(lines)):
        while kept and kept[-1][1] <= b:
            kept.pop()
        while len(kept) > 1 and _below(kept[-2], kept[-1], (a, b)):
            kept.pop()
        kept.append((a, b))
    return tuple(kept)


def _below(left: Line, middle: Line, right: Line) -> bool:
    """Whether the middle point is on or below the line through the others."""
    rise = (right[1] - left[1]) * (middle[0] - left[0])
    return (middle[1] - left[1]) * (right[0] - left[0]) <= rise
