"""What a complete schedule takes: seconds, bytes, devices, moving parts.

This is the definition; the search has arithmetic of its own, and is checked against this one
(`tests.proofs.planner_optimality`). With t a child's seconds, r and p its resident and peak bytes
on a device, x the sum of `chunk_s` over its leaves, and a the staleness:

    Leaf          t = seconds                                        r, p of the option
    Temporal      t = t1 + t2                                        r = r1 + r2 - s
                                                                     p = max(p1 + r2, p2 + r1) - s
    Spatial       t = max(t1, t2)           nothing passes           r = max(r1, r2)
                  t = max over k of a_k u1 + b_k u2                  p = max(p1, p2)
                      where first feeds second in c chunks,
                      u = t + (c - 1) x
    Asynchronous  t = max(t2, s1, X(t1, d1, t2))                     as Spatial

Chunk k is there after a_k of the first side's time, and b_k of the second side's work is in it and
behind it (`flowrl.plan.search.arrivals`). With c equal chunks at even intervals that is
max(u1, u2) + min(u1, u2) / c: the first chunk through both, and then the slower side's pace. Chunks
are so uneven as the `arrivals` of those leaves of the first side say that the second reads, itself
or what follows from them there; without any they are even.

A Temporal does first what is done in one go (`Problem.in_one`), in the order of the tasks, then the
other parts, in a stream with every chunk in turn, and last those of which nobody reads a task. So
a stream from it takes max(u1, the largest of its lines), which are those of
`flowrl.plan.search.arrivals.turn_lines` in y = (c - 1) x and these, summed over its parts:

    H    t of those with a task in one go
    h    the same before the last of these, or H where that part has several of them
    q    t of those of which somebody reads a task

A Spatial hands on after what takes turns in it: it has H and h of the side where something does
that is done in one go, or H = h = t where both sides have tasks in one go; and q = t. A Leaf has
H = 0, and so has a Spatial in which no such tasks take turns.

The seconds of an Asynchronous are its period in the steady state. A batch is drawn with weights of
a updates ago at the earliest, so its way through the first side and its update's t2 are within
a + 1 periods, which X is (`flowrl.plan.search.overlap`; with d1 = 0 it is (t1 + t2) / (a + 1)).
Meanwhile other batches are under way on the first side, which takes s1 for each if none is waited
for, d1 of it in any case:

    Leaf          s = steady_s                                       d = dense_s
    Temporal      s = t1 + t2, for devices change hands when a batch is through          d = 0
    Spatial       s = max(s1 + (c - 1) x1, s2 + (c - 1) x2)          d = max(d1, d2)

The s of memory is the parameters that both sides of a Temporal hold: for each name of weights and
form that a leaf of either side holds *on exactly the Temporal's block*, reached through Temporals
only, they are there once. A sync costs `together_s` when source and destination are such leaves of
the two sides of one Temporal, else `apart_s`; it is added to the step.

The block of a Leaf is its option's devices, of a Temporal the larger of its children's, of the
others the sum; each rounded up to the next allowed size. A part that stands apart has a block for
all devices that its tasks must have between them (`Problem.places`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import PlanError
from flowrl.plan.search.arrivals import (
    Arrivals,
    Reads,
    TurnLine,
    stream_lines,
    turn_chunks,
    turn_lines,
)
from flowrl.plan.search.overlap import age_period_s
from flowrl.plan.search.problem import Kind, Objective, Problem
from flowrl.plan.search.schedule import (
    Asynchronous,
    Leaf,
    Schedule,
    Spatial,
    Temporal,
    kind_of,
    leaves,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a schedule takes.

    Attributes:
        step_s: Seconds of a step, `sync_s` included.
        sync_s: Seconds of the weights' travel.
        devices: Size of the block that the whole schedule stands on.
        resident: Bytes on the fullest device between tasks.
        peak: Bytes on the fullest device while a task works.
        fits: The block is inside the pool and `peak` inside the memory.
        objective: What the search minimises.
        num_splits: Spatial and Asynchronous nodes.
        num_forms: Distinct forms of weights.
    """

    step_s: float
    sync_s: float
    devices: int
    resident: int
    peak: int
    fits: bool
    objective: float
    num_splits: int
    num_forms: int

    @property
    def key(self) -> tuple[float, int, int]:
        """Orders schedules: the objective to 12 digits, then the fewest moving parts."""
        return (float(rounded(self.objective)), self.num_splits, self.num_forms)


def rounded(value: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """`value` to 40 binary digits (12 decimal ones), so that rounding decides no ties."""
    mantissa, exponent = np.frexp(value)
    result: NDArray[np.float64] = np.ldexp(np.round(np.ldexp(mantissa, 40)), exponent - 40)
    return result


def evaluate(problem: Problem, schedule: Schedule) -> Evaluation:
    """What `schedule` takes; PlanError where it is no schedule of `problem` at all.

    A schedule that is too big for the pool or its memory is evaluated like any other, with
    `fits` false.
    """
    _check(problem, schedule)
    return Evaluator(problem).measure(schedule)


def seconds_of(problem: Problem, schedule: Schedule) -> float:
    """Seconds of a schedule or a part of one, without syncs."""
    return Evaluator(problem).seconds(schedule)


def block(schedule: Schedule, sizes: tuple[int, ...]) -> int:
    """Devices of the smallest block that holds `schedule`.

    Args:
        schedule: A schedule or a part of one.
        sizes: The sizes that blocks may have, ascending. What is larger than all of them is
            returned as it is, and does not fit.
    """
    match schedule:
        case Leaf():
            return _rounded_up(schedule.option.devices, sizes)
        case Temporal():
            return max(block(schedule.first, sizes), block(schedule.second, sizes))
        case Spatial() | Asynchronous():
            need = block(schedule.first, sizes) + block(schedule.second, sizes)
            return _rounded_up(need, sizes)
        case _:
            assert_never(schedule)


def _rounded_up(need: int, sizes: tuple[int, ...]) -> int:
    at = bisect_left(sizes, need)
    return sizes[at] if at < len(sizes) else need


class _Part(NamedTuple):
    """A part of a schedule, measured.

    Attributes:
        tasks: Ids of its tasks.
        block: Size of its block.
        seconds: t.
        steady_s: s.
        dense_s: d.
        chunk_s: x.
        sync_s: Seconds of the syncs between its tasks.
        resident: r.
        peak: p.
        on_block: The leaves that use exactly its block, reached through Temporals only.
        num_splits: Spatial and Asynchronous nodes.
        forms: Forms of weights, with their names.
        uneven: The leaves whose results do not come evenly.
        in_turns: It is a Temporal.
        head: H.
        early: h.
        ready: q.
    """

    tasks: frozenset[str]
    block: int
    seconds: float
    steady_s: float
    dense_s: float
    chunk_s: float
    sync_s: float
    resident: int
    peak: int
    on_block: tuple[Leaf, ...]
    num_splits: int
    forms: frozenset[tuple[str | None, str]]
    uneven: tuple[Leaf, ...]
    in_turns: bool
    head: float
    early: float
    ready: float


class Evaluator:
    """Measures schedules of one problem, without asking whether they are schedules of it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = problem.block_sizes()
        self.tasks = {task.id: task for task in problem.tasks}
        self.behind = {task.id: problem.behind(task.id) for task in problem.tasks}
        self.number = {task.id: at for at, task in enumerate(problem.tasks)}
        self.in_one, self.unread = problem.in_one(), problem.unread()

    def measure(self, schedule: Schedule) -> Evaluation:
        """What `schedule` takes."""
        part = self._part(schedule)
        step_s = part.seconds + part.sync_s
        by_time = self.problem.objective is Objective.STEP_TIME
        fits = part.block <= self.problem.num_devices and part.peak <= self.problem.memory_bytes
        return Evaluation(
            step_s=step_s,
            sync_s=part.sync_s,
            devices=part.block,
            resident=part.resident,
            peak=part.peak,
            fits=fits,
            objective=step_s if by_time else step_s * (part.block + self.problem.beside),
            num_splits=part.num_splits,
            num_forms=len(part.forms),
        )

    def seconds(self, schedule: Schedule) -> float:
        """Seconds of a schedule or a part of one, without syncs."""
        return self._part(schedule).seconds

    def arrivals(self, schedule: Spatial) -> frozenset[Arrivals]:
        """What says when the chunks of a stream are there; none where they are even."""
        first, second = self._part(schedule.first), self._part(schedule.second)
        readers = self._readers(first, second)
        if readers and _waits(first):
            return self._reads(first, readers)[1]
        return self._arrivals(first, readers)

    def chunked(self, schedule: Spatial) -> tuple[float, float]:
        """u of both sides of a stream."""
        first, second = self._part(schedule.first), self._part(schedule.second)
        return _chunked(first, schedule.chunks), _chunked(second, schedule.chunks)

    def from_turns(self, schedule: Spatial) -> list[tuple[float, float]]:
        """When each chunk of a stream from a part in turns is there, and the share of the second
        side's work that is left then; empty where it is from another part."""
        first, second = self._part(schedule.first), self._part(schedule.second)
        readers = self._readers(first, second)
        if not readers or not _waits(first):
            return []
        lines = turn_chunks(*self._reads(first, readers), schedule.chunks)
        numbers = _turns_of(first, schedule.chunks)
        return [(sum(map(mul, line, numbers)), line[-1]) for line in lines]

    def _part(self, schedule: Schedule) -> _Part:
        if isinstance(schedule, Leaf):
            return self._leaf(schedule)
        first, second = self._part(schedule.first), self._part(schedule.second)
        tasks = first.tasks | second.tasks
        together: frozenset[str] = frozenset()
        on_block: tuple[Leaf, ...] = ()
        if isinstance(schedule, Temporal):
            size = max(first.block, second.block)
            one = first.on_block if first.block == size else ()
            two = second.on_block if second.block == size else ()
            twice = self._held_twice(one, two)
            on_block = one + two
            together = frozenset(leaf.task for leaf in on_block)
            seconds = steady_s = first.seconds + second.seconds
            dense_s = 0.0
            resident = first.resident + second.resident - twice
            peak = max(first.peak + second.resident, second.peak + first.resident) - twice
            head, early = self._through(first) + self._through(second), self._early(first, second)
            ready = sum(part.ready for part in (first, second) if not part.tasks <= self.unread)
        else:
            size = _rounded_up(self._room(first) + self._room(second), self.sizes)
            resident = max(first.resident, second.resident)
            peak = max(first.peak, second.peak)
            seconds = max(first.seconds, second.seconds)
            steady_s = max(first.steady_s, second.steady_s)
            dense_s = max(first.dense_s, second.dense_s)
            head, early = max(first.head, second.head), max(first.early, second.early)
            if isinstance(schedule, Asynchronous):
                age_s = age_period_s(
                    first.seconds, first.dense_s, second.seconds, self.problem.staleness
                )
                seconds = steady_s = max(second.seconds, first.steady_s, age_s)
            if isinstance(schedule, Spatial) and (readers := self._readers(first, second)):
                arrivals = self._arrivals(first, readers)
                if _waits(first):
                    lines = turn_lines(*self._reads(first, readers), schedule.chunks)
                    seconds = _turns_s(first, second, schedule.chunks, lines)
                else:
                    seconds = _stream_s(first, second, schedule.chunks, arrivals)
                steady_s = max(_chunked_s(part, schedule.chunks) for part in (first, second))
            ready = seconds
            if head and not any(part.tasks.isdisjoint(self.in_one) for part in (first, second)):
                head = early = seconds
        return _Part(
            tasks=tasks,
            block=size,
            seconds=seconds,
            steady_s=steady_s,
            dense_s=dense_s,
            chunk_s=first.chunk_s + second.chunk_s,
            sync_s=first.sync_s + second.sync_s + self._sync_s(first, second, together),
            resident=resident,
            peak=peak,
            on_block=on_block,
            num_splits=first.num_splits + second.num_splits + (not isinstance(schedule, Temporal)),
            forms=first.forms | second.forms,
            uneven=first.uneven + second.uneven,
            in_turns=isinstance(schedule, Temporal),
            head=head,
            early=early,
            ready=ready,
        )

    def _through(self, part: _Part) -> float:
        """Seconds of what is done in one go, where the part takes turns with others."""
        if part.in_turns:
            return part.head
        return 0.0 if part.tasks.isdisjoint(self.in_one) else part.seconds

    def _early(self, first: _Part, second: _Part) -> float:
        """Seconds before the last task in one go of two parts that take turns."""
        number = {name: self.number[name] for name in (first.tasks | second.tasks) & self.in_one}
        if not number:
            return 0.0
        last = max(number, key=number.__getitem__)
        later, other = (first, second) if last in first.tasks else (second, first)
        if later.in_turns:
            return self._through(other) + later.early
        several = len(later.tasks & self.in_one) > 1
        return self._through(other) + (later.seconds if several else 0.0)

    def _room(self, part: _Part) -> int:
        """Devices of a part that stands apart: its block, or more where it must have more."""
        named = {number for name in part.tasks for number in self.problem.places.get(name, ())}
        return max(part.block, _rounded_up(len(named), self.sizes)) if named else part.block

    def _leaf(self, leaf: Leaf) -> _Part:
        option = leaf.option
        named = (self.tasks[leaf.task].weights, option.form)
        size = _rounded_up(option.devices, self.sizes)
        return _Part(
            tasks=frozenset({leaf.task}),
            block=size,
            seconds=option.seconds,
            steady_s=option.period_s,
            dense_s=option.dense_s,
            chunk_s=option.chunk_s,
            sync_s=0.0,
            resident=option.resident,
            peak=option.peak,
            on_block=(leaf,) if option.devices == size else (),
            num_splits=0,
            forms=frozenset({named}) if option.form else frozenset(),
            uneven=(leaf,) if option.arrivals is not None else (),
            in_turns=False,
            head=0.0,
            early=0.0,
            ready=option.seconds,
        )

    def _held_twice(self, first: tuple[Leaf, ...], second: tuple[Leaf, ...]) -> int:
        """Bytes of the parameters that leaves of both sides hold on the same block."""
        held = [
            {
                (weights, leaf.option.form): leaf.option.weight_bytes
                for leaf in side
                if (weights := self.tasks[leaf.task].weights) is not None
                and leaf.option.weight_bytes
            }
            for side in (first, second)
        ]
        return sum(nbytes for key, nbytes in held[0].items() if key in held[1])

    def _readers(self, first: _Part, second: _Part) -> list[str]:
        """Tasks of one side that read from the other."""
        return [name for name in second.tasks if not first.tasks.isdisjoint(self.tasks[name].after)]

    def _arrivals(self, first: _Part, readers: list[str]) -> frozenset[Arrivals]:
        """Of the uneven leaves that `readers` read, or that what they read follows from."""
        if not first.uneven:
            return frozenset()
        read = {name for reader in readers for name in self.tasks[reader].after} & first.tasks
        return frozenset(
            leaf.option.arrivals
            for leaf in first.uneven
            if leaf.option.arrivals is not None
            and any(leaf.task in self.behind[name] for name in read)
        )

    def _reads(self, first: _Part, readers: list[str]) -> tuple[Reads, frozenset[Arrivals]]:
        """What `readers` wait for of a part in turns, and how that comes."""
        read = {name for reader in readers for name in self.tasks[reader].after} & first.tasks
        if not read <= self.in_one:
            return Reads.OTHERS, frozenset()
        waited = max(read, key=self.number.__getitem__)
        last = max(first.tasks & self.in_one, key=self.number.__getitem__)
        own = (leaf.option.arrivals for leaf in first.uneven if leaf.task == waited)
        spread = not read <= self.behind[waited]
        arrivals = frozenset(
            one.of_others_work() if spread else one for one in own if one is not None
        )
        return Reads.LAST if waited == last else Reads.EARLIER, arrivals

    def _sync_s(self, first: _Part, second: _Part, together: frozenset[str]) -> float:
        """Seconds of the syncs from one side to the other."""
        seconds = 0.0
        for sync in self.problem.syncs:
            ends = {sync.source, sync.destination}
            if len(ends & first.tasks) == 1 and len(ends & second.tasks) == 1:
                seconds += sync.together_s if ends <= together else sync.apart_s
        return seconds


def _stream_s(first: _Part, second: _Part, chunks: int, arrivals: frozenset[Arrivals]) -> float:
    """Seconds of two sides of which one reads what the other makes."""
    u1, u2 = _chunked(first, chunks), _chunked(second, chunks)
    if not arrivals:
        return max(u1, u2) + min(u1, u2) / chunks
    return max(a * u1 + b * u2 for a, b in stream_lines(arrivals, chunks))


def _waits(part: _Part) -> bool:
    """Whether what a part hands on waits for tasks in turns there."""
    return part.head > 0 or part.ready < part.seconds


def _turns_of(part: _Part, chunks: int) -> tuple[float, float, float, float]:
    """h, H, q and y of a part in turns."""
    return part.early, part.head, part.ready, (chunks - 1) * part.chunk_s


def _turns_s(first: _Part, second: _Part, chunks: int, lines: tuple[TurnLine, ...]) -> float:
    """Seconds of two sides of which one reads what the other, in turns, makes."""
    numbers = (*_turns_of(first, chunks), _chunked(second, chunks))
    found: list[float] = [sum(map(mul, line, numbers)) for line in lines]
    return max(_chunked(first, chunks), *found)


def _chunked(part: _Part, chunks: int) -> float:
    """u of a side of a stream."""
    return part.seconds + (chunks - 1) * part.chunk_s


def _chunked_s(part: _Part, chunks: int) -> float:
    """Steady seconds of a side of a stream."""
    return part.steady_s + (chunks - 1) * part.chunk_s


def arrivals_of(problem: Problem, schedule: Spatial) -> frozenset[Arrivals]:
    """What says when the chunks of a stream are there; none where they are even."""
    return Evaluator(problem).arrivals(schedule)


def from_turns(problem: Problem, schedule: Spatial) -> list[tuple[float, float]]:
    """When each chunk of a stream from a part in turns is there, and the share of the second side's
    work that is left then; empty where it is from another part."""
    return Evaluator(problem).from_turns(schedule)


def chunked_seconds(problem: Problem, schedule: Spatial) -> tuple[float, float]:
    """What both sides of a stream take in its chunks."""
    return Evaluator(problem).chunked(schedule)


def readers(problem: Problem, schedule: Spatial) -> list[str]:
    """The tasks of `second` that read from `first`."""
    first = {leaf.task for leaf in leaves(schedule.first)}
    return [
        leaf.task for leaf in leaves(schedule.second) if first & set(problem.task(leaf.task).after)
    ]


def _check(problem: Problem, schedule: Schedule) -> None:
    """Raises PlanError where `schedule` breaks a rule of its shape."""
    found = [leaf.task for leaf in leaves(schedule)]
    expected = [task.id for task in problem.tasks]
    if sorted(found) != sorted(expected):
        raise PlanError(
            "A schedule runs every task exactly once", found=str(found), expected=str(expected)
        )
    for leaf in leaves(schedule):
        task = problem.task(leaf.task)
        options = (*task.options, *task.beside)
        if not any(leaf.option is option for option in options) and leaf.option not in options:
            raise PlanError("The schedule uses an option that is none", where=leaf.task)
        if leaf.option.devices not in (*problem.counts, problem.num_devices) and problem.counts:
            raise PlanError(
                "The schedule uses a size that no block may have",
                where=leaf.task,
                found=str(leaf.option.devices),
                expected=str(problem.counts),
            )
        if problem.pinned.get(leaf.task, leaf.option.devices) != leaf.option.devices:
            raise PlanError(
                "The schedule breaks a pin",
                where=leaf.task,
                found=f"{leaf.option.devices} devices",
                expected=str(problem.pinned[leaf.task]),
            )
    _check_nodes(problem, schedule, root=True)
    kind = kind_of(schedule)
    if not any(_contains(allowed, kind, len(found)) for allowed in problem.kinds):
        raise PlanError(f"The schedule is {kind}", expected=" or ".join(sorted(problem.kinds)))


def _contains(allowed: Kind, kind: Kind, num_tasks: int) -> bool:
    if allowed is Kind.HYBRID or num_tasks == 1:
        return kind is not Kind.ASYNCHRONOUS and allowed is not Kind.ASYNCHRONOUS
    return allowed is kind


def _check_nodes(problem: Problem, schedule: Schedule, *, root: bool) -> None:
    if isinstance(schedule, Leaf):
        return
    first = {leaf.task for leaf in leaves(schedule.first)}
    second = {leaf.task for leaf in leaves(schedule.second)}
    for name in first:
        if second & set(problem.task(name).after):
            raise PlanError("'second' feeds 'first'", where=name)
    if isinstance(schedule, Spatial):
        reading = [problem.task(name) for name in readers(problem, schedule)]
        allowed = problem.chunks if reading else (1,)
        most = min((task.max_chunks for task in reading), default=1)
        if schedule.chunks not in allowed or schedule.chunks > most:
            raise PlanError(
                f"{schedule.chunks} chunks are not allowed",
                where=", ".join(task.id for task in reading) or None,
                expected=f"one of {allowed}, at most {most}",
            )
    if isinstance(schedule, Asynchronous):
        if not root:
            raise PlanError("Only a whole schedule is asynchronous, no part of one")
        if problem.staleness < 1 or not first <= problem.ahead:
            raise PlanError(
                "The first part may not run ahead",
                found=f"{sorted(first)} at staleness {problem.staleness}",
                expected=f"tasks of {sorted(problem.ahead)} at staleness 1 or more",
            )
    _check_nodes(problem, schedule.first, root=False)
    _check_nodes(problem, schedule.second, root=False)
