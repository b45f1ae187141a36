"""How long an engine takes: one decode step of a batch, and the prefill of what enters it.

An engine is a `StepTime`. Whoever simulates never asks for single steps where nothing changes:
between two ends the batch is the same and each step makes every row longer by one token, so the
time of k steps is that of k times the step in the middle, exactly where the step time is linear in
the context (`decode_run_s`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from flowrl.errors import ConfigError

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


class DecodeTable:
    """Decode step times at measured batches and contexts; linear in between and beyond.

    Contexts need not be the same for every batch, for large batches of long contexts fit no device.
    Below the smallest batch and the shortest context the value there is taken; beyond the largest
    the last two go on in a line. A batch with one context has no slope of its own and takes that of
    the batch below it, in proportion to the rows.

    >>> table = DecodeTable([(1, 100, 0.01), (1, 300, 0.02), (9, 100, 0.05), (9, 300, 0.06)])
    >>> round(table.at(5, 200.0), 4)
    0.035

    Args:
        points: `(batch, context, seconds)`.

    Raises:
        ConfigError: no point, or two for one place.
    """

    __slots__ = ("_batches", "_cache", "_lines")

    def __init__(self, points: Iterable[tuple[int, float, float]]) -> None:
        by_batch: dict[int, dict[float, float]] = {}
        for batch, context, seconds in points:
            row = by_batch.setdefault(batch, {})
            if context in row or seconds < 0 or batch < 1:
                raise ConfigError(
                    "a decode time that cannot be used",
                    found=f"batch {batch}, context {context:g}: {seconds:g} s",
                    expected="one time of at least 0 for each batch and context",
                )
            row[context] = seconds
        if not by_batch:
            raise ConfigError("a table of decode times is empty", expected="at least one point")
        self._batches = sorted(by_batch)
        self._lines: list[_Line] = []
        for batch in self._batches:
            row = by_batch[batch]
            contexts = sorted(row)
            line = _Line(contexts, [row[c] for c in contexts])
            if len(contexts) == 1 and self._lines:
                below = self._lines[-1]
                ratio = batch / self._batches[len(self._lines) - 1]
                line.slope = ratio * below.slope_at(contexts[0])
            self._lines.append(line)
        self._cache: dict[int, tuple[_Line, _Line, float]] = {}

    def at(self, batch: int, context: float) -> float:
        """Seconds of a step."""
        found = self._cache.get(batch)
        if found is None:
            found = self._cache[batch] = self._between(batch)
        low, high, share = found
        if share == 0.0:
            return low.at(context)
        return (1.0 - share) * low.at(context) + share * high.at(context)

    def _between(self, batch: int) -> tuple[_Line, _Line, float]:
        """The lines of the batches below and above, and how far up it is; more than 1 beyond."""
        batches, lines = self._batches, self._lines
        if len(batches) == 1 or batch <= batches[0]:
            return lines[0], lines[0], 0.0
        above = min(max(bisect_right(batches, batch), 1), len(batches) - 1)
        low, high = batches[above - 1], batches[above]
        return lines[above - 1], lines[above], (batch - low) / (high - low)


class _Line:
    """Seconds by context, of one batch."""

    __slots__ = ("contexts", "seconds", "slope")

    def __init__(self, contexts: list[float], seconds: list[float]) -> None:
        self.contexts = contexts
        self.seconds = seconds
        self.slope = 0.0  # of a line with one point

    def at(self, context: float) -> float:
        contexts, seconds = self.contexts, self.seconds
        if context <= contexts[0]:
            return seconds[0]
        if len(contexts) == 1:
            return seconds[0] + self.slope * (context - contexts[0])
        above = min(bisect_right(contexts, context), len(contexts) - 1)
        low = contexts[above - 1]
        share = (context - low) / (contexts[above] - low)
        return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])

    def slope_at(self, context: float) -> float:
        return self.at(context + 1.0) - self.at(context)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPrefill:
    """`call_s + row_s * rows + token_s * tokens`, of the rows that enter together."""

    call_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0

    def __call__(self, rows: int, tokens: int) -> float:
        return self.call_s + self.row_s * rows + self.token_s * tokens


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
