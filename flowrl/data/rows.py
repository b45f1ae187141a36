"""Data rows: JSON lines files and the built-in arithmetic, read once, checked row by row.

A row that cannot be used is never dropped silently: it is kept as a `RowProblem` with its file
and line, and past `data.max_bad_rows` reading stops with a `DataError` that names it. Rows that
`data.difficulty` leaves out are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias, overload

from flowrl.algo.numbers import answer_number
from flowrl.backend.batch import Ints
from flowrl.config.data import ArithmeticData, DataConfig, DifficultyConfig, JsonlData
from flowrl.data.row_order import permutation
from flowrl.data.templates import Template, field_number, field_text
from flowrl.errors import DataError

__all__ = ["BadRows", "Row", "RowNeeds", "RowProblem", "Rows", "Split", "load_rows"]

Split: TypeAlias = Literal["train", "eval"]

_MAX_SHOWN_PROBLEMS = 3

_TIMES = 4
"""Wrong answers to each sum: a reward model would memorise a single one."""

_MISTAKES = (1, 2, 9, 10, 11, 20)
"""The usual errors of wrong sums: a little in the last place, in the one before it, or in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of data: a prompt with its answer, solution and further fields.

    Attributes:
        index: Its place in the source, counted from 0; with the epoch it names a group.
        prompt: The text that the policy answers.
        answer: The reference answer that rewards compare with; empty where the data has none.
        solution: The response that supervised stages learn from; of a pair, the preferred one.
        rejected: The other response of a pair; None where rows were not read for pairs.
        fields: Every field of the row as it was read, for the user's own rewards.
        where: `file:line`, for messages.
    """

    index: int
    prompt: str
    answer: str
    solution: str
    rejected: str | None = None
    fields: Mapping[str, object]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A row that cannot be used, with its place and the reason."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """The fields of rows that are read besides the prompt; a row may lack the others.

    Attributes:
        answer: True if a reward or an environment reads the answer.
        number: True if a reward reads the answer as one number (`flowrl.algo.numbers`).
        solution: True if a stage learns from the solution, the preferred response of pairs.
        rejected: True if a stage learns from pairs; only then are rejected responses read.
    """

    answer: bool = True
    number: bool = False
    solution: bool = True
    rejected: bool = False

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

    def count(self, problem: DataError, where: str) -> None:
        """Counts a bad row.

        Raises:
            DataError: It is one too many; the error names this row and earlier bad ones.
        """
        reason = "; ".join(part for part in (problem.what, problem.found) if part)
        self.problems.append(RowProblem(where=where, reason=reason))
        bad = len(self.problems)
        if bad > self._max_bad_rows:
            others = ", ".join(p.where for p in self.problems[:-1][:_MAX_SHOWN_PROBLEMS])
            raise DataError(
                problem.what,
                where=where,
                found=problem.found,
                expected=f"at most {self._max_bad_rows} bad rows (data.max_bad_rows), this is bad "
                f"row {bad}" + (f" after {others}" if others else ""),
                hint=problem.hint
                or "correct the row, or raise data.max_bad_rows to leave such out",
            ) from None


class Rows(Sequence[Row]):
    """The usable rows of a source, in its order, and the problems met on the way.

    Attributes:
        source: The file, or the name of a built-in, for messages.
        bad: Rows that were left out because they cannot be used; later checks add to them.
        num_out_of_band: Rows that `data.difficulty` left out.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        source: str,
        bad: BadRows | None = None,
        num_out_of_band: int = 0,
    ) -> None:
        self._rows = rows
        self.source = source
        self.bad = BadRows() if bad is None else bad
        self.num_out_of_band = num_out_of_band

    @property
    def problems(self) -> tuple[RowProblem, ...]:
        """The problems of the rows that were left out."""
        return tuple(self.bad.problems)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> Rows: ...
    def __getitem__(self, place: int | slice) -> Row | Rows:
        if isinstance(place, slice):
            return Rows(
                self._rows[place],
                source=self.source,
                bad=self.bad,
                num_out_of_band=self.num_out_of_band,
            )
        return self._rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Rows({self.source!r}, {len(self)} rows, {len(self.problems)} problems)"


def load_rows(
    source: str | ArithmeticData | JsonlData,
    data: DataConfig,
    *,
    split: Split,
    needs: RowNeeds | None = None,
) -> Rows:
    """Reads `data.train` or `data.eval`.

    An answer or a solution that is not needed is empty where the row has none. A held-out row is
    taken whatever its difficulty, so that what is measured does not depend on what is trained on.

    Args:
        source: A path to a JSON lines file (the templates of `data` apply), or a mapping with its
            own templates.
        split: Which of the two is read.
        needs: The fields that rows must have; a row without them is bad, and so is a pair of equal
            responses. By default an answer, and a solution for training.

    Raises:
        ConfigError: A template that cannot be parsed.
        DataError: No such file, no usable row, or more bad rows than `data.max_bad_rows`.
    """
    needs = RowNeeds(solution=split == "train") if needs is None else needs
    if isinstance(source, ArithmeticData):
        return _arithmetic(source, needs)
    where = f"data.{split}"
    if isinstance(source, str):
        keys = "data"
        source = JsonlData(
            kind="jsonl",
            path=Path(source),
            prompt=data.prompt,
            answer=data.answer,
            solution=data.solution,
            rejected=data.rejected,
        )
    else:
        keys = where
    return _Reader(source, keys, split, needs, data).read()


class _Reader:
    """Reads a JSON lines file; blank lines are no rows."""

    def __init__(
        self, source: JsonlData, keys: str, split: Split, needs: RowNeeds, data: DataConfig
    ) -> None:
        self._source = source
        self._split = split
        self._needs = needs
        self._band = _Band(data.difficulty) if data.difficulty and split == "train" else None
        pairs = needs.rejected and split == "train"
        self._rejected = Template.parse(source.rejected, key=f"{keys}.rejected") if pairs else None
        self._prompt = Template.parse(source.prompt, key=f"{keys}.prompt")
        self._solution = (
            Template.parse(source.solution, key=f"{keys}.solution")
            if source.solution or needs.solution
            else None
        )
        self._answer_key = f"{keys}.answer"
        self._bad = BadRows(data.max_bad_rows)

    def read(self) -> Rows:
        path = self._source.path
        rows: list[Row] = []
        num_read = 0
        try:
            with path.open("rb") as file:
                # Binary lines end at \n alone; text mode would also split at U+2028 in strings.
                for number, line in enumerate(file, start=1):
                    if not line.strip():
                        continue
                    if self._source.max_rows and num_read >= self._source.max_rows:
                        break
                    where = f"{path}:{number}"
                    try:
                        if (row := self._row(line, index=num_read, where=where)) is not None:
                            rows.append(row)
                    except DataError as problem:
                        self._bad.count(problem, where)
                    num_read += 1
        except OSError as reason:
            raise self._unreadable(reason) from reason
        out_of_band = self._band.num_outside if self._band is not None else 0
        if not rows and self._band is not None and out_of_band:
            raise self._band.nothing_left(str(path))
        if not rows:
            raise DataError(
                "the data file has no usable row" if num_read else "the data file is empty",
                where=str(path),
                found=self._bad.problems[0].reason if self._bad.problems else None,
                expected="one JSON object a line",
                hint=f"point data.{self._split} at a file with rows",
            )
        return Rows(rows, source=str(path), bad=self._bad, num_out_of_band=out_of_band)

    def _row(self, line: bytes, *, index: int, where: str) -> Row | None:
        """Returns the row of a line; None where its difficulty is outside the band."""
        fields = _parse(line, first=index == 0)
        if self._band is not None and not self._band.holds(fields):
            return None
        prompt = self._prompt.render(fields)
        if not prompt.strip():
            raise DataError("the prompt is empty", found=repr(prompt))
        name = self._source.answer
        try:
            answer = field_text(fields, name, key=self._answer_key) if name else ""
        except DataError:
            if self._needs.answer:
                raise
            answer = ""
        if self._needs.number and answer_number(answer) is None:
            raise DataError(
                f"field {name!r}, which {self._answer_key} reads, cannot be read as one number, "
                "which a reward compares with",
                found=_excerpt(repr(answer)),
                hint="write one number, such as 12, -3/4 or 2.5e3, score with exact_match, or "
                "raise data.max_bad_rows to leave such rows out",
            )
        try:
            solution = "" if self._solution is None else self._solution.render(fields)
        except DataError:
            if self._needs.solution:
                raise
            solution = ""
        rejected = None if self._rejected is None else self._rejected.render(fields)
        if rejected is not None:
            _check_pair(solution, rejected)
        return Row(
            index=index,
            prompt=prompt,
            answer=answer,
            solution=solution,
            rejected=rejected,
            fields=fields,
            where=where,
        )

    def _unreadable(self, reason: OSError) -> DataError:
        path = self._source.path
        if path.is_dir():
            return DataError(
                "this is a folder, not a JSON lines file",
                where=f"data.{self._split}",
                found=str(path),
            )
        return DataError(
            "no such data file" if isinstance(reason, FileNotFoundError) else "cannot be read",
            where=f"data.{self._split}",
            found=f"{path}" if isinstance(reason, FileNotFoundError) else f"{path}: {reason}",
            hint=f"paths are taken from the working folder, {Path.cwd()}",
        )


class _Band:
    """The rows that `data.difficulty` keeps: low <= their solve rate <= high."""

    def __init__(self, difficulty: DifficultyConfig) -> None:
        self._difficulty = difficulty
        self._outside: list[float] = []

    @property
    def num_outside(self) -> int:
        return len(self._outside)

    def holds(self, fields: Mapping[str, object]) -> bool:
        rate = field_number(fields, self._difficulty.field, key="data.difficulty.field")
        if self._difficulty.low <= rate <= self._difficulty.high:
            return True
        self._outside.append(rate)
        return False

    def nothing_left(self, source: str) -> DataError:
        band = self._difficulty
        return DataError(
            f"data.difficulty leaves none of the {len(self._outside)} rows",
            where=source,
            found=f"{band.field} from {min(self._outside):g} to {max(self._outside):g}",
            expected=f"from {band.low:g} to {band.high:g} (data.difficulty.low and high)",
            hint="widen the band",
        )


def _check_pair(preferred: str, rejected: str) -> None:
    for name, text in (("preferred", preferred), ("rejected", rejected)):
        if not text.strip():
            raise DataError(f"the {name} response of the pair is empty", found=repr(text))
    if preferred == rejected:
        raise DataError(
            "the preferred and the rejected response are the same",
            found=_excerpt(repr(rejected)),
            hint="a pair says which of two is better; leave the row out",
        )


def _parse(line: bytes, *, first: bool) -> dict[str, object]:
    try:
        # Some editors put a byte order mark in front of a file.
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
        value = json.loads(text, parse_constant=_no_constant)
    except UnicodeDecodeError as reason:
        raise DataError(f"not UTF-8 at byte {reason.start + 1} of the line") from None
    except json.JSONDecodeError as reason:
        raise DataError(
            f"not JSON: {reason.msg} at column {reason.colno}", found=_excerpt(text)
        ) from None
    except RecursionError:
        raise DataError("not usable JSON: nested too deeply") from None
    except ValueError as reason:
        raise DataError(f"not usable JSON: {reason}", found=_excerpt(text)) from None
    if not isinstance(value, dict):
        raise DataError("the line is no JSON object", found=_excerpt(text))
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _excerpt(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class _Sums(Sequence[Row]):
    """Rows made on demand: three digits have a million pairs.

    For pairs of answers, all sums come `_TIMES` times, each time with another wrong answer.
    """

    def __init__(self, digits: int, split: Split, sums: Ints, needs: RowNeeds) -> None:
        self._digits = digits
        self._split = split
        self._sums = sums
        self._pairs = needs.rejected and split == "train"

    def __len__(self) -> int:
        return len(self._sums) * (_TIMES if self._pairs else 1)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        chosen = range(len(self))[place]
        return self._row(chosen) if isinstance(chosen, int) else [self._row(i) for i in chosen]

    def _row(self, index: int) -> Row:
        digits = self._digits
        time, place = divmod(index, len(self._sums))
        a, b = divmod(int(self._sums[place]), 10**digits)
        width = digits + 1
        answer = f"{a + b:0{width}d}"
        return Row(
            index=index,
            prompt=f"{a:0{digits}d}+{b:0{digits}d}=",
            answer=answer,
            solution=answer,
            rejected=f"{_wrong_sum(a, b, digits, time):0{width}d}" if self._pairs else None,
            fields={"a": a, "b": b, "answer": answer},
            where=f"arithmetic {self._split}:{index + 1}",
        )


def _wrong_sum(a: int, b: int, digits: int, time: int) -> int:
    """Returns a + b with a small error, always the same, with as many digits as a right sum.

    These are the mistakes of someone who nearly knows how to add, which a reward model must
    distinguish from right sums: mostly one of `_MISTAKES`, else anything up to 25. Sums of three
    digits are wrong by ten times that as often, sums of one digit by 9 at most.
    """
    draw = blake2b(f"{a}+{b}/{time}".encode(), digest_size=4).digest()
    common = draw[0] % 10 < 7
    error = _MISTAKES[draw[1] % len(_MISTAKES)] if common else 1 + draw[1] % 25
    if digits == 1:
        error = 1 + error % 9
    elif digits == 3 and draw[2] % 2:
        error *= 10
    if draw[3] % 2:
        error = -error
    # No error is above half of the range, so that one of the two lies in it.
    return a + b + error if 0 <= a + b + error < 2 * 10**digits else a + b - error


def _arithmetic(source: ArithmeticData, needs: RowNeeds) -> Rows:
    num_pairs = 100**source.digits
    if source.held_out >= num_pairs:
        raise DataError(
            "the held-out sums leave none to train on",
            where=f"data.{source.split}.held_out",
            found=str(source.held_out),
            expected=f"fewer than the {num_pairs} sums of {source.digits}-digit numbers",
        )
    order = permutation(num_pairs, "arithmetic", source.digits)
    sums = order[: source.held_out] if source.split == "eval" else order[source.held_out :]
    return Rows(
        _Sums(source.digits, source.split, sums, needs),
        source=f"arithmetic {source.split}, {source.digits} digits",
    )
