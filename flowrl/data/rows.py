"""Data rows: prompts with their answers and responses, and those that cannot be used.

A row that cannot be used is never dropped silently: it is kept as a `RowProblem` with its file
and line, and past `data.max_bad_rows` reading stops with a `DataError` that names it. Rows that
`data.difficulty` leaves out are counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias, overload

from flowrl.data.conversations import Message, message_text
from flowrl.errors import DataError

Split: TypeAlias = Literal["train", "eval"]

_MAX_SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of data: a prompt with its answer, solution and further fields.

    Attributes:
        index: Its place in the source, counted from 0; with the epoch it names a group.
        prompt: The text that the policy answers; of a conversation the text of its last message.
        messages: The conversation that the policy answers, with the system message and examples of
            the configuration; empty where the prompt is a text alone.
        tools: The tools that the policy may call, as JSON schemas.
        answer: The reference answer that rewards compare with; empty where the data has none.
        solution: The response that supervised stages learn from; of a pair, the preferred one.
        rejected: The other response of a pair; None where rows were not read for pairs.
        fields: Every field of the row as it was read, for the user's own rewards.
        where: `file:line`, for messages.
        source: The source of a mixture that the row is from; empty without a mixture.
    """

    index: int
    prompt: str
    messages: tuple[Message, ...] = ()
    tools: tuple[object, ...] = ()
    answer: str
    solution: str
    rejected: str | None = None
    fields: Mapping[str, object]
    where: str
    source: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the prompt, from which a new tokenizer learns."""
        return tuple(map(message_text, self.messages)) or (self.prompt,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A row that cannot be used.

    Attributes:
        where: Its place.
        what: The kind of its mistake.
        reason: The mistake with what was found.
        hint: What to do about it.
        is_unreadable: True if the file's format is broken there.
    """

    where: str
    what: str
    reason: str
    hint: str | None = None
    is_unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """The fields of rows that are read besides the prompt; a row may lack the others.

    Attributes:
        answer: True if a reward or an environment reads the answer.
        number: True if a reward reads the answer as one number (`flowrl.algo.numbers`).
        solution: True if a stage learns from the solution, the preferred response of pairs.
        rejected: True if a stage learns from pairs; only then are rejected responses read. A
            held-out row may lack one.
        fields: Further fields of rows that maps read, by their paths.
    """

    answer: bool = True
    number: bool = False
    solution: bool = True
    rejected: bool = False
    fields: tuple[str, ...] = ()

    def responses_of(self, row: Row) -> tuple[str, ...]:
        """Returns the responses of a row that the tokenizer must know."""
        solution = (row.solution,) if self.solution else ()
        return solution if row.rejected is None else (*solution, row.rejected)


class BadRows:
    """The rows of a source that cannot be used, up to `data.max_bad_rows`.

    Attributes:
        problems: The bad rows, in the order of the file.
    """

    def __init__(self, max_bad_rows: int = 0) -> None:
        self._max_bad_rows = max_bad_rows
        self.problems: list[RowProblem] = []

    def count(self, problem: DataError, where: str, *, is_unreadable: bool = False) -> None:
        """Counts a bad row.

        Raises:
            DataError: It is one too many; the error names this row and earlier bad ones.
        """
        reason = "; ".join(part for part in (problem.what, problem.found) if part)
        self.problems.append(
            RowProblem(
                where=where,
                what=problem.what,
                reason=reason,
                hint=problem.hint,
                is_unreadable=is_unreadable,
            )
        )
        bad = len(self.problems)
        if bad > self._max_bad_rows:
            earlier = ", ".join(p.where for p in self.problems[:-1][:_MAX_SHOWN_PROBLEMS])
            raise DataError(
                problem.what,
                where=where,
                found=problem.found,
                expected=f"at most {self._max_bad_rows} bad rows (data.max_bad_rows), this is bad "
                f"row {bad}" + (f" after {earlier}" if earlier else ""),
                hint=problem.hint
                or "correct the row, or raise data.max_bad_rows to leave such out",
            ) from None


class RowSequence(Sequence[Row], ABC):
    """Rows that are made when they are asked for."""

    @abstractmethod
    def _row(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        chosen = range(len(self))[place]
        return self._row(chosen) if isinstance(chosen, int) else [self._row(i) for i in chosen]


class Rows(RowSequence):
    """The usable rows of a source, in its order, and the problems met on the way.

    Attributes:
        source: The file, or the name of a built-in, for messages.
        bad: Rows that were left out because they cannot be used; later checks add to them.
        num_out_of_band: Rows that `data.difficulty` left out.
        num_read: All rows of the source, also those that were left out.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        source: str,
        bad: BadRows | None = None,
        num_out_of_band: int = 0,
        num_read: int | None = None,
    ) -> None:
        self._rows = rows
        self.num_read = len(rows) if num_read is None else num_read
        self.source = source
        self.bad = BadRows() if bad is None else bad
        self.num_out_of_band = num_out_of_band

    @property
    def problems(self) -> tuple[RowProblem, ...]:
        """The problems of the rows that were left out."""
        return tuple(self.bad.problems)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def _row(self, place: int) -> Row:
        return self._rows[place]


class MixedRows(RowSequence):
    """The rows of several sources, one source after the other.

    Args:
        parts: The rows of each source, by its name.
    """

    def __init__(self, parts: Mapping[str, Rows]) -> None:
        self._parts = list(parts.items())
        self._ends = list(accumulate(len(rows) for rows in parts.values()))
        # Rows keep their index where rows before them are corrected.
        self._offsets = [0, *accumulate(rows.num_read for rows in parts.values())]

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Row]:
        for part, (_, rows) in enumerate(self._parts):
            yield from (self._of(part, row) for row in rows)

    def _row(self, place: int) -> Row:
        part = bisect_right(self._ends, place)
        return self._of(part, self._parts[part][1][place - (self._ends[part - 1] if part else 0)])

    def _of(self, part: int, row: Row) -> Row:
        return replace(row, index=row.index + self._offsets[part], source=self._parts[part][0])
