"""What a complete schedule takes: seconds, bytes, devices, moving parts.

This is the definition; the search has arithmetic of its own, and is checked against this one
(`flowrl.testing.planner_optimality`). With t a child's seconds, r and p its resident and peak bytes
on a device, and x the sum of `chunk_s` over its leaves:

    Leaf          t = seconds                                        r, p of the option
    Temporal      t = t1 + t2                                        r = r1 + r2 - s
                                                                     p = max(p1 + r2, p2 + r1) - s
    Spatial       t = max(t1, t2)           nothing passes           r = max(r1, r2)
                  t = (u1 + u2) / c + max(u1, u2) (c - 1) / c        p = max(p1, p2)
                      where first feeds second in c chunks,
                      u = t + (c - 1) x
    Asynchronous  t = max(t1, t2)           in the steady state      as Spatial

A pipeline of two stages with c equal chunks takes u1/c + u2/c + (c - 1) max(u1, u2)/c: the first
chunk through both, and then the slower stage's pace.

s is the parameters that both sides of a Temporal hold: for each name of weights and form that a
leaf of either side holds *on exactly the Temporal's block*, reached through Temporals only, they
are there once. A sync costs `together_s` when source and destination are such leaves of the two
sides of one Temporal, else `apart_s`; it is added to the step.

The block of a Leaf is its option's devices, of a Temporal the larger of its children's, of the
others the sum; each rounded up to the next allowed size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import PlanError
from flowrl.plan.search.problem import Kind, Objective, Problem, Sync
from flowrl.plan.search.schedule import (
    Asynchronous,
    Leaf,
    Schedule,
    Spatial,
    Temporal,
    kind_of,
    leaves,
    num_splits,
)

__all__ = ["Evaluation", "block", "evaluate", "rounded", "seconds_of", "sharing_leaves"]


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
    sizes = problem.block_sizes()
    devices = block(schedule, sizes)
    resident, peak = _memory(problem, schedule, sizes)
    sync_s = sum(_sync_s(schedule, sync, sizes) for sync in problem.syncs)
    step_s = seconds_of(problem, schedule) + sync_s
    forms = {
        (problem.task(leaf.task).weights, leaf.option.form)
        for leaf in leaves(schedule)
        if leaf.option.form
    }
    return Evaluation(
        step_s=step_s,
        sync_s=sync_s,
        devices=devices,
        resident=resident,
        peak=peak,
        fits=devices <= problem.num_devices and peak <= problem.memory_bytes,
        objective=step_s if problem.objective is Objective.STEP_TIME else step_s * devices,
        num_splits=num_splits(schedule),
        num_forms=len(forms),
    )


def block(schedule: Schedule, sizes: tuple[int, ...]) -> int:
    """Devices of the smallest block that holds `schedule`.

    Args:
        schedule: A schedule or a part of one.
        sizes: The sizes that blocks may have, ascending. What is larger than all of them is
            returned as it is, and does not fit.
    """
    match schedule:
        case Leaf():
            need = schedule.option.devices
        case Temporal():
            need = max(block(schedule.first, sizes), block(schedule.second, sizes))
        case Spatial() | Asynchronous():
            need = block(schedule.first, sizes) + block(schedule.second, sizes)
        case _:
            assert_never(schedule)
    at = bisect_left(sizes, need)
    return sizes[at] if at < len(sizes) else need


def seconds_of(problem: Problem, schedule: Schedule) -> float:
    """Seconds of a schedule or a part of one, without syncs."""
    match schedule:
        case Leaf():
            return schedule.option.seconds
        case Temporal():
            return seconds_of(problem, schedule.first) + seconds_of(problem, schedule.second)
        case Spatial():
            first = seconds_of(problem, schedule.first)
            second = seconds_of(problem, schedule.second)
            if not _readers(problem, schedule):
                return max(first, second)
            chunks = schedule.chunks
            first += (chunks - 1) * sum(leaf.option.chunk_s for leaf in leaves(schedule.first))
            second += (chunks - 1) * sum(leaf.option.chunk_s for leaf in leaves(schedule.second))
            return (first + second) / chunks + max(first, second) * (chunks - 1) / chunks
        case Asynchronous():
            return max(seconds_of(problem, schedule.first), seconds_of(problem, schedule.second))
        case _:
            assert_never(schedule)


def sharing_leaves(schedule: Schedule, size: int) -> Iterator[Leaf]:
    """The leaves that use exactly a Temporal's block of `size`, reached through Temporals only."""
    match schedule:
        case Leaf():
            if schedule.option.devices == size:
                yield schedule
        case Temporal():
            yield from sharing_leaves(schedule.first, size)
            yield from sharing_leaves(schedule.second, size)
        case Spatial() | Asynchronous():
            return
        case _:
            assert_never(schedule)


def _memory(problem: Problem, schedule: Schedule, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Resident and peak bytes on the fullest device."""
    if isinstance(schedule, Leaf):
        return schedule.option.resident, schedule.option.peak
    r1, p1 = _memory(problem, schedule.first, sizes)
    r2, p2 = _memory(problem, schedule.second, sizes)
    if not isinstance(schedule, Temporal):
        return max(r1, r2), max(p1, p2)
    size = block(schedule, sizes)
    first, second = (_held(problem, side, size) for side in (schedule.first, schedule.second))
    twice = sum(nbytes for key, nbytes in first.items() if key in second)
    return r1 + r2 - twice, max(p1 + r2, p2 + r1) - twice


def _held(problem: Problem, schedule: Schedule, size: int) -> dict[tuple[str, str], int]:
    """Bytes of the parameters held on exactly the block of `size`, by name and form."""
    held = {}
    for leaf in sharing_leaves(schedule, size):
        weights = problem.task(leaf.task).weights
        if weights is not None and leaf.option.weight_bytes:
            held[weights, leaf.option.form] = leaf.option.weight_bytes
    return held


def _sync_s(schedule: Schedule, sync: Sync, sizes: tuple[int, ...]) -> float:
    """Seconds of one sync: of the node whose two sides hold its two tasks."""
    node = schedule
    while not isinstance(node, Leaf):
        first = {leaf.task for leaf in leaves(node.first)}
        if (sync.source in first) is not (sync.destination in first):
            break
        node = node.first if sync.source in first else node.second
    if not isinstance(node, Temporal):
        return sync.apart_s
    on_block = {leaf.task for leaf in sharing_leaves(node, block(node, sizes))}
    return sync.together_s if {sync.source, sync.destination} <= on_block else sync.apart_s


def _readers(problem: Problem, schedule: Spatial) -> list[str]:
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
        options = problem.task(leaf.task).options
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
        readers = [problem.task(name) for name in _readers(problem, schedule)]
        allowed = problem.chunks if readers else (1,)
        most = min((task.max_chunks for task in readers), default=1)
        if schedule.chunks not in allowed or schedule.chunks > most:
            raise PlanError(
                f"{schedule.chunks} chunks are not allowed",
                where=", ".join(task.id for task in readers) or None,
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
