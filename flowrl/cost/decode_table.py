"""Times of an engine that were measured: decode steps by batch and context, and a prefill line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from flowrl.errors import ConfigError


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
                    where="decode times",
                    hint="measure them again with `flowrl profile CONFIG`",
                )
            row[context] = seconds
        if not by_batch:
            raise ConfigError(
                "a table of decode times is empty",
                expected="at least one point",
                where="decode times",
                hint="measure them with `flowrl profile CONFIG`",
            )
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
