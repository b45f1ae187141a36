"""Data rows: JSON lines files and the built-in arithmetic, read once, checked row by row.

A row that cannot be used is never dropped in silence: it is kept as a `RowProblem` with its file
and line, and past `data.max_bad_rows` reading stops with a `DataError` that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias, overload

from flowrl.backend.batch import Ints
from flowrl.config.schema import ArithmeticData, DataConfig, JsonlData
from flowrl.data.order import permutation
from flowrl.data.templates import Template, field_text
from flowrl.errors import DataError

__all__ = ["Row", "RowProblem", "Rows", "Split", "load_rows"]

Split: TypeAlias = Literal["train", "eval"]

_MAX_SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem.

    Attributes:
        index: Its place in the source, counted from 0; with the epoch it names a group.
        prompt: What the policy is asked.
        answer: The reference answer that rewards compare with; empty where the data has none.
        solution: The response that supervised stages learn from.
        fields: Every field of the row as it was read, for the user's own rewards.
        where: `file:line`, for messages.
    """

    index: int
    prompt: str
    answer: str
    solution: str
    fields: Mapping[str, object]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A row that cannot be used: where it is and why."""

    where: str
    reason: str


class Rows(Sequence[Row]):
    """The usable rows of a source, in its order, and the problems met on the way.

    Attributes:
        source: The file, or the name of a built-in, for messages.
        problems: Rows that were left out.
    """

    def __init__(
        self, rows: Sequence[Row], *, source: str, problems: Sequence[RowProblem] = ()
    ) -> None:
        self._rows = rows
        self.source = source
        self.problems = tuple(problems)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> Rows: ...
    def __getitem__(self, place: int | slice) -> Row | Rows:
        if isinstance(place, slice):
            return Rows(self._rows[place], source=self.source, problems=self.problems)
        return self._rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Rows({self.source!r}, {len(self)} rows, {len(self.problems)} problems)"


def load_rows(source: str | ArithmeticData | JsonlData, data: DataConfig, *, split: Split) -> Rows:
    """Reads `data.train` or `data.eval`.

    A held-out row needs no solution: where one cannot be made, it is empty.

    Args:
        source: A path to a JSON lines file (the templates beside it in `data` apply), or a mapping
            with its own.
        split: Which of the two it is; for messages and for whether solutions are required.

    Raises:
        ConfigError: A template that cannot be parsed.
        DataError: No such file, no usable row, or more bad rows than `data.max_bad_rows`.
    """
    if isinstance(source, ArithmeticData):
        return _arithmetic(source)
    where = f"data.{split}"
    if isinstance(source, str):
        keys = "data"
        source = JsonlData(
            kind="jsonl",
            path=Path(source),
            prompt=data.prompt,
            answer=data.answer,
            solution=data.solution,
        )
    else:
        keys = where
    return _Reader(source, keys, split, data.max_bad_rows).read()


class _Reader:
    """Reads one JSON lines file; blank lines are no rows."""

    def __init__(self, source: JsonlData, keys: str, split: Split, max_bad_rows: int) -> None:
        self._source = source
        self._split = split
        self._max_bad_rows = max_bad_rows
        self._prompt = Template.parse(source.prompt, key=f"{keys}.prompt")
        self._solution = Template.parse(source.solution, key=f"{keys}.solution")
        self._answer_key = f"{keys}.answer"
        self._problems: list[RowProblem] = []

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
                        rows.append(self._row(line, index=num_read, where=where))
                    except DataError as problem:
                        self._count(problem, where)
                    num_read += 1
        except OSError as reason:
            raise self._unreadable(reason) from reason
        if not rows:
            raise DataError(
                "the data file has no usable row" if num_read else "the data file is empty",
                where=str(path),
                found=self._problems[0].reason if self._problems else None,
                expected="one JSON object a line",
                hint=f"point data.{self._split} at a file with rows",
            )
        return Rows(rows, source=str(path), problems=self._problems)

    def _row(self, line: bytes, *, index: int, where: str) -> Row:
        fields = _parse(line, first=index == 0)
        prompt = self._prompt.render(fields)
        if not prompt.strip():
            raise DataError("the prompt is empty", found=repr(prompt))
        name = self._source.answer
        answer = field_text(fields, name, key=self._answer_key) if name else ""
        try:
            solution = self._solution.render(fields)
        except DataError:
            if self._split == "train":
                raise
            solution = ""
        return Row(
            index=index,
            prompt=prompt,
            answer=answer,
            solution=solution,
            fields=fields,
            where=where,
        )

    def _count(self, problem: DataError, where: str) -> None:
        reason = "; ".join(part for part in (problem.what, problem.found) if part)
        self._problems.append(RowProblem(where=where, reason=reason))
        bad = len(self._problems)
        if bad > self._max_bad_rows:
            others = ", ".join(p.where for p in self._problems[:-1][:_MAX_SHOWN_PROBLEMS])
            raise DataError(
                problem.what,
                where=where,
                found=problem.found,
                expected=f"at most {self._max_bad_rows} bad rows (data.max_bad_rows), this is bad "
                f"row {bad}" + (f" after {others}" if others else ""),
                hint=problem.hint or "mend the row, or raise data.max_bad_rows to leave such out",
            ) from None

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
    """Rows made when they are asked for: three digits have a million pairs."""

    def __init__(self, digits: int, split: Split, pairs: Ints) -> None:
        self._digits = digits
        self._split = split
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> _Sums: ...
    def __getitem__(self, place: int | slice) -> Row | _Sums:
        if isinstance(place, slice):
            return _Sums(self._digits, self._split, self._pairs[place])
        index = range(len(self))[place]
        digits = self._digits
        a, b = divmod(int(self._pairs[index]), 10**digits)
        answer = f"{a + b:0{digits + 1}d}"
        return Row(
            index=index,
            prompt=f"{a:0{digits}d}+{b:0{digits}d}=",
            answer=answer,
            solution=answer,
            fields={"a": a, "b": b, "answer": answer},
            where=f"arithmetic {self._split}:{index + 1}",
        )


def _arithmetic(source: ArithmeticData) -> Rows:
    num_pairs = 100**source.digits
    if source.held_out >= num_pairs:
        raise DataError(
            "the held-out sums leave none to train on",
            where=f"data.{source.split}.held_out",
            found=str(source.held_out),
            expected=f"fewer than the {num_pairs} sums of {source.digits}-digit numbers",
        )
    order = permutation(num_pairs, "arithmetic", source.digits)
    pairs = order[: source.held_out] if source.split == "eval" else order[source.held_out :]
    return Rows(
        _Sums(source.digits, source.split, pairs),
        source=f"arithmetic {source.split}, {source.digits} digits",
    )
