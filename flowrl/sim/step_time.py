"""How long an engine takes: one decode step of a batch, and the prefill of what enters it.

An engine is a `StepTime`. Whoever simulates never asks for single steps where nothing changes:
between two ends the batch is the same and each step makes every row longer by one token, so the
time of k steps is that of k times the step in the middle, exactly where the step time is linear in
the context (`decode_run_s`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowrl.cost.decode_table import DecodeTable, LinearPrefill

__all__ = ["ConstantStep", "DecodeTable", "LinearPrefill", "StepTime", "TableStep", "decode_run_s"]


class StepTime(Protocol):
    """What an engine of one replica costs."""

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        """Seconds of one decode step: one more token for each of `batch` rows.

        Args:
            context: Mean tokens of a row so far, its prompt included; `batch * context` tokens of
                keys and values are read.
            longest: Tokens of the longest row; what engines that pad pay for.
        """
        ...

    def prefill_s(self, rows: int, tokens: int) -> float:
        """Seconds in which rows enter the batch, with their first token drawn.

        Args:
            tokens: That have to be computed; of a prompt that rows share, once.
        """
        ...

    def leave_s(self) -> float:
        """Seconds that a step takes longer because some of its rows end with it."""
        ...


def decode_run_s(
    step_time: StepTime, batch: int, context: float, longest: float, steps: int
) -> float:
    """Seconds of `steps` decode steps of the same rows, which grow by a token a step."""
    if steps <= 0:
        return 0.0
    middle = (steps - 1) / 2
    return steps * step_time.decode_s(batch, context + middle, longest + middle)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantStep:
    """Every decode step takes as long, whatever the batch; a row enters in the time of a step.

    With `step_s=1` a sample of n tokens holds its slot for n seconds, so times are decode steps:
    what bounds on schedules speak of.
    """

    step_s: float = 1.0
    prefill: float | None = None

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        """See `StepTime`."""
        return self.step_s

    def prefill_s(self, rows: int, tokens: int) -> float:
        """See `StepTime`."""
        return self.step_s if self.prefill is None else self.prefill

    def leave_s(self) -> float:
        """See `StepTime`."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStep:
    """Measured times.

    Attributes:
        longest_share: How far the step depends on the longest row in place of the mean one, 0 to 1;
            1 where rows are padded.
        leave: Seconds that the batch loses each time some of its rows end.
    """

    decode: DecodeTable
    prefill: LinearPrefill
    longest_share: float = 0.0
    leave: float = 0.0

    def decode_s(self, batch: int, context: float, longest: float) -> float:
        """See `StepTime`."""
        return self.decode.at(batch, context + self.longest_share * (longest - context))

    def prefill_s(self, rows: int, tokens: int) -> float:
        """See `StepTime`."""
        return self.prefill(rows, tokens)

    def leave_s(self) -> float:
        """See `StepTime`."""
        return self.leave
