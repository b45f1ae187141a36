"""Ways in which two parts of a step run at once, with what a stream between them takes.

Sets of tasks are masks (`flowrl.plan.search.masks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowrl.plan.search.arrivals import Arrivals, Line, Reads, TurnLine, stream_lines, turn_lines
from flowrl.plan.search.masks import follows, members
from flowrl.plan.search.problem import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A way in which two parts run at once.

    Attributes:
        chunks: Pieces in which the first feeds the second; 0 = nothing passes.
        lines: (a, b): it takes the largest of all a u1 + b u2, chunks included. The first one has
            the largest b, the last one the largest a.
        even: They are those of even chunks.
        turns: Lines where the first part takes turns, which differ from these; it takes u1 besides.
    """

    chunks: int
    lines: tuple[Line, ...]
    even: bool
    turns: tuple[TurnLine, ...] = ()

    @property
    def turned(self) -> tuple[Line, ...]:
        """The lines with the second part's factor first."""
        return tuple((b, a) for a, b in self.lines)

    @property
    def in_turns(self) -> bool:
        """The second part begins when the first ends, whatever both take."""
        return self.lines == ((1.0, 1.0),)


def largest(lines: tuple[Line, ...], u1: Floats, u2: Floats) -> Floats:
    """The largest a u1 + b u2; of infinite seconds, nothing is nothing."""
    found: Floats = np.full(len(u1), -np.inf)
    for a, b in lines:
        np.maximum(found, a * u1 + b * u2 if a and b else a * u1 if a else b * u2, out=found)
    return found


def ahead_stream(staleness: int) -> Stream:
    """A first part on later steps than the second, at least: what it takes by itself, and that
    batches which overlap take longer, is not in the lines."""
    share = 1.0 / (staleness + 1)
    return Stream(chunks=0, lines=((0.0, 1.0), (share, share)), even=False)


AT_ONCE = Stream(chunks=0, lines=stream_lines(frozenset(), 0), even=True)
"""Nothing passes."""


def largest_in_turns(lines: tuple[TurnLine, ...], u1: Floats, *numbers: Floats) -> Floats:
    """Seconds of streams whose first part takes turns.

    Args:
        lines: Not none of them.
        u1: What the first part takes.
        numbers: h, H, q, y and u2.
    """
    found: Floats = u1
    for factors in lines:
        terms = [factor * number for factor, number in zip(factors, numbers, strict=True) if factor]
        found = np.maximum(found, sum(terms))
    return found


def streams_between(
    problem: Problem,
    parts: tuple[int, int],
    reads: list[int],
    told: dict[int, Arrivals],
    turning: tuple[int, int],
) -> tuple[Stream, ...]:
    """Ways for two sets to run at once.

    Args:
        parts: The sets, of which the first may feed the second.
        reads: What each task reads.
        told: Tasks of the first whose results do not come evenly: how they come.
        turning: The tasks that are done in one go, and those that nobody reads; none where the
            first part cannot take turns.
    """
    first, second = parts
    readers = [task for task in members(second) if reads[task] & first]
    if not readers:
        return (AT_ONCE,)
    behind, read = follows(reads), _read(first, second, reads)
    arrivals = frozenset(one for task, one in told.items() if behind[task] & read)
    most = min(problem.tasks[task].max_chunks for task in readers)
    return tuple(
        Stream(
            chunks=count,
            lines=stream_lines(arrivals, count),
            even=not arrivals,
            turns=_turns((first, read, behind), count, told, turning),
        )
        for count in sorted({count for count in problem.chunks if count <= most})
    )


def _turns(
    part: tuple[int, int, list[int]],
    chunks: int,
    told: dict[int, Arrivals],
    turning: tuple[int, int],
) -> tuple[TurnLine, ...]:
    """Lines of a stream from a set whose tasks take turns; none where they are as of any other.

    Args:
        part: The set, what is read of it, and of each task those that follow from it.
        told, turning: As of `streams_between`.
    """
    first, read, followers = part
    in_one, unread = (first & some for some in turning)
    if not in_one | unread:
        return ()
    if read & ~in_one:
        if chunks == 1 and not unread:
            return ()  # all of the first, and then the second
        return turn_lines(Reads.OTHERS, frozenset(), chunks)
    waited = read.bit_length() - 1
    reads = Reads.LAST if waited == in_one.bit_length() - 1 else Reads.EARLIER
    if waited not in told:
        return turn_lines(reads, frozenset(), chunks)
    spread = any(not followers[task] >> waited & 1 for task in members(read))
    comes = told[waited].of_others_work() if spread else told[waited]
    return turn_lines(reads, frozenset({comes}), chunks)


def _read(first: int, second: int, reads: list[int]) -> int:
    """The tasks of one set that those of another read."""
    read = 0
    for task in members(second):
        read |= reads[task] & first
    return read
