"""Why nothing fits, and the single changes that help.

A set of tasks binds when no schedule of these tasks alone, on the whole pool, fits into the memory.
Leaving tasks out of a schedule that fits leaves one that fits, so where a set binds, every larger
one does; the smallest are the reasons worth telling.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import combinations

from flowrl.plan.search.bounds import lower_bounds
from flowrl.plan.search.dynamic import NO_LIMIT, Aim, run
from flowrl.plan.search.evaluate import evaluate
from flowrl.plan.search.problem import EVERY_KIND, Kind, Problem, Task
from flowrl.plan.search.result import Binding, Change, ChangeKind, Infeasible
from flowrl.plan.search.schedule import Asynchronous, Leaf, Schedule, Spatial, Temporal
from flowrl.plan.search.space import compile_space, families
from flowrl.wording import counted

MOST_SIZES = 48
"""Block sizes that reasons are worked out on; more would take minutes and say the same."""

UNLIMITED = 1 << 62


def thin(problem: Problem, most: int) -> tuple[Problem, str | None]:
    """`problem` with about `most` block sizes, and the rule in words; None = unchanged.

    Kept are the sizes next below the whole pool divided by powers of a root of two, so that halves
    and quarters are among them, what each of these leaves of the pool, and those that are pinned.
    """
    sizes = problem.block_sizes()
    if len(sizes) <= most:
        return problem, None
    whole = sizes[-1]
    doublings = math.log2(whole / sizes[0])
    root = max(1, round(most / 2 / doublings))
    steps = [whole / 2 ** (step / root) for step in range(math.floor(doublings * root) + 1)]
    wanted = [part * (1 + 1e-9) for step in steps for part in (step, whole - step)]
    kept = {sizes[max(bisect_right(sizes, size) - 1, 0)] for size in wanted}
    kept |= {size for size in problem.pinned.values() if size in sizes}
    rule = (
        f"{len(kept)} of {len(sizes)} device counts: those next below {whole} divided by powers "
        f"of 2^(1/{root}), what each leaves of {whole}, and the pinned ones"
    )
    tasks = tuple(
        replace(task, options=tuple(option for option in task.options if option.devices in kept))
        for task in problem.tasks
    )
    return replace(problem, tasks=tasks, counts=tuple(sorted(kept))), rule


def least_peak(problem: Problem, memory_bytes: int) -> Schedule | None:
    """The schedule with the smallest peak, whatever it takes; None where all need more memory."""
    best: tuple[int, Schedule] | None = None
    for family in families(_timeless(problem, memory_bytes)):
        space = compile_space(family)
        aim = Aim(objective=None, memory_bytes=memory_bytes, least_peak=True)
        for schedule in run(space, lower_bounds(space), NO_LIMIT, aim).schedules[:1]:
            original = _original(problem, schedule)
            peak = evaluate(problem, original).peak
            if best is None or peak < best[0]:
                best = (peak, original)
    return None if best is None else best[1]


def fits(problem: Problem) -> bool:
    """Whether any schedule fits."""
    return least_peak(problem, problem.memory_bytes) is not None


def can_fit(problem: Problem) -> bool:
    """Whether any schedule of the sizes that reasons are worked out on fits."""
    return fits(thin(problem, MOST_SIZES)[0])


def explain(problem: Problem) -> Infeasible:
    """What binds in a problem that has no schedule, and what would help."""
    looked_at, _ = thin(problem, MOST_SIZES)
    return Infeasible(
        bindings=_bindings(looked_at), changes=tuple(_changes(looked_at, problem.counts))
    )


def _bindings(problem: Problem) -> tuple[Binding, ...]:
    for size in range(1, len(problem.tasks) + 1):
        found = []
        for names in combinations([task.id for task in problem.tasks], size):
            part = problem if size == len(problem.tasks) else _part(problem, names)
            smallest = least_peak(part, UNLIMITED)
            peak = None if smallest is None else evaluate(part, smallest).peak
            if peak is None or peak > problem.memory_bytes:
                found.append(_binding(part, names, peak))
        if found:
            return tuple(found)
    return ()


def _binding(problem: Problem, names: tuple[str, ...], peak: int | None) -> Binding:
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} together"
    verb = "needs" if len(names) == 1 else "need"
    if peak is not None:
        reason = (
            f"{who} {verb} at least {_gib(peak)} on a device of {_gib(problem.memory_bytes)}, "
            f"whatever the schedule on {counted(problem.num_devices, 'device')}"
        )
        return Binding(tasks=names, over_bytes=peak - problem.memory_bytes, reason=reason)
    counts = {}
    for name in names:
        allowed = {option.devices for option in problem.task(name).options}
        if name in problem.pinned:
            allowed &= {problem.pinned[name]}
        counts[name] = sorted(allowed & set(problem.block_sizes()))
    without = [name for name in names if not counts[name]]
    if without:
        offered = sorted({option.devices for option in problem.task(without[0]).options})
        pin = problem.pinned.get(without[0])
        reason = (
            f"{without[0]} has no option on any allowed device count up to {problem.num_devices}"
        )
        reason += f"; its options are for {_listed(offered)}" if offered else "; it has none at all"
        reason += f", and it is pinned to {pin}" if pin is not None else ""
    else:
        least = ", ".join(f"{name} {min(sizes)}" for name, sizes in counts.items())
        reason = (
            f"{who} have no schedule of the allowed kinds ({', '.join(sorted(problem.kinds))}) "
            f"on {counted(problem.num_devices, 'device')}; the fewest that each can use: {least}"
        )
    return Binding(tasks=names, over_bytes=None, reason=reason)


def _changes(problem: Problem, counts: tuple[int, ...]) -> list[Change]:
    found = []
    smallest = least_peak(problem, UNLIMITED)
    if smallest is not None:
        peak = evaluate(problem, smallest).peak
        text = f"{_gib(peak)} of memory on each device, {_gib(peak - problem.memory_bytes)} more"
        found.append(Change(kind=ChangeKind.MEMORY, text=text, value=peak))
    for count in sorted({count for count in counts if count > problem.num_devices}):
        larger = replace(problem, num_devices=count, counts=counts)
        if fits(thin(larger, MOST_SIZES)[0]):
            text = f"{counted(count, 'device')} instead of {problem.num_devices}"
            found.append(Change(kind=ChangeKind.DEVICES, text=text, value=count))
            break
    for name, count in problem.pinned.items():
        others = {key: value for key, value in problem.pinned.items() if key != name}
        places = {key: value for key, value in problem.places.items() if key != name}
        if fits(replace(problem, pinned=others, places=places)):
            text = f"{name} not pinned to {counted(count, 'device')}"
            found.append(Change(kind=ChangeKind.PIN, text=text, tasks=(name,)))
    if problem.kinds != EVERY_KIND and fits(replace(problem, kinds=EVERY_KIND)):
        text = f"other kinds of schedule than {', '.join(sorted(problem.kinds))}"
        found.append(Change(kind=ChangeKind.KINDS, text=text))
    return found


def _part(problem: Problem, names: tuple[str, ...]) -> Problem:
    """The problem of these tasks alone; what is not their memory is made as free as it can be."""
    chosen = set(names)
    before: dict[str, set[str]] = {}
    for task in problem.tasks:
        before[task.id] = set(task.after).union(*(before[read] for read in task.after))
    most = max(problem.chunks)
    tasks = tuple(
        replace(
            task,
            after=tuple(name for name in names if name in before[task.id]),
            max_chunks=max(task.max_chunks, most),
        )
        for task in problem.tasks
        if task.id in chosen
    )
    asynchronous = Kind.ASYNCHRONOUS in problem.kinds
    return replace(
        problem,
        tasks=tasks,
        syncs=(),
        ahead=problem.ahead & chosen,
        pinned={name: count for name, count in problem.pinned.items() if name in chosen},
        places={name: where for name, where in problem.places.items() if name in chosen},
        kinds=problem.kinds | {Kind.HYBRID} if asynchronous else problem.kinds,
    )


def _timeless(problem: Problem, memory_bytes: int) -> Problem:
    """The problem with all seconds zero; each option's label says which of the task's it is."""
    sizes = set(problem.block_sizes())
    tasks = tuple(
        replace(
            task,
            options=tuple(
                replace(option, seconds=0.0, chunk_s=0.0, steady_s=None, dense_s=0.0, label=at)
                for at, option in enumerate(task.options)
                if option.devices in sizes and option.peak <= memory_bytes
            ),
        )
        for task in problem.tasks
    )
    return replace(
        problem,
        tasks=tasks,
        syncs=(),
        chunks=(min(problem.chunks),),
        memory_bytes=memory_bytes,
    )


def _original(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with the options of `problem` in place of those of `_timeless`."""
    if isinstance(schedule, Leaf):
        task: Task = problem.task(schedule.task)
        return Leaf(task=task.id, option=task.options[schedule.option.label])
    first, second = _original(problem, schedule.first), _original(problem, schedule.second)
    if isinstance(schedule, Temporal):
        return Temporal(first=first, second=second)
    if isinstance(schedule, Asynchronous):
        return Asynchronous(first=first, second=second)
    return Spatial(first=first, second=second, chunks=schedule.chunks)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.4g} GiB"


def _listed(counts: list[int]) -> str:
    shown = ", ".join(str(count) for count in counts[:6])
    return shown + (f", ... {counts[-1]}" if len(counts) > 6 else "")
