"""What a rollout takes at least, however its samples are ordered: for a handful of decode steps.

A row is one token of a sample. With n tokens of all samples of a replica, a step of b rows that
takes f(b) seconds, and B slots, a rollout takes no less than

    n f(B) / B                    a token takes no less of a step than where all slots are full
    s a + n r                     where a + b r <= f(b), and there are s steps or more

Steps are no fewer than the longest sample has tokens, than n / B, and than the tokens that samples
hold in the cache, summed over their steps, over those that it has room for.

Seconds are linear in the contexts of rows, so all are taken at the mean context of the tokens,
prompt + E[L^2] / (2 E[L]). In the rows they bend one way: up where compute takes over from memory
or rows fill a pipeline, down where kernels work better on more. Lines with the slope of the first
rows (at most that of all) and with that of the last ones, low enough for one row and for full
slots, are below both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flowrl.cost.lengths import Lengths, expected_maximum
from flowrl.cost.occupancy import EngineBatch, token_steps

LEAST = 0.97
"""Of a bound, for rows come in an order in which they may fit a little better with less room,
and measured steps may be a little faster with more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBound:
    """A lower bound of the seconds of a rollout in one layout.

    Attributes:
        full_s: Of all tokens, in steps of full slots.
        steps: At least, with a cache that is never full.
        held: Tokens that samples hold in a replica's cache, summed over their steps.
        lines: Of each, a and the r of all tokens, in seconds.
    """

    full_s: float
    steps: float
    held: float
    lines: tuple[tuple[float, float], ...]

    def least_s(self, kv_tokens: float = math.inf) -> float:
        """Seconds, with a cache of so many tokens a replica."""
        steps = max(self.steps, self.held / kv_tokens)
        return LEAST * max(self.full_s, *(steps * a + rows_s for a, rows_s in self.lines))


def rollout_bound(
    step_s: Callable[[int, float], float], lengths: Lengths, batch: EngineBatch
) -> RolloutBound:
    """The bound of a batch, but for its cache.

    Args:
        step_s: Seconds of a decode step of so many rows at a mean context.
        lengths: Of responses.
        batch: Its `kv_tokens` are not looked at.
    """
    slots, half = batch.slots, (batch.slots + 1) // 2
    context = batch.prompt_tokens + lengths.mean_square / (2 * lengths.mean)
    one_s, two_s, half_s, full_s = (step_s(rows, context) for rows in (1, 2, half, slots))
    first_s = min(two_s - one_s, (full_s - one_s) / max(1, slots - 1))
    last_s = (full_s - half_s) / max(1, slots - half)
    tokens = batch.samples / batch.replicas * lengths.mean
    return RolloutBound(
        full_s=tokens * full_s / slots,
        steps=max(expected_maximum(lengths, batch.samples), tokens / slots),
        held=token_steps(lengths, batch),
        lines=tuple(
            (max(0.0, min(one_s - row_s, full_s - slots * row_s)), tokens * row_s)
            for row_s in (max(0.0, first_s), max(0.0, last_s))
        ),
    )
