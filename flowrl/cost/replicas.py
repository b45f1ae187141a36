"""A batch on all replicas: what one of them does, until the last one ends.

`flowrl.cost.occupancy` has one replica, with samples that stand for its share. From it come the
steps s_1 ... s_n at which samples start; which of them are long, and on which replica, is chance.
With F the distribution of lengths, the chance that all of R replicas have ended at step t is

    P(t) = (F(t - s_1) ... F(t - s_n))^R

for lengths are independent of each other and, nearly, of when samples start (the largest of
independent numbers: David and Nagaraja 2003, Order Statistics, section 5.2). So the batch ends
after

    the integral of 1 - P(t)                                                   steps on average

and more replicas end later, for each has last ones that may be long.

Replicas have unequal work too, of what they were given ahead, for none of that goes elsewhere: all
else is handed out where samples end. Of m samples that a replica still has to start, the work is
about X times its mean, X lognormal with mean 1 and variance var[w] / (m E[w]^2), w being what one
sample takes, as sums of lognormal numbers nearly are (Fenton 1960, IRE Transactions on
Communications Systems 8, 57). So samples start

    (X - 1) m / n s_n                                                              steps later

in proportion to s, and P is the mean over X for one replica (by the rule of Gauss and Hermite), to
the power of R. Where slots decide, w is L, and m what a replica is given ahead of its slots.

Where the cache decides, so that fewer rows run than there are slots, w = L (L / 2 + held) is what a
sample holds of it at all of its steps together, which varies far more; and m is all that a replica
is given, but for half of the rows that run. Much of such work is in few long samples: where it is X
times the mean, all samples are taken to be sqrt(X) times as long, for work grows with the square.
Where a cache holds few of the longest samples, single ones decide: `flowrl.cost.short_caches`.

The replica that ends last has its rows as long as samples start, that much longer; after that it
has the rows of any other, and at the end of them its last row alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from flowrl.cost.ended import NEVER, last_ones, log_ended
from flowrl.cost.lengths import Lengths, expected_maximum
from flowrl.cost.occupancy import EngineBatch, Occupancy, check_room, occupancy
from flowrl.cost.prompts import held_tokens, shared_by
from flowrl.cost.short_caches import is_short, on_short_caches
from flowrl.cost.spread import Floats
from flowrl.cost.uneven import work_variation

POINTS = 32
"""Steps at which it is asked whether all have ended."""

FULL = 0.97
"""Of the slots: where fewer rows run while samples start, the cache decides."""

_NORMAL = (
    (-3.7504397177257425, 0.000548268855972217),
    (-2.366759410734541, 0.03075712396758652),
    (-1.1544053947399682, 0.2401231786050127),
    (0.0, 0.45714285714285724),
    (1.1544053947399682, 0.2401231786050127),
    (2.366759410734541, 0.03075712396758652),
    (3.7504397177257425, 0.000548268855972217),
)
_NODES, _SHARES = np.array(_NORMAL).T
"""Points of a normal number and their shares, by the rule of Gauss and Hermite (Abramowitz and
Stegun 1964, table 25.10). NumPy has the rule too, but importing it takes longer than the rollouts
of a plan."""

_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnReplicas:
    """A batch on all replicas.

    Attributes:
        pieces: Of the replica that ends last; its `starts` are those of any replica.
        prompts: That each replica computes together, before the first samples start.
        later: That it computes one by one, as samples end.
    """

    pieces: Occupancy
    prompts: int
    later: float


def on_replicas(lengths: Lengths, batch: EngineBatch) -> OnReplicas:
    """What each engine does of a batch.

    Raises:
        PlanError: see `occupancy`.
    """
    given, mean = batch.given_per_slot * batch.slots, batch.samples / batch.replicas
    mine, every = math.ceil(mean), 0
    if mine <= given:
        # Whole groups: some replicas may have one more than others, and end last.
        groups = mean / batch.group_size
        mine = max(mine, min(given, math.ceil(groups) * batch.group_size, batch.samples))
        every = min(mine - 1, math.floor(groups) * batch.group_size)
    slots = min(batch.slots, mine)
    shared = shared_by(
        replicas=batch.replicas, samples=mine, group_size=batch.group_size, at_first=given
    )
    held = held_tokens(lengths, prompt_tokens=batch.prompt_tokens, shared=shared, rows=slots)
    last = _last(lengths, batch, (mine, every, mean), held)
    return OnReplicas(
        pieces=last,
        prompts=math.ceil(slots / min(batch.group_size, mine)),
        later=(mine - slots) / shared,
    )


def _last(
    lengths: Lengths, batch: EngineBatch, samples: tuple[int, int, float], held: float
) -> Occupancy:
    """Pieces of the replica that ends last.

    Args:
        samples: See `_until_last`.
    """
    most, _, mean = samples
    slots, given = min(batch.slots, most), batch.given_per_slot * batch.slots
    longest = expected_maximum(lengths, batch.samples)
    needed = batch.prompt_tokens + longest
    if is_short(lengths, held, samples=most, kv_tokens=batch.kv_tokens, needed=needed):
        check_room(needed, slots=batch.slots, kv_tokens=batch.kv_tokens)
        return on_short_caches(
            lengths,
            replicas=batch.replicas,
            samples=most,
            mean=mean,
            # One replica has all; of several, what is not given ahead goes where there is room.
            varied=most if batch.replicas == 1 else min(most, given),
            held=held,
            slots=slots,
            kv_tokens=float(f"{batch.kv_tokens:.3g}"),
        )
    pieces = occupancy(
        lengths,
        samples=most,
        of_samples=batch.samples,
        prompt_tokens=batch.prompt_tokens,
        held_tokens=held,
        slots=slots,
        kv_tokens=batch.kv_tokens,
    )
    return _until_last(pieces, lengths, batch.replicas, samples, slots, given, held)


@lru_cache(maxsize=1024)
def _until_last(
    pieces: Occupancy,
    lengths: Lengths,
    replicas: int,
    samples: tuple[int, int, float],
    slots: int,
    given: int,
    held: float,
) -> Occupancy:
    """Pieces of the replica that ends last.

    Args:
        samples: Of a replica with the most, of every replica, and of each on average.
        given: Of these, before the first ends.
    """
    starts = np.sort(np.concatenate(pieces.starts))[::-1]
    at_once = starts[0] <= 0 and len(pieces.runs) == 1
    if at_once or lengths.mean_square <= lengths.mean**2 * (1 + _SAME):
        return pieces  # the longest is there, or nothing is left to chance
    most, every, mean = samples
    dense, late, end = [0] * len(pieces.runs), 0.0, 0.0
    if starts[0] > 0:
        dense = [
            int(pieces.steps[run].cumsum().searchsorted(own.max() * (1 + _SAME), side="right"))
            for run, own in zip(pieces.runs, pieces.starts, strict=True)
        ]
        rows = _rows(pieces, dense)
        if rows < FULL * slots:
            waiting, power = min(most, given - rows / 2), 0.5
            variation = work_variation(lengths, held)
        else:
            waiting, power = max(0, min(most, given) - slots), 0.0
            variation = math.sqrt(lengths.mean_square / lengths.mean**2 - 1)
        # Not all replicas have those that start last.
        weight = np.full(len(starts), most / len(starts))
        weight[: round((most - every) / weight[0])] *= (mean - every) / (most - every)
        unequal = _Unequal(
            variation=variation / math.sqrt(waiting) if waiting else 0.0,
            ahead=waiting / most,
            power=power,
        )
        end, late = _end(last_ones(starts, weight), lengths, replicas, unequal)
    # Lengths times sqrt(X) have nearly the same mean, not quite.
    end = max(end, expected_maximum(lengths, mean * replicas))
    tables = []
    for run, num in zip(pieces.runs, dense, strict=True):
        table = np.array((pieces.steps[run], pieces.batch[run], pieces.own[run]))
        table[0, :num] *= 1 + late
        tables.append(_ending(table, end))
    steps, batch, own = np.concatenate(tables, axis=1)
    edges = [0, *accumulate(table.shape[1] for table in tables)]
    runs = tuple(slice(low, high) for low, high in pairwise(edges))
    return replace(pieces, steps=steps, batch=batch, own=own, runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unequal:
    """How unequal the work of replicas is.

    Attributes:
        variation: Coefficient of variation of X.
        ahead: m / n.
        power: Samples are X to this power times as long.
    """

    variation: float
    ahead: float
    power: float

    def work(self) -> tuple[Floats, Floats]:
        """Some X that rise, and the share of replicas that each stands for."""
        if not self.variation:
            return np.ones(1), np.ones(1)
        scale = math.sqrt(math.log1p(self.variation**2))
        found: Floats = np.exp(scale * _NODES - scale**2 / 2)
        return found, _SHARES


def _rows(pieces: Occupancy, dense: list[int]) -> float:
    """That run while samples start.

    Args:
        dense: Pieces of each alternative in which they do.
    """
    first = [slice(run.start, run.start + num) for run, num in zip(pieces.runs, dense, strict=True)]
    steps = sum(float(pieces.steps[part].sum()) for part in first)
    tokens = sum(float(pieces.steps[part] @ pieces.batch[part]) for part in first)
    return tokens / steps if steps else float(pieces.batch.max())


def _ending(table: Floats, end: float) -> Floats:
    """Pieces, `[3, pieces]`, that end after so many steps, the last row by itself."""
    steps, rows, own = table
    ends = steps.cumsum()
    if end > ends[-1]:
        left = end - ends[-1]
        return np.append(table, [[left], rows[-1:], own[-1:] + (steps[-1] + left) / 2], axis=1)
    steps -= np.minimum(steps, np.maximum(0.0, ends - end))
    kept: Floats = table[:, steps > 0]
    return kept


def _end(
    starts: tuple[Floats, Floats],
    lengths: Lengths,
    replicas: int,
    unequal: _Unequal,
) -> tuple[float, float]:
    """Steps until all replicas have ended; and by which share of the steps so far samples start
    later on the one that ends last.

    Args:
        starts: Last one first, and the samples of a replica that have each.
    """
    at, weight = starts
    more, shares = unequal.work()
    late, scaled = unequal.ahead * (more - 1), more**unequal.power
    total = replicas * float(weight.sum())
    # Outside of these hardly any batch ends; nearly nothing has the two largest X.
    first = max(
        at[0] * (1 + late[0]) + lengths.quantile(0.001) * scaled[0],
        lengths.quantile(0.001 ** (1 / total)) * scaled[0],
    )
    far = min(lengths.maximum, lengths.quantile(1 - 0.01 / total) * scaled[-1])
    steps = np.linspace(first, at[0] * (1 + late[-2:][0]) + far, POINTS)
    age = (steps[:, None, None] - at * (1 + late[:, None])) / scaled[:, None]
    one = np.exp(np.maximum(log_ended(lengths, age) @ weight, NEVER))
    mean = one @ shares
    every = mean**replicas
    end = float(first + np.trapezoid(1 - every, steps))
    if len(more) == 1:
        return end, 0.0
    # The last one ends in an interval with a chance that each X has its part of.
    risen = (np.diff(one, axis=0) * shares) @ late
    last = replicas * ((mean[1:] + mean[:-1]) / 2) ** (replicas - 1)
    return end, float(risen @ last) / max(1e-9, float(every[-1] - every[0]))
