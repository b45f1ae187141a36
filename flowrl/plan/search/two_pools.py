"""The best steps over two pools of devices, of which each holds a part of the tasks.

    pair = Pair(whole, first, second)
    one, other = Parts(first, feeds=True), Parts(second)
    for tasks in cuts(whole):
        best = pair.best(one.fronts(...)[tasks], other.fronts(...)[others], top=4)

The first part feeds the second one, which works at once, in chunks, or a step behind. What a step
takes is as `flowrl.plan.search.evaluate` has it, of both parts as one schedule; where devices
count, those of both pools do. Exact: no schedules of the two parts make a better step than `best`
finds among those that `Parts.fronts` keeps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count, product

import numpy as np

from flowrl.plan.search.arrivals import Line
from flowrl.plan.search.evaluate import Evaluation, Evaluator, rounded
from flowrl.plan.search.masks import numbers, read_masks
from flowrl.plan.search.problem import Kind, Objective, Problem
from flowrl.plan.search.schedule import Asynchronous, Schedule, Spatial, leaves
from flowrl.plan.search.space import Floats
from flowrl.plan.search.streams import AT_ONCE, streams_between

Cut = tuple[frozenset[str], frozenset[str]]
"""The tasks of both parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Least:
    """What a part takes at least.

    Attributes:
        seconds: `[K]`, on a block of each size.
        chunk_s: For a further chunk.
    """

    seconds: Floats
    chunk_s: float

    def further_s(self, chunks: int) -> float:
        """Seconds of all chunks but the first."""
        return max(chunks - 1, 0) * self.chunk_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutBounds:
    """What steps that are cut so take at least.

    Attributes:
        parts: Of both parts.
        may_be_ahead: The first part may run ahead of the second.
        streams: Lines of the ways in which both may work at once, and the chunks of each.
    """

    parts: tuple[Least, Least]
    may_be_ahead: bool
    streams: tuple[tuple[tuple[Line, ...], int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A step over two pools.

    Attributes:
        step_s: With the syncs inside of each pool, and without those between them.
        devices: Of both, and those that are counted beside.
        objective: What is to be small.
        num_splits: Spatial and Asynchronous nodes.
    """

    schedule: Spatial | Asynchronous
    step_s: float
    devices: int
    objective: float
    num_splits: int

    @property
    def key(self) -> tuple[float, int]:
        """Orders them: the objective to 12 digits, then the fewest moving parts."""
        return (float(rounded(self.objective)), self.num_splits)


class Pair:
    """Two pools.

    Args:
        whole: All tasks with the options of both pools, what may run ahead, the kinds of steps
            that are wanted, the objective, and what counts besides.
        first, second: The tasks on each pool.

    Attributes:
        runs_ahead: The first part may run ahead of the second.
    """

    def __init__(self, whole: Problem, first: Problem, second: Problem) -> None:
        self.whole = whole
        self._both = Evaluator(replace(whole, syncs=()))
        self._sizes = tuple(
            np.array(side.block_sizes(), dtype=np.float64) for side in (first, second)
        )
        self._sides = (Evaluator(first), Evaluator(second))
        self.runs_ahead = Kind.ASYNCHRONOUS in whole.kinds and whole.staleness > 0

    def best(
        self,
        firsts: Sequence[Schedule],
        seconds: Sequence[Schedule],
        top: int = 1,
        within: float = math.inf,
    ) -> list[Joined]:
        """The best steps that schedules of two parts make, best first.

        Args:
            within: An objective; what is above it is of no use.
        """
        one, two = (
            [side.measure(part) for part in parts]
            for side, parts in zip(self._sides, (firsts, seconds), strict=True)
        )
        number = count()
        found: list[tuple[float, int, int, Joined]] = []  # the best, as a heap: the worst is first
        for least, i, j in self._pairs(one, two, within):
            if len(found) == top and least > -found[0][0]:
                break
            for schedule in self.forms(firsts[i], seconds[j]):
                new = self._joined(schedule, (one[i], two[j]))
                heapq.heappush(found, (-new.objective, -new.num_splits, -next(number), new))
                if len(found) > top:
                    heapq.heappop(found)
        return sorted((entry[-1] for entry in found), key=lambda joined: joined.key)

    def _pairs(
        self, one: Sequence[Evaluation], two: Sequence[Evaluation], within: float
    ) -> Iterator[tuple[float, int, int]]:
        """Lower bounds of the objective with the pair that each is of, ascending."""
        (first, sync1, devices1), (second, sync2, devices2) = (
            np.array([(p.step_s - p.sync_s, p.sync_s, p.devices) for p in side]).reshape(-1, 3).T
            for side in (one, two)
        )
        # A part that runs `staleness` steps ahead may take so many steps longer than one.
        first = first / (self.whole.staleness + 1 if self.runs_ahead else 1)
        least = np.maximum(first[:, None], second) + sync1[:, None] + sync2
        if self.whole.objective is not Objective.STEP_TIME:
            least = least * (devices1[:, None] + devices2 + self.whole.beside)
        flat = least.ravel()
        rows = np.flatnonzero(flat <= within)
        for row in rows[np.argsort(flat[rows], kind="stable")].tolist():
            yield float(flat[row]), row // len(two), row % len(two)

    def forms(self, first: Schedule, second: Schedule) -> Iterator[Spatial | Asynchronous]:
        """The ways in which both parts may work at once."""
        here = {leaf.task for leaf in leaves(first)}
        tasks = [self.whole.task(leaf.task) for leaf in leaves(second)]
        readers = [task for task in tasks if here & set(task.after)]
        if self.whole.kinds & {Kind.HYBRID, Kind.SPATIAL}:
            most = min((task.max_chunks for task in readers), default=1)
            for chunks in self.whole.chunks if readers else (1,):
                if chunks <= most:
                    yield Spatial(first=first, second=second, chunks=chunks)
        if self.runs_ahead and here <= self.whole.ahead:
            yield Asynchronous(first=first, second=second)

    def joined(self, schedule: Spatial | Asynchronous) -> Joined | None:
        """What a step takes; None where a part of it does not fit its pool."""
        one, two = (
            side.measure(part)
            for side, part in zip(self._sides, (schedule.first, schedule.second), strict=True)
        )
        return self._joined(schedule, (one, two)) if one.fits and two.fits else None

    def bounds(self, cut: Cut, first: Problem, parts: tuple[Least, Least]) -> CutBounds:
        """Of steps that are cut so.

        Args:
            first: The tasks on the first pool, whose arrivals count.
            parts: What both parts take at least.
        """
        some = self.whole.kinds & {Kind.HYBRID, Kind.SPATIAL}
        return CutBounds(
            parts=parts,
            may_be_ahead=self.runs_ahead and cut[0] <= self.whole.ahead,
            streams=tuple(self._streams(cut, first)) if some else (),
        )

    def least(self, bounds: CutBounds) -> float:
        """A lower bound of the objective; infinite where there is no such step."""
        parts = bounds.parts
        two, share = self._beside(0, parts)
        runs = np.isfinite(parts[0].seconds)
        one, share = parts[0].seconds[runs, None], share[runs]
        if not share.size:
            return math.inf
        if bounds.may_be_ahead:
            step_s = np.maximum(two, (one + two) / (self.whole.staleness + 1))
            return float((step_s / share).min())
        found = math.inf
        for lines, chunks in bounds.streams:
            u1, u2 = one + parts[0].further_s(chunks), two + parts[1].further_s(chunks)
            step_s = np.maximum.reduce([a * u1 + b * u2 for a, b in lines])
            found = min(found, float((step_s / share).min()))
        return found

    def most_seconds(self, bounds: CutBounds, objective: float) -> tuple[Floats, Floats]:
        """Of both parts on a block of each size, in steps that have at most this objective; minus
        infinity where there is none."""
        parts = bounds.parts
        found = []
        for at in (0, 1):
            other, share = self._beside(at, parts)
            step_s, most = objective * share, np.full(share.shape, -np.inf)
            if bounds.may_be_ahead:
                # A batch's way and its update's are within so many periods.
                both = (self.whole.staleness + 1) * step_s - other
                fits = np.where(other <= step_s, both, -np.inf)
                most = fits if at == 0 else np.minimum(step_s, both)
            else:
                for lines, chunks in bounds.streams:
                    beside = other + parts[1 - at].further_s(chunks)
                    room = np.full(share.shape, np.inf)
                    for line in lines:
                        mine, others = line[at], line[1 - at]
                        left = step_s - others * beside if others else step_s
                        if mine:
                            np.minimum(room, left / mine, out=room)
                        else:
                            room[left < 0] = -np.inf
                    np.maximum(most, room - parts[at].further_s(chunks), out=most)
            found.append(most.max(axis=1, initial=-np.inf))
        return found[0], found[1]

    def _beside(self, part: int, parts: tuple[Least, Least]) -> tuple[Floats, Floats]:
        """What the other part takes on each block that is worth having for it; and the seconds of a
        step for one of the objective, by the size of this part's block and of that one."""
        other, sizes = parts[1 - part].seconds, self._sizes[1 - part]
        by_time = self.whole.objective is Objective.STEP_TIME
        # The smallest block of those that take as long; where devices do not count, the fastest.
        worth = np.flatnonzero(other < np.append(np.inf, other[:-1]))[-1 if by_time else 0 :]
        devices = self._sizes[part][:, None] + sizes[worth] + self.whole.beside
        return other[worth][None], np.ones(devices.shape) if by_time else 1.0 / devices

    def _streams(self, cut: Cut, problem: Problem) -> list[tuple[tuple[Line, ...], int]]:
        first, second = cut
        whole = self.whole
        reads, _ = read_masks(whole)
        masks = (numbers(whole, first), numbers(whole, second))
        own = masks[0].bit_count() > 1
        turning = (
            (numbers(whole, whole.in_one()), numbers(whole, whole.unread())) if own else (0, 0)
        )
        there = [
            (at, tuple(dict.fromkeys(option.arrivals for option in task.options)))
            for at, task in enumerate(problem.tasks)
            if task.id in first
        ]
        found: dict[tuple[tuple[Line, ...], int], None] = {}
        for chosen in product(*(ways for _, ways in there)):
            told = {at: one for (at, _), one in zip(there, chosen, strict=True) if one is not None}
            for stream in streams_between(whole, masks, reads, told, turning):
                # One from tasks that take turns has other lines; none is below either part.
                found[AT_ONCE.lines if stream.turns else stream.lines, stream.chunks] = None
        return list(found)

    def in_turns(self, first: frozenset[str], second: frozenset[str]) -> bool:
        """Whether the second part can only begin when the first one has ended, in the same step."""
        if self.runs_ahead and first <= self.whole.ahead:
            return False
        tasks = [self.whole.task(name) for name in second]
        readers = [task for task in tasks if not first.isdisjoint(task.after)]
        if min((task.max_chunks for task in readers), default=2) > 1:
            return False
        # Of tasks that take turns, some may follow those that are read.
        read = first & {name for task in readers for name in task.after}
        goes_on = read <= self.whole.in_one() or not first.isdisjoint(self.whole.unread())
        return len(first) == 1 or not goes_on

    def _joined(
        self, schedule: Spatial | Asynchronous, parts: tuple[Evaluation, Evaluation]
    ) -> Joined:
        step_s = self._both.measure(schedule).step_s + sum(part.sync_s for part in parts)
        devices = sum(part.devices for part in parts) + self.whole.beside
        by_time = self.whole.objective is Objective.STEP_TIME
        return Joined(
            schedule=schedule,
            step_s=step_s,
            devices=devices,
            objective=step_s if by_time else step_s * devices,
            num_splits=sum(part.num_splits for part in parts) + 1,
        )


def cuts(problem: Problem) -> list[frozenset[str]]:
    """All sets of tasks that may be the first part: nothing in them reads from the others."""
    names = [task.id for task in problem.tasks]
    found = []
    for size in range(1, len(names)):
        for some in combinations(names, size):
            here = frozenset(some)
            if all(here.issuperset(problem.task(name).after) for name in some):
                found.append(here)
    return found


def restricted(problem: Problem, tasks: frozenset[str]) -> Problem:
    """The problem of some of the tasks alone; they run ahead of nothing."""
    return replace(
        problem,
        tasks=tuple(
            replace(task, after=tuple(name for name in task.after if name in tasks))
            for task in problem.tasks
            if task.id in tasks
        ),
        syncs=tuple(sync for sync in problem.syncs if {sync.source, sync.destination} <= tasks),
        staleness=0,
        ahead=frozenset(),
        pinned={name: size for name, size in problem.pinned.items() if name in tasks},
        places={name: some for name, some in problem.places.items() if name in tasks},
    )
