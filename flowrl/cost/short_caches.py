"""A batch on replicas whose caches hold few of the longest samples.

There a few long samples decide. Two that do not fit together are drawn one after the other: the one
that came last is put back whenever the first one's tokens fill the cache, and goes on when that has
ended. How many of them a replica has is chance, which a replica with lengths that stand for all
does not tell; so rows are run for replicas with little, more and much work (`flowrl.cost.uneven`),
each with lengths of its own, some sets of them where there are few samples.

A row that was put back ends when it ends there. Of others, which start at steps s, it is chance
which of them are long, as in `flowrl.cost.replicas`. So the chance that one of R replicas has ended
at step t is the mean over such runs of

    product of F(t - s) over the rows that were not put back,    and 0 before the others end

F being the distribution of lengths on such a replica, and the chance that all have is its R-th
power. The replica that ends last has the pieces of all runs, each as long as that takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from flowrl.cost.ended import NEVER, last_ones
from flowrl.cost.lengths import Lengths, expected_maximum
from flowrl.cost.occupancy import Occupancy, golden_order, run_rows
from flowrl.cost.spread import Floats
from flowrl.cost.uneven import Uneven, uneven, work_variation

SHORT = 5
"""A cache that holds fewer of the longest samples is short."""

MOST_SAMPLES = 256
"""Of a replica: with more, replicas are so alike that a factor tells them apart."""

FEW = 256
"""Samples of all sets of lengths that stand for a replica's, where it has fewer; at most
`MOST_SETS`."""

MOST_SETS = 4

POINTS = 64
"""Steps at which it is asked whether all have ended."""

HEAVY = 1.25
"""Coefficient of variation of what samples take of a cache, above which few of them take most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Rows of a replica.

    Attributes:
        share: Of replicas, for which it stands.
        pieces: Steps, rows, and tokens of a row: `[3, pieces]`.
        starts: Of rows, in the order in which they come.
        put_back: Of rows that ever were, the step at which they end; -1 of others.
        again: Tokens that these computed again.
    """

    kind: Uneven
    share: float
    pieces: Floats
    starts: Floats
    put_back: Floats
    again: float

    def ended(self, steps: Floats, samples: int) -> Floats:
        """The chance that all samples have ended, at each step."""
        free = np.sort(self.starts[self.put_back < 0])[::-1]
        # Between two of the steps the mean of before and after.
        past = (steps - self.put_back.max()) / (steps[1] - steps[0]) + 0.5
        found: Floats = np.minimum(1.0, np.maximum(0.0, past))
        if len(free):
            at, each = last_ones(free, np.full(len(free), samples / len(self.starts)))
            logs = self.kind.log_ended(steps[:, None] - at) @ each
            found *= np.exp(np.maximum(logs, NEVER))
        return found


def is_short(
    lengths: Lengths, held: float, *, samples: int, kv_tokens: float, needed: float
) -> bool:
    """Whether a cache is so short that single samples decide.

    Args:
        held: Of its prompt, that a row holds.
        samples: Of a replica.
        needed: Tokens of the longest sample.
    """
    return (
        samples <= MOST_SAMPLES
        and kv_tokens < SHORT * needed
        and work_variation(lengths, held) > HEAVY
    )


@lru_cache(maxsize=1024)
def on_short_caches(
    lengths: Lengths,
    *,
    replicas: int,
    samples: int,
    mean: float,
    varied: int,
    held: float,
    slots: int,
    kv_tokens: float,
) -> Occupancy:
    """Pieces of the replica that ends last.

    Args:
        samples: Of a replica with the most.
        mean: Of all replicas.
        varied: Of its samples, those that differ from one replica to the other.
        held: Of its prompt, that a row holds.
        kv_tokens: At least what the longest needs.
    """
    runs = _runs(lengths, samples, varied, held, slots, kv_tokens)
    totals = [float(run.pieces[0].sum()) for run in runs]
    end = max(
        _end(runs, lengths, max(totals), samples, replicas * mean / samples),
        expected_maximum(lengths, replicas * mean),
        samples * (held * lengths.mean + lengths.mean_square / 2) / kv_tokens,
    )
    # Each as long as the last replica takes.
    steps, batch, own = np.concatenate([run.pieces for run in runs], axis=1)
    edges = [0, *accumulate(run.pieces.shape[1] for run in runs)]
    parts = [slice(low, high) for low, high in pairwise(edges)]
    for part, total in zip(parts, totals, strict=True):
        steps[part] *= end / total
    return Occupancy(
        steps=steps,
        batch=batch,
        own=own,
        again=sum(run.again * run.share for run in runs),
        runs=tuple(parts),
        starts=tuple(run.starts * (end / took) for run, took in zip(runs, totals, strict=True)),
        samples_a_row=1,
    )


def _runs(
    lengths: Lengths, samples: int, varied: int, held: float, slots: int, kv_tokens: float
) -> list[_Run]:
    """Rows of replicas with little, more and much work, some sets of each."""
    order = golden_order(samples)
    sets = max(1, min(MOST_SETS, FEW // samples))
    found = []
    for kind in uneven(lengths, held=held, samples=samples, varied=varied):
        for number in range(sets):
            values = kind.spread(samples, (number + 0.5) / sets)
            turn = round(samples * (number + 0.5) / sets)
            rows = np.minimum(values, kv_tokens - held)[np.roll(order, turn)]
            run = run_rows(rows.tolist(), slots=slots, kv_tokens=kv_tokens, held_tokens=held)
            ends = np.array(run.ends)
            found.append(
                _Run(
                    kind=kind,
                    share=kind.replicas / sets,
                    pieces=np.array((run.steps, run.rows, run.own), np.float64),
                    starts=np.maximum(0.0, ends - rows),
                    put_back=np.where(np.array(run.put_back), ends, -1.0),
                    again=run.again,
                )
            )
    return found


def _end(runs: list[_Run], lengths: Lengths, latest: float, samples: int, replicas: float) -> float:
    """Steps until all replicas have ended."""
    total = samples * replicas
    first = lengths.quantile(0.001 ** (1 / total))  # nearly never have all ended before
    last = latest + min(lengths.maximum, lengths.quantile(1 - 0.01 / total))
    steps = np.linspace(first, last, POINTS)
    one = np.zeros(POINTS)
    for run in runs:
        one += run.share * run.ended(steps, samples)
    return float(first + np.trapezoid(1 - one**replicas, steps))
