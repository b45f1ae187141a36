"""What the work of a step costs beside generation: by the samples, linear in what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flowrl.sim.workload import GroupDraw


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWork:
    """What a node of the batch part is given.

    Attributes:
        calls: Times that the backend is called: mini-batches of an update.
        passes: Micro-batches of all calls.
        rows: Samples.
        tokens: Of all rows, prompts included.
        distinct: Of those, what is left where each group's common beginnings count once, and the
            last token of a row, which is nobody's input, not at all.
        response_tokens: Of all rows.
    """

    calls: int = 1
    passes: int = 1
    rows: float = 0.0
    tokens: float = 0.0
    distinct: float = 0.0
    response_tokens: float = 0.0

    def scaled(self, share: float, *, calls: int = 1, micro_batch: int = 0) -> BatchWork:
        """A share of the same samples, in so many calls and passes of `micro_batch` rows."""
        rows = self.rows * share
        in_call = math.ceil(rows / calls / micro_batch) if micro_batch else 1
        return BatchWork(
            calls=calls,
            passes=calls * in_call,
            rows=rows,
            tokens=self.tokens * share,
            distinct=self.distinct * share,
            response_tokens=self.response_tokens * share,
        )


def batch_work(
    groups: Iterable[GroupDraw], said: Callable[[int], int] = lambda drawn: 0
) -> BatchWork:
    """What the samples of whole groups hold.

    Args:
        said: Tokens of an environment in an episode in which so many are drawn.
    """
    rows = tokens = responses = 0
    distinct = 0.0
    for group in groups:
        members, drawn = len(group.lengths), sum(group.lengths)
        rows += members
        responses += drawn
        heard = sum(map(said, group.lengths))
        tokens += members * group.prompt_tokens + drawn + heard
        distinct += group.prompt_tokens + group.distinct * (drawn + heard - members)
    return BatchWork(rows=rows, tokens=tokens, distinct=distinct, response_tokens=float(responses))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """So many seconds for each call, micro-batch, row, token and distinct token.

    A backend that computes common beginnings once has `token_s` near 0, another `distinct_s`.
    """

    call_s: float = 0.0
    pass_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    distinct_s: float = 0.0

    def __call__(self, work: BatchWork) -> float:
        return (
            self.call_s * work.calls
            + self.pass_s * work.passes
            + self.row_s * work.rows
            + self.token_s * work.tokens
            + self.distinct_s * work.distinct
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """What the driver itself takes.

    Attributes:
        step_s: A step.
        offer_s: A sample that is offered: its admission, its request to an engine.
        sample_s: A sample that ends: its report, its text, its way to the scorer.
        answer_s: A sample that is scored: its score, the verdict on it, its delivery.
        row_s: A sample that is learned from: its place in the batch, its rows of the logs.
    """

    step_s: float = 0.0
    offer_s: float = 0.0
    sample_s: float = 0.0
    answer_s: float = 0.0
    row_s: float = 0.0
