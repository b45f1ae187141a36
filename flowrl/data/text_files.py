"""Data files of text: JSON lines, one JSON array, CSV.

Lines are read in binary and decoded one by one, so that the place of a row is its byte, and a row
that is not UTF-8 costs no other.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from flowrl.data.row_file import DataFile, Fields, Record
from flowrl.errors import DataError
from flowrl.wording import excerpt

_CHUNK = 1 << 20

_MAX_CELL = 1 << 24
"""Characters of the largest cell of a CSV file; a quote that is never closed ends there."""

_TO_UTF8 = "convert the file with its own encoding: iconv -f LATIN1 -t UTF-8 FILE > NEW"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def parse_object(line: bytes, *, first: bool = False) -> Fields | DataError:
    """Returns the object of a line, or why there is none.

    Args:
        first: The line is the first of its file, which may begin with a byte order mark.
    """
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
        value = _DECODER.decode(text)
    except UnicodeDecodeError as reason:
        return DataError(f"not UTF-8 at byte {reason.start + 1} of the line", hint=_TO_UTF8)
    except json.JSONDecodeError as reason:
        return DataError(f"not JSON: {reason.msg} at column {reason.colno}", found=excerpt(text))
    except RecursionError:
        return DataError("not usable JSON: nested too deeply")
    except ValueError as reason:
        return DataError(f"not usable JSON: {reason}", found=excerpt(text))
    if not isinstance(value, dict):
        return DataError("the line is no JSON object", found=excerpt(text))
    return value


class JsonLinesFile(DataFile):
    """One JSON object a line; blank lines are no rows."""

    def _scan(self) -> Iterator[Record]:
        place = 0
        with self.path.open("rb") as file:
            # Binary lines end at \n alone; text mode would also split at U+2028 in strings.
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Record(place, number, parse_object(line, first=place == 0))
                place += len(line)

    def _read(self, place: int) -> Fields | DataError:
        with self.path.open("rb") as file:
            file.seek(place)
            return parse_object(file.readline(), first=place == 0)


class JsonArrayFile(DataFile):
    """One JSON array of objects, which is in memory as a whole."""

    _unit = "row "

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._elements: list[object] = []

    def _scan(self) -> Iterator[Record]:
        self._elements = self._parsed()
        for place, element in enumerate(self._elements):
            yield Record(place, place + 1, _as_object(element))

    def _read(self, place: int) -> Fields | DataError:
        return _as_object(self._elements[place])

    def _parsed(self) -> list[object]:
        where = str(self.path)
        try:
            value = _DECODER.decode(self.path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as reason:
            line = reason.object[: reason.start].count(b"\n") + 1
            raise DataError("not UTF-8", where=f"{where}:{line}", hint=_TO_UTF8) from None
        except json.JSONDecodeError as reason:
            raise DataError(f"not JSON: {reason.msg}", where=f"{where}:{reason.lineno}") from None
        except (RecursionError, ValueError) as reason:
            raise DataError(f"not usable JSON: {reason}", where=where) from None
        if not isinstance(value, list):
            raise DataError("this is no JSON array", where=where, expected="a list of objects")
        return value


def _as_object(value: object) -> Fields | DataError:
    if isinstance(value, dict):
        return value
    return DataError("the element of the array is no JSON object", found=excerpt(repr(value)))


class CsvFile(DataFile):
    """Comma-separated values with a header; also by tabs or semicolons."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        csv.field_size_limit(_MAX_CELL)
        with path.open("rb") as file:
            head = file.read(_CHUNK).removeprefix(codecs.BOM_UTF8)
        self._delimiter = delimiter_of(head.lstrip().partition(b"\n")[0]) or ","
        self._header: list[str] = []

    def _scan(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            lines = _TextLines(file)
            rows = csv.reader(lines, delimiter=self._delimiter, strict=True)
            header = self._next(rows)
            self._header = self._checked_header(header)
            while True:
                place, number = lines.place, lines.number + 1
                cells = self._next(rows)
                if cells is None:
                    return
                if cells != []:
                    yield Record(place, number, self._fields(cells))

    def _read(self, place: int) -> Fields | DataError:
        with self.path.open("rb") as file:
            file.seek(place)
            rows = csv.reader(_TextLines(file), delimiter=self._delimiter, strict=True)
            return self._fields(self._next(rows) or [])

    @staticmethod
    def _next(rows: Iterator[list[str]]) -> list[str] | DataError | None:
        try:
            return next(rows, None)
        except csv.Error as reason:
            return DataError(f"not CSV: {reason}", hint="a quote in a quoted cell is written twice")

    def _checked_header(self, header: list[str] | DataError | None) -> list[str]:
        if isinstance(header, DataError):
            raise DataError(header.what, where=self.where(1), hint=header.hint)
        header = header or []
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise DataError(
                "two columns have the same name",
                where=self.where(1),
                found=", ".join(map(repr, twice)),
                expected="a first line with the names of the columns",
            )
        return header

    def _fields(self, cells: list[str] | DataError) -> Fields | DataError:
        if isinstance(cells, DataError):
            return cells
        if len(cells) != len(self._header):
            return DataError(
                f"the row has {len(cells)} cells, and the header has {len(self._header)}",
                found=excerpt(repr(cells)),
            )
        if any("\udc80" <= c <= "\udcff" for cell in cells if not cell.isascii() for c in cell):
            return DataError("the row is not UTF-8", hint=_TO_UTF8)
        return dict(zip(self._header, cells, strict=True))


class _TextLines:
    """The lines of a file as text; bytes that are not UTF-8 become lone surrogates.

    Attributes:
        place: The byte at which the next line begins.
        number: Lines that were read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.place = file.tell()
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        text = line.removeprefix(codecs.BOM_UTF8) if self.place == 0 else line
        self.place += len(line)
        self.number += 1
        return text.decode("utf-8", errors="surrogateescape")


def delimiter_of(header: bytes) -> str:
    """Returns the sign that separates most cells of a header; empty where there is none."""
    counts = {sign: header.count(sign.encode()) for sign in ",\t;"}
    best = max(counts, key=lambda sign: counts[sign])
    return best if counts[best] else ""
