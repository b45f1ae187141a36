"""Data files of columns: Parquet and Arrow. Only here pyarrow is imported, and only to read one.

A scan holds one batch of rows. Rows that are asked for again come from columns in memory: of a
Parquet file the row groups that were asked for, of an Arrow file the mapped file itself.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.data.row_file import DataFile, Fields, Record
from flowrl.errors import DataError
from flowrl.wording import excerpt

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 1024


class _ColumnFile(DataFile):
    """What formats of columns have in common."""

    _unit = "row "

    def _scan(self) -> Iterator[Record]:
        place = 0
        try:
            for batch in self._batches():
                for fields in _rows_of(batch):
                    yield Record(place, place + 1, fields)
                    place += 1
        except _arrow_errors() as reason:
            raise self._broken(reason, place) from reason

    def _read(self, place: int) -> Fields | DataError:
        try:
            (fields,) = _rows_of(self._row(place))
        except _arrow_errors() as reason:
            raise self._broken(reason, place) from reason
        return fields

    def _broken(self, reason: Exception, num_read: int) -> DataError:
        text = str(reason).strip() or type(reason).__name__
        return DataError(
            f"the file is broken after {num_read} rows",
            where=str(self.path),
            found=excerpt(text.splitlines()[0], 200),
            hint="copy or download it again",
        )

    @abstractmethod
    def _batches(self) -> Iterator[pa.RecordBatch]: ...

    @abstractmethod
    def _row(self, place: int) -> pa.Table: ...


class ParquetFile(_ColumnFile):
    """A Parquet file, of which the row groups that were asked for stay in memory as columns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._groups: dict[int, pa.Table] = {}
        self._ends: list[int] = []

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with _pyarrow("pyarrow.parquet").ParquetFile(self.path) as file:
            groups = range(file.num_row_groups)
            self._ends = list(accumulate(file.metadata.row_group(i).num_rows for i in groups))
            yield from file.iter_batches(batch_size=_BATCH)

    def _row(self, place: int) -> pa.Table:
        group = bisect_right(self._ends, place)
        if group not in self._groups:
            with _pyarrow("pyarrow.parquet").ParquetFile(self.path) as file:
                self._groups[group] = file.read_row_group(group)
        first = self._ends[group - 1] if group else 0
        return self._groups[group].slice(place - first, 1)


class ArrowFile(_ColumnFile):
    """An Arrow file or stream, mapped into memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._mapped: pa.Table | None = None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        yield from self._table().to_batches(max_chunksize=_BATCH)

    def _row(self, place: int) -> pa.Table:
        return self._table().slice(place, 1)

    def _table(self) -> pa.Table:
        if self._mapped is None:
            arrow = _pyarrow("pyarrow")
            with self.path.open("rb") as file:
                is_file = file.read(6) == b"ARROW1"
            source = arrow.memory_map(str(self.path))
            opened = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
            self._mapped = opened.read_all()
        return self._mapped


def _rows_of(batch: pa.RecordBatch | pa.Table) -> list[Fields | DataError]:
    try:
        return list(batch.to_pylist())
    # Values that Python has none for: text that is not UTF-8, dates before the year 1.
    except (UnicodeDecodeError, ValueError, OverflowError) as reason:
        if batch.num_rows == 1:
            return [DataError(f"the row cannot be read: {reason}")]
        return [row for i in range(batch.num_rows) for row in _rows_of(batch.slice(i, 1))]


def _pyarrow(module: str) -> Any:
    """Imports pyarrow, which takes a third of a second and 100 MB that other formats do without."""
    try:
        return import_module(module)
    except ImportError as reason:
        raise DataError(
            "Parquet and Arrow files are read by pyarrow, which is not installed",
            found=str(reason),
            hint="pip install 'flowrl[data]', or write the rows as JSON lines",
        ) from reason


def _arrow_errors() -> tuple[type[Exception], ...]:
    return (_pyarrow("pyarrow").ArrowException, OSError, EOFError)
