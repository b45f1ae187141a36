"""A problem compiled to arrays: sets of tasks, their cuts, the block sizes, the options.

Sets of tasks are bit masks. From all tasks downwards, a set S is cut into `first`, which is
downward closed in S (no task of it reads from the rest), and `second`, the rest; both are cut
again. Every binary tree over the tasks that respects the order is reached in this way. Where
nothing passes between the parts, only one of the two orders is kept: they take the same.

Tokens say what a partial schedule holds on exactly its block, which decides at a Temporal what is
shared and which sync is cheap. A token is a bit: of a form of weights (numbered anew for each block
size, so that few bits suffice), or of a task of a sync. A set keeps only the tokens that a task
outside of it can still meet.

A task whose options differ in their `arrivals` makes a set that it is in several sets, one for each
of them, as long as something outside of the set can still read what follows from it. So all that a
cut needs to know of a stream is in the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import PlanError
from flowrl.plan.search.arrivals import Arrivals
from flowrl.plan.search.masks import (
    crossing,
    downward_closed,
    feeds,
    follows,
    members,
    numbers,
    read_masks,
)
from flowrl.plan.search.problem import Kind, Option, Problem, Sync, Task
from flowrl.plan.search.streams import Stream, ahead_stream, streams_between

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_TASKS = 14
"""The number of sets grows as 3^tasks at worst."""

NUM_TOKENS = 62

Ways = tuple[tuple[int, int], ...]
"""Chosen arrivals: pairs of a task and an index of its `Space.arrivals`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to part a set of tasks.

    Attributes:
        first: Index of the set that may feed the other.
        second: Index of the other.
        streams: Ways in which both may run at once.
        crossing: Indices of the syncs with one end in each part.
        turns: It may be a Temporal.
        runs_ahead: It is an Asynchronous (and then neither of the others); the one stream is its.
    """

    first: int
    second: int
    streams: tuple[Stream, ...]
    crossing: tuple[int, ...]
    turns: bool
    runs_ahead: bool = False


class Turns(NamedTuple):
    """Which numbers count of sets whose tasks take turns and that feed a stream.

    Attributes:
        head: H, where one of them is done in one go.
        early: h, where several are.
        ready: q, where nobody reads one of them; else it is the seconds.
    """

    head: bool = False
    early: bool = False
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The options of one task, ascending by block size.

    Attributes:
        options: The options.
        size: `[O]`, index of each one's block size.
        seconds, steady, dense, chunk_s, resident, peak: `[O]`.
        tokens: `[O]`, bits.
        arrivals: `[O]`, index of each one's among `Space.arrivals` of the task.
    """

    options: tuple[Option, ...]
    size: Ints
    seconds: Floats
    steady: Floats
    dense: Floats
    chunk_s: Floats
    resident: Floats
    peak: Floats
    tokens: Ints
    arrivals: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What one run of the dynamic programme looks through.

    Attributes:
        tasks: The tasks, by index.
        sizes: `[K]`, block sizes, ascending.
        fitting: `[num_devices + 1]`, index of the largest block size not above a number; -1 = none.
        rests: `[K * (K + 1)]`, index of the largest size that is left of a block (rows) beside a
            part of a size (columns, the last one for none of them); -1 = none.
        arrivals: Of each task, those that its options have, where they tell sets apart; else none.
        sets: Masks of the sets of tasks, ascending by their number of tasks; the last is all.
        cuts: The cuts of each set.
        leaves: The options of each task.
        alone: The task of each set that holds a single one, else -1.
        ways: The arrivals that tell each set from others of the same tasks.
        rows: Of each set of a single task, which options it has; None = all.
        chunk_s: Least seconds for a further chunk of each set.
        least: `[sets]`, devices that the tasks of each set must have between them: what a part
            that stands apart needs at least.
        relevant: `[sets, K]`, tokens that tasks outside of a set can still meet.
        weight_tokens: Bits that are forms of weights.
        weight_bytes: `[bit, K]`, bytes of a form's parameters.
        syncs: The syncs.
        sync_tokens: Bits of source and destination of each sync.
        exact_tokens: Bits of which more is not better: of syncs that cost more together.
        beside: Devices that count besides those of a block.
        staleness: Steps by which a part may run ahead; 0 = none may.
        ahead: Of each set, whether it may be part of one that runs ahead: its steady seconds count.
        in_one: The tasks that are done in one go, as a set.
        unread: Those that nobody reads.
        hands_on: Of each set, whether it may be part of one that hands on in a stream: when its
            results are there counts.
        turns: What counts then of sets whose tasks take turns, as `Turns` has it.
    """

    tasks: tuple[Task, ...]
    sizes: Ints
    fitting: Ints
    rests: Ints
    arrivals: tuple[tuple[Arrivals | None, ...], ...]
    sets: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    leaves: tuple[Leaves, ...]
    alone: tuple[int, ...]
    ways: tuple[Ways, ...]
    rows: tuple[Bools | None, ...]
    chunk_s: Floats
    least: Ints
    relevant: Ints
    weight_tokens: int
    weight_bytes: Floats
    syncs: tuple[Sync, ...]
    sync_tokens: tuple[tuple[int, int], ...]
    exact_tokens: int
    beside: int
    staleness: int
    ahead: tuple[bool, ...]
    in_one: int
    unread: int
    hands_on: tuple[bool, ...]
    turns: Turns

    def handing_on(self, sets: Iterable[bool]) -> Space:
        """The space where some of the sets may be parts of such that hand on in a stream."""
        hands_on = tuple(sets)
        parted = {
            mask
            for mask, hands, cuts in zip(self.sets, hands_on, self.cuts, strict=True)
            if hands and any(cut.turns for cut in cuts)
        }
        several = max(((mask & self.in_one).bit_count() for mask in parted), default=0)
        turns = Turns(
            head=several > 0,
            early=several > 1,
            ready=any(mask & self.unread for mask in parted),
        )
        return replace(self, hands_on=hands_on, turns=turns)

    @property
    def num_values(self) -> int:
        """Numbers of a point (`flowrl.plan.search.points`)."""
        return self.first_turn + sum(self.turns)

    @property
    def first_turn(self) -> int:
        """Of these, the place of the first of `turns`."""
        return 8 if any(self.ahead) else 6

    @property
    def places(self) -> tuple[int, int, int]:
        """Places of H, h and q among the numbers of a point; 0 of what does not count."""
        found, at = [], self.first_turn
        for counts in self.turns:
            found.append(at if counts else 0)
            at += counts
        return found[0], found[1], found[2]


def _rests(sizes: Ints, fitting: Ints) -> Ints:
    left = np.maximum(sizes[:, None] - sizes, 0)
    rests = np.full((len(sizes), len(sizes) + 1), -1, dtype=np.int64)
    rests[:, :-1] = fitting[left]
    return rests.ravel()


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
        known = _compile(problem, like.arrivals)
        known = replace(known, sets=like.sets, ways=like.ways, cuts=like.cuts)
        return _completed(problem, known)
    kinds = problem.kinds
    runs_ahead = Kind.ASYNCHRONOUS in kinds and problem.staleness > 0
    whole = Kind.HYBRID in kinds
    splits = Kind.TEMPORAL not in kinds or whole
    told = splits and max(problem.chunks) > 1
    return _with_cuts(
        problem,
        _compile(problem, _arrivals(problem) if told else tuple(() for _ in problem.tasks)),
        turns=Kind.SPATIAL not in kinds or whole,
        splits=splits,
        root=runs_ahead if whole else (None if runs_ahead else False),
    )


def _arrivals(problem: Problem) -> tuple[tuple[Arrivals | None, ...], ...]:
    """Of each task whose results do not always come evenly, how they may come."""
    sizes = {size: at for at, size in enumerate(problem.block_sizes())}
    found = []
    for task in problem.tasks:
        ways = dict.fromkeys(option.arrivals for option in _usable(problem, task, sizes))
        found.append(() if set(ways) <= {None} else tuple(ways))
    return tuple(found)


def _compile(problem: Problem, arrivals: tuple[tuple[Arrivals | None, ...], ...]) -> Space:
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
    for options, bits, ways in zip(usable, tokens, arrivals, strict=True):
        leaves.append(
            Leaves(
                options=options,
                size=np.array([index[option.devices] for option in options], dtype=np.int64),
                seconds=_column(option.seconds for option in options),
                steady=_column(option.period_s for option in options),
                dense=_column(option.dense_s for option in options),
                chunk_s=_column(option.chunk_s for option in options),
                resident=_column(option.resident for option in options),
                peak=_column(option.peak for option in options),
                tokens=np.array(bits, dtype=np.int64),
                arrivals=_places(options, ways),
            )
        )
    return Space(
        tasks=problem.tasks,
        sizes=np.array(sizes, dtype=np.int64),
        fitting=fitting.astype(np.int64),
        rests=_rests(np.array(sizes), fitting),
        arrivals=arrivals,
        sets=(),
        ways=(),
        cuts=(),
        leaves=tuple(leaves),
        alone=(),
        rows=(),
        chunk_s=np.zeros(0),
        least=np.zeros(0, dtype=np.int64),
        relevant=np.zeros((0, len(sizes)), dtype=np.int64),
        weight_tokens=weight_tokens,
        weight_bytes=weight_bytes,
        syncs=problem.syncs,
        sync_tokens=sync_tokens,
        exact_tokens=exact,
        beside=problem.beside,
        staleness=problem.staleness,
        ahead=(),
        in_one=numbers(problem, problem.in_one()),
        unread=numbers(problem, problem.unread()),
        hands_on=(),
        turns=Turns(),
    )


def _places(options: tuple[Option, ...], ways: tuple[Arrivals | None, ...]) -> Ints:
    """Where each option's arrivals are among `ways`."""
    at = {way: number for number, way in enumerate(ways)}
    return np.array([at[option.arrivals] if ways else 0 for option in options], dtype=np.int64)


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
    reads, ahead = read_masks(problem)
    found = _halves((1 << len(problem.tasks)) - 1, reads, ahead, root)
    behind = follows(reads)
    told = {
        mask: tuple(task for task in members(mask) if space.arrivals[task] and behind[task] & ~mask)
        for mask in found
    }
    masks = sorted(found, key=lambda mask: (mask.bit_count(), mask))
    sets = [(mask, ways) for mask in masks for ways in _choices(space, told[mask])]
    at = {one: number for number, one in enumerate(sets)}

    @cache
    def between(first: int, second: int, ways: Ways) -> tuple[Stream, ...]:
        arrivals = {task: one for task, way in ways if (one := space.arrivals[task][way])}
        turning = (space.in_one, space.unread) if turns and first.bit_count() > 1 else (0, 0)
        return streams_between(problem, (first, second), reads, arrivals, turning)

    cuts = []
    for mask, ways in sets:
        own: list[Cut] = []
        for first, runs_ahead in found[mask]:
            second = mask ^ first
            meet = _meet(problem, first, second)
            if runs_ahead and meet:
                continue
            chosen = _choices(space, told[first] + told[second])
            for one, two in _ways_of_halves(first, second, ways, chosen):
                streams: tuple[Stream, ...]
                streams = (ahead_stream(problem.staleness),) if runs_ahead else ()
                if splits and not runs_ahead and not meet:
                    streams = between(first, second, one)
                own.append(
                    Cut(
                        first=at[first, one],
                        second=at[second, two],
                        streams=streams,
                        crossing=crossing(problem, first, second),
                        turns=turns and not runs_ahead,
                        runs_ahead=runs_ahead,
                    )
                )
        cuts.append(tuple(own))
    return _completed(
        problem,
        replace(
            space,
            sets=tuple(mask for mask, _ in sets),
            ways=tuple(w for _, w in sets),
            cuts=tuple(cuts),
        ),
    )


def _ways_of_halves(
    first: int, second: int, whole: Ways, choices: Iterable[Ways]
) -> Iterator[tuple[Ways, Ways]]:
    """What `choices` are for each half of a set; those that contradict `whole`, the set's, not."""
    for chosen in choices:
        if set(whole) <= set(chosen):
            one = tuple(way for way in chosen if first >> way[0] & 1)
            two = tuple(way for way in chosen if second >> way[0] & 1)
            yield one, two


def _halves(
    everything: int, reads: list[int], ahead: int, root: bool | None
) -> dict[int, list[tuple[int, bool]]]:
    """Each set of tasks that cutting leads to, and its cuts: the first half, and whether it runs
    ahead of the second."""
    found: dict[int, list[tuple[int, bool]]] = {}
    waiting = [everything]
    while waiting:
        tasks = waiting.pop()
        if tasks in found:
            continue
        found[tasks] = parts = []
        for first in downward_closed(tasks, reads):
            second = tasks ^ first
            if (first & -first) < (second & -second) or feeds(first, second, reads):
                parts.append((first, False))
            if tasks == everything and root is not False and not first & ~ahead:
                parts.append((first, True))
        if tasks == everything and root is None:
            found[tasks] = parts = [part for part in parts if part[1]]
        waiting += [half for first, _ in parts for half in (first, tasks ^ first)]
    return found


def _choices(space: Space, tasks: tuple[int, ...]) -> Iterator[Ways]:
    """Every choice of arrivals for `tasks`."""
    return product(*([(task, way) for way in range(len(space.arrivals[task]))] for task in tasks))


def _meet(problem: Problem, first: int, second: int) -> bool:
    """Whether tasks of both parts must have one device."""
    return bool(_named(problem, first) & _named(problem, second))


def _named(problem: Problem, mask: int) -> frozenset[int]:
    """The devices that tasks of a set must have."""
    if not problem.places:
        return frozenset()
    names = [problem.tasks[task].id for task in members(mask)]
    return frozenset[int]().union(*(problem.places.get(name, ()) for name in names))


def _completed(problem: Problem, space: Space) -> Space:
    """`space` with what follows from its sets."""
    least = [float(leaves.chunk_s.min(initial=np.inf)) for leaves in space.leaves]
    sets = space.sets
    alone = tuple(mask.bit_length() - 1 if mask.bit_count() == 1 else -1 for mask in sets)
    return replace(
        space,
        alone=alone,
        rows=tuple(
            space.leaves[task].arrivals == ways[0][1] if task >= 0 and ways else None
            for task, ways in zip(alone, space.ways, strict=True)
        ),
        chunk_s=np.array([sum(least[task] for task in members(mask)) for mask in sets]),
        least=np.array([len(_named(problem, mask)) for mask in sets], dtype=np.int64),
        relevant=_relevant(space, sets),
        ahead=_within_ahead(space.cuts),
    ).handing_on(_hand_on(space.cuts))


def _hand_on(cuts: tuple[tuple[Cut, ...], ...]) -> list[bool]:
    """Of each set, whether cutting a first part of a stream leads to it."""
    found = [False] * len(cuts)
    for at in range(len(cuts) - 1, -1, -1):  # parts have smaller numbers
        for cut in cuts[at]:
            if found[at] or any(stream.chunks for stream in cut.streams):
                found[cut.first] = True
            if found[at]:
                found[cut.second] = True
    return found


def _within_ahead(cuts: tuple[tuple[Cut, ...], ...]) -> tuple[bool, ...]:
    """Of each set, whether cutting a part that runs ahead leads to it."""
    found = [False] * len(cuts)
    for at in range(len(cuts) - 1, -1, -1):  # parts have smaller numbers
        for cut in cuts[at]:
            if found[at] or cut.runs_ahead:
                found[cut.first] = True
            if found[at]:
                found[cut.second] = True
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
