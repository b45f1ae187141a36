"""What a rollout takes, with its tail: decode steps of a batch that shrinks.

    seconds = sum over pieces of  steps x step(rows, prompt + own tokens)     (the host included)
            + passes in which prompts enter, in chunks
            + tokens that rows put back compute again, at the rate of a full chunk

Pieces are those of `flowrl.cost.replicas`. A step's time is asked of the cost at a few batches
(doubling) and contexts and is linear in between: exact in the context for a roofline, and within a
percent or so in the batch.

Where batches follow each other without a gap (`Estimate.steady_s`), engines stay as full as they
get (`flowrl.cost.steady`), and there is no tail:

    steady seconds = n E[L] / rows  x step(rows, prompt + E[L^2] / (2 E[L]))
                     + passes in which rows enter, one by one + what is computed again

Of these, what every row adds to a step, and prompts, are the batch's own (`Estimate.dense_s`).

The batch is complete when the last replica is (`flowrl.cost.replicas`). A prompt is computed once a
group and replica, those of the first rows together, and later ones one by one as rows get free
(`flowrl.cost.prompts` says on how many replicas a group is); rows read it each for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flowrl.cost import efficiency
from flowrl.cost.arrivals import clock_of
from flowrl.cost.lengths import Lengths
from flowrl.cost.occupancy import EngineBatch, Occupancy
from flowrl.cost.replicas import on_replicas
from flowrl.cost.source import Estimate, Source
from flowrl.cost.spread import Floats
from flowrl.cost.steady import Full, full_engine

COMPUTED_AGAIN = "computed again"
"""The part of a rollout in which contexts of rows that were put back are."""

DecodeStep = Callable[[int, float], Estimate]
"""Of a batch and a mean context."""

Prefill = Callable[[int, int], Estimate]
"""Of rows and their tokens."""


def rollout_estimate(
    decode: DecodeStep,
    prefill: Prefill,
    *,
    replicas: int,
    samples: int,
    group_size: int,
    prompt_tokens: float,
    lengths: Lengths,
    slots: int,
    kv_tokens: int,
    contexts: int = 2,
) -> Estimate:
    """A whole batch on all replicas.

    Args:
        contexts: How many contexts a step is asked at; 2 where it is linear in them.
    """
    batch = EngineBatch(
        replicas=replicas,
        samples=samples,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        slots=slots,
        kv_tokens=kv_tokens,
    )
    found, full = on_replicas(lengths, batch), full_engine(lengths, batch)
    pieces, longest = found.pieces, prompt_tokens + lengths.maximum
    entering = _prefill_s(prefill, found.prompts, prompt_tokens)
    one = prefill(1, max(1, round(prompt_tokens))).seconds
    later, again = found.later * one, _again_s(prefill, pieces.again)
    # Without a gap, rows enter one by one.
    singly = full.prompts * one + _again_s(prefill, max(full.again, pieces.again))
    return _of_pieces(
        decode,
        pieces,
        full,
        slots,
        prompt_tokens,
        longest,
        contexts,
        entering,
        later,
        again,
        singly,
    )


@lru_cache(maxsize=512)
def _of_pieces(
    decode: DecodeStep,
    pieces: Occupancy,
    full: Full,
    slots: int,
    prompt_tokens: float,
    longest: float,
    contexts: int,
    entering: Estimate,
    later: float,
    again: float,
    singly: float,
) -> Estimate:
    """Computed once for caches that are never filled, which have the same pieces."""
    top = int(pieces.batch.max())
    steps = _step_table(decode, top, max(top, slots), prompt_tokens + 1, longest, contexts)
    seconds = pieces.steps * steps.at(pieces.batch, prompt_tokens + pieces.own) / len(pieces.runs)
    decoding, thin = float(seconds.sum()), pieces.batch <= top / 8
    total = decoding + entering.seconds + later + again
    one, most = steps.at(np.array([1.0, full.rows]), np.full(2, prompt_tokens + full.own))
    followed = full.steps * float(most) + singly
    steady = min(total, followed)
    return Estimate(
        seconds=total,
        source=steps.source,
        parts=(
            ("decode", decoding),
            ("tail of it", float(seconds[thin].sum())),
            ("prefill", entering.seconds + later),
            *([(COMPUTED_AGAIN, again)] if again else []),
        ),
        notes=tuple(dict.fromkeys((*steps.notes, *entering.notes))),
        clock=clock_of(pieces, seconds, entering.seconds / total),
        steady_s=steady,
        dense_s=min(steady, full.dense_s(followed, one_s=float(one), full_s=float(most))),
    )


def _prefill_s(prefill: Prefill, prompts: int, prompt_tokens: float) -> Estimate:
    """Prompts that a replica computes together, some of them in each pass."""
    tokens = max(1, round(prompt_tokens))
    rows = max(1, min(prompts, efficiency.PREFILL_CHUNK_TOKENS // tokens))
    once = prefill(rows, tokens)
    return Estimate(seconds=once.seconds * prompts / rows, source=once.source, notes=once.notes)


def _again_s(prefill: Prefill, tokens: float) -> float:
    if not tokens:
        return 0.0
    chunk = efficiency.PREFILL_CHUNK_TOKENS
    return prefill(1, chunk).seconds * tokens / chunk


@lru_cache(maxsize=512)
def _step_table(
    decode: DecodeStep, top: int, most: int, shortest: float, longest: float, contexts: int
) -> _StepTable:
    """Computed once for caches of all sizes.

    Args:
        top: Rows of a batch by itself.
        most: Where batches follow each other, which may fill slots that one leaves free.
    """
    sizes = {1 << power for power in range(most.bit_length()) if 1 << power < most}
    return _StepTable(decode, sorted({*sizes, top, most}), np.linspace(shortest, longest, contexts))


class _StepTable:
    """Seconds of decode steps at some batches and contexts; linear in between."""

    __slots__ = ("_batches", "_contexts", "_seconds", "notes", "source")

    def __init__(self, decode: DecodeStep, sizes: Sequence[int], contexts: Floats) -> None:
        asked = [[decode(size, float(context)) for context in contexts] for size in sizes]
        self._batches = np.array(sizes, np.float64)
        self._contexts = contexts
        self._seconds = np.array([[found.seconds for found in row] for row in asked])
        every = [found for row in asked for found in row]
        self.source: Source = _most(every)
        self.notes = tuple(dict.fromkeys(note for found in every for note in found.notes))

    def at(self, batch: Floats, context: Floats) -> Floats:
        """Seconds, of arrays of equal length."""
        row, up = _place(self._batches, batch)
        column, right = _place(self._contexts, context)
        table, left = self._seconds, 1 - right
        low: Floats = table[row, column] * left + table[row, column + 1] * right
        if len(self._batches) == 1:
            return low
        high: Floats = table[row + 1, column] * left + table[row + 1, column + 1] * right
        return low * (1 - up) + high * up


def _place(grid: Floats, values: Floats) -> tuple[int | npt.NDArray[np.intp], Floats]:
    """The grid point below each value, and how far it is to the next one."""
    if len(grid) == 1:
        return 0, np.zeros(len(values))
    if len(grid) == 2:
        share = (values - grid[0]) / (grid[1] - grid[0])
        return 0, np.minimum(np.maximum(share, 0.0), 1.0)
    below = np.minimum(np.maximum(grid.searchsorted(values, side="right") - 1, 0), len(grid) - 2)
    first = grid[below]
    share = (values - first) / (grid[below + 1] - first)
    return below, np.minimum(np.maximum(share, 0.0), 1.0)


def _most(estimates: Sequence[Estimate]) -> Source:
    """The source of most of the seconds."""
    sums: dict[Source, float] = {}
    for found in estimates:
        sums[found.source] = sums.get(found.source, 0.0) + found.seconds
    return max(sums, key=lambda source: sums[source])
