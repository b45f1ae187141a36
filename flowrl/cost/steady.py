"""How full an engine is where batches follow each other without a gap.

A row that ends makes room for the next one, of this batch or of the next, so there is no tail: as
many rows run as there are slots, or as the cache has room for. In such a state a row is seen with a
chance in proportion to its length L, half-way through on average: it has drawn

    E[L^2] / (2 E[L])                                                                        tokens

(the mean age of a renewal process; Cox 1962, Renewal Theory, section 5.4). By Little's law
(Little 1961) a batch of n samples then takes  n E[L] / rows  decode steps of an engine.

Of a step's seconds some are there for any row (the weights are read once for all), others come with
each row (its keys and values, its work). The latter, of all tokens of a batch, are what a batch
takes of an engine however full it is: its dense seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.cost.lengths import Lengths
from flowrl.cost.occupancy import RESERVE_SHARE, RESERVE_TOKENS, EngineBatch

__all__ = ["Full", "full_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """One replica's engine at full occupancy.

    Attributes:
        rows: That run at once.
        own: Tokens that a row has drawn, on average.
        steps: Decode steps in which a batch's share of samples comes and goes.
    """

    rows: float
    own: float
    steps: float

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
    own = lengths.mean_square / (2 * lengths.mean)
    free = max(RESERVE_TOKENS, RESERVE_SHARE * lengths.mean)
    prompt = batch.prompt_tokens / min(batch.group_size, max(1.0, mine))
    room = batch.kv_tokens / (prompt + own + free)
    rows = max(1.0, min(batch.slots, room))
    return Full(rows=rows, own=own, steps=mine * lengths.mean / rows)
