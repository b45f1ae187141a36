"""How full an engine is while it generates a batch: which rows run when, in decode steps.

One replica has n samples, `slots` rows at most, and room for `kv_tokens`. All rows that run get a
token a step. A sample that ends makes room for the next that waits. Prompts of a group are held
once, so a row needs `prompt / group` tokens besides its own. Where rows outgrow the cache, the one
that came last is put back with what it has, and comes first again when there is room (SGLang and
vLLM do so, and compute its keys and values again then).

Nothing is drawn: lengths are those that stand for drawn ones (`flowrl.cost.spread`), in an
order that mixes long and short ones (steps of the golden ratio). Where all start at once, the
longest is the expected longest of the whole batch; where samples wait, `flowrl.cost.replicas` says
when the last of all ends.
Where samples wait, which of them come last matters, so some rotations of the order are averaged.

Batches of more than `MOST_SAMPLES`, and with samples that wait of more than `MOST_WAITING`, are
computed with each row standing for several. Where slots are too few for that and the queue is long,
its first `MOST_SAMPLES` rows are run, and the time before the last ones drain is stretched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.cost.lengths import Lengths, expected_maximum
from flowrl.cost.spread import Floats, spread
from flowrl.errors import PlanError

MOST_SAMPLES = 1024
MOST_WAITING = 256
ROTATIONS = 2
LONGEST = 4
"""Rows with the longest sample that a cache has room for at least where each stands for several."""

RESERVE_TOKENS, RESERVE_SHARE = 64, 1 / 32
"""Of every row, free when another is let in, so that it is not put back at once: so many tokens,
and at least this share of a mean response."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """Pieces of time in which the same rows run: float64 `[pieces]` each.

    Attributes:
        steps: Decode steps of the piece.
        batch: Rows.
        own: Mean tokens that a row has generated, in the middle of the piece.
        again: Tokens that rows put back had to compute again, prompts included, of all pieces.
        runs: The pieces of each alternative; each counts `1 / len(runs)`.
        starts: Of each alternative, the steps before each row's first, in the order in which rows
            come; what a row waits after it was put back is before its first too.
        samples_a_row: Samples that each of these rows stands for.
        stretch: Of the time before the last rows drain, where rows stand for a longer queue.
    """

    steps: Floats
    batch: Floats
    own: Floats
    again: float
    runs: tuple[slice, ...]
    starts: tuple[Floats, ...]
    samples_a_row: int
    stretch: float = 1.0

    @property
    def total_steps(self) -> float:
        """Decode steps until the last sample ends."""
        return float(self.steps.sum()) / len(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBatch:
    """A batch of samples that engines share.

    Attributes:
        samples: Of all replicas.
        slots: Rows that one replica decodes at once.
        kv_tokens: Tokens whose keys and values one replica holds.
        given_per_slot: Samples that one replica is given for each of its slots: those above one
            wait in it.
    """

    replicas: int
    samples: int
    group_size: int
    prompt_tokens: float
    slots: int
    kv_tokens: int
    given_per_slot: int = GIVEN_PER_SLOT


def reserve_tokens(mean: float) -> float:
    """Tokens of each row that are free when another is let in.

    Args:
        mean: Of responses.
    """
    return max(RESERVE_TOKENS, RESERVE_SHARE * mean)


def token_steps(lengths: Lengths, batch: EngineBatch) -> float:
    """Tokens that an engine's cache holds, summed over the decode steps of its share of a batch.

    A sample of L tokens holds what it has generated, and its part of its prompt, for L steps; in
    the mean  prompt / group E[L] + E[L^2] / 2.  So many over the tokens that a cache has room for
    are steps that no order of samples can save.
    """
    mine = batch.samples / batch.replicas
    each = batch.prompt_tokens / min(batch.group_size, max(1.0, mine))
    return mine * (each * lengths.mean + lengths.mean_square / 2)


def occupancy(
    lengths: Lengths,
    *,
    samples: int,
    of_samples: int,
    prompt_tokens: float,
    held_tokens: float,
    slots: int,
    kv_tokens: int,
) -> Occupancy:
    """What one replica's engine does with its share of a batch.

    Args:
        samples: Of this replica.
        of_samples: Of all replicas: the longest of them decides when the batch is complete.
        held_tokens: Of its prompt, that a row holds besides what it has drawn.

    Raises:
        PlanError: the cache does not hold the longest sample, or there are no slots.
    """
    longest = expected_maximum(lengths, of_samples)
    check_room(prompt_tokens + longest, slots=slots, kv_tokens=kv_tokens)
    slots = min(slots, samples)
    # All that is above what fits in any case is the same; so is what three digits do not tell.
    most = math.ceil(slots * (held_tokens + longest + RESERVE_TOKENS))
    room = most if kv_tokens >= most else float(f"{kv_tokens:.3g}")
    room = max(room, held_tokens + longest)
    if room >= _enough(lengths, samples, slots, held_tokens, longest):
        room = math.inf
    return _occupancy(lengths, samples, slots, held_tokens, longest, room)


def check_room(longest: float, *, slots: int, kv_tokens: int) -> None:
    """Whether an engine can work at all.

    Args:
        longest: Tokens of the longest sample, its prompt included.

    Raises:
        PlanError: the cache does not hold the longest sample, or there are no slots.
    """
    if slots < 1 or longest > kv_tokens:
        raise PlanError(
            "an engine cannot hold the longest sample",
            found=f"{slots} slots, room for {kv_tokens:,} tokens",
            expected=f"a slot, and {longest:,.0f} tokens",
            hint="give it more devices, or shorten max_response_tokens",
            where="rollout",
        )


@lru_cache(maxsize=256)
def _enough(lengths: Lengths, samples: int, slots: int, held: float, longest: float) -> float:
    """Tokens of a cache that is never filled, nor keeps a row waiting: all such are alike.

    That is what all rows have at the fullest moment without a limit, and in every slot what a row
    has to find free.
    """
    free = _occupancy(lengths, samples, slots, held, longest, math.inf)
    fullest = float(np.max(free.batch * (free.own + free.steps / 2)))
    return fullest + slots * (held + reserve_tokens(longest))


@lru_cache(maxsize=1024)
def _occupancy(
    lengths: Lengths, samples: int, slots: int, held: float, longest: float, kv_tokens: float
) -> Occupancy:
    scale = max(1, samples // MOST_SAMPLES)
    values = _values(lengths, samples, scale, longest)
    if samples <= slots and _peak_tokens(values, held) * scale <= kv_tokens:
        return _at_once(values, scale)
    scale = max(1, min(samples // MOST_WAITING, slots // 16))
    stretch = max(1.0, samples / scale / MOST_SAMPLES)
    if kv_tokens < scale * LONGEST * (held + longest):
        # Rows that stand for several do not fit in as single ones do.
        wanted, scale = scale * stretch, max(1, int(kv_tokens / (LONGEST * (held + longest))))
        stretch = wanted / scale
    values = spread(lengths, max(1, round(samples / stretch / scale)))
    num = len(values)
    order = golden_order(num)
    tables: list[Floats] = []
    starts: list[Floats] = []
    again = 0.0
    for rotation in range(ROTATIONS):
        turned = np.roll(order, rotation * num // ROTATIONS)
        rows = values[turned]
        run = run_rows(
            rows.tolist(),
            slots=max(1, slots // scale),
            kv_tokens=max(kv_tokens / scale, held + longest),
            held_tokens=held,
        )
        table = np.array((run.steps, run.rows, run.own), np.float64)
        ends = np.array(run.ends)
        drains = float(np.sort(ends)[3 * num // 4]) if kv_tokens < math.inf else math.inf
        table, began = _stretched(table, ends - rows, stretch, drains)
        tables.append(table)
        starts.append(began)
        again += run.again * stretch
    steps, batch, own = np.concatenate(tables, axis=1)
    edges = [0, *accumulate(table.shape[1] for table in tables)]
    return Occupancy(
        steps=steps,
        batch=batch * scale,
        own=own,
        again=again * scale / ROTATIONS,
        runs=tuple(slice(low, high) for low, high in pairwise(edges)),
        starts=tuple(starts),
        samples_a_row=scale,
        stretch=stretch,
    )


def golden_order(num: int) -> npt.NDArray[np.intp]:
    """Places in an order that mixes what lies near to each other."""
    return np.argsort((np.arange(num) * _GOLDEN) % 1.0, kind="stable")


def _stretched(
    table: Floats, starts: Floats, stretch: float, drains: float
) -> tuple[Floats, Floats]:
    """Pieces, `[3, pieces]`, and starts of a queue that is so many times as long.

    What is before its last rows drain takes longer.

    Args:
        drains: The step by which they do, of caches that fill; of others it is seen in the rows.
    """
    if stretch > 1.0:
        steps, batch, _ = table
        if drains < math.inf:
            full = int(steps.cumsum().searchsorted(drains)) + 1
        else:
            in_order = batch.argsort()
            half = steps[in_order].cumsum().searchsorted(steps.sum() / 2)
            usual = batch[in_order[half]]
            full = int(np.flatnonzero(batch >= 0.9 * usual)[-1]) + 1
        tokens = steps * batch
        before, after = float(tokens[:full].sum()), float(tokens[full:].sum())
        factor = (stretch * (before + after) - after) / before
        drain = float(steps[:full].sum())
        steps[:full] *= factor
        starts = starts + np.minimum(starts, drain) * (factor - 1)
    return table, starts


def _values(lengths: Lengths, samples: int, scale: int, longest: float) -> Floats:
    """Lengths of the rows, shortest first."""
    values = spread(lengths, max(1, round(samples / scale))).copy()
    values[-1] = max(values[-1], longest)
    return values


def _at_once(values: Floats, scale: int) -> Occupancy:
    """All start together; between two ends the batch stays."""
    before = np.concatenate([[0.0], values[:-1]])
    kept = values > before
    return Occupancy(
        steps=(values - before)[kept],
        batch=(np.arange(len(values), 0, -1.0) * scale)[kept],
        own=((values + before) / 2)[kept],
        again=0.0,
        runs=(slice(0, int(kept.sum())),),
        starts=(np.zeros(len(values)),),
        samples_a_row=scale,
    )


def _peak_tokens(values: Floats, held: float) -> float:
    """Most tokens at once where all start together: just before an end."""
    return float(np.max(np.arange(len(values), 0, -1.0) * (values + held)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPieces:
    """What rows on slots do, from one end to the next; see `Occupancy`.

    Attributes:
        steps: Decode steps of each piece.
        rows: That run in it.
        own: Mean tokens that a row has generated, in the middle of it.
        ends: The step at which each row ends, in the order in which rows come.
        again: Tokens that rows put back computed again.
        put_back: How often each was, in the order in which rows come.
    """

    steps: list[float]
    rows: list[int]
    own: list[float]
    ends: list[float]
    put_back: list[int]
    again: float = 0.0


def run_rows(
    lengths: Sequence[float], *, slots: int, kv_tokens: float, held_tokens: float
) -> RowPieces:
    """Rows on slots.

    Args:
        lengths: In the order in which samples come.
        kv_tokens: At least what one sample needs.
        held_tokens: Of a row besides what it generates.
    """
    if kv_tokens == math.inf:
        return _run_free(lengths, slots)
    waiting = deque((length, 0.0, place) for place, length in enumerate(lengths))
    ends: list[tuple[float, int]] = []  # those put back stay in it
    # id: length, step at which it had no token, place in the order
    running: dict[int, tuple[float, float, int]] = {}
    ended, put_back = [0.0] * len(lengths), [0] * len(lengths)
    found = RowPieces(steps=[], rows=[], own=[], ends=ended, put_back=put_back)
    add_steps, add_rows, add_own = found.steps.append, found.rows.append, found.own.append
    asked = held_tokens + reserve_tokens(sum(lengths) / len(lengths))
    now = own = again = 0.0
    number = rows = 0
    while waiting or running:
        while waiting and rows < slots:
            length, has, place = waiting[0]
            if rows and own + has + (rows + 1) * asked > kv_tokens:
                break
            waiting.popleft()
            number += 1
            rows += 1
            running[number] = (length, now - has, place)
            heappush(ends, (now - has + length, number))
            own += has
        while ends[0][1] not in running:
            heappop(ends)
        room, steps = (kv_tokens - own - rows * held_tokens) / rows, ends[0][0] - now
        full = rows > 1 and room < steps
        if full:
            steps = room if room > 0 else 0.0
        if steps > 0:
            add_steps(steps)
            add_rows(rows)
            add_own(own / rows + steps / 2)
        now += steps
        own += rows * steps
        if full:
            _, (length, start, place) = running.popitem()  # the one that came last
            rows -= 1
            own -= now - start
            again += held_tokens + now - start
            put_back[place] += 1
            waiting.appendleft((length, now - start, place))
            continue
        while ends and (ends[0][0] <= now or ends[0][1] not in running):
            row = running.pop(heappop(ends)[1], None)
            if row is not None:
                rows -= 1
                own -= row[0]
                ended[row[2]] = now
    return replace(found, again=again)


def _run_free(lengths: Sequence[float], slots: int) -> RowPieces:
    """`run_rows` with a cache that is never filled: the same sums in the same order, but no row
    waits for anything but a slot or is put back."""
    num = len(lengths)
    found = RowPieces(steps=[], rows=[], own=[], ends=[0.0] * num, put_back=[0] * num)
    now = own = 0.0
    rows = place = 0
    ends: list[tuple[float, int]] = []
    while place < num or ends:
        while place < num and rows < slots:
            heappush(ends, (now + lengths[place], place))
            place += 1
            rows += 1
        steps = ends[0][0] - now
        if steps > 0:
            found.steps.append(steps)
            found.rows.append(rows)
            found.own.append(own / rows + steps / 2)
        now += steps
        own += rows * steps
        while ends and ends[0][0] <= now:
            row = heappop(ends)[1]
            rows -= 1
            own -= lengths[row]
            found.ends[row] = now
    return found
