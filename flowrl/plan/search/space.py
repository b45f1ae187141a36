"""A problem compiled to arrays: sets of tasks, their cuts, the block sizes, the options.

Sets of tasks are bit masks. From all tasks downwards, a set S is cut into `first`, which is
downward closed in S (no task of it reads from the rest), and `second`, the rest; both are cut
again. Every binary tree over the tasks that respects the order is reached in this way. Where
nothing passes between the parts, only one of the two orders is kept: they take the same.

Tokens say what a partial schedule holds on exactly its block, which decides at a Temporal what is
shared and which sync is cheap. A token is a bit: of a form of weights (numbered anew for each block
size, so that few bits suffice), or of a task of a sync. A set keeps only the tokens that a task
outside of it can still meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import PlanError
from flowrl.plan.search.problem import Kind, Option, Problem, Sync, Task

__all__ = [
    "MAX_TASKS",
    "Bools",
    "Cut",
    "Floats",
    "Ints",
    "Leaves",
    "Space",
    "compile_space",
    "families",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_TASKS = 14
"""The number of sets grows as 3^tasks at worst."""

NUM_TOKENS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to part a set of tasks.

    Attributes:
        first: Index of the set that may feed the other.
        second: Index of the other.
        chunks: Allowed chunk counts of a stream between them; None where nothing passes.
        crossing: Indices of the syncs with one end in each part.
        turns: It may be a Temporal.
        splits: It may be a Spatial.
        runs_ahead: It is an Asynchronous (and then neither of the others).
    """

    first: int
    second: int
    chunks: tuple[int, ...] | None
    crossing: tuple[int, ...]
    turns: bool
    splits: bool
    runs_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The options of one task, ascending by block size.

    Attributes:
        options: The options.
        size: `[O]`, index of each one's block size.
        seconds, chunk_s, resident, peak: `[O]`.
        tokens: `[O]`, bits.
    """

    options: tuple[Option, ...]
    size: Ints
    seconds: Floats
    chunk_s: Floats
    resident: Floats
    peak: Floats
    tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What one run of the dynamic programme looks through.

    Attributes:
        tasks: The tasks, by index.
        sizes: `[K]`, block sizes, ascending.
        fitting: `[num_devices + 1]`, index of the largest block size not above a number; -1 = none.
        sets: Masks of the sets of tasks, ascending by their number of tasks; the last is all.
        cuts: The cuts of each set.
        leaves: The options of each task.
        alone: The task of each set that holds a single one, else -1.
        chunk_s: Least seconds for a further chunk of each set.
        relevant: `[sets, K]`, tokens that tasks outside of a set can still meet.
        weight_tokens: Bits that are forms of weights.
        weight_bytes: `[bit, K]`, bytes of a form's parameters.
        syncs: The syncs.
        sync_tokens: Bits of source and destination of each sync.
        exact_tokens: Bits of which more is not better: of syncs that cost more together.
    """

    tasks: tuple[Task, ...]
    sizes: Ints
    fitting: Ints
    sets: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    leaves: tuple[Leaves, ...]
    alone: tuple[int, ...]
    chunk_s: Floats
    relevant: Ints
    weight_tokens: int
    weight_bytes: Floats
    syncs: tuple[Sync, ...]
    sync_tokens: tuple[tuple[int, int], ...]
    exact_tokens: int


def families(problem: Problem) -> list[Problem]:
    """The problem once for each family of `kinds` that no other of them contains."""
    kinds = problem.kinds
    alone = len(problem.tasks) == 1
    if Kind.HYBRID in kinds:
        return [problem]
    found = []
    if Kind.TEMPORAL in kinds or (alone and Kind.SPATIAL in kinds):
        found.append(replace(problem, kinds=frozenset({Kind.TEMPORAL})))
    if Kind.SPATIAL in kinds and not alone:
        found.append(replace(problem, kinds=frozenset({Kind.SPATIAL})))
    if Kind.ASYNCHRONOUS in kinds and not alone and problem.staleness > 0:
        found.append(replace(problem, kinds=frozenset({Kind.ASYNCHRONOUS})))
    return found


def compile_space(problem: Problem, like: Space | None = None) -> Space:
    """The space of one of the `families` of a problem.

    Args:
        problem: The problem.
        like: The space of a problem that differs in options, sizes and memory alone; its sets and
            cuts are taken over.

    Raises:
        PlanError: More tasks or more forms at one block size than the search can number.
    """
    if len(problem.tasks) > MAX_TASKS:
        raise PlanError(
            "The search cannot place so many tasks",
            found=str(len(problem.tasks)),
            expected=f"at most {MAX_TASKS}",
            hint="join tasks that run on the same devices anyway",
        )
    if like is not None:
        return _completed(replace(_compile(problem), sets=like.sets, cuts=like.cuts))
    kinds = problem.kinds
    runs_ahead = Kind.ASYNCHRONOUS in kinds and problem.staleness > 0
    whole = Kind.HYBRID in kinds
    return _with_cuts(
        problem,
        _compile(problem),
        turns=Kind.SPATIAL not in kinds or whole,
        splits=Kind.TEMPORAL not in kinds or whole,
        root=runs_ahead if whole else (None if runs_ahead else False),
    )


def _compile(problem: Problem) -> Space:
    """All of a space but its sets and cuts."""
    sizes = problem.block_sizes()
    index = {size: at for at, size in enumerate(sizes)}
    usable = [_usable(problem, task, index) for task in problem.tasks]
    tokens, weight_tokens, weight_bytes, sync_tokens = _number_tokens(problem, usable, index)
    fitting = np.searchsorted(np.array(sizes), np.arange(problem.num_devices + 1), side="right") - 1
    exact = 0
    for sync, (source, destination) in zip(problem.syncs, sync_tokens, strict=True):
        if sync.together_s > sync.apart_s:
            exact |= source | destination
    leaves = []
    for options, bits in zip(usable, tokens, strict=True):
        leaves.append(
            Leaves(
                options=options,
                size=np.array([index[option.devices] for option in options], dtype=np.int64),
                seconds=_column(option.seconds for option in options),
                chunk_s=_column(option.chunk_s for option in options),
                resident=_column(option.resident for option in options),
                peak=_column(option.peak for option in options),
                tokens=np.array(bits, dtype=np.int64),
            )
        )
    return Space(
        tasks=problem.tasks,
        sizes=np.array(sizes, dtype=np.int64),
        fitting=fitting.astype(np.int64),
        sets=(),
        cuts=(),
        leaves=tuple(leaves),
        alone=(),
        chunk_s=np.zeros(0),
        relevant=np.zeros((0, len(sizes)), dtype=np.int64),
        weight_tokens=weight_tokens,
        weight_bytes=weight_bytes,
        syncs=problem.syncs,
        sync_tokens=sync_tokens,
        exact_tokens=exact,
    )


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def _usable(problem: Problem, task: Task, index: dict[int, int]) -> tuple[Option, ...]:
    """The options that could be part of a schedule that fits, ascending by devices."""
    pinned = problem.pinned.get(task.id)
    options = [
        option
        for option in task.options
        if option.devices in index
        and option.peak <= problem.memory_bytes
        and pinned in (None, option.devices)
    ]
    return tuple(sorted(options, key=lambda option: option.devices))


def _number_tokens(
    problem: Problem, usable: list[tuple[Option, ...]], index: dict[int, int]
) -> tuple[list[list[int]], int, Floats, tuple[tuple[int, int], ...]]:
    """Bits of every option; the bits that are weights; their bytes; the bits of every sync."""
    holders: dict[tuple[str, str, int], set[str]] = {}
    for task, options in zip(problem.tasks, usable, strict=True):
        for option in options:
            if task.weights is not None and option.weight_bytes:
                key = (task.weights, option.form, option.devices)
                holders.setdefault(key, set()).add(task.id)
    bits: dict[tuple[str, str, int], int] = {}
    used: dict[int, int] = {}  # bits given out at each device count
    for key, ids in sorted(holders.items()):
        if len(ids) > 1:
            bits[key] = used.get(key[2], 0)
            used[key[2]] = bits[key] + 1
    num_weights = max(used.values(), default=0)
    ends = sorted({id_ for sync in problem.syncs for id_ in (sync.source, sync.destination)})
    if num_weights + len(ends) > NUM_TOKENS:
        raise PlanError(
            "Too many forms of shared weights at one device count",
            found=str(num_weights),
            expected=f"at most {NUM_TOKENS - len(ends)}",
            hint="offer fewer layouts of the tasks that share weights",
        )
    end_bit = {id_: 1 << (num_weights + at) for at, id_ in enumerate(ends)}
    weight_bytes = np.zeros((num_weights, len(index)))
    tokens: list[list[int]] = []
    for task, options in zip(problem.tasks, usable, strict=True):
        tokens.append([])
        for option in options:
            bit = bits.get((task.weights or "", option.form, option.devices))
            shared = task.weights is not None and option.weight_bytes > 0 and bit is not None
            if shared and bit is not None:
                weight_bytes[bit, index[option.devices]] = option.weight_bytes
            tokens[-1].append(
                end_bit.get(task.id, 0) | (1 << bit if shared and bit is not None else 0)
            )
    pairs = tuple((end_bit[sync.source], end_bit[sync.destination]) for sync in problem.syncs)
    return tokens, (1 << num_weights) - 1, weight_bytes, pairs


def _with_cuts(
    problem: Problem, space: Space, *, turns: bool, splits: bool, root: bool | None
) -> Space:
    """`space` with its sets and cuts.

    Args:
        turns: Temporal nodes are allowed.
        splits: Spatial nodes are allowed.
        root: The root may be an Asynchronous; None: it must.
    """
    reads, ahead = _read_masks(problem)
    everything = (1 << len(problem.tasks)) - 1
    found: dict[int, list[tuple[int, bool]]] = {}
    waiting = [everything]
    while waiting:
        tasks = waiting.pop()
        if tasks in found:
            continue
        found[tasks] = parts = []
        for first in _downward_closed(tasks, reads):
            second = tasks ^ first
            if (first & -first) < (second & -second) or _feeds(first, second, reads):
                parts.append((first, False))
            if tasks == everything and root is not False and not first & ~ahead:
                parts.append((first, True))
        if tasks == everything and root is None:
            found[tasks] = parts = [part for part in parts if part[1]]
        waiting += [half for first, _ in parts for half in (first, tasks ^ first)]
    sets = sorted(found, key=lambda mask: (mask.bit_count(), mask))
    at = {mask: number for number, mask in enumerate(sets)}
    cuts = []
    for mask in sets:
        cuts.append(
            tuple(
                Cut(
                    first=at[first],
                    second=at[mask ^ first],
                    chunks=_chunks(problem, first, mask ^ first, reads),
                    crossing=_crossing(problem, first, mask ^ first),
                    turns=turns and not runs_ahead,
                    splits=splits and not runs_ahead,
                    runs_ahead=runs_ahead,
                )
                for first, runs_ahead in found[mask]
            )
        )
    return _completed(replace(space, sets=tuple(sets), cuts=tuple(cuts)))


def _completed(space: Space) -> Space:
    """`space` with what follows from its sets."""
    least = [float(leaves.chunk_s.min(initial=np.inf)) for leaves in space.leaves]
    sets = space.sets
    return replace(
        space,
        alone=tuple(mask.bit_length() - 1 if mask.bit_count() == 1 else -1 for mask in sets),
        chunk_s=np.array([sum(least[task] for task in _members(mask)) for mask in sets]),
        relevant=_relevant(space, sets),
    )


def _read_masks(problem: Problem) -> tuple[list[int], int]:
    """What each task reads from, and the tasks that may run ahead, as masks."""
    number = {task.id: at for at, task in enumerate(problem.tasks)}
    reads = [sum(1 << number[read] for read in set(task.after)) for task in problem.tasks]
    return reads, sum(1 << number[name] for name in problem.ahead)


def _members(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def _downward_closed(tasks: int, reads: list[int]) -> list[int]:
    """The proper, non-empty parts of `tasks` that read nothing from the rest of it."""
    closed = {0}
    for task in _members(tasks):  # in an order in which they could run
        inside = reads[task] & tasks
        closed |= {part | 1 << task for part in closed if not inside & ~part}
    return sorted(closed - {0, tasks})


def _feeds(first: int, second: int, reads: list[int]) -> bool:
    return any(reads[task] & first for task in _members(second))


def _chunks(problem: Problem, first: int, second: int, reads: list[int]) -> tuple[int, ...] | None:
    readers = [problem.tasks[task] for task in _members(second) if reads[task] & first]
    if not readers:
        return None
    most = min(task.max_chunks for task in readers)
    return tuple(sorted({count for count in problem.chunks if count <= most}))


def _crossing(problem: Problem, first: int, second: int) -> tuple[int, ...]:
    number = {task.id: 1 << at for at, task in enumerate(problem.tasks)}
    found = []
    for at, sync in enumerate(problem.syncs):
        source, destination = number[sync.source], number[sync.destination]
        if (source & first and destination & second) or (source & second and destination & first):
            found.append(at)
    return tuple(found)


def _relevant(space: Space, sets: tuple[int, ...]) -> Ints:
    """`[sets, K]`: tokens that a task outside of the set can meet at a block size."""
    number = {task.id: at for at, task in enumerate(space.tasks)}
    wanted = np.zeros((len(space.tasks), len(space.sizes)), dtype=np.int64)
    for at, leaves in enumerate(space.leaves):
        np.bitwise_or.at(wanted[at], leaves.size, leaves.tokens & space.weight_tokens)
    for sync, (source, destination) in zip(space.syncs, space.sync_tokens, strict=True):
        wanted[number[sync.destination]] |= source
        wanted[number[sync.source]] |= destination
    relevant = np.zeros((len(sets), len(space.sizes)), dtype=np.int64)
    for at, mask in enumerate(sets):
        for task in range(len(space.tasks)):
            if not mask >> task & 1:
                relevant[at] |= wanted[task]
    return relevant
