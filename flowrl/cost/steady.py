"""How full an engine is where batches follow each other without a gap.

A row that ends makes room for the next one, of this batch or of the next, so there is no tail: as
many rows run as there are slots, or as the cache has room for. In such a state a row is seen with a
chance in proportion to its length L, half-way through on average: it has drawn

    E[L^2] / (2 E[L])                                                                        tokens

(the mean age of a renewal process; Cox 1962, Renewal Theory, section 5.4). By Little's law
(Little 1961) a batch of n samples then takes  n E[L] / rows  decode steps of an engine.

Rows of different ages come and go, so what n of them hold varies around n times its mean, with a
deviation of sqrt(n Var[age]), where E[age^2] = E[L^3] / (3 E[L]). Where that is more than the cache
has, rows that are let in put others back, which compute their contexts again
(`flowrl.sim.engine` plays it): with P the chance that the slots' rows hold more than there is,

    rows  = slots - E[tokens above the cache] / tokens of a row                  (normal loss)
    again = P n (prompt / group + E[L^2] / (2 E[L]))                                     tokens

Rows are let in one by one, as others end, and those of a prompt soon after each other: the first
computes it, the others find it.

Of a step's seconds some are there for any row (the weights are read once for all), others come with
each row (its keys and values, its work). The latter, of all tokens of a batch, are what a batch
takes of an engine however full it is: its dense seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flowrl.cost.lengths import Lengths
from flowrl.cost.occupancy import EngineBatch, reserve_tokens
from flowrl.cost.spread import spread

AGES = 256
"""Lengths that the mean square of ages is taken from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """One replica's engine at full occupancy.

    Attributes:
        rows: That run at once.
        own: Tokens that a row has drawn, on average.
        steps: Decode steps in which a batch's share of samples comes and goes.
        prompts: That a batch's share of samples computes.
        again: Tokens that rows put back compute again, of a batch.
    """

    rows: float
    own: float
    steps: float
    prompts: float
    again: float

    def dense_s(self, steady_s: float, *, one_s: float, full_s: float) -> float:
        """Of the steady seconds of a batch, those that come with its rows; at least 0.

        Args:
            steady_s: Of a batch, its steps and all else.
            one_s, full_s: Of a step with one row, and with `rows` of them; linear in between.
        """
        each = (full_s - one_s) / (self.rows - 1) if self.rows > 1 else 0.0
        return max(0.0, steady_s - self.steps * max(0.0, one_s - each))


def full_engine(lengths: Lengths, batch: EngineBatch) -> Full:
    """What each engine does of a batch.

    Prompts are held once a group, and each row keeps free what it needs to be let in, as in
    `flowrl.cost.occupancy`.
    """
    mine = batch.samples / batch.replicas
    own, square = lengths.mean_square / (2 * lengths.mean), _age_square(lengths)
    sharing = min(batch.group_size, max(1.0, mine))
    held = batch.prompt_tokens / sharing + own
    each = held + reserve_tokens(lengths.mean)
    deviation = math.sqrt(batch.slots * max(0.0, square - own * own))
    above, _ = _above(batch.slots * each, deviation, batch.kv_tokens)
    _, chance = _above(batch.slots * held, deviation, batch.kv_tokens)
    rows = max(1.0, batch.slots - above / each)
    return Full(
        rows=rows,
        own=own,
        steps=mine * lengths.mean / rows,
        prompts=mine / sharing,
        again=chance * mine * held,
    )


@lru_cache(maxsize=64)
def _age_square(lengths: Lengths) -> float:
    """Mean square of the tokens that a row has drawn."""
    values = spread(lengths, AGES)
    return float((values**3).sum() / (3 * values.sum()))


def _above(mean: float, deviation: float, limit: float) -> tuple[float, float]:
    """How much a normal number is above a limit in the mean, and with which chance."""
    if deviation <= 0:
        return max(0.0, mean - limit), float(mean > limit)
    far = (limit - mean) / deviation
    chance = 0.5 * math.erfc(far / math.sqrt(2))
    density = math.exp(-far * far / 2) / math.sqrt(2 * math.pi)
    return max(0.0, deviation * (density - far * chance)), chance
